"""The shape of the usage table's items.

``pk`` is ``REQ#<record id>``, ``sk`` is ``RECORD``. The index ``ByDay`` lists a day's records by time; the day is
spread over ``DAY_SHARDS`` partitions by the record id, so that a busy day does not throttle its own writes.
"""

from __future__ import annotations

import zlib
from datetime import date, datetime
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from completions.domain.metering import Outcome, Reservation, UsageRecord, plain_record, plain_reservation

RECORD_SORT: Final = "RECORD"
DAY_INDEX: Final = "ByDay"
DAY_SHARDS: Final = 8


class ReservedItem(BaseModel):
    """A claim. ``expires_at`` is the table's TTL, in epoch seconds; ``claim_id`` tells this claim from a rival's."""

    model_config = ConfigDict(extra="ignore")

    pk: str
    sk: str = RECORD_SORT
    state: Literal["RESERVED", "SETTLED"] = "RESERVED"
    claim_id: str
    day_shard: str
    created_at: datetime
    expires_at: int
    request_id: str
    key_id: str
    owner: str
    team: str | None = None
    dialect: str
    requested_model: str
    model: str
    estimated_tokens: int = 0
    estimated_nanos: int = 0
    limited: bool = False
    fingerprint: str | None = None
    lasts_until: datetime | None = None
    endpoint: str
    streamed: bool


class SettlementFields(BaseModel):
    """What settling adds. Counts are tokens, times milliseconds; ``model`` and ``endpoint`` are a fallback's if one
    answered."""

    model: str
    endpoint: str
    outcome: Outcome
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    estimated: bool
    queue_ms: int
    total_ms: int
    attempts: int
    first_token_ms: int | None = None
    variant: str | None = None
    error: str | None = None
    nanos: int = 0
    price_version: str | None = None


class RecordItem(ReservedItem, SettlementFields, defer_build=True):
    """A settled record, as reports read it."""


def partition(record_id: str) -> str:
    """The partition key of a request's record."""
    return f"REQ#{record_id}"


def day_shards(day: date) -> list[str]:
    """All partitions of one UTC day in the ``ByDay`` index."""
    return [f"{day.isoformat()}#{shard}" for shard in range(DAY_SHARDS)]


def reserved_item(reservation: Reservation, claim_id: str, retention_days: int) -> ReservedItem:
    """The claim's item."""
    return ReservedItem.model_validate(
        {
            **plain_reservation(reservation),
            **record_keys(reservation.record_id, reservation.created_at, retention_days),
            "claim_id": claim_id,
        }
    )


def record_keys(record_id: str, created_at: datetime, retention_days: int) -> dict[str, str | int]:
    """What a record is found by, and when it goes."""
    shard = zlib.crc32(record_id.encode()) % DAY_SHARDS
    return {
        "pk": partition(record_id),
        "day_shard": f"{created_at.date().isoformat()}#{shard}",
        "expires_at": int(created_at.timestamp()) + retention_days * 86_400,
    }


def settlement_fields(record: UsageRecord) -> SettlementFields:
    """What settling ``record`` writes."""
    return SettlementFields.model_validate(plain_record(record))
