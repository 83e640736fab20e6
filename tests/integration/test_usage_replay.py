"""Records that only the log has: what writing them changes, and that writing them again changes nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from aws_lambda_powertools import Logger
from botocore.config import Config
from typer.testing import CliRunner

from completions.domain.completion import Usage
from completions.domain.errors import MeteringError
from completions.domain.limits import Charge, LimitKind
from completions.domain.metering import Principal, Reservation, UsageRecord, plain_record
from completions.metering.dynamodb import DynamoUsageLedger
from completions.metering.items import RecordItem
from completions.metering.replay import Replayed, UsageReplayer, read_logged
from completions.metering.sweep import LostCharge
from completions.metering.usage_table import UsageTable
from completions_cli.local.tables import moto_dynamodb
from completions_cli.main import app
from fakes import ManualClock
from metered import AMPLE, LONG_AGO, NOON, Books, DiedError, key, recent_table, record, reservation

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

REGION = "ap-northeast-2"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_dynamodb() as url:
        yield url


@pytest.fixture(scope="module")
def client(moto: str) -> Iterator[DynamoDBClient]:
    settings = Config(region_name=REGION, retries={"total_max_attempts": 1})
    with closing(boto3.client("dynamodb", endpoint_url=moto, config=settings)) as opened:
        yield opened


@pytest.fixture
def books(client: DynamoDBClient) -> Books:
    return Books(client, recent_table(client))


def replayer(books: Books, now: timedelta = 2 * LONG_AGO) -> UsageReplayer:
    return UsageReplayer(books.client, books.table, 400, ManualClock(now=NOON + now))


def replay(books: Books, done: UsageRecord, now: timedelta = 2 * LONG_AGO) -> Replayed:
    """As it comes out of the log."""
    return replayer(books, now).replay(read_logged(json.loads(json.dumps(plain_record(done)))))


def unwritten(books: Books, request: Reservation, *steps: str) -> UsageRecord:
    """A request whose function was refused these writes, and logged the record."""
    ledger: DynamoUsageLedger = books.ledger()

    def refuse(*_: object, **__: object) -> None:
        raise MeteringError("The usage could not be written.")

    table = UsageTable(books.client, books.table, 400)
    for step in steps:
        setattr(table, step, refuse)
    ledger._table = table
    done = record(request)
    claim = ledger.reserve(request)
    with pytest.raises(MeteringError):
        claim.settle(done)
    return done


def ended(books: Books, done: UsageRecord) -> tuple[str, int, int]:
    """Outcome, tokens and nano-dollars of the record in the table."""
    item = books.record(done.reservation.record_id)
    assert item is not None
    return item["outcome"], int(item["prompt_tokens"] + item["completion_tokens"]), int(item["nanos"])


# each is what the function could not write, and leaves another state behind
OUTAGES = {
    "the claim": ("put_claim",),
    "the claim and the hold's end": ("put_claim", "close_hold"),
    "the record": ("settle_record",),
    "the record and the hold's end": ("settle_record", "close_hold"),
    "the hold's end": ("close_hold",),
}


UNLIMITED = ["the claim", "the record"]  # there is no hold
CASES = [("unlimited", outage) for outage in UNLIMITED] + [("limited", outage) for outage in OUTAGES]


@pytest.mark.parametrize("policy", [None, *LostCharge], ids=["not swept", "swept", "swept for the estimate"])
@pytest.mark.parametrize(("limited", "outage"), CASES)
def test_a_logged_record_is_written_and_counted_whatever_happened_before(
    books: Books, limited: str, outage: str, policy: LostCharge | None
) -> None:
    limits = AMPLE if limited == "limited" else {}
    principal = key(**limits)
    done = unwritten(books, reservation(principal), *OUTAGES[outage])
    if policy is not None:
        books.sweeper(principal, charge=policy).sweep()

    first = replay(books, done)

    known = outage == "the hold's end" or (policy is not None and outage == "the record" and limits)  # by its hold
    assert first is (Replayed.THERE if known else Replayed.WRITTEN)
    assert replay(books, done) is Replayed.THERE
    if outage == "the hold's end":
        books.sweeper(principal, now=NOON + 3 * LONG_AGO).sweep()
    assert ended(books, done) == ("succeeded", 40, 400)
    if limits:
        books.require_balance(principal)
        assert books.used(principal, LimitKind.NANOS_PER_DAY) == 400


@pytest.mark.parametrize("swept_between", [False, True])
@pytest.mark.parametrize(
    ("step", "swept_before", "outage"),
    [
        ("recount", True, "the claim and the hold's end"),
        ("write_replayed", False, "the claim and the hold's end"),
        ("write_replayed", True, "the claim and the hold's end"),
        ("write_replayed", False, "the record and the hold's end"),
        ("write_replayed", True, "the record and the hold's end"),
        ("drop_limits_attributes", True, "the record and the hold's end"),
        ("drop_swept", True, "the claim and the hold's end"),
    ],
)
def test_a_replay_that_is_cut_short_is_finished_by_the_next(
    books: Books, outage: str, step: str, swept_before: bool, swept_between: bool
) -> None:
    principal = key(**AMPLE)
    done = unwritten(books, reservation(principal), *OUTAGES[outage])
    if swept_before:
        books.sweeper(principal).sweep()

    def die(*_: object, **__: object) -> None:
        raise DiedError

    cut_short = replayer(books)
    setattr(cut_short._table, step, die)
    with suppress(DiedError):
        cut_short.replay(read_logged(plain_record(done)))
    if swept_between:
        books.sweeper(principal, now=NOON + 3 * LONG_AGO).sweep()
    replay(books, done, now=4 * LONG_AGO)
    books.sweeper(principal, now=NOON + 5 * LONG_AGO).sweep()
    assert ended(books, done) == ("succeeded", 40, 400)
    books.require_balance(principal)


def test_a_replayed_record_is_the_record_that_settling_would_have_written(books: Books) -> None:
    settled, logged = reservation(key()), reservation(key(), fingerprint="f")
    books.ledger().reserve(settled).settle(record(settled))
    done = unwritten(books, logged, "put_claim")
    replay(books, done)

    one, other = (books.record(request.record_id) for request in (settled, logged))
    assert one is not None
    assert other is not None
    own = {"pk", "claim_id", "request_id", "key_id", "day_shard", "fingerprint"}
    assert {name: value for name, value in one.items() if name not in own} == {
        name: value for name, value in other.items() if name not in own
    }
    assert RecordItem.model_validate(other).fingerprint == "f"


def test_another_delivery_in_progress_is_not_settled_with_this_ones_record(books: Books) -> None:
    principal = key(**AMPLE)
    running = reservation(principal)
    claim = books.ledger().reserve(running)
    claim.confirm()
    other = replace(running, created_at=NOON + timedelta(seconds=1))
    assert replay(books, record(other, Charge(0, 0))) is Replayed.THERE
    claim.settle(record(running))
    books.sweeper(principal).sweep()
    books.require_balance(principal)


def test_what_others_noted_on_a_lost_record_is_kept(books: Books) -> None:
    done = unwritten(books, reservation(key()), "settle_record")
    books.sweeper().sweep()
    name = done.reservation.record_id
    books.client.update_item(
        TableName=books.table,
        Key={"pk": {"S": f"REQ#{name}"}, "sk": {"S": "RECORD"}},
        UpdateExpression="SET noted = :noted",
        ExpressionAttributeValues={":noted": {"S": "by others"}},
    )
    assert replay(books, done) is Replayed.WRITTEN
    item = books.record(name)
    assert item is not None
    assert (item["noted"], item["outcome"]) == ("by others", "succeeded")


def test_counters_of_a_day_that_is_over_long_ago_are_not_made_anew(books: Books) -> None:
    principal = key(**AMPLE)
    done = unwritten(books, reservation(principal), "put_claim", "close_hold")
    books.sweeper(principal).sweep()
    books.sweeper(principal, now=NOON + timedelta(days=6)).sweep()
    replay(books, done, now=timedelta(days=6))
    assert {name.partition("#")[0] for name in books.limits(principal)} == {
        "pk",
        "sk",
        "parallel_requests",
        "tokens_per_month",
        "nanos_per_month",
    }
    assert books.used(principal, LimitKind.NANOS_PER_MONTH) == 400


# The command


def log_line(done: UsageRecord, **fields: Any) -> str:
    """As the function writes it."""
    stream = io.StringIO()
    log = Logger(service=f"test-{id(stream)}", stream=stream, level="INFO")
    log.error("usage_record_unwritten", record={**plain_record(done), **fields}, detail="throttled")
    return stream.getvalue().strip()


@pytest.fixture
def environment(moto: str, books: Books, monkeypatch: pytest.MonkeyPatch) -> Books:
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", moto)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("USAGE_TABLE", books.table)
    return books


def unwritten_records(count: int) -> list[UsageRecord]:
    principal: Principal = key()
    return [record(reservation(principal)) for _ in range(count)]


def test_the_command_writes_what_it_finds_between_other_lines(environment: Books, tmp_path: Path) -> None:
    records = unwritten_records(5)
    lines = [
        "START RequestId: 1 Version: $LATEST",
        log_line(records[0]),
        '{"level": "INFO", "message": "rolled_up", "note": "usage_record_unwritten"}',
        f"2026-11-30T12:00:00 {log_line(records[1])}",  # aws logs tail
        f"{log_line(records[2])}\t{log_line(records[3])}",  # --query events[].message --output text
        "",
        log_line(records[0]),
    ]
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(lines))
    result = CliRunner().invoke(app, ["usage", "replay", str(file)])
    assert (result.exit_code, result.output) == (0, "4 written, 1 already there\n")
    again = CliRunner().invoke(app, ["usage", "replay", "-"], input="\n".join(lines))
    assert (again.exit_code, again.output) == (0, "0 written, 5 already there\n")
    assert [ended(environment, done) for done in records[:4]] == [("succeeded", 40, 400)] * 4
    assert environment.record(records[4].reservation.record_id) is None


def test_a_record_that_cannot_be_read_is_named_by_its_line_and_the_others_written(environment: Books) -> None:
    (good, bad) = unwritten_records(2)
    lines = [log_line(bad, nanos=-1), log_line(good)]
    result = CliRunner().invoke(app, ["usage", "replay", "-"], input="\n".join(lines))
    assert result.exit_code == 1
    assert "1 written, 0 already there" in result.output
    assert "1 unreadable, on line 1" in result.output
    assert environment.record(bad.reservation.record_id) is None


@pytest.mark.parametrize(
    "line",
    ["usage_record_unwritten", '{"message": "usage_record_unwritten", ', '{"message": "usage_record_unwritten"}'],
)
def test_a_line_that_is_cut_off_is_unreadable(environment: Books, line: str) -> None:
    result = CliRunner().invoke(app, ["usage", "replay", "-"], input=f"\n{line}\n")
    assert (result.exit_code, "on line 2" in result.output) == (1, True)


def test_a_file_or_table_that_is_not_there_is_named(environment: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = CliRunner().invoke(app, ["usage", "replay", "nowhere.jsonl"])
    assert (missing.exit_code, "nowhere.jsonl" in missing.output) == (1, True)
    monkeypatch.setenv("USAGE_TABLE", "nowhere")
    (done,) = unwritten_records(1)
    refused = CliRunner().invoke(app, ["usage", "replay", "-"], input=log_line(done))
    assert (refused.exit_code, "table nowhere" in refused.output) == (1, True)


def test_a_cached_token_is_still_one_in_the_table(books: Books) -> None:
    request = reservation(key())
    done = replace(record(request), usage=Usage(30, 10, cached_tokens=20))
    replay(books, done)
    item = books.record(request.record_id)
    assert item is not None
    assert (item["prompt_tokens"], item["completion_tokens"], item["cached_tokens"]) == (30, 10, 20)
