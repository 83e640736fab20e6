"""Measure what the service adds to the model's own time, side by side with other gateways, and publish it.

Sections run one after the other. What they find goes to ``results/latest.json``, one picture beside it, and with
``--markdown`` as a README section to the standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))  # when it is not run as a script

import artifact
import buffered
import cold_start
import cost
import dynamodb_units
import peers
import streaming
from figures import Effort, Section
from markdown import readme_section
from picture import draw

RESULTS = Path(__file__).parent / "results"
SECTIONS: dict[str, Callable[[Effort], Section]] = {
    "buffered": buffered.measure,
    "streams": streaming.measure,
    "cold-start": cold_start.measure,
    "dynamodb": dynamodb_units.measure,
    "artifact": artifact.measure,
    "peers": peers.measure,
}
PACKAGES = (
    "boto3",
    "botocore",
    "fastapi",
    "mangum",
    "pydantic",
    "starlette",
    "uvicorn",
    "aws-lambda-powertools",
    "moto",
)


def machine() -> dict[str, Any]:
    """What it was measured on."""
    info = Path("/proc/cpuinfo")
    model = next(
        (line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")), ""
    ) if info.exists() else ""  # fmt: skip
    return {
        "system": platform.platform(terse=True),
        "processor": model or platform.machine(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def measured(names: list[str], effort: Effort, console: Console) -> dict[str, Any]:
    """Each section's plain form; one that fails says why and leaves the others be."""
    sections: dict[str, Any] = {}
    for name in names:
        started = time.perf_counter()
        try:
            section = SECTIONS[name](effort)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other sections still run
            reason = f"{name}: {type(error).__name__}: {str(error)[:600]}"
            section = Section(name, (), not_measured=(reason,))
        sections[name] = {
            **section.plain,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "quick": effort.quick,
            "seconds": round(time.perf_counter() - started, 1),
        }
        show(sections[name], console)
    return sections


def with_cost(sections: dict[str, Any]) -> dict[str, Any]:
    """The sums, from whatever was measured last."""
    try:
        computed = cost.section(sections).plain
    except KeyError as missing:
        reason = f"cost: it needs the section or figure {missing}, which has not been measured"
        computed = Section("cost", (), not_measured=(reason,)).plain
    return {**sections, "cost": computed}


def show(section: Mapping[str, Any], console: Console) -> None:
    """A table each, targets and omissions below."""
    for grid in section["grids"]:
        table = Table(*grid["columns"], title=grid["title"], caption=grid["note"], title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in grid["rows"]:
            table.add_row(*row)
        console.print(table)
    for reason in section["not_measured"]:
        console.print(f"not measured: {reason}", markup=False)
    if "seconds" in section:
        console.print(f"({section['seconds']} s)\n", markup=False)


def show_targets(sections: Mapping[str, Any], console: Console) -> None:
    """All promises, and whether they were kept."""
    table = Table("target", "limit", "measured", "", title="Targets", title_justify="left")
    for section in sections.values():
        for target in section["targets"]:
            value, unit = target["measured"], target["unit"]
            sign = "≥" if target["at_least"] else "≤"
            found = target["why"][:60] or "—" if value is None else f"{value:.2f} {unit}"
            verdict = {True: "met", False: "missed", None: "not measured"}[target["met"]]
            table.add_row(target["text"], f"{sign} {target['limit']:g} {unit}", found, verdict)
    console.print(table)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make bench ARGS=…", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="about a minute: wider spreads, no artifact, no other gateways unless by --only",
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--no-artifact", action="store_true", help="do not build the functions, which takes a minute")
    parser.add_argument("--no-peers", action="store_true", help="do not install or run other gateways")
    parser.add_argument(
        "--markdown", action="store_true", help="measure nothing; print the README section of the last run"
    )
    return parser.parse_args()


def main() -> None:
    """Measure, show, keep."""
    chosen = options()
    latest = RESULTS / "latest.json"
    kept: dict[str, Any] = json.loads(latest.read_text()) if latest.exists() else {"sections": {}}
    if chosen.markdown:
        if not latest.exists():
            raise SystemExit(f"{latest} is not there yet: run `make bench` first")
        print(readme_section(kept))
        return
    left_out = {"artifact"} if chosen.no_artifact or chosen.quick else set()
    left_out |= {"peers"} if chosen.no_peers or chosen.quick else set()  # one of them takes a quarter minute to start
    names = chosen.only or [name for name in SECTIONS if name not in left_out]
    console = Console(width=170)
    before = machine()
    sections = measured(names, Effort(chosen.quick), console)
    sections = with_cost({**kept["sections"], **sections})
    show(sections["cost"], console)
    show_targets(sections, console)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": before,
        "versions": {name: version(name) for name in PACKAGES},
        "sections": sections,
    }
    RESULTS.mkdir(exist_ok=True)
    latest.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    (RESULTS / "latest.svg").write_text(draw(result))
    console.print(f"written: {latest} and latest.svg", markup=False)


if __name__ == "__main__":
    main()
