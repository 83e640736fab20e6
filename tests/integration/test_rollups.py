"""From settled records to roll-ups: on moto, and on DynamoDB Local, where transactions meet for real."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from completions.domain.completion import Usage
from completions.domain.errors import MeteringError
from completions.domain.limits import Charge, KeyLimits, LimitKind
from completions.domain.metering import Outcome, Principal, Reservation, Timings, UsageRecord, plain_record
from completions.domain.usage import Granularity, Totals
from completions.dynamodb_json import deserialized
from completions.metering.dynamodb import DynamoUsageLedger
from completions.metering.replay import UsageReplayer, read_logged
from completions.metering.rollup_items import RolledRecord
from completions.metering.rollup_queries import DynamoUsageReports, RollUpReader, day_claims
from completions.metering.rollups import RollUps, add_stream_records
from completions_cli.local.stream_poller import lambda_event
from completions_cli.local.tables import moto_dynamodb
from completions_cli.local.triggers import matches, stream_triggers
from completions_cli.usage_audit import DayAudit, add_missing
from dynamodb_local import new_table
from fakes import ManualClock

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

NOON = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC)
LATER = NOON + timedelta(hours=20)
KEYS = (
    Principal("key-1", "ada", "compilers"),
    Principal("key-2", "grace", "compilers", limits=KeyLimits(tokens_per_day=10**9, nanos_per_month=10**12)),
    Principal("key-3", "alan"),
)
REGION = "ap-northeast-2"
SETTINGS = Config(region_name=REGION, retries={"mode": "standard", "total_max_attempts": 3}, max_pool_connections=32)


class Bench:
    """One usage table with its stream, and everything that happens to it."""

    def __init__(self, url: str, client: DynamoDBClient, patterns: Sequence[Any]) -> None:
        self.client = client
        self.table = new_table(client)
        client.update_table(
            TableName=self.table,
            StreamSpecification={"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"},
        )
        self.clock = ManualClock(now=NOON)
        self.now = ManualClock(now=LATER)
        self.ledger = DynamoUsageLedger(client, self.table, 400, self.clock)
        self.roll_ups = RollUps(client, self.table, self.now)
        self.written: dict[str, UsageRecord] = {}
        self.url = url
        self._patterns = patterns

    def request(self, number: int, principal: Principal = KEYS[0], **fields: Any) -> UsageRecord:
        """Claimed and settled."""
        name = f"r-{number}"
        reservation = Reservation(
            name, name, principal, "openai", "demo", "demo", False, self.clock.now(), Charge(500, 50_000)
        )
        record = UsageRecord(
            reservation,
            model="demo",
            endpoint_name="demo",
            outcome=Outcome.SUCCEEDED,
            usage=Usage(10 + number, 5, cached_tokens=3, estimated=number % 5 == 0),
            timings=Timings(0, 20 + number, 100 + 10 * number),
            attempts=1,
            charge=Charge(15 + number, 1_000 + number),
        )
        record = replace(record, **fields)
        claim = self.ledger.reserve(reservation)
        claim.confirm()
        claim.settle(record)
        self.written[name] = record
        return record

    def all_events(self) -> list[dict[str, Any]]:
        """What the stream has, as Lambda would send it if it filtered nothing."""
        found = []
        with closing(boto3.client("dynamodbstreams", endpoint_url=self.url, config=SETTINGS)) as streams:
            (stream,) = streams.list_streams(TableName=self.table)["Streams"]
            arn = stream["StreamArn"]
            for shard in streams.describe_stream(StreamArn=arn)["StreamDescription"]["Shards"]:
                iterator: str | None = streams.get_shard_iterator(
                    StreamArn=arn, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
                )["ShardIterator"]
                while iterator is not None:
                    reply = streams.get_records(ShardIterator=iterator, Limit=1000)
                    found += [lambda_event(record, arn) for record in reply["Records"]]
                    iterator = reply.get("NextShardIterator") if reply["Records"] else None
        return found

    def events(self) -> list[dict[str, Any]]:
        """Those of them that pass the template's filters."""
        return [event for event in self.all_events() if any(matches(one, event) for one in self._patterns)]

    def rows(self, granularity: Granularity) -> dict[tuple[str, str, str, datetime], Totals]:
        """Sums by key, model, outcome and time."""
        sums: dict[tuple[str, str, str, datetime], Totals] = {}
        reader = RollUpReader(self.client, self.table, self.now)
        for row in reader.rows(granularity, NOON - timedelta(days=2), NOON + timedelta(days=2), latencies=True):
            where = (row.dimensions.key_id, row.dimensions.model, row.dimensions.outcome.value, row.start)
            sums[where] = sums.get(where, Totals()) + row.totals
        return {where: totals for where, totals in sums.items() if totals.any}

    def total(self, granularity: Granularity = Granularity.DAY) -> Totals:
        return sum(self.rows(granularity).values(), Totals())

    def expect_the_records(self) -> None:
        """Every granularity has every record once."""
        records = self.written.values()
        for granularity in Granularity:
            total = self.total(granularity)
            assert total.requests == len(records)
            assert total.prompt_tokens == sum(record.usage.prompt_tokens for record in records)
            assert total.cached_tokens == sum(record.usage.cached_tokens for record in records)
            assert total.completion_tokens == sum(record.usage.completion_tokens for record in records)
            assert total.nanos == sum(record.charge.nanos for record in records)
            assert total.estimated == sum(record.usage.estimated for record in records)
            assert sum(total.total_ms.values()) == len(records)
            by_key = {
                principal.key_id: sum(record.reservation.principal == principal for record in records)
                for principal in KEYS
            }
            rows = self.rows(granularity)
            for key_id, count in by_key.items():
                assert sum(totals.requests for where, totals in rows.items() if where[0] == key_id) == count

    def audit(self, day: datetime = NOON) -> DayAudit:
        return DayAudit(self.client, self.table, day.date(), self.now)


