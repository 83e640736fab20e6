"""The README's section, from the JSON of the last run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SHOWN = {
    "buffered": (0,),
    "streams": (0, 1, 2),
    "cold-start": (0, 1),
    "dynamodb": (0,),
    "cost": (0,),
    "peers": (0, 1),
}
"""Which of a section's tables; all are in the JSON."""


def readme_section(result: Mapping[str, Any]) -> str:
    """Between its markers."""
    return "\n".join(_lines(result))


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    machine = result["machine"]
    sections = result["sections"]
    yield BEGIN
    yield (
        f"Measured on {result['date'][:10]}: {machine['processor']}, {machine['processors']} processors, "
        f"CPython {machine['python']}. Figures are medians, in brackets what half of all "
        "runs lie between. Seconds differ by machine, ratios hardly."
    )
    if any(section.get("quick") for section in sections.values()):
        yield "\nSome of it is of a quick run, with few repetitions."
    yield ""
    yield "![what this service and others take: CPU, memory, start](tests/bench/results/latest.svg)"
    yield ""
    yield from _targets(sections)
    yield "<details><summary>All of it, table by table</summary>"
    yield ""
    for name, numbers in SHOWN.items():
        grids = sections.get(name, {}).get("grids", [])
        for number in numbers:
            if number < len(grids):
                yield from _table(grids[number])
    reasons = [reason for section in sections.values() for reason in section["not_measured"]]
    for reason in reasons:
        yield f"- not measured: {_cell(reason.partition(': {')[0][:200])}"
    yield ""
    yield "</details>"
    yield END


def _targets(sections: Mapping[str, Any]) -> Iterator[str]:
    yield "| target | limit | measured | |"
    yield "| --- | ---: | ---: | --- |"
    for section in sections.values():
        for target in section["targets"]:
            sign = "≥" if target["at_least"] else "≤"
            value = "—" if target["measured"] is None else f"{target['measured']:.2f} {target['unit']}"
            verdict = {True: "met", False: "**missed**", None: "not measured"}[target["met"]]
            yield f"| {target['text']} | {sign} {target['limit']:g} {target['unit']} | {value} | {verdict} |"
    yield ""


def _table(grid: Mapping[str, Any]) -> Iterator[str]:
    yield f"**{grid['title']}**"
    yield ""
    yield "| " + " | ".join(map(_cell, grid["columns"])) + " |"
    yield "| --- |" + " ---: |" * (len(grid["columns"]) - 1)
    for row in grid["rows"]:
        yield "| " + " | ".join(map(_cell, row)) + " |"
    yield ""
    if grid["note"]:
        yield grid["note"]
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
