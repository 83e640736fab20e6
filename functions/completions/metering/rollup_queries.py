"""Reading roll-ups, and what keys have used of their limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.errors import MeteringError
from completions.domain.limits import LimitKind, reset_at
from completions.domain.metering import Principal
from completions.domain.ports import Clock
from completions.domain.usage import COUNTS, Granularity, KeyUse, LimitUse, UsageReports, UsageRow
from completions.dynamodb_json import deserialized
from completions.metering.items import DAY_INDEX, ReservedItem, day_shards
from completions.metering.limit_items import LIMITS_SORT, counter, limits_partition
from completions.metering.rollup_items import DIMENSIONS, RolledRecord, rollup_spans, stamp, usage_row

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_MOST_READ: Final = 100
_READS: Final = 5
_PLAIN: Final = {f"#a{number}": name for number, name in enumerate((*DIMENSIONS, *COUNTS))}
_WITHOUT_HISTOGRAMS: Final = {"ProjectionExpression": ", ".join(_PLAIN), "ExpressionAttributeNames": _PLAIN}
"""botocore takes its time for every attribute, and histograms are most of them."""
_FUTURE: Final = timedelta(days=1)
"""Nothing is counted so far ahead, whatever clock it was counted by."""


class DynamoUsageReports(UsageReports):
    """``keys`` lists every key's principal."""

    def __init__(
        self, client: DynamoDBClient, table: str, clock: Clock, keys: Callable[[], Iterable[Principal]]
    ) -> None:
        self._client = client
        self._table = table
        self._reader = RollUpReader(client, table, clock)
        self._keys = keys

    def rows(
        self, granularity: Granularity, start: datetime, end: datetime, *, latencies: bool = False
    ) -> Iterator[UsageRow]:
        with _unreachable_as_metering_error():
            yield from self._reader.rows(granularity, start, end, latencies=latencies)

    def limits(self, moment: datetime) -> Sequence[KeyUse]:
        with _unreachable_as_metering_error():
            principals = sorted(self._keys(), key=lambda principal: principal.key_id)
            used = limit_counters(self._client, self._table, [one.key_id for one in principals], moment)
        return [_key_use(principal, used.get(principal.key_id, {}), moment) for principal in principals]


class RollUpReader:
    """Over one usage table. Raises boto3's errors."""

    def __init__(self, client: DynamoDBClient, table: str, clock: Clock) -> None:
        self._client = client
        self._table = table
        self._clock = clock

    def rows(
        self, granularity: Granularity, start: datetime, end: datetime, *, latencies: bool = False
    ) -> Iterator[UsageRow]:
        """As ``UsageReports.rows``. What is past its time is left out although it may be there still: the table's TTL
        removes it bit by bit."""
        now = self._clock.now()
        start = max(start, granularity.ceiling(now - granularity.kept))
        end = min(end, now + _FUTURE)
        paginator = self._client.get_paginator("query")
        brief: Any = {} if latencies else _WITHOUT_HISTOGRAMS
        for partition in rollup_spans(granularity, start, end):
            pages = paginator.paginate(
                TableName=self._table,
                KeyConditionExpression="pk = :partition AND sk BETWEEN :first AND :end",
                ExpressionAttributeValues={
                    ":partition": {"S": partition},
                    ":first": {"S": stamp(start)},
                    ":end": {"S": stamp(end)},  # a bucket that begins there has a longer key, and is beyond
                },
                **brief,
            )
            for page in pages:
                rows = map(usage_row, page["Items"])
                yield from (row for row in rows if row.totals.any)


def day_claims(client: DynamoDBClient, table: str, day: date) -> Iterator[RolledRecord | ReservedItem]:
    """Everything that was claimed on a UTC day: settled records, and claims that are not. Raises boto3's errors."""
    paginator = client.get_paginator("query")
    for shard in day_shards(day):
        pages = paginator.paginate(
            TableName=table,
            IndexName=DAY_INDEX,
            KeyConditionExpression="day_shard = :shard",
            ExpressionAttributeValues={":shard": {"S": shard}},
        )
        for item in (deserialized(item) for page in pages for item in page["Items"]):
            kind = RolledRecord if item["state"] == "SETTLED" else ReservedItem
            yield kind.model_validate(item)


def limit_counters(
    client: DynamoDBClient, table: str, key_ids: Sequence[str], moment: datetime
) -> dict[str, Mapping[str, int]]:
    """By key id, the counters of the periods of ``moment`` by name. Raises boto3's errors."""
    names = {f"#n{number}": counter(kind, moment) for number, kind in enumerate(LimitKind)}
    found: dict[str, Mapping[str, int]] = {}
    for first in range(0, len(key_ids), _MOST_READ):
        partitions = {limits_partition(key_id): key_id for key_id in key_ids[first : first + _MOST_READ]}
        wanted: Any = {
            table: {
                "Keys": [{"pk": {"S": partition}, "sk": {"S": LIMITS_SORT}} for partition in partitions],
                "ProjectionExpression": ", ".join(["pk", *names]),
                "ExpressionAttributeNames": names,
            }
        }
        for item in _read(client, table, wanted):
            partition = item.pop("pk")
            found[partitions[partition]] = {name: int(value) for name, value in item.items()}
    return found


def _read(client: DynamoDBClient, table: str, wanted: Any) -> Iterator[dict[str, Any]]:
    for _ in range(_READS):
        reply = client.batch_get_item(RequestItems=wanted)
        yield from map(deserialized, reply["Responses"].get(table, []))
        wanted = reply.get("UnprocessedKeys")
        if not wanted:
            return
    raise MeteringError("The usage table is busy; try again shortly.", retry_after=1, detail="throttled")


def _key_use(principal: Principal, used: Mapping[str, int], moment: datetime) -> KeyUse:
    limits = [
        LimitUse(kind, limit, used.get(counter(kind, moment), 0), reset_at(kind, moment))
        for kind in LimitKind
        if (limit := principal.limits.of(kind)) is not None
    ]
    return KeyUse(principal.key_id, principal.owner, principal.team, limits)


@contextmanager
def _unreachable_as_metering_error() -> Iterator[None]:
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise MeteringError(
            "The usage cannot be read right now.", retry_after=1, detail=type(error).__name__
        ) from error