@pytest.fixture(scope="module", params=["moto", "DynamoDB Local"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, DynamoDBClient]]:
    if request.param == "moto":
        with moto_dynamodb() as url, closing(boto3.client("dynamodb", endpoint_url=url, config=SETTINGS)) as client:
            yield url, client
    else:
        url = request.getfixturevalue("dynamodb_local")
        with closing(boto3.client("dynamodb", endpoint_url=url, config=SETTINGS)) as client:
            yield url, client


@pytest.fixture
def bench(server: tuple[str, DynamoDBClient], project_root: Path) -> Bench:
    (trigger,) = stream_triggers(project_root / "template.yaml")
    return Bench(*server, trigger.patterns)


def mixed_day(bench: Bench, count: int) -> None:
    """Requests of three keys and two models with every outcome, over some hours, and claims nobody settled."""
    for number in range(count):
        model = "demo" if number % 3 else "coder"
        bench.request(number, KEYS[number % 3], model=model, outcome=list(Outcome)[number % 4])
        bench.clock.advance(97)
    for number in range(5):
        name = f"open-{number}"
        open_claim = Reservation(name, name, KEYS[1], "openai", "demo", "demo", False, bench.clock.now(), Charge(9, 9))
        bench.ledger.reserve(open_claim).confirm()


def batched(events: Sequence[dict[str, Any]], size: int) -> list[Sequence[dict[str, Any]]]:
    return [events[first : first + size] for first in range(0, len(events), size)]


def test_every_batch_twice_in_any_order_is_every_record_once(bench: Bench) -> None:
    mixed_day(bench, 24)
    events = bench.events()
    deliveries = 2 * batched(events, 5)
    random.Random(7).shuffle(deliveries)  # noqa: S311 - an order, no secret
    for batch in deliveries:
        assert add_stream_records(bench.roll_ups, batch) == []

    bench.expect_the_records()
    result = bench.audit().run()
    assert (result.records, result.keys, result.unsettled, result.missing) == (24, 3, 5, 0)
    assert result.differences == []
    assert result.agreements == [
        "roll-ups by the minute",
        "roll-ups by the hour",
        "roll-ups by the day",
        "key key-2's tokens_per_day",
        "key key-2's nanos_per_day",
    ]


