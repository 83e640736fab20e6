"""Who pays, and what is written down about a request. Records hold counts and timings, never text."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from completions.domain.limits import Charge, KeyLimits

if TYPE_CHECKING:
    from completions.domain.completion import Usage


@dataclass(frozen=True, slots=True)
class Principal:
    """The owner of a credential. ``key_id`` is the key's public identifier, never the key.

    ``allowed_models`` ``None`` allows every model. A key is of no use once it is ``disabled`` or past ``expires_at``.
    """

    key_id: str
    owner: str
    team: str | None = None
    admin: bool = False
    allowed_models: frozenset[str] | None = None
    limits: KeyLimits = field(default_factory=KeyLimits)
    expires_at: datetime | None = None
    disabled: bool = False

    @property
    def tenant(self) -> str:
        """Whom the key belongs to: what keys of one team share, and no other."""
        return f"team:{self.team}" if self.team is not None else f"owner:{self.owner}"

    def may_use(self, model_id: str) -> bool:
        """Whether the key is allowed this model."""
        return self.allowed_models is None or model_id in self.allowed_models


class Outcome(StrEnum):
    """How a logical request ended."""

    SUCCEEDED = "succeeded"
    REFUSED = "refused"
    """The container turned it down before any output: nothing was generated."""
    FAILED = "failed"
    ABORTED = "aborted"
    """The caller hung up; what was generated until then is counted."""
    LOST = "lost"
    """The function died before it could settle; a sweeper did."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The claim that is made before the GPU is asked. ``record_id`` derives from the logical request.

    ``estimate`` is the most the request can come to. With ``caller_named`` the caller chose the logical request's name,
    and ``fingerprint``, a digest, tells whether it is the same request that comes again. One that ``lasts_until`` some
    moment outlives the function that made it, for its answer comes by another event.
    """

    record_id: str
    request_id: str
    principal: Principal
    dialect: str
    model: str
    endpoint_name: str
    streamed: bool
    created_at: datetime
    estimate: Charge = field(default_factory=Charge)
    caller_named: bool = False
    fingerprint: str | None = None
    lasts_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds: in our hands before dispatch, from arrival to the first upstream record, and in all."""

    queue_ms: int
    first_token_ms: int | None
    total_ms: int


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One settled request. ``model`` and ``endpoint_name`` are those that answered, or were asked last; a fallback's
    differ from the reservation's. ``attempts`` counts the calls that were made; ``variant`` is the production variant
    that answered, when the runtime named it. ``charge`` is by the price of the model that answered, whose version is
    ``price_version``; ``None`` for a model without a price, which costs nothing."""

    reservation: Reservation
    model: str
    endpoint_name: str
    outcome: Outcome
    usage: Usage
    timings: Timings
    attempts: int
    variant: str | None = None
    error: str | None = None
    charge: Charge = field(default_factory=Charge)
    price_version: str | None = None


def plain_reservation(reservation: Reservation) -> dict[str, str | int | bool | None]:
    """A claim's facts under the names they have in the usage table and in the log; no text, no credential."""
    return {
        "record_id": reservation.record_id,
        "request_id": reservation.request_id,
        "created_at": reservation.created_at.isoformat(),
        "key_id": reservation.principal.key_id,
        "owner": reservation.principal.owner,
        "team": reservation.principal.team,
        "dialect": reservation.dialect,
        "requested_model": reservation.model,
        "model": reservation.model,
        "endpoint": reservation.endpoint_name,
        "streamed": reservation.streamed,
        "estimated_tokens": reservation.estimate.tokens,
        "estimated_nanos": reservation.estimate.nanos,
        "limited": reservation.principal.limits.any,
        "fingerprint": reservation.fingerprint,
        "lasts_until": None if reservation.lasts_until is None else reservation.lasts_until.isoformat(),
    }


def plain_record(record: UsageRecord) -> dict[str, str | int | bool | None]:
    """A settled record's facts, the claim's among them. Counts are tokens, times milliseconds, money nano-dollars."""
    return {
        **plain_reservation(record.reservation),
        "model": record.model,
        "endpoint": record.endpoint_name,
        "outcome": record.outcome.value,
        "prompt_tokens": record.usage.prompt_tokens,
        "completion_tokens": record.usage.completion_tokens,
        "cached_tokens": record.usage.cached_tokens,
        "estimated": record.usage.estimated,
        "nanos": record.charge.nanos,
        "price_version": record.price_version,
        "queue_ms": record.timings.queue_ms,
        "first_token_ms": record.timings.first_token_ms,
        "total_ms": record.timings.total_ms,
        "attempts": record.attempts,
        "variant": record.variant,
        "error": record.error,
    }
