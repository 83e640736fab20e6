"""A stream in this process: the ASGI app as uvicorn calls it, without uvicorn, against a bare read of the bytes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench_models import KEY
from figures import Effort, Spread
from processes import Urls

SHORT, LONG = 16, 528
WARM_UP = 8


@dataclass(frozen=True, slots=True)
class Streamed:
    """CPU microseconds for each further event, and milliseconds until the first one of a short answer."""

    event_cpu_us: float
    first_cpu_ms: Spread
    first_wall_ms: Spread


@dataclass(frozen=True, slots=True)
class _Sample:
    cpu: float
    first_cpu: float
    first_wall: float


class _Stopwatch:
    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        self._first: tuple[float, float] | None = None

    def event(self) -> None:
        if self._first is None:
            self._first = (time.process_time() - self._cpu, time.perf_counter() - self._wall)

    def stop(self) -> _Sample:
        assert self._first is not None
        return _Sample(time.process_time() - self._cpu, *self._first)


def bare_read(client: Any) -> Callable[[int], _Sample]:
    """boto3's own stream, every part taken and none looked at."""

    def read(tokens: int) -> _Sample:
        body = {"prompt": "x", "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
        watch = _Stopwatch()
        reply = client.invoke_endpoint_with_response_stream(
            EndpointName="bench", Body=json.dumps(body).encode(), ContentType="application/json"
        )
        for event in reply["Body"]:
            watch.event()
            assert event["PayloadPart"]["Bytes"]
        return watch.stop()

    return read


def app_stream(app: Any, loop: asyncio.AbstractEventLoop) -> Callable[[int], _Sample]:
    """A streamed request in OpenAI's dialect; what is sent is counted and thrown away."""
    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def ask(tokens: int) -> _Sample:
        body = json.dumps({"model": "bench", "prompt": "x", "max_tokens": tokens, "stream": True}).encode()
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        sent: list[bytes] = []
        watch = _Stopwatch()

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                watch.event()
                sent.append(message["body"])

        await app(dict(scope), messages.get, send)
        sample = watch.stop()
        assert b"".join(sent).count(b"lorem") == tokens
        return sample

    return lambda tokens: loop.run_until_complete(ask(tokens))


def measure(urls: Urls, effort: Effort) -> dict[str, Streamed]:
    """Interleaved. Imports come late: the clients read the environment."""
    os.environ |= urls.variables
    from memory_parts import memory_parts  # noqa: PLC0415

    from completions.bootstrap import openai_completions_app  # noqa: PLC0415
    from completions.clients import build_sagemaker_client  # noqa: PLC0415
    from completions.handlers import ready  # noqa: PLC0415
    from completions.settings import read_settings  # noqa: PLC0415

    loop = asyncio.new_event_loop()
    calls = {
        "bare": bare_read(build_sagemaker_client(read_settings())),
        "unmetered": app_stream(openai_completions_app(memory_parts()), loop),
    }
    ready()
    samples: dict[tuple[str, int], list[_Sample]] = {(name, size): [] for name in calls for size in (SHORT, LONG)}
    for number in range(WARM_UP + effort.of(120, 25)):
        for (name, tokens), taken in samples.items():
            sample = calls[name](tokens)
            if number >= WARM_UP:
                taken.append(sample)
    loop.close()
    return {name: _streamed(samples[name, SHORT], samples[name, LONG]) for name in calls}


def _streamed(short: list[_Sample], long: list[_Sample]) -> Streamed:
    cpu = [Spread.of([sample.cpu for sample in taken]).median for taken in (short, long)]
    return Streamed(
        (cpu[1] - cpu[0]) / (LONG - SHORT) * 1e6,
        Spread.of([sample.first_cpu * 1000 for sample in short]),
        Spread.of([sample.first_wall * 1000 for sample in short]),
    )