def test_workers_that_get_the_same_batches_at_once_add_each_record_once(
    dynamodb_local: str, project_root: Path
) -> None:
    (trigger,) = stream_triggers(project_root / "template.yaml")
    with closing(boto3.client("dynamodb", endpoint_url=dynamodb_local, config=SETTINGS)) as client:
        deliver_at_once(Bench(dynamodb_local, client, trigger.patterns))


def deliver_at_once(bench: Bench) -> None:
    mixed_day(bench, 48)
    events = bench.events()

    def work(seed: int) -> list[str]:
        roll_ups = RollUps(bench.client, bench.table, ManualClock())
        shuffled = list(events)
        random.Random(seed).shuffle(shuffled)  # noqa: S311 - an order, no secret
        return [number for batch in batched(shuffled, 10) for number in add_stream_records(roll_ups, batch)]

    with ThreadPoolExecutor(6) as pool:
        failed = [number for numbers in pool.map(work, range(6)) for number in numbers]
    for number in failed:  # delivered again, as the stream would
        again = [event for event in events if event["dynamodb"]["SequenceNumber"] == number]
        assert add_stream_records(bench.roll_ups, again) == []
    bench.expect_the_records()
    assert bench.audit().run().differences == []


def test_the_stream_brings_settled_records_alone_and_no_mark(bench: Bench) -> None:
    mixed_day(bench, 6)
    events = bench.events()
    assert sorted(event["dynamodb"]["Keys"]["pk"]["S"] for event in events) == [f"REQ#r-{n}" for n in range(6)]
    add_stream_records(bench.roll_ups, events)
    assert len(bench.events()) == 6
    assert len(bench.all_events()) > 12  # the marks and the roll-ups are in the stream


def test_a_request_counts_when_it_began(bench: Bench) -> None:
    bench.request(1)
    add_stream_records(bench.roll_ups, bench.events())
    assert [where[3] for where in bench.rows(Granularity.MINUTE)] == [NOON.replace(second=0)]
    assert [where[3] for where in bench.rows(Granularity.HOUR)] == [NOON.replace(minute=0, second=0)]


LOST: dict[str, Any] = {
    "outcome": Outcome.LOST,
    "usage": Usage(0, 0),
    "charge": Charge(),
    "timings": Timings(0, None, 0),
}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_lost_request_that_turns_up_is_counted_as_what_it_was(bench: Bench, order: Sequence[int]) -> None:
    """The events of the loss, of the true record, and the loss's once more, in any order."""
    lost = bench.request(1, **LOST)
    loss = bench.events()
    true = replace(lost, outcome=Outcome.SUCCEEDED, model="coder", usage=Usage(20, 30, 10), charge=Charge(50, 777))
    replayer = UsageReplayer(bench.client, bench.table, 400, bench.now)
    if order[0] == 0:  # the loss had been counted before the record was found
        add_stream_records(bench.roll_ups, loss)
        assert {where[2] for where in bench.rows(Granularity.DAY)} == {"lost"}
    replayer.replay(read_logged(json.loads(json.dumps(plain_record(true)))))
    events = bench.events()
    assert len(events) == 2
    for number in order:
        assert add_stream_records(bench.roll_ups, [[events[0], events[1], loss[0]][number]]) == []

    for granularity in Granularity:
        ((where, totals),) = bench.rows(granularity).items()
        assert where[:3] == ("key-1", "coder", "succeeded")
        assert (totals.requests, totals.prompt_tokens, totals.cached_tokens) == (1, 20, 10)
        assert (totals.completion_tokens, totals.nanos) == (30, 777)
    assert bench.audit().run().differences == []


def test_a_record_that_only_the_log_had_is_counted(bench: Bench) -> None:
    name = "only-in-the-log"
    reservation = Reservation(name, name, KEYS[0], "openai", "demo", "demo", False, NOON, Charge(9, 9))
    record = UsageRecord(
        reservation, "demo", "demo", Outcome.SUCCEEDED, Usage(4, 5), Timings(0, 1, 2), 1, charge=Charge(9, 9)
    )
    replayer = UsageReplayer(bench.client, bench.table, 400, bench.now)
    replayer.replay(read_logged(json.loads(json.dumps(plain_record(record)))))
    add_stream_records(bench.roll_ups, bench.events())
    assert bench.total() == Totals(1, 4, 0, 5, 9, 0, {5: 1}, {1: 1})


