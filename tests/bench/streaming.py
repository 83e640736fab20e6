"""What the service adds to a stream: in this process, and under uvicorn as functions/run.sh starts it.

Full speed means that all events of an answer are already there; paced, that one comes every 20 ms, as a model sends
them, and nothing can be taken together.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import in_process
from bench_models import KEY
from encoders import encoder_grid
from figures import TIMES, Effort, Grid, Section, Spread, Target
from processes import LoadGenerator, Server, Urls, called, load_generator, ours, silenced

AT_ONCE = (1, 16, 64)
SHORT, LONG = 16, 272
APPS = {"unmetered": "unmetered_app:app", "metered": "completions.handlers.completions:app"}
LABELS = {"unmetered": "service, no metering", "metered": "service, metered"}
LIMIT_MEGABYTES = 512


@dataclass(frozen=True, slots=True)
class Flow:
    """One server under one load. CPU is the server's: for each event beyond the first ones, and all in."""

    event_cpu_us: float
    events_per_cpu_second: float
    first_ms: Spread


@dataclass(frozen=True, slots=True)
class Memory:
    """Megabytes: at rest, with all streams open, the most there ever was."""

    rest: float
    opened: float
    peak: float

    @property
    def kilobytes_per_stream(self) -> float:
        """What one more open stream takes."""
        return (self.opened - self.rest) * 1024 / AT_ONCE[-1]


def plan(server: Server, model: str, tokens: int, at_once: int, requests: int) -> dict[str, Any]:
    """A streamed request in OpenAI's dialect."""
    return {
        "port": server.port,
        "path": "/v1/completions",
        "headers": {"authorization": f"Bearer {KEY}"},
        "body": {"model": model, "prompt": "x", "max_tokens": tokens, "stream": True},
        "tokens": tokens,
        "at_once": at_once,
        "requests": requests,
    }


def flow(server: Server, load: LoadGenerator, at_once: int, requests: int) -> Flow:
    """At full speed: short answers and long ones, the difference being events alone."""
    load.run(**plan(server, "bench", SHORT, at_once, at_once))
    spent: list[float] = []
    firsts: list[float] = []
    for tokens in (SHORT, LONG):
        count = max(requests, at_once)
        before = server.cpu_seconds()
        told = load.run(**plan(server, "bench", tokens, at_once, count))
        spent.append((server.cpu_seconds() - before) / count)
        firsts += told["first_ms"]
    return Flow((spent[1] - spent[0]) / (LONG - SHORT) * 1e6, LONG / spent[1], Spread.of(firsts))


def paced(server: Server, load: LoadGenerator, at_once: int) -> float:
    """CPU microseconds an event, all in, where one comes every 20 ms."""
    tokens = 100
    before = server.cpu_seconds()
    load.run(**plan(server, "bench-20ms", tokens, at_once, at_once))
    return (server.cpu_seconds() - before) / (at_once * tokens) * 1e6


def memory(server: Server, load: LoadGenerator) -> Memory:
    """Before and while all streams are open; the server must have served a few and no more."""
    streams = AT_ONCE[-1]
    load.run(**plan(server, "bench", SHORT, 1, 8))
    rest = server.megabytes()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(load.run, **plan(server, "bench-100ms", 30, streams, streams))
        opened = rest
        while not running.done():
            opened = max(opened, server.megabytes())
            time.sleep(0.1)
        running.result()
    return Memory(rest, opened, server.megabytes("VmHWM"))


@contextmanager
def bench_server(kind: str, urls: Urls) -> Iterator[Server]:
    """This service, with or without metering."""
    with tempfile.TemporaryDirectory() as folder, ours(APPS[kind], urls, Path(folder) / "log") as running:
        yield running


def measure(effort: Effort) -> Section:
    """All of it; the encoders alone, too."""
    flows: dict[tuple[str, int], Flow] = {}
    paces: dict[tuple[str, int], float] = {}
    memories: dict[str, Memory] = {}
    with called() as urls, load_generator() as load:
        with silenced():
            inside = in_process.measure(urls, effort)
        for kind in APPS:
            with bench_server(kind, urls) as server:
                memories[kind] = memory(server, load)
                for at_once in AT_ONCE if not effort.quick else (AT_ONCE[0], AT_ONCE[-1]):
                    flows[kind, at_once] = flow(server, load, at_once, effort.of(96, 24))
                    paces[kind, at_once] = paced(server, load, at_once)
                memories[kind] = Memory(memories[kind].rest, memories[kind].opened, server.megabytes("VmHWM"))
    encoders, growth = encoder_grid()
    return section(inside, flows, paces, memories, encoders, growth)


