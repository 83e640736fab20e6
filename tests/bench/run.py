"""What the service adds to the model's own time: the whole handler path against a bare boto3 call to the same stand-in.

The stand-in runs in a process of its own and answers at once. Contenders take turns within one run; figures are medians
of this process's CPU time and of wall time, per request, and per event from the difference between a long and a short
answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifact import artifact_table
from rich.console import Console
from rich.table import Table
from streams import stream_table

ROOT = Path(__file__).parents[2]
SHORT, LONG = 16, 272
ROUNDS = 60
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}
WARM_UP = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """Milliseconds of one call."""

    cpu: float
    wall: float


@contextmanager
def upstream() -> Iterator[dict[str, str]]:
    """The other process; its URLs."""
    command = [sys.executable, str(Path(__file__).with_name("upstream.py"))]
    environment = {**os.environ, **CREDENTIALS}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()


def bare_call(client: Any) -> Callable[[int], None]:
    """What a script without any service would do: the call, and each part read but not looked into."""

    def call(tokens: int) -> None:
        body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": True}).encode()
        response = client.invoke_endpoint_with_response_stream(
            EndpointName="bench", Body=body, ContentType="application/json"
        )
        for event in response["Body"]:
            assert event["PayloadPart"]["Bytes"]

    return call


def handler_call(handler: Any, *, stream: bool) -> Callable[[int], None]:
    """An API Gateway event through Mangum to the proxy reply."""
    event = json.loads((ROOT / "events" / "openai_completions.json").read_text())

    class Context:
        aws_request_id = "bench"

        def get_remaining_time_in_millis(self) -> int:
            return 29_000

    def call(tokens: int) -> None:
        event["requestContext"]["requestId"] = str(uuid.uuid4())
        event["body"] = json.dumps({"model": "bench", "prompt": "x", "max_tokens": tokens, "stream": stream})
        reply = handler(event, Context())
        assert reply["statusCode"] == 200, reply

    return call


def measured(call: Callable[[int], None], tokens: int) -> Sample:
    cpu, wall = time.process_time(), time.perf_counter()
    call(tokens)
    return Sample((time.process_time() - cpu) * 1000, (time.perf_counter() - wall) * 1000)


def contenders(urls: dict[str, str]) -> dict[str, Callable[[int], None]]:
    """Each way to get an answer. Imports come late: the clients read the environment."""
    os.environ |= {
        **CREDENTIALS,
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": urls["sagemaker"],
        "AWS_ENDPOINT_URL_DYNAMODB": urls["dynamodb"],
        "POWERTOOLS_LOG_LEVEL": "CRITICAL",
    }
    sys.path.insert(0, str(ROOT / "tests"))
    from mangum import Mangum  # noqa: PLC0415

    from completions.bootstrap import (  # noqa: PLC0415
        Parts,
        build_dynamodb_client,
        build_parts,
        build_sagemaker_client,
        openai_completions_app,
    )
    from completions.domain.catalog import ModelRoute  # noqa: PLC0415
    from completions.domain.metering import Principal  # noqa: PLC0415
    from completions.registry.dynamodb import put_key, put_model  # noqa: PLC0415
    from completions.settings import Settings  # noqa: PLC0415
    from completions.web.auth import secret_digest  # noqa: PLC0415
    from fakes import InMemoryLedger, InMemoryRegistry  # noqa: PLC0415

    route = ModelRoute(model_id="bench", endpoint_name="bench", family="vllm", context_length=8192, created=1)
    principal = Principal("bench", "bench")
    digest = secret_digest("sk-local")
    settings = Settings(registry_table="RegistryTable", usage_table="UsageTable")
    client = build_dynamodb_client()
    put_model(client, "RegistryTable", route)
    put_key(client, "RegistryTable", digest, principal)
    real = build_parts(settings)
    registry = InMemoryRegistry({digest: principal}, [route])
    unmetered = Parts(registry, real.backend, InMemoryLedger(), real.reports, real.clock)

    def handler(parts: Parts) -> Any:
        return Mangum(openai_completions_app(parts), lifespan="off")

    return {
        "bare boto3 call": bare_call(build_sagemaker_client(settings)),
        "handler, buffered, unmetered": handler_call(handler(unmetered), stream=False),
        "handler, streamed, unmetered": handler_call(handler(unmetered), stream=True),
        "handler, buffered, metered": handler_call(handler(real), stream=False),
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no-artifact", action="store_true", help="do not build the functions, which takes a minute")
    with_artifact = not parser.parse_args().no_artifact
    with upstream() as urls:
        calls = contenders(urls)
        samples: dict[tuple[str, int], list[Sample]] = {key: [] for key in itertools.product(calls, (SHORT, LONG))}
        for number in range(WARM_UP + ROUNDS):
            for (name, tokens), taken in samples.items():
                sample = measured(calls[name], tokens)
                if number >= WARM_UP:
                    taken.append(sample)
    table = Table(
        "contender",
        f"CPU ms, {SHORT} events",
        "wall ms (p95)",
        "added CPU ms",
        "ratio",
        "CPU µs per event",
        "added µs per event",
        title=f"What the service adds, medians of {ROUNDS} interleaved calls",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    baseline = figures(samples, "bare boto3 call")
    for name in calls:
        cpu, wall, p95, per_event = figures(samples, name)
        table.add_row(
            name,
            f"{cpu:.2f}",
            f"{wall:.2f} ({p95:.2f})",
            f"{cpu - baseline[0]:+.2f}",
            f"{cpu / baseline[0]:.2f}",
            f"{per_event:.1f}",
            f"{per_event - baseline[3]:+.1f}",
        )
    console = Console(width=140)
    console.print(table)
    console.print(stream_table())
    if with_artifact:
        console.print(artifact_table())


def figures(samples: dict[tuple[str, int], list[Sample]], name: str) -> tuple[float, float, float, float]:
    """Median CPU and wall of the short answer, its 95th percentile, and CPU microseconds an event."""
    short, long = samples[name, SHORT], samples[name, LONG]
    cpu = statistics.median(sample.cpu for sample in short)
    wall = statistics.median(sample.wall for sample in short)
    p95 = statistics.quantiles((sample.wall for sample in short), n=20)[-1]
    per_event = (statistics.median(sample.cpu for sample in long) - cpu) / (LONG - SHORT) * 1000
    return cpu, wall, p95, per_event


if __name__ == "__main__":
    main()
