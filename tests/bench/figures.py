"""What a section of the benchmark hands over: figures, tables made from them, and the targets they are held against."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

TIMES, TO = "\u00d7", "\u2013"
"""As they are printed: the sign of a ratio, and of a range."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one quantity measured several times: the median, what half of all lie between, and the tail."""

    median: float
    low: float
    high: float
    p95: float
    p99: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Quantiles of ``values``; of a single one, itself."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], values[0], values[0], 1)
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        return cls(statistics.median(values), cuts[24], cuts[74], cuts[94], cuts[98], len(values))

    def text(self, digits: int = 2) -> str:
        """The median with the middle half."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}{TO}{self.high:,.{digits}f})"

    @property
    def plain(self) -> dict[str, float]:
        """For JSON."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Target:
    """A promise. ``measured`` is ``None`` where it could not be measured; ``why`` then says so."""

    text: str
    limit: float
    measured: float | None
    unit: str = ""
    at_least: bool = False
    why: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it was kept."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    @property
    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: the first column is text, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Section:
    """``data`` are the figures themselves, by names that stay, for whoever reads the JSON."""

    name: str
    grids: tuple[Grid, ...]
    data: dict[str, Any] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    not_measured: tuple[str, ...] = ()
    """What was left out, each with the reason."""

    @property
    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "grids": [grid.plain for grid in self.grids],
            "data": self.data,
            "targets": [target.plain for target in self.targets],
            "not_measured": list(self.not_measured),
        }


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: all of it, or a minute's worth."""

    quick: bool

    def of(self, full: int, quick: int) -> int:
        """The number of repetitions."""
        return quick if self.quick else full
