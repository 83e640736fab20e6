"""Records that could not be written when their requests ended, from the log into the usage table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from completions.domain.completion import Usage
from completions.domain.limits import Charge, LimitKind
from completions.domain.metering import Outcome
from completions.domain.ports import Clock
from completions.dynamodb_json import serialized
from completions.metering.items import RecordItem, record_keys
from completions.metering.limit_items import CLOSED, OPEN, Hold, Result, amount, closed_results, counter, open_holds
from completions.metering.recovery_table import RecoveryTable
from completions.metering.sweep import past_counters
from completions.metering.usage_table import UsageTable

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

UNWRITTEN: Final = "usage_record_unwritten"
"""The log's event; its field ``record`` is ``domain.metering.plain_record``."""

Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]


class LoggedRecord(BaseModel):
    """A record as it stands in the log."""

    model_config = ConfigDict(strict=True, frozen=True)

    record_id: Name
    request_id: Name
    created_at: AwareDatetime
    key_id: Name
    owner: Name
    team: str | None
    dialect: Name
    requested_model: Name
    model: Name
    endpoint: Name
    streamed: bool
    estimated_tokens: Count
    estimated_nanos: Count
    limited: bool
    fingerprint: str | None
    outcome: Outcome
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    estimated: bool
    nanos: Count
    price_version: str | None
    queue_ms: int
    first_token_ms: int | None
    total_ms: int
    attempts: Count
    variant: str | None
    error: str | None


class Replayed(StrEnum):
    """What became of a record."""

    WRITTEN = "written"
    THERE = "there"
    """The table has it already, or has another delivery of the same request."""


def read_logged(record: object) -> LoggedRecord:
    """Raises ``ValueError`` for what is no such record."""
    return LoggedRecord.model_validate_json(json.dumps(record))


class UsageReplayer:
    """Writing a record again changes nothing, at any age."""

    def __init__(self, client: DynamoDBClient, table: str, retention_days: int, clock: Clock) -> None:
        self._usage = UsageTable(client, table, retention_days)
        self._table = RecoveryTable(client, table, retention_days)
        self._retention_days = retention_days
        self._clock = clock

    def replay(self, logged: LoggedRecord) -> Replayed:
        """Write one record, and make its key's counters hold what it came to. Raises boto3's errors, and
        ``MeteringError``.

        The order matters: counters first, by a ``closed`` entry that keeps them from being changed twice, then the
        record, after which nothing is done again.
        """
        known = self._table.record(logged.record_id)
        record = self._item(logged, str(uuid4()))
        if known is not None and not _may_be_replaced(known, serialized(record)["created_at"]["S"]):
            return Replayed.THERE
        claim_id = self._counted(logged) if logged.limited else None
        if claim_id is not None:
            record = record.model_copy(update={"claim_id": claim_id})
        written = self._table.write_replayed(record)
        if logged.limited:
            self._table.drop_limits_attributes(logged.key_id, [CLOSED + logged.record_id])
            self._table.drop_swept(logged.record_id)
        return Replayed.WRITTEN if written else Replayed.THERE

    def _item(self, logged: LoggedRecord, claim_id: str) -> RecordItem:
        keys = record_keys(logged.record_id, logged.created_at, self._retention_days)
        return RecordItem.model_validate({**logged.model_dump(), **keys, "state": "SETTLED", "claim_id": claim_id})

    def _counted(self, logged: LoggedRecord) -> str | None:
        """The claim whose hold is counted now as what the record says; ``None`` for one that is not known.

        A hold that is not there, and that the sweeper has not closed, was closed by its own function, or was never
        taken: then limits were not enforced, and the counters are left as they are.
        """
        item = self._table.limits(logged.key_id)
        estimate = Charge(logged.estimated_tokens, logged.estimated_nanos)
        result = Result(
            logged.outcome,
            Usage(logged.prompt_tokens, logged.completion_tokens, logged.cached_tokens, logged.estimated),
            logged.nanos,
        )
        if (entry := _only(item, OPEN + logged.record_id)) is not None:
            (hold,) = open_holds(entry)
            if hold.at == logged.created_at:
                self._usage.close_hold(logged.key_id, hold, result, self._clock.now(), keep=True)
                return hold.claim_id
        if (entry := _only(item, CLOSED + logged.record_id)) is not None:
            return closed_results(entry)[logged.record_id][0]
        swept = self._table.swept(logged.record_id)
        if swept is None or swept.at != logged.created_at:
            return None
        hold = Hold(logged.record_id, swept.claim_id, swept.at, estimate)
        missing = Charge(result.charge.tokens - swept.charge.tokens, result.charge.nanos - swept.charge.nanos)
        self._table.recount(logged.key_id, hold, result, additions(missing, swept.at, self._clock.now()))
        return swept.claim_id


def additions(charge: Charge, began: datetime, now: datetime) -> dict[str, int]:
    """What a request that began then adds to the counters that are still kept; a minute's is of no use any more."""
    amounts = {
        counter(kind, began): amount(kind, charge)
        for kind in LimitKind
        if kind.is_quota and ("tokens" in kind or "nanos" in kind)
    }
    return {name: added for name, added in amounts.items() if added and not past_counters([name], now)}


def _may_be_replaced(known: Mapping[str, Any], created_at: str) -> bool:
    """Whether what the table has is the same claim, unsettled or given up for lost. Two deliveries of one request
    differ in when they were claimed."""
    unsettled = known["state"] == "RESERVED" or known.get("outcome") == Outcome.LOST
    return unsettled and bool(known["created_at"] == created_at)


def _only(item: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return {name: item[name]} if name in item else None
