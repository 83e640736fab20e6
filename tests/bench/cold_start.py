"""How long a function takes from nothing: imports, the first request, under Lambda's emulator, and under uvicorn.

Handlers are found by listing their folder; those that speak HTTP have an ``app``. All of them are held against a plain
import of the frameworks in the same run, since seconds differ by machine and the ratio does not.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from deployed import deployment
from figures import TIMES, Effort, Grid, Section, Spread, Target
from processes import HERE, ROOT, Urls, called, clean_environment, free_port, ours

HANDLERS = ROOT / "functions" / "completions" / "handlers"
PLAIN = "plain"
OFTEN = ("openai_completions", "completions")
"""Of those that speak HTTP; the others have the same imports and are looked at a few times."""
EMULATED = ("openai_completions", "usage_rollup", "health")
RIE = {"x86_64": "x86_64", "aarch64": "arm64"}.get(platform.machine())
_IMPORT_TIME = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s*(\S+)")
Told = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cold:
    """One function's runs; ``first`` is empty where no event of ``events/`` is its own, or the first request failed."""

    http: bool
    import_cpu: Spread
    import_wall: Spread
    first_cpu: Spread | None
    peak_mb: float
    status: int | str | None


def handlers() -> list[str]:
    """Their modules' names."""
    return sorted(path.stem for path in HANDLERS.glob("*.py") if path.stem != "__init__")


def run_child(name: str, urls: Urls) -> Told:
    """One fresh process. Raises ``RuntimeError`` with what it said when it fails."""
    target = name if name == PLAIN else f"completions.handlers.{name}"
    built = deployment()
    command = [str(built.python), str(HERE / "cold_child.py"), target, str(ROOT / "events")]
    environment = {**clean_environment(), **urls.variables, "PYTHONPATH": str(built.tree)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} does not start: {done.stderr.strip().splitlines()[-1][:300]}")
    told: Told = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    return told


def _answered(status: int | str | None) -> bool:
    return isinstance(status, int) and status < 400


def _cold(runs: Sequence[Told]) -> Cold:
    firsts = [told["first_cpu_ms"] for told in runs if _answered(told.get("status"))]
    return Cold(
        bool(runs[0]["http"]),
        Spread.of([told["import_cpu_ms"] for told in runs]),
        Spread.of([told["import_ms"] for told in runs]),
        Spread.of(firsts) if firsts else None,
        max(told["peak_mb"] for told in runs),
        runs[0].get("status"),
    )


def in_turns(urls: Urls, effort: Effort) -> tuple[dict[str, Cold], list[str]]:
    """Every function and the plain import, round after round; and what could not be measured."""
    runs: dict[str, list[Told]] = {}
    problems = []
    for name in (PLAIN, *handlers()):
        try:
            run_child(name, urls)  # brings the files into memory; does not count
            runs[name] = []
        except RuntimeError as error:
            problems.append(str(error))
    seldom = effort.of(4, 1)
    for number in range(effort.of(25, 3)):
        for name, taken in runs.items():
            is_seldom = bool(taken) and taken[0]["http"] and name not in OFTEN
            if not is_seldom or number < seldom:
                taken.append(run_child(name, urls))
    return {name: _cold(taken) for name, taken in runs.items()}, problems


def imported_packages(name: str, urls: Urls) -> list[tuple[str, float]]:
    """Milliseconds of each top package's own modules, the longest first."""
    target = f"completions.handlers.{name}"
    built = deployment()
    command = [str(built.python), "-X", "importtime", "-c", f"import {target}"]
    environment = {**clean_environment(), **urls.variables, "PYTHONPATH": str(built.tree)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    spent: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        if found := _IMPORT_TIME.match(line):
            package = found[2].partition(".")[0]
            spent["Python's own" if package in sys.stdlib_module_names else package] += int(found[1])
    return [(package, microseconds / 1000) for package, microseconds in spent.most_common(12)]


def emulated(name: str, urls: Urls, log: Path) -> float:
    """Milliseconds of a first invocation through Lambda's runtime client, its start included.

    Raises ``RuntimeError`` where the emulator is not here.
    """
    binary = resources.files("samcli") / "local" / "rapid" / f"aws-lambda-rie-{RIE}"
    if RIE is None or not Path(str(binary)).exists():
        raise RuntimeError("Lambda's emulator is not in the SAM CLI's package on this machine")
    built = deployment()
    address, api = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [
        str(binary), "--runtime-interface-emulator-address", address, "--runtime-api-address", api,
        str(built.python), "-m", "awslambdaric", f"completions.handlers.{name}.handler",
    ]  # fmt: skip
    variables = {
        **clean_environment(),
        **urls.variables,
        "PYTHONPATH": f"{built.tree}:{built.runtime}",
        "AWS_LAMBDA_FUNCTION_TIMEOUT": "29",
        "AWS_LAMBDA_FUNCTION_NAME": "function",
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "512",
    }
    event = json.loads((ROOT / "events" / f"{name}.json").read_text())
    if "requestContext" in event:
        event["requestContext"]["requestId"] = str(uuid.uuid4())
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=built.tree, env=variables, stdout=output, stderr=output)
        try:
            return _first_invocation(f"http://{address}/2015-03-31/functions/function/invocations", event)
        finally:
            process.terminate()
            process.wait()


