"""Usage as a table, as CSV and as JSON. Dollars are exact: as many decimals as it takes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Final, TypeAlias

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from completions.domain.usage import UsageRow

GROUPS: Final[Mapping[str, Callable[[UsageRow], str]]] = {
    "model": lambda row: row.dimensions.model,
    "key": lambda row: row.dimensions.key_id,
    "team": lambda row: row.dimensions.team or "",
    "owner": lambda row: row.dimensions.owner,
    "day": lambda row: row.start.strftime("%Y-%m-%d"),
    "hour": lambda row: row.start.strftime("%Y-%m-%dT%H:00Z"),
    "outcome": lambda row: row.dimensions.outcome.value,
}
_COLUMNS: Final = ("requests", "succeeded", "prompt_tokens", "cached_tokens", "completion_tokens")
_COST: Final = "cost_dollars"
_NANOS: Final = 10**9

Figures: TypeAlias = dict[str, int]
"""The columns' sums, and ``nanos``."""


class UnknownGroupError(ValueError):
    """Usage cannot be grouped by that."""


def parse_groups(text: str) -> tuple[str, ...]:
    """The names of a list with commas, each once. Raises ``UnknownGroupError``."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in GROUPS:
            raise UnknownGroupError(f"--group-by {name}: there are {', '.join(GROUPS)}")
    return names


def grouped_figures(rows: Iterable[UsageRow], groups: Sequence[str]) -> list[tuple[tuple[str, ...], Figures]]:
    """The sums by group: in the order of time where there is one, else, and within it, most tokens first."""
    sums: dict[tuple[str, ...], Figures] = {}
    for row in rows:
        group = tuple(GROUPS[name](row) for name in groups)
        _add(sums.setdefault(group, _nothing()), row)
    times = [number for number, name in enumerate(groups) if name in ("day", "hour")]

    def order(entry: tuple[tuple[str, ...], Figures]) -> tuple[list[str], int, tuple[str, ...]]:
        group, figures = entry
        return [group[number] for number in times], -figures["prompt_tokens"] - figures["completion_tokens"], group

    return sorted(sums.items(), key=order)


def usage_table(rows: Sequence[UsageRow], groups: Sequence[str], title: str) -> Table:
    """One row a group, and a total."""
    table = Table(*groups, *(name.replace("_", " ") for name in _COLUMNS), "cost $", title=title)
    for column in table.columns[len(groups) :]:
        column.justify = "right"
        column.min_width = max(map(len, str(column.header).split()))
    for column in table.columns[: len(groups)]:
        column.overflow = "fold"
    for group, figures in grouped_figures(rows, groups):
        table.add_row(*map(Text, group), *_cells(figures))
    if groups:
        total = _nothing()
        for row in rows:
            _add(total, row)
        table.add_section()
        table.add_row("all", *("" for _ in groups[1:]), *_cells(total))
    return table


def csv_text(rows: Iterable[UsageRow], groups: Sequence[str]) -> str:
    """A line of names, then one a group."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*groups, *_COLUMNS, _COST])
    for group, figures in grouped_figures(rows, groups):
        writer.writerow([*group, *(figures[name] for name in _COLUMNS), dollars(figures["nanos"])])
    return text.getvalue()


def json_text(rows: Iterable[UsageRow], groups: Sequence[str]) -> str:
    """One object a group; the cost is a text, which no reader makes a float of."""
    entries = [
        dict(zip(groups, group, strict=True))
        | {name: figures[name] for name in _COLUMNS}
        | {_COST: dollars(figures["nanos"])}
        for group, figures in grouped_figures(rows, groups)
    ]
    return json.dumps(entries, indent=2, ensure_ascii=False)


def dollars(nanos: int) -> str:
    """Nano-dollars in dollars: at least two decimals, and no zeros behind those."""
    text = f"{Decimal(nanos) / _NANOS:.9f}"
    whole, _, decimals = text.partition(".")
    return f"{whole}.{decimals.rstrip('0').ljust(2, '0')}"


def _nothing() -> Figures:
    return dict.fromkeys((*_COLUMNS, "nanos"), 0)


def _add(figures: Figures, row: UsageRow) -> None:
    totals = row.totals
    figures["requests"] += totals.requests
    figures["succeeded"] += totals.requests if row.dimensions.outcome == "succeeded" else 0
    figures["prompt_tokens"] += totals.prompt_tokens
    figures["cached_tokens"] += totals.cached_tokens
    figures["completion_tokens"] += totals.completion_tokens
    figures["nanos"] += totals.nanos


def _cells(figures: Figures) -> list[str]:
    return [*(f"{figures[name]:,}" for name in _COLUMNS), dollars(figures["nanos"])]
