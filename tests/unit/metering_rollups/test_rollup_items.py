"""What a record adds to the roll-ups, how that is remembered, and how many records fit one transaction."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from completions.domain.metering import Outcome
from completions.domain.usage import Dimensions, Granularity, Totals, latency_bucket
from completions.metering.rollup_items import (
    Facts,
    RolledRecord,
    RollUpKey,
    add_update,
    contributions,
    mark_update,
    rollup_spans,
    usage_row,
)
from completions.metering.rollups import grouped

NOON = datetime(2026, 11, 30, 12, 34, 56, tzinfo=UTC)


def record(name: str = "r-1", **fields: Any) -> RolledRecord:
    known: dict[str, Any] = {
        "pk": f"REQ#{name}",
        "state": "SETTLED",
        "claim_id": "c",
        "day_shard": "2026-11-30#1",
        "created_at": NOON,
        "expires_at": 2_000_000_000,
        "request_id": name,
        "key_id": "key-1",
        "owner": "ada",
        "team": "compilers",
        "dialect": "openai",
        "requested_model": "demo",
        "model": "demo",
        "endpoint": "demo",
        "streamed": True,
        "outcome": "succeeded",
        "prompt_tokens": 7,
        "completion_tokens": 11,
        "cached_tokens": 2,
        "estimated": False,
        "queue_ms": 1,
        "first_token_ms": 40,
        "total_ms": 90,
        "attempts": 1,
        "nanos": 1_234,
    }
    return RolledRecord.model_validate({**known, **fields})


def test_a_record_counts_once_in_the_minute_the_hour_and_the_day_it_began_in() -> None:
    added = contributions(record())
    own = Dimensions("key-1", "compilers", "ada", "demo", Outcome.SUCCEEDED)
    totals = Totals(1, 7, 2, 11, 1_234, 0, {latency_bucket(90): 1}, {latency_bucket(40): 1})
    assert added == {
        RollUpKey(Granularity.MINUTE, NOON.replace(second=0), own): totals,
        RollUpKey(Granularity.HOUR, NOON.replace(minute=0, second=0), own): totals,
        RollUpKey(Granularity.DAY, NOON.replace(hour=0, minute=0, second=0), own): totals,
    }


def test_a_record_that_is_in_adds_nothing() -> None:
    assert contributions(record(rolled_up=Facts.of(record()).mark)) == {}


def test_a_lost_request_that_turns_up_takes_the_loss_back() -> None:
    lost = record(outcome="lost", prompt_tokens=0, completion_tokens=0, cached_tokens=0, nanos=0, first_token_ms=None)
    found = record(model="fallback", rolled_up=Facts.of(lost).mark)
    added = contributions(found)
    assert len(added) == 6
    sums = {(key.dimensions.outcome, key.dimensions.model): totals for key, totals in added.items()}
    assert sums[Outcome.SUCCEEDED, "fallback"].requests == 1
    assert sums[Outcome.LOST, "demo"] == Totals(requests=-1, total_ms={latency_bucket(90): -1})
    assert sum((totals for totals in added.values()), Totals()).requests == 0


@pytest.mark.parametrize("first", [None, 0, 40])
@pytest.mark.parametrize("model", ["demo", "a model with spaces", "-", "häßlich/7b:latest"])
def test_a_mark_tells_all_that_was_added(first: int | None, model: str) -> None:
    facts = Facts.of(record(model=model, first_token_ms=first, estimated=True))
    assert Facts.parse(facts.mark) == facts
    assert facts.totals.estimated == 1


def test_a_mark_is_small_enough_to_cost_nothing() -> None:
    assert len(Facts.of(record()).mark) < 60


def test_marking_depends_on_the_mark_that_is_known() -> None:
    fresh, marked = mark_update("T", record()), mark_update("T", record(rolled_up="lost 0 0 0 0 0 0 - demo"))
    assert "attribute_not_exists(#mark)" in fresh["ConditionExpression"]
    assert marked["ConditionExpression"].endswith("#mark = :old")
    assert all("#state = :settled" in update["ConditionExpression"] for update in (fresh, marked))


def test_an_item_goes_when_its_granularity_is_kept_no_longer() -> None:
    for key, totals in contributions(record()).items():
        expires = int(add_update("T", key, totals, 0)["ExpressionAttributeValues"][":v5"]["N"])
        assert expires == int((key.start + key.granularity.kept).timestamp())


def test_teams_with_no_name_and_a_name_of_nothing_are_two() -> None:
    (nobody, *_), (nameless, *_) = contributions(record(team=None)), contributions(record(team=""))
    assert nobody.key(0) != nameless.key(0)


def test_no_two_combinations_share_an_item() -> None:
    (one, *_) = contributions(record(key_id="a#b", owner="c"))
    (other, *_) = contributions(record(key_id="a", owner="b#c"))
    assert one.key(0) != other.key(0)


def test_an_item_reads_back_as_a_row() -> None:
    item = {
        "start": {"S": "2026-11-30T12:00:00+00:00"},
        "key_id": {"S": "key-1"},
        "owner": {"S": "ada"},
        "model": {"S": "demo"},
        "outcome": {"S": "aborted"},
        "requests": {"N": "3"},
        "nanos": {"N": "5"},
        "total_ms#27": {"N": "2"},
        "total_ms#3": {"N": "1"},
        "first_token_ms#9": {"N": "0"},
    }
    row = usage_row(item)
    assert row.dimensions == Dimensions("key-1", None, "ada", "demo", Outcome.ABORTED)
    assert row.totals == Totals(requests=3, nanos=5, total_ms={3: 1, 27: 2})


@pytest.mark.parametrize(
    ("granularity", "days", "partitions"),
    [(Granularity.MINUTE, 2, 2), (Granularity.HOUR, 7, 2), (Granularity.DAY, 40, 2), (Granularity.DAY, 31, 1)],
)
def test_a_span_of_time_is_few_partitions(granularity: Granularity, days: int, partitions: int) -> None:
    start = datetime(2026, 11, 29, tzinfo=UTC) if days != 31 else datetime(2026, 10, 1, tzinfo=UTC)
    names = rollup_spans(granularity, start, start + timedelta(days=days))
    assert len(names) == len(set(names)) == 4 * partitions


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 400), st.sampled_from(list(Outcome))),
        max_size=300,
    )
)
def test_no_group_is_more_than_a_transaction_takes(drawn: list[tuple[str, int, Outcome]]) -> None:
    records = [
        record(f"r-{number}", key_id=key, created_at=NOON + timedelta(minutes=minutes), outcome=outcome)
        for number, (key, minutes, outcome) in enumerate(drawn)
    ]
    groups = list(grouped(records))
    assert [one.pk for group in groups for one in group] == [one.pk for one in records]
    for group in groups:
        keys = {key for one in group for key in contributions(one)}
        assert len(group) + len(keys) <= 100


def test_a_busy_key_s_records_share_a_transaction() -> None:
    (group,) = grouped(record(f"r-{number}") for number in range(97))
    assert len(group) == 97