def _first_invocation(url: str, event: dict[str, Any]) -> float:
    deadline = time.monotonic() + 10
    while True:
        request = urllib.request.Request(url, json.dumps(event).encode())  # noqa: S310 - a loopback address of ours
        started = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
                told = json.loads(reply.read())
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise RuntimeError("the emulator never listened") from None
            time.sleep(0.02)
            continue
        if "errorMessage" in told or told.get("statusCode", 200) >= 400:
            raise RuntimeError(f"the emulated function answered {json.dumps(told)[:300]}")
        return (time.perf_counter() - started) * 1000


def measure(effort: Effort) -> Section:
    """All of it."""
    with called() as urls, tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        functions, problems = in_turns(urls, effort)
        packages = {name: imported_packages(name, urls) for name in EMULATED if name in functions}
        emulator: dict[str, Spread] = {}
        for name in EMULATED:
            try:
                emulator[name] = Spread.of([emulated(name, urls, log) for _ in range(effort.of(5, 1))])
            except RuntimeError as error:
                problems.append(f"{name} under the emulator: {error}")
        seconds, cpu = [], []
        for _ in range(effort.of(8, 2)):
            with ours("completions.handlers.openai_completions:app", urls, log) as running:
                seconds.append(running.ready_seconds * 1000)
                cpu.append(running.ready_cpu_seconds * 1000)
    return section(functions, packages, emulator, (Spread.of(seconds), Spread.of(cpu)), problems)


def section(
    functions: dict[str, Cold],
    packages: dict[str, list[tuple[str, float]]],
    emulator: dict[str, Spread],
    uvicorn: tuple[Spread, Spread],
    problems: Sequence[str],
) -> Section:
    """The figures of all."""
    plain = functions[PLAIN].import_cpu.median
    ratios = {name: cold.import_cpu.median / plain for name, cold in functions.items() if name != PLAIN}
    http = {name: ratio for name, ratio in ratios.items() if functions[name].http and name in OFTEN}
    workers = {name: ratio for name, ratio in ratios.items() if not functions[name].http}
    most_http = max(http.values())
    slowest = max(workers, key=lambda name: workers[name])
    return Section(
        "cold-start",
        (_function_grid(functions), _uvicorn_grid(emulator, uvicorn), *_package_grids(packages)),
        {
            "import_cpu_ms": {name: cold.import_cpu.plain for name, cold in functions.items()},
            "import_ms": {name: cold.import_wall.plain for name, cold in functions.items()},
            "first_cpu_ms": {name: cold.first_cpu.plain for name, cold in functions.items() if cold.first_cpu},
            "peak_mb": {name: cold.peak_mb for name, cold in functions.items()},
            "ratio": ratios,
            "packages_ms": {name: dict(spent) for name, spent in packages.items()},
            "emulator_ms": {name: spread.plain for name, spread in emulator.items()},
            "uvicorn_ready_ms": uvicorn[0].plain,
            "uvicorn_ready_cpu_ms": uvicorn[1].plain,
        },
        (
            Target("cold start of an HTTP function against a plain import of the frameworks", 0.72, most_http, TIMES),
            Target(f"cold start of the slowest worker ({slowest}) against it", 0.5, workers[slowest], TIMES),
        ),
        tuple(problems),
    )  # fmt: skip


def _function_grid(functions: dict[str, Cold]) -> Grid:
    plain = functions[PLAIN].import_cpu.median
    rows = tuple(
        (
            "import fastapi, mangum, boto3, aws_lambda_powertools" if name == PLAIN else name,
            cold.import_cpu.text(0),
            f"{cold.import_wall.median:.0f}",
            f"{cold.import_cpu.median / plain:.2f}",
            cold.first_cpu.text(0)
            if cold.first_cpu
            else ("—" if cold.status is None else f"not answered: {cold.status}"),
            f"{cold.peak_mb:.0f}",
            str(cold.import_cpu.runs),
        )
        for name, cold in functions.items()
    )
    columns = (
        "function", "imports to ready, CPU ms (middle half)", "wall ms", "ratio", "first request, CPU ms", "peak MB",
        "runs",
    )  # fmt: skip
    return Grid(
        f"Cold start of the built tree, CPython {platform.python_version()}, a fresh process each time", columns, rows
    )


def _uvicorn_grid(emulator: dict[str, Spread], uvicorn: tuple[Spread, Spread]) -> Grid:
    rows = [
        (f"{name}, emulator and awslambdaric: start and first event", spread.text(0), "—", str(spread.runs))
        for name, spread in emulator.items()
    ]
    ready, cpu = uvicorn
    rows.append(("openai_completions, run.sh until /healthz answers", ready.text(0), cpu.text(0), str(ready.runs)))
    return Grid("Through the servers", ("", "wall ms (middle half)", "CPU ms (middle half)", "runs"), tuple(rows))


def _package_grids(packages: dict[str, list[tuple[str, float]]]) -> list[Grid]:
    return [
        Grid(
            f"What {name} imports: -X importtime, which itself takes time",
            ("package", "ms of its own modules"),
            tuple((package, f"{spent:.1f}") for package, spent in packages[name]),
        )
        for name in packages
        if name != "health"
    ]