def test_a_record_that_is_gone_by_now_is_not_brought_back(bench: Bench) -> None:
    bench.request(1)
    events = bench.events()
    key: Any = {"pk": {"S": "REQ#r-1"}, "sk": {"S": "RECORD"}}
    bench.client.delete_item(TableName=bench.table, Key=key)
    assert add_stream_records(bench.roll_ups, events) == []
    assert "Item" not in bench.client.get_item(TableName=bench.table, Key=key)
    assert bench.total() == Totals()


def test_what_cannot_be_read_is_reported_and_the_others_are_added(bench: Bench) -> None:
    for number in range(4):
        bench.request(number)
    events = bench.events()
    broken = json.loads(json.dumps(events[1]))
    del broken["dynamodb"]["NewImage"]["total_ms"]
    number = events[1]["dynamodb"]["SequenceNumber"]
    assert add_stream_records(bench.roll_ups, [events[0], broken, *events[2:]]) == [number]
    assert bench.total().requests == 3


def test_rows_past_their_time_are_left_out_before_they_are_removed(bench: Bench) -> None:
    bench.request(1)
    add_stream_records(bench.roll_ups, bench.events())
    minute = NOON.replace(second=0)
    for age, kept in ((timedelta(days=3), 1), (timedelta(days=3, seconds=1), 0)):
        reader = RollUpReader(bench.client, bench.table, ManualClock(now=minute + age))
        assert len(list(reader.rows(Granularity.MINUTE, NOON - timedelta(days=5), NOON + timedelta(days=5)))) == kept
        assert len(list(reader.rows(Granularity.HOUR, NOON - timedelta(days=5), NOON + timedelta(days=5)))) == 1


def test_limits_tell_the_counters_of_every_key(bench: Bench) -> None:
    bench.request(1, KEYS[1])
    open_claim = Reservation("o", "o", KEYS[1], "openai", "demo", "demo", False, NOON, Charge(90, 900))
    bench.ledger.reserve(open_claim).confirm()
    many = [Principal(f"key-x{number:03}", "ada") for number in range(130)]
    reports = DynamoUsageReports(bench.client, bench.table, bench.clock, lambda: iter([*many, *KEYS]))

    uses = {use.key_id: use for use in reports.limits(NOON)}
    assert list(uses) == sorted(uses)
    assert len(uses) == 133
    assert [(one.kind, one.limit, one.used, one.resets_at) for one in uses["key-2"].limits] == [
        (LimitKind.TOKENS_PER_DAY, 10**9, 16 + 90, datetime(2026, 12, 1, tzinfo=UTC)),
        (LimitKind.NANOS_PER_MONTH, 10**12, 1_001 + 900, datetime(2026, 12, 1, tzinfo=UTC)),
    ]
    tomorrow = reports.limits(NOON + timedelta(days=1))
    assert [one.used for use in tomorrow for one in use.limits] == [0, 0]
    assert uses["key-1"].limits == []


def test_usage_that_cannot_be_read_is_an_error_of_its_own() -> None:
    settings = Config(retries={"total_max_attempts": 1}, connect_timeout=0.2)
    with closing(boto3.client("dynamodb", endpoint_url="http://127.0.0.1:9", config=settings)) as nowhere:
        reports = DynamoUsageReports(nowhere, "UsageTable", ManualClock(now=LATER), lambda: KEYS)
        with pytest.raises(MeteringError):
            list(reports.rows(Granularity.DAY, NOON, LATER))
        with pytest.raises(MeteringError):
            reports.limits(NOON)


# The audit


