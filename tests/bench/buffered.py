"""What the service adds to a buffered request: Mangum's event in to bytes out, against a bare boto3 call.

Both ask the same stand-in for the same answer, in turns, in this process; the stand-in and DynamoDB are others, whose
CPU does not count. The bare call reads the stream and looks at nothing.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

from bench_models import KEY, LIMITED_KEY
from figures import TIMES, Effort, Grid, Section, Spread, Target
from processes import ROOT, Urls, called, silenced

TOKENS = 16
WARM_UP = 20


def bare_call(client: Any) -> Callable[[], None]:
    """What a script without any service would do."""
    body = json.dumps({"prompt": "x", "max_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}})

    def call() -> None:
        reply = client.invoke_endpoint_with_response_stream(
            EndpointName="bench", Body=body.encode(), ContentType="application/json"
        )
        for event in reply["Body"]:
            assert event["PayloadPart"]["Bytes"]

    return call


class Context:
    """Lambda's."""

    aws_request_id = "bench"

    def get_remaining_time_in_millis(self) -> int:
        """Time enough."""
        return 29_000


def proxy_event(key: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    """What API Gateway sends; each call needs a request id of its own."""
    event: dict[str, Any] = json.loads((ROOT / "events" / "openai_completions.json").read_text())
    for headers in (event["headers"], event["multiValueHeaders"]):
        for name in headers:
            if name.lower() == "authorization":
                value = f"Bearer {key}"
                headers[name] = value if isinstance(headers[name], str) else [value]
    event["body"] = json.dumps({"model": "bench", "prompt": "x", "max_tokens": tokens, "stream": stream})
    return event


def handler_call(handler: Any, key: str) -> Callable[[], None]:
    """A buffered request through Mangum to the proxy reply."""
    event, context = proxy_event(key, TOKENS, stream=False), Context()

    def call() -> None:
        event["requestContext"]["requestId"] = str(uuid.uuid4())
        reply = handler(event, context)
        assert reply["statusCode"] == 200, reply

    return call


def contenders(urls: Urls) -> dict[str, Callable[[], None]]:
    """Each way to get an answer. Imports come late: the clients read the environment."""
    os.environ |= urls.variables
    from mangum import Mangum  # noqa: PLC0415
    from memory_parts import memory_parts  # noqa: PLC0415

    from completions.bootstrap import build_parts, openai_completions_app  # noqa: PLC0415
    from completions.clients import build_sagemaker_client  # noqa: PLC0415
    from completions.handlers import ready  # noqa: PLC0415
    from completions.settings import read_settings  # noqa: PLC0415

    unmetered = Mangum(openai_completions_app(memory_parts()), lifespan="off")
    metered = Mangum(openai_completions_app(build_parts()), lifespan="off")
    ready()
    return {
        "bare": bare_call(build_sagemaker_client(read_settings())),
        "unmetered": handler_call(unmetered, KEY),
        "metered": handler_call(metered, KEY),
        "limited": handler_call(metered, LIMITED_KEY),
    }


NAMES = {
    "bare": "bare boto3 call",
    "unmetered": "service, no metering",
    "metered": "service, metered",
    "limited": "service, metered, key with limits",
}


def measure(effort: Effort) -> Section:
    """Interleaved calls."""
    with called() as urls, silenced():
        calls = contenders(urls)
        cpu: dict[str, list[float]] = {name: [] for name in calls}
        wall: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(WARM_UP + effort.of(400, 100)):
            for name, call in calls.items():
                cpu_started, started = time.process_time(), time.perf_counter()
                call()
                ended, cpu_ended = time.perf_counter(), time.process_time()
                if number >= WARM_UP:
                    cpu[name].append((cpu_ended - cpu_started) * 1000)
                    wall[name].append((ended - started) * 1000)
    return section(
        {name: Spread.of(values) for name, values in cpu.items()}, {n: Spread.of(v) for n, v in wall.items()}
    )


def section(cpu: dict[str, Spread], wall: dict[str, Spread]) -> Section:
    """The figures of all contenders."""
    bare = cpu["bare"].median
    rows = tuple(
        (
            NAMES[name],
            cpu[name].text(),
            f"{cpu[name].median - bare:+.2f}",
            f"{cpu[name].median / bare:.2f}",
            f"{wall[name].median:.2f}",
            f"{wall[name].p95:.2f}",
            f"{wall[name].p99:.2f}",
            f"{wall[name].median - wall['bare'].median:+.2f}",
        )
        for name in cpu
    )
    columns = (
        "contender", "CPU ms (middle half)", "added CPU ms", "ratio", "wall ms p50", "p95", "p99", "added wall ms p50",
    )  # fmt: skip
    title = f"Buffered request of {TOKENS} tokens, event in to bytes out, {cpu['bare'].runs} interleaved calls each"
    return Section(
        "buffered",
        (Grid(title, columns, rows),),
        {
            "tokens": TOKENS,
            "cpu_ms": {name: spread.plain for name, spread in cpu.items()},
            "wall_ms": {name: spread.plain for name, spread in wall.items()},
        },
        (
            Target(
                "buffered, no metering: CPU against the bare boto3 call", 1.3, cpu["unmetered"].median / bare, TIMES
            ),
            Target("buffered, metered: CPU in all", 6, cpu["metered"].median, "ms"),
        ),
    )
