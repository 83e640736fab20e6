"""Keys, requests and their records over one usage table, and whether its books balance."""

from __future__ import annotations

import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from completions.domain.completion import Usage
from completions.domain.limits import Charge, KeyLimits, LimitKind
from completions.domain.metering import Outcome, Principal, Reservation, Timings, UsageRecord
from completions.domain.ports import Clock
from completions.dynamodb_json import deserialized
from completions.metering.dynamodb import DynamoUsageLedger
from completions.metering.limit_items import counter
from completions.metering.recovery_table import RecoveryTable
from completions.metering.sweep import LostCharge, SweepPolicy, UsageSweeper
from completions.metering.usage_table import UsageTable
from dynamodb_local import new_table
from fakes import ManualClock

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

NOON = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC)
ESTIMATE = Charge(tokens=100, nanos=1_000)
USED = Charge(tokens=40, nanos=400)
LONG_AGO = timedelta(seconds=961)
"""Older than what the sweeper leaves alone."""
AMPLE = {kind.value: 10**12 for kind in LimitKind}
COUNTED = {
    LimitKind.TOKENS_PER_DAY: "tokens",
    LimitKind.TOKENS_PER_MONTH: "tokens",
    LimitKind.NANOS_PER_DAY: "nanos",
    LimitKind.NANOS_PER_MONTH: "nanos",
}


def key(**limits: int) -> Principal:
    """A key of its own."""
    return Principal(f"key-{uuid.uuid4()}", "ada", limits=KeyLimits(**limits))


def reservation(principal: Principal, at: datetime = NOON, name: str = "", **fields: Any) -> Reservation:
    """A request of this key."""
    record_id = name or str(uuid.uuid4())
    known = Reservation(record_id, record_id, principal, "openai", "demo", "demo-endpoint", False, at, ESTIMATE)
    return replace(known, **fields)


def record(of: Reservation, charge: Charge = USED, outcome: Outcome = Outcome.SUCCEEDED) -> UsageRecord:
    """What it came to; a quarter of the tokens is the prompt's."""
    prompt = charge.tokens // 4
    return UsageRecord(
        of,
        model="demo",
        endpoint_name="demo-endpoint",
        outcome=outcome,
        usage=Usage(prompt, charge.tokens - prompt),
        timings=Timings(1, 2, 3),
        attempts=1,
        charge=charge,
        price_version="2026-11",
    )


def recent_table(client: DynamoDBClient) -> str:
    """An empty usage table whose claims are known to be settled until half an hour before noon: a sweep then does not
    look through two empty days first, which takes its time."""
    table = new_table(client)
    RecoveryTable(client, table, 400).note_looked_through(NOON - timedelta(minutes=30))
    return table


class Books:
    """One usage table."""

    def __init__(self, client: DynamoDBClient, table: str) -> None:
        self.client = client
        self.table = table

    def ledger(self, clock: Clock | None = None) -> DynamoUsageLedger:
        """As one worker has it."""
        return DynamoUsageLedger(self.client, self.table, 400, clock or ManualClock(now=NOON))

    def sweeper(
        self, *keys: Principal, now: datetime = NOON + LONG_AGO, charge: LostCharge = LostCharge.NOTHING, **policy: Any
    ) -> UsageSweeper:
        """One at this moment."""
        return UsageSweeper(
            self.client,
            self.table,
            400,
            ManualClock(now=now),
            limited_keys=lambda: [one.key_id for one in keys if one.limits.any],
            policy=replace(SweepPolicy(charge=charge), **policy),
        )

    def limits(self, principal: Principal) -> dict[str, Any]:
        """The key's limits item in plain attributes."""
        return self.item(f"LIMITS#{principal.key_id}", "LIMITS") or {}

    def record(self, record_id: str) -> dict[str, Any] | None:
        """A request's item."""
        return self.item(f"REQ#{record_id}", "RECORD")

    def item(self, pk: str, sk: str) -> dict[str, Any] | None:
        """Any item."""
        found = self.client.get_item(
            TableName=self.table, Key={"pk": {"S": pk}, "sk": {"S": sk}}, ConsistentRead=True
        ).get("Item")
        return None if found is None else deserialized(found)

    def used(self, principal: Principal, kind: LimitKind, at: datetime = NOON) -> int:
        """What stands against a limit."""
        return int(self.limits(principal).get(counter(kind, at), 0))

    def records(self, principal: Principal) -> list[dict[str, Any]]:
        """All of the key's records."""
        pages = self.client.get_paginator("scan").paginate(
            TableName=self.table,
            FilterExpression="sk = :record AND key_id = :key",
            ExpressionAttributeValues={":record": {"S": "RECORD"}, ":key": {"S": principal.key_id}},
            ConsistentRead=True,
        )
        return [deserialized(item) for page in pages for item in page["Items"]]

    def require_balance(self, principal: Principal) -> None:
        """Every record is settled, nothing is held, and a key with limits counts in each period the sum of its
        records."""
        item = self.limits(principal)
        sums: Counter[str] = Counter()
        for one in self.records(principal):
            assert one["state"] == "SETTLED", one
            at = datetime.fromisoformat(one["created_at"])
            for kind, what in COUNTED.items():
                tokens = int(one["prompt_tokens"] + one["completion_tokens"])
                sums[counter(kind, at)] += tokens if what == "tokens" else int(one["nanos"])
        counters = {name: int(value) for name, value in item.items() if name.partition("#")[0] in COUNTED}
        assert +Counter(counters) == (+sums if principal.limits.any else Counter())
        assert all(value >= 0 for value in counters.values()), counters
        assert [name for name in item if name.startswith("open#")] == []
        assert int(item.get("parallel_requests#", 0)) == 0


class DiedError(Exception):
    """A write that a process did not live to make."""


def dying(books: Books, *steps: str) -> DynamoUsageLedger:
    """A ledger whose process does not live to see these writes."""
    ledger = books.ledger()

    def die(*_: object, **__: object) -> None:
        raise DiedError

    table = UsageTable(books.client, books.table, 400)
    for step in steps:
        setattr(table, step, die)
    ledger._table = table
    return ledger


def left_behind(books: Books, request: Reservation, *steps: str) -> None:
    """A request whose function did all it does but these writes."""
    with suppress(DiedError):
        claim = dying(books, *steps).reserve(request)
        claim.settle(record(request))
