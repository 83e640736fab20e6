"""A day's figures, added up anew from its records and compared with what was added up on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from completions.domain.limits import Charge, LimitKind, period
from completions.domain.ports import Clock
from completions.domain.usage import Dimensions, Granularity, Totals
from completions.dynamodb_json import deserialized
from completions.metering.items import ReservedItem, partition
from completions.metering.limit_items import amount, closed_results, counter, open_holds
from completions.metering.rollup_items import Facts, RolledRecord, contributions, record_dimensions
from completions.metering.rollup_queries import RollUpReader, day_claims
from completions.metering.rollups import RollUps
from completions.metering.usage_table import limits_key

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_DAILY: Final = (LimitKind.TOKENS_PER_DAY, LimitKind.NANOS_PER_DAY)
_COUNTERS_KEPT: Final = timedelta(days=2)
"""So long a day's counters are there for certain."""
_BATCH: Final = 1000


@dataclass(slots=True)
class AuditResult:
    """``missing`` records are settled, and not in the roll-ups yet."""

    records: int = 0
    keys: int = 0
    unsettled: int = 0
    missing: int = 0
    agreements: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


class DayAudit:
    """Of one UTC day. ``run`` raises boto3's errors."""

    def __init__(self, client: DynamoDBClient, table: str, day: date, clock: Clock) -> None:
        self._client = client
        self._table = table
        self._clock = clock
        self._start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        self._sums: dict[Dimensions, Totals] = {}
        self._charges: dict[str, Charge] = {}  # of keys with limits
        self._unsettled: set[str] = set()

    def run(self) -> AuditResult:
        """Read the records, then what they are compared with."""
        result = AuditResult()
        for claim in day_claims(self._client, self._table, self._start.date()):
            if isinstance(claim, RolledRecord):
                self._take(claim)
                result.records += 1
                result.missing += bool(contributions(claim))
            else:
                self._unsettled.add(claim.pk)
                self._charge(claim, Charge())
        result.unsettled = len(self._unsettled)
        result.keys = len({dimensions.key_id for dimensions in self._sums})
        for granularity in Granularity:
            self._compare_roll_ups(granularity, result)
        for key_id in sorted(self._charges):
            self._compare_counters(key_id, result)
        return result

    def _take(self, record: RolledRecord) -> None:
        dimensions = record_dimensions(record)
        self._sums[dimensions] = self._sums.get(dimensions, Totals()) + Facts.of(record).totals
        self._charge(record, Charge(record.prompt_tokens + record.completion_tokens, record.nanos))

    def _charge(self, claim: ReservedItem, charge: Charge) -> None:
        if claim.limited:
            self._charges[claim.key_id] = _plus(self._charges.get(claim.key_id, Charge()), charge)

    def _compare_roll_ups(self, granularity: Granularity, result: AuditResult) -> None:
        if self._start < granularity.ceiling(self._clock.now() - granularity.kept):
            result.agreements.append(f"nothing by the {granularity}, which is kept for {granularity.kept.days} days")
            return
        found: dict[Dimensions, Totals] = {}
        reader = RollUpReader(self._client, self._table, self._clock)
        for row in reader.rows(granularity, self._start, self._start + timedelta(days=1), latencies=True):
            found[row.dimensions] = found.get(row.dimensions, Totals()) + row.totals
        differences = list(_differences(self._sums, found))
        result.differences += [f"by the {granularity}, {text}" for text in differences]
        if not differences:
            result.agreements.append(f"roll-ups by the {granularity}")

    def _compare_counters(self, key_id: str, result: AuditResult) -> None:
        key: Any = limits_key(key_id)
        reply = self._client.get_item(TableName=self._table, Key=key, ConsistentRead=True)
        item = deserialized(reply.get("Item", {}))
        expected = _plus(self._charges[key_id], self._in_progress(item))
        for kind in _DAILY:
            name = counter(kind, self._start)
            if name not in item and self._start < self._clock.now() - timedelta(days=1) - _COUNTERS_KEPT:
                result.agreements.append(f"nothing of key {key_id}'s {kind}, which is no longer kept")
                continue
            counted, wanted = int(item.get(name, 0)), amount(kind, expected)
            if counted == wanted:
                result.agreements.append(f"key {key_id}'s {kind}")
            else:
                result.differences.append(
                    f"key {key_id}'s {kind}: {wanted:,} by records and holds, {counted:,} counted"
                )

    def _in_progress(self, item: Mapping[str, Any]) -> Charge:
        """What the day's counters hold of requests whose records are not settled."""
        held = [hold.estimate for hold in open_holds(item) if self._is_today(hold.at)]
        closed = [
            result.charge
            for record_id, (_, at, result) in closed_results(item).items()
            if self._is_today(at) and partition(record_id) in self._unsettled
        ]
        return _plus(*held, *closed)

    def _is_today(self, moment: datetime) -> bool:
        return period(LimitKind.TOKENS_PER_DAY, moment) == period(LimitKind.TOKENS_PER_DAY, self._start)


def add_missing(client: DynamoDBClient, table: str, day: date, clock: Clock) -> tuple[int, int]:
    """Add a day's records that the roll-ups lack; how many were added, and how many could not be."""
    roll_ups = RollUps(client, table, clock)
    claims = day_claims(client, table, day)
    missing = (claim for claim in claims if isinstance(claim, RolledRecord) and contributions(claim))
    added = failed = 0
    for batch in iter(lambda: list(islice(missing, _BATCH)), []):
        lost = roll_ups.add(batch)
        added += len(batch) - len(lost)
        failed += len(lost)
    return added, failed


def _differences(records: Mapping[Dimensions, Totals], roll_ups: Mapping[Dimensions, Totals]) -> Iterator[str]:
    dimensions = records.keys() | roll_ups.keys()
    for one in sorted(
        dimensions, key=lambda each: (each.key_id, each.model, each.team or "", each.owner, each.outcome)
    ):
        wanted, found = records.get(one, Totals()), roll_ups.get(one, Totals())
        if wanted == found:
            continue
        pairs = [(each.name, getattr(wanted, each.name), getattr(found, each.name)) for each in fields(Totals)]
        figures = [
            f"{name} {_said(right)} in the records, {_said(wrong)} added up"
            for name, right, wrong in pairs
            if right != wrong
        ]
        team = "" if one.team is None else f", team {one.team}"
        whose = f"key {one.key_id}, model {one.model}{team}, owner {one.owner}, {one.outcome}"
        yield f"{whose}: {'; '.join(figures)}"


def _said(value: int | Mapping[int, int]) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "{" + ", ".join(f"{bucket}: {count}" for bucket, count in sorted(value.items())) + "}"


def _plus(*charges: Charge) -> Charge:
    sums: Counter[str] = Counter()
    for charge in charges:
        sums.update(tokens=charge.tokens, nanos=charge.nanos)
    return Charge(sums["tokens"], sums["nanos"])
