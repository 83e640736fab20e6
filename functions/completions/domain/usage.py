"""What was used, added up over time: what reports are made of. Money is integer nano-dollars."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final, Protocol

from completions.domain.limits import LimitKind
from completions.domain.metering import Outcome

_BUCKETS_PER_DOUBLING: Final = 4
_LONGEST_MS: Final = 15 * 60 * 1000
_BOUNDS: Final = tuple(
    2 ** (step / _BUCKETS_PER_DOUBLING) for step in range(math.ceil(math.log2(_LONGEST_MS) * _BUCKETS_PER_DOUBLING) + 1)
)


class Granularity(StrEnum):
    """How long a bucket of time is. Buckets are UTC's own."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"

    @property
    def length(self) -> timedelta:
        """How long."""
        return timedelta(**{f"{self.value}s": 1})

    @property
    def kept(self) -> timedelta:
        """How long usage of this granularity can be asked for, from a bucket's start on."""
        return timedelta(days={"minute": 3, "hour": 100, "day": 800}[self.value])

    def floor(self, moment: datetime) -> datetime:
        """The start of the bucket that ``moment`` is in."""
        seconds = int(self.length.total_seconds())
        return datetime.fromtimestamp(int(moment.timestamp()) // seconds * seconds, UTC)

    def ceiling(self, moment: datetime) -> datetime:
        """The first start of a bucket that is not before ``moment``."""
        start = self.floor(moment)
        return start if start == moment else start + self.length


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Whose usage it is, and of what. ``model`` is the one that answered, or was asked last."""

    key_id: str
    team: str | None
    owner: str
    model: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over requests. ``estimated`` counts those whose tokens are an estimate.

    The histograms have a count by ``latency_bucket``; one without an answer has no first token.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    nanos: int = 0
    estimated: int = 0
    total_ms: Mapping[int, int] = field(default_factory=dict)
    first_token_ms: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        return _combined(self, other, 1)

    def __sub__(self, other: Totals) -> Totals:
        return _combined(self, other, -1)

    @property
    def any(self) -> bool:
        """Whether it differs from nothing."""
        return self != Totals()


COUNTS: Final = tuple(one.name for one in fields(Totals) if not one.name.endswith("_ms"))
HISTOGRAMS: Final = tuple(one.name for one in fields(Totals) if one.name.endswith("_ms"))


def _combined(one: Totals, other: Totals, sign: int) -> Totals:
    sums = {name: getattr(one, name) + sign * getattr(other, name) for name in COUNTS}
    for name in HISTOGRAMS:
        histogram = Counter(getattr(one, name))
        for bucket, count in getattr(other, name).items():
            histogram[bucket] += sign * count
        sums[name] = {bucket: count for bucket, count in sorted(histogram.items()) if count}
    return Totals(**sums)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The usage of one combination in the bucket that begins at ``start``."""

    start: datetime
    dimensions: Dimensions
    totals: Totals


@dataclass(frozen=True, slots=True)
class LimitUse:
    """One limit of a key, and what is used of it, requests in progress included. ``resets_at`` is ``None`` where
    waiting for a time is no help."""

    kind: LimitKind
    limit: int
    used: int
    resets_at: datetime | None

    @property
    def remaining(self) -> int:
        """What is left."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A key with its limits."""

    key_id: str
    owner: str
    team: str | None
    limits: Sequence[LimitUse]


class UsageReports(Protocol):
    """Reading usage. Raises ``MeteringError`` or ``BackendUnavailableError`` when it cannot be read."""

    def rows(
        self, granularity: Granularity, start: datetime, end: datetime, *, latencies: bool = False
    ) -> Iterator[UsageRow]:
        """The buckets that begin in ``start`` <= t < ``end``, in no particular order. Each combination may come several
        times: its rows are to be added up. Histograms are empty unless ``latencies`` are asked for."""
        ...

    def limits(self, moment: datetime) -> Sequence[KeyUse]:
        """Every key, with what it has used of its limits in the periods of ``moment``."""
        ...


def latency_bucket(milliseconds: int) -> int:
    """The histogram bucket of a time: 0 below a millisecond, then four for each doubling, the last one open."""
    return bisect_right(_BOUNDS, milliseconds)


def percentile(histogram: Mapping[int, int], share: float) -> float | None:
    """The time that ``share`` of the requests did not exceed, as exactly as the buckets tell: within a fifth.

    ``None`` without requests.
    """
    rank = share * sum(histogram.values())
    below = 0
    for bucket, count in sorted(histogram.items()):
        if count > 0 and below + count >= rank:
            low, high = _edges(bucket)
            return low + (high - low) * (rank - below) / count
        below += count
    return None


def _edges(bucket: int) -> tuple[float, float]:
    low = 0.0 if bucket == 0 else _BOUNDS[min(bucket, len(_BOUNDS)) - 1]
    return low, _BOUNDS[min(bucket, len(_BOUNDS) - 1)]
