"""The deployed entry point without Docker: Lambda's own emulator and runtime client run the handler on ``events/``.

The emulator ships inside the SAM CLI's package. It serves one call at a time.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from completions_cli.local.server import bind
from completions_cli.local.stack import LocalStack
from ledger_reader import LedgerReader

MACHINE = {"x86_64": "x86_64", "aarch64": "arm64"}.get(platform.machine())

pytestmark = pytest.mark.skipif(
    MACHINE is None or sys.platform != "linux", reason="the emulator is a Linux binary for x86_64 and arm64"
)


def free_port() -> int:
    listener = bind(0)
    port: int = listener.getsockname()[1]
    listener.close()
    return port


@contextmanager
def emulated(handler: str, environment: dict[str, str], root: Path, log: Path) -> Iterator[str]:
    """The emulator around ``handler``; where to post events."""
    binary = resources.files("samcli") / "local" / "rapid" / f"aws-lambda-rie-{MACHINE}"
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(binary),
        "--runtime-interface-emulator-address",
        address,
        "--runtime-api-address",
        f"127.0.0.1:{free_port()}",
        sys.executable,
        "-m",
        "awslambdaric",
        handler,
    ]
    variables = {
        **os.environ,
        **environment,
        "AWS_LAMBDA_FUNCTION_TIMEOUT": "29",
        "AWS_LAMBDA_FUNCTION_NAME": "function",
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "512",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=root / "functions", env=variables, stdout=output, stderr=output)
        try:
            yield f"http://{address}/2015-03-31/functions/function/invocations"
        finally:
            process.terminate()
            process.wait()


def invoke(url: str, event: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while True:
        try:
            reply: dict[str, Any] = httpx.post(url, json=event, timeout=60).json()
        except httpx.ConnectError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return reply


def load_event(root: Path, name: str, request_id: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads((root / "events" / name).read_text())
    event["requestContext"]["requestId"] = request_id
    return event


@pytest.fixture
def completions_url(stack: LocalStack, project_root: Path, tmp_path: Path) -> Iterator[str]:
    handler = "completions.handlers.openai_completions.handler"
    with emulated(handler, dict(stack.environment), project_root, tmp_path / "emulator.log") as url:
        yield url


def test_the_runtime_client_runs_the_buffered_event(
    ledger: LedgerReader, completions_url: str, project_root: Path
) -> None:
    reply = invoke(completions_url, load_event(project_root, "openai_completions.json", "emulated-whole"))

    assert reply["statusCode"] == 200
    assert reply["headers"]["x-request-id"] == "emulated-whole"
    answer = json.loads(reply["body"])
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    assert ledger.settled("emulated-whole").completion_tokens == answer["usage"]["completion_tokens"]


def test_a_stream_event_still_yields_correct_bytes_all_at_once(
    ledger: LedgerReader, completions_url: str, project_root: Path
) -> None:
    whole = invoke(completions_url, load_event(project_root, "openai_completions.json", "emulated-again"))
    reply = invoke(completions_url, load_event(project_root, "openai_completions_stream.json", "emulated-stream"))

    assert reply["headers"]["content-type"].startswith("text/event-stream")
    assert reply["isBase64Encoded"] is False
    frames = reply["body"].split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == json.loads(whole["body"])["choices"][0]["text"]
    assert ledger.settled("emulated-stream").streamed is True


def test_the_same_gateway_request_is_not_answered_twice(completions_url: str, project_root: Path) -> None:
    event = load_event(project_root, "openai_completions.json", "emulated-twice")
    first, second = invoke(completions_url, event), invoke(completions_url, event)

    assert first["statusCode"] == 200
    assert second["statusCode"] == 409
    assert json.loads(second["body"])["error"]["code"] == "duplicate_request"


@pytest.mark.parametrize(
    ("module", "event"),
    [
        ("openai_models", "openai_models.json"),
        ("openai_models", "openai_models_retrieve.json"),
        ("scale_completions", "scale_completions.json"),
        ("scale_v1_completions", "scale_v1_completions_sync.json"),
        ("scale_models", "scale_models.json"),
        ("sourcegraph_completions", "sourcegraph_code.json"),
        ("sourcegraph_completions", "sourcegraph_stream.json"),
        ("sourcegraph_site", "sourcegraph_graphql.json"),
        ("health", "health.json"),
    ],
)
def test_every_other_function_answers_its_event(
    stack: LocalStack, project_root: Path, tmp_path: Path, module: str, event: str
) -> None:
    handler = f"completions.handlers.{module}.handler"
    with emulated(handler, dict(stack.environment), project_root, tmp_path / "emulator.log") as url:
        reply = invoke(url, load_event(project_root, event, f"emulated-{event}"))
    assert reply["statusCode"] == 200
