"""Holds on a key's limits: who gets through, what is told to who does not, and what is given back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from completions.domain.completion import Usage
from completions.domain.errors import (
    CompletionError,
    DuplicateRequestError,
    InvalidRequestError,
    QuotaExceededError,
    RateLimitError,
)
from completions.domain.limits import Charge, KeyLimits, LimitKind
from completions.domain.metering import Outcome, Principal, Reservation, Timings, UsageRecord
from completions.dynamodb_json import deserialized
from completions.metering.dynamodb import DynamoUsageLedger
from completions.metering.limit_items import counter
from completions_cli.local.tables import create_tables, moto_dynamodb
from fakes import ManualClock

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

NOON = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC)
ESTIMATE = Charge(tokens=100, nanos=1_000)


@pytest.fixture(scope="module")
def client(project_root: Path) -> Iterator[DynamoDBClient]:
    settings = Config(region_name="ap-south-1", retries={"total_max_attempts": 1}, max_pool_connections=64)
    with moto_dynamodb() as url, closing(boto3.client("dynamodb", endpoint_url=url, config=settings)) as tables:
        create_tables(tables, project_root / "infra" / "tables.yaml")
        yield tables


class Bench:
    """One key, and a ledger."""

    def __init__(self, client: DynamoDBClient, **limits: int) -> None:
        self.client = client
        self.clock = ManualClock(now=NOON)
        self.ledger = DynamoUsageLedger(client, "UsageTable", 400, self.clock)
        self.principal = Principal(f"key-{uuid.uuid4()}", "ada", limits=KeyLimits(**limits))

    def reservation(self, name: str = "", **fields: Any) -> Reservation:
        record_id = name or str(uuid.uuid4())
        known = Reservation(
            record_id, record_id, self.principal, "openai", "demo", "demo", False, self.clock.now(), ESTIMATE
        )
        return replace(known, **fields)

    def record(self, reservation: Reservation, tokens: int = 40, nanos: int = 400) -> UsageRecord:
        return UsageRecord(
            reservation,
            model="demo",
            endpoint_name="demo",
            outcome=Outcome.SUCCEEDED,
            usage=Usage(tokens - 10, 10),
            timings=Timings(0, 1, 2),
            attempts=1,
            charge=Charge(tokens, nanos),
        )

    @property
    def item(self) -> dict[str, Any]:
        key = {"pk": {"S": f"LIMITS#{self.principal.key_id}"}, "sk": {"S": "LIMITS"}}
        return deserialized(self.client.get_item(TableName="UsageTable", Key=key, ConsistentRead=True).get("Item", {}))

    def used(self, kind: LimitKind) -> int:
        return int(self.item.get(counter(kind, NOON), 0))


# what fits twice, and a third time does not
LIMITS = {
    LimitKind.REQUESTS_PER_MINUTE: (2, RateLimitError, 30.0),
    LimitKind.TOKENS_PER_MINUTE: (299, RateLimitError, 30.0),
    LimitKind.PARALLEL_REQUESTS: (2, RateLimitError, 1.0),
    LimitKind.TOKENS_PER_DAY: (299, QuotaExceededError, 43_170.0),
    LimitKind.TOKENS_PER_MONTH: (299, QuotaExceededError, 43_170.0),
    LimitKind.NANOS_PER_DAY: (2_999, QuotaExceededError, 43_170.0),
    LimitKind.NANOS_PER_MONTH: (2_999, QuotaExceededError, 43_170.0),
}


@pytest.mark.parametrize("kind", LimitKind)
def test_a_limit_lets_through_what_fits_and_says_when_to_come_back(client: DynamoDBClient, kind: LimitKind) -> None:
    limit, error, reset = LIMITS[kind]
    bench = Bench(client, **{kind.value: limit})
    claims = [bench.ledger.reserve(bench.reservation()) for _ in range(2)]
    with pytest.raises(error) as caught:
        bench.ledger.reserve(bench.reservation())

    taken = 2_000 if "nanos" in kind else 200 if "tokens" in kind else 2
    assert [claim.limits[0].remaining for claim in claims] == [limit - taken // 2, limit - taken]
    status = caught.value.status
    assert status is not None
    assert (status.name, status.limit, status.remaining, status.reset_seconds) == (kind, limit, limit - taken, reset)
    assert type(caught.value) is error
    assert caught.value.retry_after == reset
    assert bench.principal.key_id in caught.value.message
    assert f"{limit:,}" in caught.value.message


@pytest.mark.parametrize("kind", [kind for kind in LimitKind if "tokens" in kind or "nanos" in kind])
def test_what_the_estimate_was_too_high_by_is_given_back(client: DynamoDBClient, kind: LimitKind) -> None:
    bench = Bench(client, **{kind.value: 10_000})
    reservation = bench.reservation()
    claim = bench.ledger.reserve(reservation)
    assert bench.used(kind) == (1_000 if "nanos" in kind else 100)
    claim.settle(bench.record(reservation))
    claim.settle(bench.record(reservation))
    assert bench.used(kind) == (400 if "nanos" in kind else 40)


def test_a_place_is_free_again_when_its_request_is_settled(client: DynamoDBClient) -> None:
    bench = Bench(client, parallel_requests=1)
    for _ in range(3):
        reservation = bench.reservation()
        bench.ledger.reserve(reservation).settle(bench.record(reservation))
    assert bench.used(LimitKind.PARALLEL_REQUESTS) == 0


def test_a_request_that_can_never_fit_is_told_so(client: DynamoDBClient) -> None:
    bench = Bench(client, tokens_per_minute=99)
    with pytest.raises(QuotaExceededError, match="never fit") as caught:
        bench.ledger.reserve(bench.reservation())
    assert caught.value.retry_after is None


def test_a_new_period_starts_at_nothing(client: DynamoDBClient) -> None:
    bench = Bench(client, requests_per_minute=1)
    bench.ledger.reserve(bench.reservation())
    bench.clock.advance(30)
    bench.ledger.reserve(bench.reservation())
    with pytest.raises(RateLimitError):
        bench.ledger.reserve(bench.reservation())


def test_a_request_that_ends_in_another_period_counts_in_its_own(client: DynamoDBClient) -> None:
    bench = Bench(client, nanos_per_day=10_000, tokens_per_minute=10_000)
    reservation = bench.reservation()
    claim = bench.ledger.reserve(reservation)
    bench.clock.advance(86_400)
    claim.settle(bench.record(reservation))
    assert bench.used(LimitKind.NANOS_PER_DAY) == 400
    later = counter(LimitKind.NANOS_PER_DAY, bench.clock.now())
    assert later not in bench.item


def test_what_was_settled_leaves_no_trace_but_the_counters(client: DynamoDBClient) -> None:
    bench = Bench(client, parallel_requests=9)
    for _ in range(5):
        reservation = bench.reservation()
        bench.ledger.reserve(reservation).settle(bench.record(reservation))
    names = {name.partition("#")[0] for name in bench.item}
    assert names == {"pk", "sk", "closed", *(kind.value for kind in LimitKind)}
    assert len([name for name in bench.item if name.startswith("closed#")]) == 1  # the last: the next hold drops it


def test_old_minutes_are_dropped_on_the_way(client: DynamoDBClient) -> None:
    bench = Bench(client, requests_per_minute=100)
    for _ in range(40):
        reservation = bench.reservation()
        bench.ledger.reserve(reservation).settle(bench.record(reservation))
        bench.clock.advance(60)
    assert len([name for name in bench.item if name.startswith("requests_per_minute#")]) <= 11


# One logical request


def test_a_second_delivery_holds_nothing_and_gives_nothing_back(client: DynamoDBClient) -> None:
    bench = Bench(client, nanos_per_day=10_000)
    reservation = bench.reservation()
    first = bench.ledger.reserve(reservation)
    with pytest.raises(DuplicateRequestError):
        bench.ledger.reserve(reservation)
    assert bench.used(LimitKind.NANOS_PER_DAY) == 1_000
    first.settle(bench.record(reservation))
    assert bench.used(LimitKind.NANOS_PER_DAY) == 400


def test_a_second_delivery_of_what_was_settled_long_ago_is_noticed_by_its_record(client: DynamoDBClient) -> None:
    bench = Bench(client, nanos_per_day=10_000)
    old = bench.reservation()
    bench.ledger.reserve(old).settle(bench.record(old))
    for _ in range(2):  # drops the closed entry
        other = bench.reservation()
        bench.ledger.reserve(other).settle(bench.record(other))
    again = DynamoUsageLedger(client, "UsageTable", 400, bench.clock).reserve(old)
    with pytest.raises(DuplicateRequestError):
        again.confirm()
    again.settle(bench.record(old, tokens=99, nanos=999))
    assert bench.used(LimitKind.NANOS_PER_DAY) == 1_200
    assert bench.used(LimitKind.PARALLEL_REQUESTS) == 0


@pytest.mark.parametrize(
    ("settled", "fingerprint", "error", "text"),
    [
        (False, "a", DuplicateRequestError, "in progress"),
        (True, "a", DuplicateRequestError, "already answered and charged"),
        (True, "b", InvalidRequestError, "another request"),
        (False, "b", InvalidRequestError, "another request"),
    ],
)
def test_a_name_that_comes_again_is_told_what_became_of_it(
    client: DynamoDBClient, settled: bool, fingerprint: str, error: type[CompletionError], text: str
) -> None:
    bench = Bench(client)
    first = bench.reservation(caller_named=True, fingerprint="a")
    claim = bench.ledger.reserve(first)
    if settled:
        claim.settle(bench.record(first))
    with pytest.raises(error, match=text):
        bench.ledger.reserve(replace(first, fingerprint=fingerprint))


def test_a_named_request_without_room_may_come_again_under_its_name(client: DynamoDBClient) -> None:
    bench = Bench(client, parallel_requests=1)
    running = bench.reservation()
    claim = bench.ledger.reserve(running)
    named = bench.reservation(caller_named=True, fingerprint="a")
    with pytest.raises(RateLimitError):
        bench.ledger.reserve(named)
    claim.settle(bench.record(running))
    bench.ledger.reserve(named).settle(bench.record(named))
    assert bench.used(LimitKind.PARALLEL_REQUESTS) == 0
