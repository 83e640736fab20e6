"""What the sweeper finishes, for whom, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from completions.domain.limits import LimitKind
from completions.domain.metering import Reservation
from completions.metering.limit_items import counter
from completions.metering.sweep import LostCharge, SweepCounts, SweepError, UsageSweeper
from completions.observability import logger
from completions_cli.local.tables import moto_dynamodb
from dynamodb_local import new_table
from fakes import ManualClock
from metered import AMPLE, LONG_AGO, NOON, Books, DiedError, dying, key, left_behind, recent_table, record, reservation

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

REGION = "ap-northeast-1"
NOTHING, ALL = LostCharge.NOTHING, LostCharge.ESTIMATE


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
def untouched(client: DynamoDBClient) -> Books:
    return Books(client, new_table(client))


@pytest.fixture
def books(client: DynamoDBClient) -> Books:
    return Books(client, recent_table(client))


def counts(found: SweepCounts) -> dict[str, int]:
    """What was found, old minutes apart: they grow with every request."""
    plain = {"released": found.released, "lost": found.lost, "repaired": found.repaired, "forgotten": found.forgotten}
    return {name: count for name, count in plain.items() if count}


def outcome(books: Books, request: Reservation) -> tuple[str, int, int] | None:
    """Outcome, tokens and nano-dollars of a request's record."""
    item = books.record(request.record_id)
    if item is None:
        return None
    return item["outcome"], int(item["prompt_tokens"] + item["completion_tokens"]), int(item["nanos"])


# Holds


@pytest.mark.parametrize(
    ("missing", "policy", "found", "ended"),
    [
        (["put_claim"], NOTHING, {"released": 1}, None),
        (["put_claim"], ALL, {"released": 1}, None),
        (["settle_record", "close_hold"], NOTHING, {"released": 1, "lost": 1}, ("lost", 0, 0)),
        (["settle_record", "close_hold"], ALL, {"released": 1, "lost": 1}, ("lost", 100, 1_000)),
        (["close_hold"], NOTHING, {"released": 1}, ("succeeded", 40, 400)),
        (["close_hold"], ALL, {"released": 1}, ("succeeded", 40, 400)),
        (["settle_record"], NOTHING, {"repaired": 1, "forgotten": 1}, ("succeeded", 40, 400)),
        (["settle_record"], ALL, {"repaired": 1, "forgotten": 1}, ("succeeded", 40, 400)),
        ([], NOTHING, {"forgotten": 1}, ("succeeded", 40, 400)),
    ],
)
def test_what_a_function_did_not_live_to_write_is_written(
    books: Books, missing: list[str], policy: LostCharge, found: dict[str, int], ended: tuple[str, int, int] | None
) -> None:
    principal = key(**AMPLE)
    request = reservation(principal)
    left_behind(books, request, *(["put_claim", "settle_record", "close_hold"] if "put_claim" in missing else missing))

    swept = books.sweeper(principal, charge=policy).sweep()

    assert counts(swept) == found
    assert outcome(books, request) == ended
    books.require_balance(principal)
    assert counts(books.sweeper(principal, charge=policy).sweep()) == {}
    assert outcome(books, request) == ended


def test_what_may_still_be_in_progress_is_left_alone(books: Books) -> None:
    principal = key(**AMPLE)
    for steps in (("settle_record", "close_hold"), ("settle_record",), ("close_hold",)):
        left_behind(books, reservation(principal), *steps)
    before = books.limits(principal)

    swept = books.sweeper(principal, now=NOON + timedelta(seconds=960)).sweep()

    assert counts(swept) == {}
    after = books.limits(principal)
    assert {name: value for name, value in before.items() if "_minute" not in name} == {
        name: value for name, value in after.items() if "_minute" not in name
    }


def test_an_entry_whose_record_is_settled_is_left_to_its_process_for_five_minutes(books: Books) -> None:
    principal = key(**AMPLE)
    left_behind(books, reservation(principal))
    assert counts(books.sweeper(principal, now=NOON + timedelta(minutes=5)).sweep()) == {}
    assert counts(books.sweeper(principal, now=NOON + timedelta(minutes=5, seconds=1)).sweep()) == {"forgotten": 1}


def test_a_settled_record_keeps_what_its_own_function_wrote(books: Books) -> None:
    principal = key(**AMPLE)
    request = reservation(principal)
    left_behind(books, request, "close_hold")
    before = books.record(request.record_id)
    books.sweeper(principal).sweep()
    assert books.record(request.record_id) == before


def test_a_repaired_record_says_what_its_hold_came_to(books: Books) -> None:
    principal = key(**AMPLE)
    request = reservation(principal)
    left_behind(books, request, "settle_record")
    books.sweeper(principal).sweep()
    item = books.record(request.record_id)
    assert item is not None
    assert (item["prompt_tokens"], item["completion_tokens"], item["cached_tokens"]) == (10, 30, 0)
    assert (item["estimated"], item["model"], item["endpoint"], item["owner"]) == (
        False,
        "demo",
        "demo-endpoint",
        "ada",
    )


