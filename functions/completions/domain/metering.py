"""Who pays, and what is written down about a request. Records hold counts and timings, never text."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from completions.domain.completion import Usage


@dataclass(frozen=True, slots=True)
class Principal:
    """The owner of a credential. ``key_id`` is the key's public identifier, never the key.

    ``allowed_models`` ``None`` allows every model.
    """

    key_id: str
    owner: str
    team: str | None = None
    admin: bool = False
    allowed_models: frozenset[str] | None = None

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


@dataclass(frozen=True, slots=True)
class Reservation:
    """The claim that is made before the GPU is asked. ``record_id`` derives from the logical request."""

    record_id: str
    request_id: str
    principal: Principal
    dialect: str
    model: str
    endpoint_name: str
    streamed: bool
    created_at: datetime


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
    that answered, when the runtime named it."""

    reservation: Reservation
    model: str
    endpoint_name: str
    outcome: Outcome
    usage: Usage
    timings: Timings
    attempts: int
    variant: str | None = None
    error: str | None = None
