"""Other gateways side by side with this one: the same stand-in, the same prompt, the same number at a time.

Each runs as one worker without a database. What is compared is the server process's own CPU (its children included),
since the load generator and the stand-in share the machine with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench_models import KEY
from figures import TIMES, Effort, Grid, Section, Spread, Target
from peers_installed import NotMeasuredError, Route, litellm, litellm_routes, portkey, portkey_routes
from processes import LoadGenerator, Server, Urls, called, load_generator, ours

WHOLE_TOKENS, STREAM_TOKENS = 16, 272
SHORT_TOKENS = 16
AT_ONCE = 16
OURS = "this service"
UNMETERED, METERED = f"{OURS}, no metering", f"{OURS}, metered"
LITELLM = "LiteLLM"
SAGEMAKER = f"{LITELLM}, SageMaker"
Start = Callable[[Path], AbstractContextManager[Server]]


@dataclass(frozen=True, slots=True)
class Gateway:
    """One process and the ways to ask it. ``thrifty`` ones are given fewer requests, for they take long."""

    name: str
    start: Start
    routes: tuple[Route, ...]
    thrifty: bool = False


@dataclass
class Measured:
    """Of one route. Milliseconds are wall time at one request after another."""

    requests_per_cpu_second: float | None = None
    whole_ms: Spread | None = None
    events_per_cpu_second: float | None = None
    event_cpu_us: float | None = None
    first_ms: Spread | None = None
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Process:
    """Of one gateway: how it starts, and what it holds after the load."""

    ready_seconds: float
    ready_cpu_seconds: float
    rest_megabytes: float
    megabytes: float


def gateways(urls: Urls) -> list[Gateway]:
    """All that are tried."""
    headers = {"authorization": f"Bearer {KEY}"}

    def own(name: str) -> tuple[Route, ...]:
        return (Route(name, "bench", headers=headers), Route(f"{name}, TGI", "bench-tgi", headers=headers))

    def start(app: str) -> Start:
        return lambda log: ours(app, urls, log)

    return [
        Gateway(UNMETERED, start("unmetered_app:app"), own(UNMETERED)),
        Gateway(METERED, start("completions.handlers.completions:app"), own(METERED)[:1]),
        Gateway(LITELLM, partial(litellm, urls), tuple(litellm_routes()), thrifty=True),
        Gateway("Portkey", partial(portkey, urls), tuple(portkey_routes(urls))),
    ]


def plan(server: Server, route: Route, tokens: int, *, stream: bool) -> dict[str, Any]:
    """One kind of request."""
    model = route.stream_model if stream and route.stream_model else route.model
    return {
        "port": server.port,
        "path": route.path,
        "headers": dict(route.headers),
        "body": {"model": model, "prompt": "x", "max_tokens": tokens, "temperature": 0.5, "stream": stream},
        "tokens": tokens,
    }


def measure_route(server: Server, load: LoadGenerator, route: Route, requests: int) -> Measured:
    """Whole answers, then streams: latency one at a time, CPU with some at a time."""
    told = Measured()
    try:
        whole = plan(server, route, WHOLE_TOKENS, stream=False)
        load.run(**whole, at_once=AT_ONCE, requests=2 * AT_ONCE)
        told.whole_ms = Spread.of(load.run(**whole, at_once=1, requests=requests)["total_ms"])
        told.requests_per_cpu_second = 1 / _cpu_each(server, load, whole, requests)
    except RuntimeError as error:
        told.problems.append(f"{route.name}, whole answers: {str(error)[:300]}")
    try:
        short, long = (plan(server, route, tokens, stream=True) for tokens in (SHORT_TOKENS, STREAM_TOKENS))
        load.run(**short, at_once=AT_ONCE, requests=AT_ONCE)
        told.first_ms = Spread.of(load.run(**short, at_once=1, requests=requests // 2)["first_ms"])
        brief = _cpu_each(server, load, short, requests // 4)
        each = _cpu_each(server, load, long, requests // 4)
        told.events_per_cpu_second = STREAM_TOKENS / each
        told.event_cpu_us = (each - brief) / (STREAM_TOKENS - SHORT_TOKENS) * 1e6
    except RuntimeError as error:
        told.problems.append(f"{route.name}, streams: {str(error)[:300]}")
    return told


def _cpu_each(server: Server, load: LoadGenerator, request: dict[str, Any], requests: int) -> float:
    """CPU seconds of the server for one, ``AT_ONCE`` at a time."""
    before = server.cpu_seconds()
    load.run(**request, at_once=AT_ONCE, requests=requests)
    return max(server.cpu_seconds() - before, 0.001) / requests


def measure(effort: Effort) -> Section:
    """Each gateway in turn, alone on the machine but for what it calls and who asks."""
    routes: dict[str, Measured] = {}
    processes: dict[str, Process] = {}
    problems: list[str] = []
    with called() as urls, load_generator() as load, tempfile.TemporaryDirectory() as folder:
        bare = _direct(urls, load, effort.of(400, 100))
        for gateway in gateways(urls):
            log = Path(folder) / "log"
            try:
                with gateway.start(log) as server:
                    rest = server.megabytes()
                    for route in gateway.routes:
                        count = effort.of(200, 64) if gateway.thrifty else effort.of(600, 160)
                        routes[route.name] = measure_route(server, load, route, count)
                    processes[gateway.name] = Process(
                        server.ready_seconds, server.ready_cpu_seconds, rest, server.megabytes("VmHWM")
                    )
            except (NotMeasuredError, RuntimeError) as error:
                problems.append(f"{gateway.name}: {error}")
    problems += [problem for told in routes.values() for problem in told.problems]
    return section(bare, routes, processes, problems)


def _direct(urls: Urls, load: LoadGenerator, requests: int) -> Spread:
    """Milliseconds of the stand-in's own whole answer, which every gateway adds to."""
    port = int(urls.sagemaker.rpartition(":")[2])
    request = {"port": port, "path": "/v1/completions", "headers": {}, "tokens": WHOLE_TOKENS}
    body = {"model": "bench", "prompt": "x", "max_tokens": WHOLE_TOKENS, "stream": False}
    return Spread.of(load.run(**request, body=body, at_once=1, requests=requests)["total_ms"])


