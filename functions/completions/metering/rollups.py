"""Settled records into roll-ups, from the usage table's stream; each record once, however often it is delivered.

A record is marked in the transaction that adds it, on the condition that its mark is still the one the addition was
made for. A record that does not meet it is read again, and only what the roll-ups lack is added: nothing, after a
second delivery; the difference, when a lost request's record was replaced by the true one. So neither the order of the
events nor their number matters, and the images they carry need not be current.

The shard is chosen for a transaction and not for a record, so that the requests of a busy key become one addition.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError
from pydantic import ValidationError

from completions.domain.ports import Clock
from completions.domain.usage import Totals
from completions.dynamodb_json import deserialized
from completions.metering.items import RECORD_SORT
from completions.metering.rollup_items import (
    ROLLUP_SHARDS,
    RolledRecord,
    RollUpKey,
    add_update,
    contributions,
    mark_update,
)
from completions.observability import logger

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_MOST_ACTIONS: Final = 100
_ATTEMPTS: Final = 10
_BASE_SECONDS: Final = 0.02
_MOST_SECONDS: Final = 1.0
_CHANGED: Final = "ConditionalCheckFailed"
_PASSING: Final = frozenset({"None", "TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"})

OnAdded = Callable[[Sequence[RolledRecord]], object]
"""Is told the records that a transaction added, with the mark that they had until then."""


class RollUps:
    """Over one usage table."""

    def __init__(self, client: DynamoDBClient, table: str, clock: Clock) -> None:
        self._client = client
        self._table = table
        self._clock = clock

    def add(self, records: Iterable[RolledRecord], on_added: OnAdded | None = None) -> frozenset[str]:
        """Add what the roll-ups lack of these records; the partition keys of those that could not be added."""
        failed: set[str] = set()
        latest = {record.pk: record for record in records}
        work = deque((group, 0) for group in grouped(latest.values()))
        while work:
            group, attempt = work.popleft()
            try:
                self._write(group)
            except (ClientError, BotoCoreError) as error:
                reasons = _reasons(error)
                if _CHANGED in reasons and attempt < _ATTEMPTS:
                    work.extendleft((current, attempt + 1) for current in self._current(group, reasons, failed))
                elif reasons and _PASSING.issuperset(reasons) and attempt < _ATTEMPTS:
                    longest = min(_MOST_SECONDS, _BASE_SECONDS * 2.0**attempt)
                    self._clock.sleep(random.uniform(0, longest))  # noqa: S311 - jitter
                    work.appendleft((group, attempt + 1))
                elif reasons and len(group) > 1:  # one of them cannot be added; the others can
                    middle = len(group) // 2
                    work.extendleft([(group[:middle], attempt), (group[middle:], attempt)])
                else:
                    _give_up(group, error, failed)
            else:
                if on_added is not None:
                    on_added(group)
        return frozenset(failed)

    def _write(self, group: Sequence[RolledRecord]) -> None:
        shard = zlib.crc32(group[0].pk.encode()) % ROLLUP_SHARDS
        marks = [{"Update": mark_update(self._table, record)} for record in group]
        sums = _sums(group).items()
        additions = [{"Update": add_update(self._table, key, totals, shard)} for key, totals in sums if totals.any]
        actions: Any = [*marks, *additions]
        self._client.transact_write_items(TransactItems=actions)

    def _current(
        self, group: Sequence[RolledRecord], reasons: Sequence[str], failed: set[str]
    ) -> Iterable[Sequence[RolledRecord]]:
        """The group once more, those whose mark was not as expected as they stand now. ``reasons`` are one an action,
        and the marks come first."""
        changed = {record.pk for record, why in zip(group, reasons, strict=False) if why == _CHANGED}
        try:
            found = self._read(changed)
        except (ClientError, BotoCoreError, ValidationError) as error:
            _give_up([record for record in group if record.pk in changed], error, failed)
            found = []
        return grouped([*(record for record in group if record.pk not in changed), *found])

    def _read(self, partitions: Iterable[str]) -> list[RolledRecord]:
        """Those of the records that are there and settled."""
        found: list[RolledRecord] = []
        for partition in partitions:
            key: Any = {"pk": {"S": partition}, "sk": {"S": RECORD_SORT}}
            item = self._client.get_item(TableName=self._table, Key=key, ConsistentRead=True).get("Item")
            if item is not None and item["state"] == {"S": "SETTLED"}:
                found.append(RolledRecord.model_validate(deserialized(item)))
        return found


def add_stream_records(
    roll_ups: RollUps, events: Sequence[Mapping[str, Any]], on_added: OnAdded | None = None
) -> list[str]:
    """Add what the stream's events tell; the sequence numbers of those that could not be added."""
    records: dict[str, RolledRecord] = {}
    failed: list[str] = []
    for event in events:
        change = event["dynamodb"]
        number = str(change["SequenceNumber"])
        try:
            records[number] = RolledRecord.model_validate(deserialized(change["NewImage"]))
        except (KeyError, TypeError, ValidationError) as error:
            logger.error("rollup_unreadable", sequence_number=number, error=type(error).__name__)
            failed.append(number)
    lost = roll_ups.add(records.values(), on_added)
    failed += [number for number, record in records.items() if record.pk in lost]
    logger.info("rolled_up", records=len(events), failed=len(failed))
    return failed


def grouped(records: Iterable[RolledRecord]) -> Iterator[Sequence[RolledRecord]]:
    """The records that the roll-ups lack something of, in groups that fit one transaction each."""
    group: list[RolledRecord] = []
    keys: set[RollUpKey] = set()
    for record in records:
        added = contributions(record).keys()
        if not added:
            continue
        if len(group) + 1 + len(keys | added) > _MOST_ACTIONS:
            yield group
            group, keys = [], set()
        group.append(record)
        keys |= added
    if group:
        yield group


def _sums(group: Iterable[RolledRecord]) -> dict[RollUpKey, Totals]:
    sums: dict[RollUpKey, Totals] = {}
    for record in group:
        for key, totals in contributions(record).items():
            sums[key] = sums.get(key, Totals()) + totals
    return sums


def _reasons(error: ClientError | BotoCoreError) -> list[str]:
    """Why a transaction was cancelled, one reason an action; nothing of any other failure."""
    if not isinstance(error, ClientError):
        return []
    response: Mapping[str, Any] = error.response
    return [str(reason.get("Code")) for reason in response.get("CancellationReasons", ())]


def _give_up(group: Collection[RolledRecord], error: Exception, failed: set[str]) -> None:
    failed.update(record.pk for record in group)
    reasons = sorted({why for why in _reasons(error) if why != "None"}) if isinstance(error, ClientError) else []
    logger.error("rollup_failed", records=len(group), error=type(error).__name__, reasons=reasons)
