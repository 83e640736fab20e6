"""The shape of roll-up items: usage added up by the minute, the hour and the day.

``pk`` is ``ROLLUP#<granularity>#<span>#<shard>``: a day of minutes, a month of hours or a year of days, spread over
``ROLLUP_SHARDS`` partitions that are added up when read. ``sk`` is ``<bucket's start>#<digest of the dimensions>``.
Counts are attributes by their own names; histograms have one attribute a bucket, as ``total_ms#27``, since ``ADD``
reaches nothing that is nested.

A record that is in the roll-ups carries, as ``rolled_up``, what they hold of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from completions.domain.metering import Outcome
from completions.domain.usage import COUNTS, HISTOGRAMS, Dimensions, Granularity, Totals, UsageRow, latency_bucket
from completions.metering.items import RECORD_SORT, RecordItem

ROLLUP_SHARDS: Final = 4
DIMENSIONS: Final = ("start", "key_id", "team", "owner", "model", "outcome")
"""The attributes that say whose usage an item is, and when."""
_SPANS: Final = {Granularity.MINUTE: "%Y%m%d", Granularity.HOUR: "%Y%m", Granularity.DAY: "%Y"}
_NONE: Final = "-"


class RolledRecord(RecordItem):
    """A settled record, and the mark of what the roll-ups hold of it."""

    rolled_up: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a record adds to the roll-ups."""

    outcome: Outcome
    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    nanos: int
    estimated: int
    total_ms: int
    first_token_ms: int | None

    @classmethod
    def of(cls, record: RecordItem) -> Facts:
        """A record's own."""
        return cls(
            outcome=record.outcome,
            model=record.model,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            completion_tokens=record.completion_tokens,
            nanos=record.nanos,
            estimated=int(record.estimated),
            total_ms=record.total_ms,
            first_token_ms=record.first_token_ms,
        )

    @classmethod
    def parse(cls, mark: str) -> Facts:
        """Those a mark tells."""
        outcome, *numbers, first_token, model = mark.split(" ", 8)
        prompt, cached, completion, nanos, estimated, total = map(int, numbers)
        first = None if first_token == _NONE else int(first_token)
        return cls(Outcome(outcome), model, prompt, cached, completion, nanos, estimated, total, first)

    @property
    def mark(self) -> str:
        """All of them in a few bytes; the model's name, which may hold spaces, is last."""
        first = _NONE if self.first_token_ms is None else self.first_token_ms
        numbers = (self.prompt_tokens, self.cached_tokens, self.completion_tokens, self.nanos, self.estimated)
        return " ".join(map(str, (self.outcome, *numbers, self.total_ms, first, self.model)))

    @property
    def totals(self) -> Totals:
        """The sums over this one request."""
        first = {} if self.first_token_ms is None else {latency_bucket(self.first_token_ms): 1}
        return Totals(
            requests=1,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            nanos=self.nanos,
            estimated=self.estimated,
            total_ms={latency_bucket(self.total_ms): 1},
            first_token_ms=first,
        )


@dataclass(frozen=True, slots=True)
class RollUpKey:
    """Which roll-up item, its shard apart."""

    granularity: Granularity
    start: datetime
    dimensions: Dimensions

    def key(self, shard: int) -> dict[str, Any]:
        """The table's key."""
        dimensions = self.dimensions
        names = [dimensions.key_id, dimensions.team, dimensions.owner, dimensions.model, dimensions.outcome]
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:20]
        partition = rollup_partition(self.granularity, self.start, shard)
        return {"pk": {"S": partition}, "sk": {"S": f"{stamp(self.start)}#{digest}"}}


def rollup_partition(granularity: Granularity, moment: datetime, shard: int) -> str:
    """The partition key of the span that ``moment`` is in."""
    return f"ROLLUP#{granularity}#{moment.strftime(_SPANS[granularity])}#{shard}"


def rollup_spans(granularity: Granularity, start: datetime, end: datetime) -> list[str]:
    """The partition keys of everything from ``start`` to before ``end``, in every shard."""
    moments = []
    day = Granularity.DAY.floor(start)
    while day < end:
        moments.append(day)
        day += Granularity.DAY.length
    names = (rollup_partition(granularity, moment, shard) for moment in moments for shard in range(ROLLUP_SHARDS))
    return list(dict.fromkeys(names))


def stamp(start: datetime) -> str:
    """How a bucket's start begins its sort key."""
    return start.strftime("%Y%m%dT%H%M")