def test_the_audit_finds_a_roll_up_that_was_tampered_with(bench: Bench) -> None:
    mixed_day(bench, 12)
    add_stream_records(bench.roll_ups, bench.events())
    items = bench.client.scan(TableName=bench.table)["Items"]
    hour = next(item for item in items if item["pk"]["S"].startswith("ROLLUP#hour#") and item["key_id"]["S"] == "key-3")
    bench.client.update_item(
        TableName=bench.table,
        Key={"pk": hour["pk"], "sk": hour["sk"]},
        UpdateExpression="ADD nanos :one",
        ExpressionAttributeValues={":one": {"N": "1"}},
    )
    (difference,) = bench.audit().run().differences
    assert difference.startswith("by the hour, key key-3, model ")
    wanted = sum(
        record.charge.nanos
        for record in bench.written.values()
        if record.reservation.principal.key_id == "key-3"
        and (record.model, record.outcome) == (hour["model"]["S"], hour["outcome"]["S"])
    )
    assert f"nanos {wanted:,} in the records, {wanted + 1:,} added up" in difference


def test_the_audit_finds_a_counter_that_is_wrong(bench: Bench) -> None:
    bench.request(1, KEYS[1])
    add_stream_records(bench.roll_ups, bench.events())
    bench.client.update_item(
        TableName=bench.table,
        Key={"pk": {"S": "LIMITS#key-2"}, "sk": {"S": "LIMITS"}},
        UpdateExpression="ADD #day :less",
        ExpressionAttributeNames={"#day": "tokens_per_day#20261130"},
        ExpressionAttributeValues={":less": {"N": "-1"}},
    )
    assert bench.audit().run().differences == ["key key-2's tokens_per_day: 16 by records and holds, 15 counted"]


def test_the_audit_counts_what_is_in_progress(bench: Bench) -> None:
    bench.request(1, KEYS[1])
    open_claim = Reservation("o", "o", KEYS[1], "openai", "demo", "demo", False, NOON, Charge(9, 9))
    bench.ledger.reserve(open_claim).confirm()
    result = bench.audit().run()
    assert (result.unsettled, result.missing) == (1, 1)
    assert "key key-2's tokens_per_day" in result.agreements


def test_what_never_reached_the_roll_ups_can_be_added_by_hand_once(bench: Bench) -> None:
    mixed_day(bench, 10)
    assert bench.audit().run().missing == 10
    assert add_missing(bench.client, bench.table, NOON.date(), bench.now) == (10, 0)
    assert add_missing(bench.client, bench.table, NOON.date(), bench.now) == (0, 0)
    add_stream_records(bench.roll_ups, bench.events())
    bench.expect_the_records()
    assert bench.audit().run().differences == []


# Failures of transactions, which the table cannot be made to have


class Refusing:
    """A client whose transactions fail as ``reasons`` says of each: a code an action, or none at all."""

    def __init__(self, client: DynamoDBClient, reasons: Any) -> None:
        self.calls = 0
        self._client = client
        self._reasons = reasons

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def transact_write_items(self, TransactItems: list[Any]) -> Any:
        self.calls += 1
        if codes := self._reasons(self.calls, TransactItems):
            response: Any = {
                "Error": {"Code": "TransactionCanceledException", "Message": "cancelled"},
                "CancellationReasons": [{"Code": code} for code in codes],
            }
            raise ClientError(response, "TransactWriteItems")
        return self._client.transact_write_items(TransactItems=TransactItems)


def test_a_conflict_is_tried_again_after_a_moment(bench: Bench) -> None:
    bench.request(1)

    def reasons(call: int, actions: list[Any]) -> list[str]:
        return ["None", "TransactionConflict", *["None"] * (len(actions) - 2)] if call <= 4 else []

    client: Any = Refusing(bench.client, reasons)
    clock = ManualClock()
    assert add_stream_records(RollUps(client, bench.table, clock), bench.events()) == []
    assert (client.calls, len(clock.slept)) == (5, 4)
    assert bench.total().requests == 1


def test_a_conflict_without_an_end_is_reported(bench: Bench) -> None:
    bench.request(1)
    client: Any = Refusing(bench.client, lambda _, actions: ["TransactionConflict"] * len(actions))
    clock = ManualClock()
    (event,) = bench.events()
    failed = add_stream_records(RollUps(client, bench.table, clock), [event])
    assert failed == [event["dynamodb"]["SequenceNumber"]]
    assert sum(clock.slept) < 10


