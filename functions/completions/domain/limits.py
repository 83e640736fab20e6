"""What a key may use in a period, and what a request may cost at most. Money is integer nano-dollars.

Periods are UTC's own: a minute, a day, a month. A request counts in those in which it began.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum


class LimitKind(StrEnum):
    """What a limit counts, and over what period; ``PARALLEL_REQUESTS`` counts what is in progress."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    PARALLEL_REQUESTS = "parallel_requests"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    NANOS_PER_DAY = "nanos_per_day"
    NANOS_PER_MONTH = "nanos_per_month"

    @property
    def is_quota(self) -> bool:
        """Whether waiting a moment is no help: the day's or the month's share is used up."""
        return self.value.endswith(("_day", "_month"))


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """A key's own limits; ``None`` is none."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    nanos_per_day: int | None = None
    nanos_per_month: int | None = None

    def of(self, kind: LimitKind) -> int | None:
        """One of them by its name."""
        limit: int | None = getattr(self, kind.value)
        return limit

    @property
    def any(self) -> bool:
        """Whether there is one at all."""
        return any(self.of(kind) is not None for kind in LimitKind)


@dataclass(frozen=True, slots=True)
class Charge:
    """Tokens of every kind, and what they cost."""

    tokens: int = 0
    nanos: int = 0


def period(kind: LimitKind, moment: datetime) -> str:
    """The name of the period a request that begins at ``moment`` counts in; ``""`` for what has no period."""
    if kind.value.endswith("_minute"):
        return moment.astimezone(UTC).strftime("%Y%m%dT%H%M")
    if kind.value.endswith("_day"):
        return moment.astimezone(UTC).strftime("%Y%m%d")
    return moment.astimezone(UTC).strftime("%Y%m") if kind.value.endswith("_month") else ""


def reset_at(kind: LimitKind, moment: datetime) -> datetime | None:
    """When the period of ``moment`` ends; ``None`` for what has no period."""
    moment = moment.astimezone(UTC)
    if kind.value.endswith("_minute"):
        return moment.replace(second=0, microsecond=0) + timedelta(minutes=1)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    if kind.value.endswith("_day"):
        return midnight + timedelta(days=1)
    if kind.value.endswith("_month"):
        return (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
    return None
