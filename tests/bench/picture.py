"""One picture of the last run: bars for this service and the others, in SVG that needs no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

OURS = "this service"
COLOURS = {True: "#2563eb", False: "#9ca3af"}
WIDTH, PANEL, ROW, LABEL, VALUE = 1000, 480, 22, 205, 60
HEADING = 56


@dataclass(frozen=True, slots=True)
class Panel:
    """One comparison. ``more`` says which way is better."""

    title: str
    more: bool
    bars: Sequence[tuple[str, float]]


def panels(result: Mapping[str, Any]) -> list[Panel]:
    """What the sections have; nothing of what they have not."""
    data = result["sections"].get("peers", {}).get("data", {})
    routes, processes = data.get("routes", {}), data.get("processes", {})

    def of(entries: Mapping[str, Any], figure: str) -> list[tuple[str, float]]:
        return [(name, fields[figure]) for name, fields in entries.items() if fields.get(figure) is not None]

    found = [
        Panel("buffered requests per CPU-second", True, of(routes, "requests_per_cpu_second")),
        Panel("streamed events per CPU-second", True, of(routes, "events_per_cpu_second")),
        Panel("memory under load, MB", False, of(processes, "peak_mb")),
        Panel("ready after, seconds", False, of(processes, "ready_seconds")),
    ]
    cold = result["sections"].get("cold-start", {}).get("data", {}).get("import_cpu_ms", {})
    names = {"plain": "frameworks alone", "openai_completions": f"{OURS}, HTTP", "usage_rollup": f"{OURS}, roll-up"}
    bars = [(label, cold[name]["median"]) for name, label in names.items() if name in cold]
    added = result["sections"].get("buffered", {}).get("data", {}).get("cpu_ms", {})
    labels = {"bare": "bare boto3 call", "unmetered": f"{OURS}, no metering", "metered": f"{OURS}, metered"}
    spent = [(label, added[name]["median"]) for name, label in labels.items() if name in added]
    found += [
        Panel("cold start, imports to ready, CPU ms", False, bars),
        Panel("a buffered request, CPU ms", False, spent),
    ]
    return [panel for panel in found if panel.bars]


def draw(result: Mapping[str, Any]) -> str:
    """The SVG's text. Each panel has a scale of its own, from zero."""
    shown = panels(result)
    pieces: list[str] = []
    tops = [HEADING, HEADING]
    for number, panel in enumerate(shown):
        column = number % 2
        pieces += _panel(panel, 10 + column * (PANEL + 20), tops[column])
        tops[column] += (len(panel.bars) + 2) * ROW + 16
    title = f"Measured {result['date'][:10]}, {result['machine']['processor']}, medians"
    height = max(tops) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="10" y="28" font-size="16" font-weight="600" fill="#111827">{escape(title)}</text>\n'
        + "\n".join(pieces)
        + "\n</svg>\n"
    )


def _panel(panel: Panel, left: int, top: int) -> list[str]:
    most = max(value for _, value in panel.bars) or 1
    hint = "more is better" if panel.more else "less is better"
    pieces = [
        f'<text x="{left}" y="{top + 15}" font-weight="600" fill="#111827">{escape(panel.title)}'
        f'<tspan font-weight="400" fill="#6b7280"> — {hint}</tspan></text>'
    ]
    room = PANEL - LABEL - VALUE
    for number, (name, value) in enumerate(panel.bars):
        y = top + (number + 1) * ROW + 4
        length = max(1.0, value / most * room)
        text = f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
        pieces += [
            f'<text x="{left + LABEL - 8}" y="{y + 13}" text-anchor="end" fill="#374151">{escape(name)}</text>',
            f'<rect x="{left + LABEL}" y="{y + 2}" width="{length:.1f}" height="{ROW - 6}" rx="2" '
            f'fill="{COLOURS[name.startswith(OURS)]}"/>',
            f'<text x="{left + LABEL + length + 6:.1f}" y="{y + 13}" fill="#374151">{text}</text>',
        ]
    return pieces