def section(
    bare: Spread, routes: Mapping[str, Measured], processes: Mapping[str, Process], problems: list[str]
) -> Section:
    """The figures of all."""
    return Section(
        "peers",
        (_route_grid(bare, routes), _process_grid(processes)),
        {
            "stand_in_ms": bare.plain,
            "routes": {
                name: {
                    "requests_per_cpu_second": told.requests_per_cpu_second,
                    "events_per_cpu_second": told.events_per_cpu_second,
                    "event_cpu_us": told.event_cpu_us,
                    "whole_ms": told.whole_ms and told.whole_ms.plain,
                    "first_ms": told.first_ms and told.first_ms.plain,
                }
                for name, told in routes.items()
            },
            "processes": {
                name: {
                    "ready_seconds": one.ready_seconds,
                    "ready_cpu_seconds": one.ready_cpu_seconds,
                    "rest_mb": one.rest_megabytes,
                    "peak_mb": one.megabytes,
                }
                for name, one in processes.items()
            },
        },
        _targets(routes, processes, problems),
        tuple(problems),
    )


def _targets(
    routes: Mapping[str, Measured], processes: Mapping[str, Process], problems: list[str]
) -> tuple[Target, ...]:
    """Against its SageMaker provider, which is the same work. Its other one stands in the table."""
    why = next((problem for problem in problems if problem.startswith(LITELLM)), "")

    def ratio(above: float | None, below: float | None) -> float | None:
        return None if above is None or not below else above / below

    def of(route: str, figure: str) -> float | None:
        value: float | None = getattr(routes.get(route), figure, None)
        return value

    requests, events = (of(SAGEMAKER, figure) for figure in ("requests_per_cpu_second", "events_per_cpu_second"))
    own, theirs = processes.get(METERED), processes.get(LITELLM)
    memory = start = None
    if own is not None and theirs is not None:
        memory = own.megabytes / theirs.megabytes
        start = own.ready_seconds / theirs.ready_seconds

    def against(text: str, limit: float, measured: float | None, *, at_least: bool) -> Target:
        return Target(f"against {LITELLM}: {text}", limit, measured, TIMES, at_least, why)

    own_rates = (of(UNMETERED, "requests_per_cpu_second"), of(METERED, "requests_per_cpu_second"))
    return (
        against("requests per CPU-second, no metering", 6, ratio(own_rates[0], requests), at_least=True),
        against("requests per CPU-second, metered", 3, ratio(own_rates[1], requests), at_least=True),
        against(
            "streamed events per CPU-second", 8, ratio(of(UNMETERED, "events_per_cpu_second"), events), at_least=True
        ),
        against("memory", 0.25, memory, at_least=False),
        against("time until ready", 0.2, start, at_least=False),
    )


def _route_grid(bare: Spread, routes: Mapping[str, Measured]) -> Grid:
    def number(value: float | None) -> str:
        return "—" if value is None else f"{value:,.0f}"

    def added(spread: Spread | None, quantile: str, own: float = 0) -> str:
        return "—" if spread is None else f"{getattr(spread, quantile) - own:,.1f}"

    rows = tuple(
        (
            name,
            number(told.requests_per_cpu_second),
            added(told.whole_ms, "median", bare.median),
            added(told.whole_ms, "p99", bare.median),
            number(told.events_per_cpu_second),
            number(told.event_cpu_us),
            added(told.first_ms, "median"),
        )
        for name, told in routes.items()
    )
    columns = (
        "contender", "requests per CPU-second", "added ms p50", "p99", "streamed events per CPU-second", "µs per event",
        "first event ms p50",
    )  # fmt: skip
    note = (
        f"Whole answers of {WHOLE_TOKENS} tokens, streams of {STREAM_TOKENS}. CPU at {AT_ONCE} requests at a time, "
        f"milliseconds at one; the stand-in's own {bare.median:.2f} ms are taken off."
    )
    return Grid("Gateways side by side", columns, rows, note)


def _process_grid(processes: Mapping[str, Process]) -> Grid:
    rows = tuple(
        (
            name,
            f"{one.ready_seconds:.2f}",
            f"{one.ready_cpu_seconds:.2f}",
            f"{one.rest_megabytes:.0f}",
            f"{one.megabytes:.0f}",
        )
        for name, one in processes.items()
    )
    return Grid("Their processes", ("gateway", "ready after, s", "CPU s", "MB when ready", "MB at its peak"), rows)