def test_one_record_that_cannot_be_added_does_not_keep_the_others_out(bench: Bench) -> None:
    for number in range(9):
        bench.request(number)

    def reasons(call: int, actions: list[Any]) -> list[str]:
        keys = [action["Update"]["Key"]["pk"]["S"] for action in actions]
        return ["ValidationError" if key == "REQ#r-5" else "None" for key in keys] if "REQ#r-5" in keys else []

    client: Any = Refusing(bench.client, reasons)
    events = bench.events()
    (poison,) = [event for event in events if event["dynamodb"]["Keys"]["pk"]["S"] == "REQ#r-5"]
    failed = add_stream_records(RollUps(client, bench.table, ManualClock()), events)
    assert failed == [poison["dynamodb"]["SequenceNumber"]]
    assert bench.total().requests == 8


def test_a_transaction_whose_reply_was_lost_is_not_made_twice(bench: Bench) -> None:
    bench.request(1)
    records = [claim for claim in day_claims(bench.client, bench.table, NOON.date()) if isinstance(claim, RolledRecord)]
    sent: list[object] = []

    def lose_first_reply(response: object, **_: object) -> Any:
        """A delay in seconds asks botocore to send the request again."""
        sent.append(response)
        return 0.0 if len(sent) == 1 else None

    events = bench.client.meta.events
    events.register_first("needs-retry.dynamodb.TransactWriteItems", lose_first_reply, unique_id="lost")
    try:
        assert bench.roll_ups.add(records) == frozenset()
    finally:
        events.unregister("needs-retry.dynamodb.TransactWriteItems", unique_id="lost")
    assert len(sent) >= 2
    assert bench.total().requests == 1


# The function


def test_the_recorded_event_is_added_and_looks_as_the_poller_s_do(bench: Bench, project_root: Path) -> None:
    recorded = json.loads((project_root / "events" / "usage_rollup.json").read_text())["Records"]
    for event in recorded:
        bench.client.put_item(TableName=bench.table, Item=event["dynamodb"]["NewImage"])
    assert add_stream_records(bench.roll_ups, recorded) == []
    assert bench.total().requests == len(recorded)
    bench.request(1)
    (own,) = [event for event in bench.events() if event["dynamodb"]["Keys"]["pk"]["S"] == "REQ#r-1"]
    assert own.keys() == recorded[0].keys()
    assert own["dynamodb"].keys() == recorded[0]["dynamodb"].keys()
    assert type(own["dynamodb"]["ApproximateCreationDateTime"]) in (int, float)
    new = deserialized(recorded[0]["dynamodb"]["NewImage"])
    assert new.keys() - {"fingerprint", "price_version"} <= deserialized(own["dynamodb"]["NewImage"]).keys() | {
        "variant",
        "team",
        "first_token_ms",
    }


FUNCTION = """
import json, pathlib, sys
from completions.handlers.usage_rollup import handler
event = json.loads(pathlib.Path(sys.argv[1]).read_text())
for delivery in range(2):
    print(json.dumps({"reply": handler(event, None)}))
"""


def test_the_function_measures_what_it_adds_and_nothing_of_a_second_delivery(bench: Bench, project_root: Path) -> None:
    path = project_root / "events" / "usage_rollup.json"
    for event in json.loads(path.read_text())["Records"]:
        bench.client.put_item(TableName=bench.table, Item=event["dynamodb"]["NewImage"])
    environment = {
        "PYTHONPATH": str(project_root / "functions"),
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL_DYNAMODB": bench.url,
        "REGISTRY_TABLE": "none",
        "USAGE_TABLE": bench.table,
        "POWERTOOLS_SERVICE_NAME": "gateway",
    }
    run = subprocess.run(
        [sys.executable, "-c", FUNCTION, str(path)], env=environment, capture_output=True, text=True, check=True
    )

    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["reply"] for line in lines if "reply" in line] == [{"batchItemFailures": []}] * 2
    (measured,) = [line for line in lines if "_aws" in line]  # of the first delivery alone
    assert lines.index(measured) < next(number for number, line in enumerate(lines) if "reply" in line)
    (told,) = measured["_aws"]["CloudWatchMetrics"]
    assert told["Namespace"] == "completions"
    assert sorted(map(sorted, told["Dimensions"])) == [["Model", "service"], ["service"]]
    del measured["_aws"]
    assert measured == {
        "service": "gateway",
        "Model": "demo",
        "Requests": [2.0],
        "Aborted": [1.0],
        "PromptTokens": [14.0],
        "CompletionTokens": [21.0],
        "CostDollars": [0.000_014_4],
        "FirstTokenMilliseconds": [95.0, 95.0],
        "TokensPerSecond": [50.794, 15.873],  # 16 and 5 tokens in 315 ms
    }
    for name in ("key_5f2a9c01b7de", "ada", "compilers", "3f1c9a52"):
        assert name not in run.stdout
    assert bench.total().requests == 2