def test_a_second_deliverys_hold_is_given_back_whole(books: Books) -> None:
    principal = key(**AMPLE)
    request = reservation(principal)
    left_behind(books, request)
    books.sweeper(principal).sweep()  # forgets the first one's entry, so that the second finds room
    again = replace(request, created_at=NOON + LONG_AGO)
    with suppress(DiedError):
        dying(books, "close_hold").reserve(again).settle(record(again))
    assert books.used(principal, LimitKind.NANOS_PER_DAY) == 1_400

    swept = books.sweeper(principal, now=NOON + 2 * LONG_AGO).sweep()

    assert counts(swept) == {"released": 1}
    assert outcome(books, request) == ("succeeded", 40, 400)
    books.require_balance(principal)


def test_sweeping_a_key_costs_the_others_nothing(books: Books) -> None:
    mine, other = key(**AMPLE), key(**AMPLE)
    left_behind(books, reservation(mine), "settle_record", "close_hold")
    running = reservation(other, NOON + LONG_AGO)
    claim = books.ledger(ManualClock(now=NOON + LONG_AGO)).reserve(running)
    books.sweeper(mine, other).sweep()
    claim.settle(record(running))
    books.require_balance(mine)
    books.require_balance(other)


# Claims


@pytest.mark.parametrize(("policy", "ended"), [(NOTHING, ("lost", 0, 0)), (ALL, ("lost", 100, 1_000))])
def test_a_claim_of_a_key_without_limits_is_settled_by_policy(
    books: Books, policy: LostCharge, ended: tuple[str, int, int]
) -> None:
    request = reservation(key())
    left_behind(books, request, "settle_record")
    assert counts(books.sweeper(charge=policy).sweep()) == {"lost": 1}
    assert outcome(books, request) == ended


def test_a_claim_that_was_never_held_costs_nothing(books: Books) -> None:
    principal = key(**AMPLE)
    request = reservation(principal, caller_named=True)
    left_behind(books, request, "take_hold")
    assert counts(books.sweeper(principal, charge=ALL).sweep()) == {"lost": 1}
    assert outcome(books, request) == ("lost", 0, 0)
    books.require_balance(principal)


@pytest.mark.parametrize("step", ["close_hold", "settle_record"])
def test_holds_of_a_key_that_is_gone_are_found_by_their_claims(books: Books, step: str) -> None:
    principal = key(**AMPLE)
    request = reservation(principal)
    left_behind(books, request, "settle_record", step)
    books.sweeper().sweep()
    books.require_balance(principal)
    assert outcome(books, request) is not None


def test_a_claim_beside_another_deliverys_hold_is_settled_all_the_same(books: Books) -> None:
    principal = key(**AMPLE)
    request = reservation(principal, caller_named=True)
    left_behind(books, request, "take_hold")
    other = replace(request, caller_named=False)
    with suppress(DiedError):
        dying(books, "close_hold").reserve(other).settle(record(other))
    swept = books.sweeper(charge=ALL).sweep()
    assert counts(swept) == {"lost": 1}  # the hold is found by its key, not by this claim
    assert counts(books.sweeper(principal, charge=ALL).sweep()) == {"released": 1}
    books.require_balance(principal)


def test_claims_are_looked_through_once(untouched: Books) -> None:
    early, late = reservation(key()), reservation(key(), NOON + timedelta(hours=2))
    left_behind(untouched, early, "settle_record")
    queries: list[str] = []
    untouched.client.meta.events.register(
        "before-call.dynamodb.Query", lambda model, **_: queries.append(model.name), unique_id="count"
    )
    try:
        untouched.sweeper().sweep()
        first, queries[:] = len(queries), []
        untouched.sweeper().sweep()
        assert queries == []
        left_behind(untouched, late, "settle_record")
        untouched.sweeper(now=late.created_at + LONG_AGO).sweep()
    finally:
        untouched.client.meta.events.unregister("before-call.dynamodb.Query", unique_id="count")
    assert first == 8 * 6  # 1, 2, 4, 8 and 9 hours of yesterday, and this morning; eight partitions each
    assert len(queries) == 8 * 2  # two hours in two steps
    assert outcome(untouched, early) == outcome(untouched, late) == ("lost", 0, 0)


def test_a_claim_near_the_edge_of_an_hour_or_a_day_is_not_missed(untouched: Books) -> None:
    midnight = NOON.replace(hour=0, minute=0, second=0)
    moments = [
        midnight - timedelta(microseconds=1),
        midnight,
        midnight + timedelta(microseconds=1),
        midnight + timedelta(hours=1) - timedelta(microseconds=1),
        midnight + timedelta(hours=1),
        NOON + timedelta(microseconds=500_000),
    ]
    requests = [reservation(key(), moment) for moment in moments]
    for request in requests:
        left_behind(untouched, request, "settle_record")
    for minute in range(3):  # in steps, as the schedule does it
        untouched.sweeper(now=NOON + LONG_AGO + timedelta(minutes=minute)).sweep()
    assert [outcome(untouched, request) for request in requests] == [("lost", 0, 0)] * len(requests)