def section(
    inside: dict[str, in_process.Streamed],
    flows: dict[tuple[str, int], Flow],
    paces: dict[tuple[str, int], float],
    memories: dict[str, Memory],
    encoders: Grid,
    growth: float,
) -> Section:
    """The figures of all."""
    bare = inside["bare"]
    first = {kind: flows[kind, 1].first_ms.median - bare.first_wall_ms.median for kind in APPS}
    return Section(
        "streams",
        (_inside_grid(inside), _flow_grid(flows, paces), _memory_grid(memories), encoders),
        {
            "in_process": {
                name: {
                    "event_cpu_us": one.event_cpu_us,
                    "first_cpu_ms": one.first_cpu_ms.plain,
                    "first_wall_ms": one.first_wall_ms.plain,
                }
                for name, one in inside.items()
            },
            "uvicorn": {
                f"{kind}, {at_once} streams": {
                    "event_cpu_us": one.event_cpu_us,
                    "events_per_cpu_second": one.events_per_cpu_second,
                    "first_ms": one.first_ms.plain,
                    "paced_event_cpu_us": paces[kind, at_once],
                }
                for (kind, at_once), one in flows.items()
            },
            "memory": {
                kind: {
                    "rest_mb": one.rest,
                    "open_mb": one.opened,
                    "peak_mb": one.peak,
                    "kb_per_stream": one.kilobytes_per_stream,
                }
                for kind, one in memories.items()
            },
            "added_first_event_ms": first,
            "cumulative_growth": growth,
        },
        _targets(inside, flows, memories, first, growth),
    )


def _targets(
    inside: dict[str, in_process.Streamed],
    flows: dict[tuple[str, int], Flow],
    memories: dict[str, Memory],
    first: dict[str, float],
    growth: float,
) -> tuple[Target, ...]:
    added = inside["unmetered"].event_cpu_us - inside["bare"].event_cpu_us
    in_function = inside["unmetered"].first_wall_ms.median - inside["bare"].first_wall_ms.median
    most = max(AT_ONCE)
    through = flows["unmetered", most].event_cpu_us
    each = max(one.kilobytes_per_stream for one in memories.values())
    peak = memories["metered"].peak
    return (
        Target("stream in process: CPU an event beyond the bare boto3 read", 30, added, "µs"),
        Target(f"stream through uvicorn, {most} at once: CPU an event in all", 60, through, "µs"),
        Target("first event, in process: added", 3, in_function, "ms"),
        Target("first event, through uvicorn: added", 3, first["unmetered"], "ms"),
        # quadratic work would be 4; what leaves is quadratic in bytes by the dialect's design, and copying them shows
        Target("cumulative Sourcegraph form: an event of the longest answer to one of the shortest", 2, growth, TIMES),
        Target(f"memory with {most} streams open in one process, at its peak", LIMIT_MEGABYTES, peak, "MB"),
        Target("memory of one open stream", 300, each, "KB"),
    )


def _inside_grid(inside: dict[str, in_process.Streamed]) -> Grid:
    names = {"bare": "bare boto3 read", "unmetered": "service, no metering"}
    bare = inside["bare"]
    rows = tuple(
        (
            names[name],
            f"{one.event_cpu_us:.1f}",
            f"{one.event_cpu_us - bare.event_cpu_us:+.1f}",
            one.first_cpu_ms.text(),
            one.first_wall_ms.text(),
            f"{one.first_wall_ms.median - bare.first_wall_ms.median:+.2f}",
        )
        for name, one in inside.items()
    )
    columns = (
        "contender", "CPU µs per event", "added µs", "first event, CPU ms (middle half)", "wall ms (middle half)",
        "added wall ms",
    )  # fmt: skip
    return Grid("A stream in this process, at full speed", columns, rows)


def _flow_grid(flows: dict[tuple[str, int], Flow], paces: dict[tuple[str, int], float]) -> Grid:
    rows = tuple(
        (
            LABELS[kind],
            str(at_once),
            f"{one.event_cpu_us:.0f}",
            f"{one.events_per_cpu_second:,.0f}",
            f"{paces[kind, at_once]:.0f}",
            f"{one.first_ms.median:.1f}",
            f"{one.first_ms.p99:.1f}",
        )
        for (kind, at_once), one in flows.items()
    )
    columns = (
        "contender", "streams", "CPU µs per event", "events per CPU-second, all in",
        "µs per event, all in, 50 a second", "first event, wall ms p50", "p99",
    )  # fmt: skip
    note = f"Answers of {LONG} events. CPU is the server process's, from /proc."
    return Grid("Streams through uvicorn, one worker", columns, rows, note)


def _memory_grid(memories: dict[str, Memory]) -> Grid:
    rows = tuple(
        (LABELS[kind], f"{one.rest:.0f}", f"{one.opened:.0f}", f"{one.peak:.0f}", f"{one.kilobytes_per_stream:.0f}")
        for kind, one in memories.items()
    )
    columns = ("contender", "MB at rest", f"MB, {AT_ONCE[-1]} streams open", "MB at its peak", "KB per open stream")
    return Grid("Memory under uvicorn", columns, rows)