def test_only_what_was_added_is_told(bench: Bench) -> None:
    for number in range(9):
        bench.request(number)

    def reasons(call: int, actions: list[Any]) -> list[str]:
        keys = [action["Update"]["Key"]["pk"]["S"] for action in actions]
        return ["ValidationError" if key == "REQ#r-5" else "None" for key in keys] if "REQ#r-5" in keys else []

    client: Any = Refusing(bench.client, reasons)
    added: list[RolledRecord] = []
    events = bench.events()
    add_stream_records(RollUps(client, bench.table, ManualClock()), events, added.extend)
    assert sorted(record.pk for record in added) == [f"REQ#r-{number}" for number in range(9) if number != 5]
    added.clear()
    add_stream_records(bench.roll_ups, events, added.extend)  # delivered again, and now it can be added
    assert [record.pk for record in added] == ["REQ#r-5"]


def test_workers_that_get_the_same_records_at_once_tell_each_of_them_once(
    dynamodb_local: str, project_root: Path
) -> None:
    (trigger,) = stream_triggers(project_root / "template.yaml")
    with closing(boto3.client("dynamodb", endpoint_url=dynamodb_local, config=SETTINGS)) as client:
        bench = Bench(dynamodb_local, client, trigger.patterns)
        mixed_day(bench, 24)
        events = bench.events()
        added: list[RolledRecord] = []

        def work(_: int) -> list[str]:
            return add_stream_records(RollUps(client, bench.table, ManualClock()), events, added.extend)

        with ThreadPoolExecutor(4) as pool:
            failed = [number for numbers in pool.map(work, range(4)) for number in numbers]
        again = [event for event in events if event["dynamodb"]["SequenceNumber"] in failed]
        assert add_stream_records(bench.roll_ups, again, added.extend) == []
        assert sorted(record.pk for record in added) == sorted(f"REQ#r-{number}" for number in range(24))


def test_a_lost_request_that_turns_up_is_told_with_what_was_known_of_it(bench: Bench) -> None:
    lost = bench.request(1, **LOST)
    added: list[RolledRecord] = []
    add_stream_records(bench.roll_ups, bench.events(), added.extend)
    true = replace(lost, outcome=Outcome.SUCCEEDED, usage=Usage(20, 30, 10), charge=Charge(50, 777))
    UsageReplayer(bench.client, bench.table, 400, bench.now).replay(
        read_logged(json.loads(json.dumps(plain_record(true))))
    )
    add_stream_records(bench.roll_ups, bench.events(), added.extend)
    first, second = added
    assert (first.outcome, first.rolled_up) == (Outcome.LOST, None)
    assert (second.outcome, second.completion_tokens) == (Outcome.SUCCEEDED, 30)
    assert second.rolled_up is not None
    assert second.rolled_up.startswith("lost ")


@pytest.mark.parametrize("handler", ["usage_rollup", "usage_sweeper"])
def test_a_function_that_speaks_no_http_loads_no_web_framework(project_root: Path, handler: str) -> None:
    script = (
        f"import sys, completions.handlers.{handler} as h; assert callable(h.handler); "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'fastapi', 'starlette', 'mangum', 'uvicorn'}))"
    )
    environment = {
        "PYTHONPATH": str(project_root / "functions"),
        "AWS_DEFAULT_REGION": "us-east-1",
        "REGISTRY_TABLE": "R",
        "USAGE_TABLE": "U",
    }
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