def test_progress_from_a_clock_that_was_ahead_is_not_believed(books: Books) -> None:
    books.sweeper(now=NOON + timedelta(days=365)).sweep()
    request = reservation(key())
    left_behind(books, request, "settle_record")
    books.sweeper().sweep()
    assert outcome(books, request) == ("lost", 0, 0)


# Counters


def test_counters_of_past_periods_are_dropped_and_others_kept(books: Books) -> None:
    principal = key(**AMPLE)
    ages = {
        LimitKind.REQUESTS_PER_MINUTE: [timedelta(minutes=14), timedelta(minutes=17)],
        LimitKind.TOKENS_PER_MINUTE: [timedelta(minutes=14), timedelta(minutes=17)],
        LimitKind.TOKENS_PER_DAY: [timedelta(days=3), timedelta(days=5)],
        LimitKind.NANOS_PER_DAY: [timedelta(days=3), timedelta(days=5)],
        LimitKind.TOKENS_PER_MONTH: [timedelta(days=61), timedelta(days=125)],
        LimitKind.NANOS_PER_MONTH: [timedelta(days=61), timedelta(days=125)],
    }
    kept = {counter(kind, NOON - young) for kind, (young, _) in ages.items()} | {"parallel_requests#", "later#2020"}
    gone = {counter(kind, NOON - old) for kind, (_, old) in ages.items()}
    books.client.put_item(
        TableName=books.table,
        Item={
            "pk": {"S": f"LIMITS#{principal.key_id}"},
            "sk": {"S": "LIMITS"},
            **{name: {"N": "7"} for name in kept | gone},
        },
    )
    swept = books.sweeper(principal, now=NOON).sweep()
    assert swept.dropped == 6
    assert books.limits(principal).keys() - {"pk", "sk"} == kept


# Runs


def test_a_step_that_fails_does_not_keep_the_others_from_being_done(books: Books) -> None:
    principal, other = key(**AMPLE), key(**AMPLE)
    left_behind(books, reservation(principal), "settle_record", "close_hold")
    left_behind(books, reservation(other), "settle_record", "close_hold")
    books.client.update_item(
        TableName=books.table,
        Key={"pk": {"S": f"LIMITS#{principal.key_id}"}, "sk": {"S": "LIMITS"}},
        UpdateExpression="SET #broken = :broken",
        ExpressionAttributeNames={"#broken": "open#broken"},
        ExpressionAttributeValues={":broken": {"M": {"claim": {"S": "private"}}}},
    )
    with pytest.raises(SweepError) as caught:
        books.sweeper(principal, other).sweep()
    assert counts(caught.value.counts) == {"released": 2, "lost": 2}
    assert caught.value.counts.failed == 1
    books.require_balance(other)
    assert [name for name in books.limits(principal) if name.startswith("open#")] == ["open#broken"]


def test_keys_that_cannot_be_listed_do_not_keep_claims_from_being_settled(books: Books) -> None:
    request = reservation(key())
    left_behind(books, request, "settle_record")

    def unlisted() -> list[str]:
        raise ValueError("no registry")

    sweeper = UsageSweeper(books.client, books.table, 400, ManualClock(now=NOON + LONG_AGO), limited_keys=unlisted)
    with pytest.raises(SweepError):
        sweeper.sweep()
    assert outcome(books, request) == ("lost", 0, 0)


def test_a_run_that_is_out_of_time_stops_and_the_next_one_goes_on(books: Books) -> None:
    keys = [key(**AMPLE) for _ in range(3)]
    for principal in keys:
        left_behind(books, reservation(principal), "settle_record", "close_hold")
    cut_short = books.sweeper(*keys, seconds=0).sweep()
    assert (counts(cut_short), cut_short.complete) == ({}, False)
    whole = books.sweeper(*keys).sweep()
    assert (counts(whole), whole.complete) == ({"released": 3, "lost": 3}, True)


def test_a_run_is_one_line_in_the_log(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(logger, "info", lambda message, **fields: lines.append((message, fields)))
    principal = key(**AMPLE)
    left_behind(books, reservation(principal), "settle_record", "close_hold")
    books.sweeper(principal).sweep()
    (message, fields) = lines[-1]
    assert len(lines) == 1
    assert message == "usage_swept"
    assert fields == {
        "released": 1,
        "lost": 1,
        "repaired": 0,
        "forgotten": 0,
        "dropped": 2,
        "failed": 0,
        "complete": True,
    }