def record_dimensions(record: RecordItem) -> Dimensions:
    """Whose usage a record is."""
    return Dimensions(record.key_id, record.team, record.owner, record.model, record.outcome)


def contributions(record: RolledRecord) -> dict[RollUpKey, Totals]:
    """What the roll-ups lack of a record: all of it, or the difference to what its mark tells."""
    wanted = Facts.of(record)
    known = None if record.rolled_up is None else Facts.parse(record.rolled_up)
    added: dict[RollUpKey, Totals] = {}
    if known == wanted:
        return added
    own = record_dimensions(record)
    for granularity in Granularity:
        start = granularity.floor(record.created_at)
        key = RollUpKey(granularity, start, own)
        added[key] = wanted.totals
        if known is not None:
            old = RollUpKey(granularity, start, replace(own, model=known.model, outcome=known.outcome))
            added[old] = added.get(old, Totals()) - known.totals
    return added


def mark_update(table: str, record: RolledRecord) -> dict[str, Any]:
    """The action that marks a record, on the condition that its mark is still the one that is known."""
    values = {":settled": {"S": "SETTLED"}, ":new": {"S": Facts.of(record).mark}}
    condition = "attribute_not_exists(#mark)"
    if record.rolled_up is not None:
        values[":old"] = {"S": record.rolled_up}
        condition = "#mark = :old"
    return {
        "TableName": table,
        "Key": {"pk": {"S": record.pk}, "sk": {"S": RECORD_SORT}},
        "UpdateExpression": "SET #mark = :new",
        "ConditionExpression": f"#state = :settled AND {condition}",
        "ExpressionAttributeNames": {"#mark": "rolled_up", "#state": "state"},
        "ExpressionAttributeValues": values,
    }


def add_update(table: str, key: RollUpKey, totals: Totals, shard: int) -> dict[str, Any]:
    """The action that adds to a roll-up item, which may not be there yet."""
    dimensions = key.dimensions
    facts: dict[str, Mapping[str, str]] = {
        "start": {"S": key.start.isoformat()},
        "key_id": {"S": dimensions.key_id},
        "owner": {"S": dimensions.owner},
        "model": {"S": dimensions.model},
        "outcome": {"S": dimensions.outcome.value},
        "expires_at": {"N": str(int((key.start + key.granularity.kept).timestamp()))},
    }
    if dimensions.team is not None:
        facts["team"] = {"S": dimensions.team}
    added = {name: {"N": str(count)} for name, count in _attributes(totals) if count}
    names = {f"#n{number}": name for number, name in enumerate((*facts, *added))}
    values = {f":v{number}": value for number, value in enumerate((*facts.values(), *added.values()))}
    terms = list(zip(names, values, strict=True))
    assignments = ", ".join(f"{name} = {value}" for name, value in terms[: len(facts)])
    additions = ", ".join(f"{name} {value}" for name, value in terms[len(facts) :])
    return {
        "TableName": table,
        "Key": key.key(shard),
        "UpdateExpression": f"SET {assignments} ADD {additions}",
        "ExpressionAttributeNames": names,
        "ExpressionAttributeValues": values,
    }


def usage_row(item: Mapping[str, Mapping[str, Any]]) -> UsageRow:
    """A roll-up item in DynamoDB's typed JSON: a page has thousands, and reading them as plain attributes is slower."""
    counts = {name: int(item[name]["N"]) for name in COUNTS if name in item}
    histograms: dict[str, dict[int, int]] = {name: {} for name in HISTOGRAMS}
    for attribute, value in item.items():
        name, found, bucket = attribute.partition("#")
        if found and value["N"] != "0":
            histograms[name][int(bucket)] = int(value["N"])
    team = item["team"]["S"] if "team" in item else None
    outcome = Outcome(item["outcome"]["S"])
    dimensions = Dimensions(item["key_id"]["S"], team, item["owner"]["S"], item["model"]["S"], outcome)
    totals = Totals(**counts, total_ms=histograms["total_ms"], first_token_ms=histograms["first_token_ms"])
    return UsageRow(datetime.fromisoformat(item["start"]["S"]), dimensions, totals)


def _attributes(totals: Totals) -> Iterable[tuple[str, int]]:
    for name in COUNTS:
        yield name, getattr(totals, name)
    for name in HISTOGRAMS:
        for bucket, count in getattr(totals, name).items():
            yield f"{name}#{bucket}", count
