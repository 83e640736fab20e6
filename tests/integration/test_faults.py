"""What SageMaker and its containers do to a request: the client's answer, the record, and the calls it took."""

from __future__ import annotations

import asyncio
import json
import pkgutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI

from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import LocalStack
from ledger_reader import LedgerReader

REQUEST = {"model": "demo", "prompt": "import os\n", "max_tokens": 20, "temperature": 0}


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, headers={"Authorization": "Bearer sk-local"}, timeout=30) as client:
        yield client


def script(stack: LocalStack, *faults: Fault) -> int:
    stack.sagemaker.faults.replace("demo", list(faults))
    return stack.sagemaker.call_count["demo"]


# how the endpoint refuses every call: the client's status and code, the record's outcome, when to come back, the calls
REFUSALS = {
    "throttled": (Refusal(kind="throttled"), 429, "rate_limit_exceeded", "refused", "1", 3),
    "not ready": (Refusal(kind="not_ready"), 503, None, "failed", "10", 3),
    "scaled to zero": (Refusal(kind="no_capacity"), 503, None, "failed", "300", 1),
    "service unavailable": (Refusal(kind="unavailable"), 503, None, "failed", "1", 3),
    "internal failure": (Refusal(kind="internal"), 500, None, "failed", None, 1),
    "container 500": (
        Refusal(kind="model_error", status=500, message="CUDA secret-detail"),
        500,
        None,
        "failed",
        None,
        1,
    ),
    "container overloaded": (Refusal(kind="model_error", status=503), 503, None, "failed", "1", 3),
    "container timed out": (Refusal(kind="model_error", status=0), 504, None, "failed", None, 1),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.replace(" ", "-"))
def test_a_failure_before_the_first_record_is_a_status_and_one_record(
    ledger: LedgerReader, http: httpx.Client, faults: LocalStack, case: str, stream: bool
) -> None:
    refusal, status, code, outcome, retry_after, calls = REFUSALS[case]
    before = script(faults, Fault(refusal=refusal, calls=None))

    reply = http.post("/v1/completions", json={**REQUEST, "stream": stream})

    assert reply.status_code == status
    assert reply.json()["error"]["code"] == code
    assert "secret-detail" not in reply.text
    assert reply.headers.get("retry-after") == retry_after
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == (outcome, 0, 0)
    assert (faults.sagemaker.call_count["demo"], record.attempts) == (before + calls, calls)


@pytest.mark.parametrize("kind", ["throttled", "not_ready", "unavailable"])
def test_a_refusal_that_passes_is_tried_again_and_charged_once(
    ledger: LedgerReader, http: httpx.Client, faults: LocalStack, kind: Literal["throttled", "not_ready", "unavailable"]
) -> None:
    before = script(faults, Fault(refusal=Refusal(kind=kind), calls=2))

    reply = http.post("/v1/completions", json=REQUEST)

    assert reply.status_code == 200
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.outcome, record.attempts) == ("succeeded", 3)
    assert record.completion_tokens == reply.json()["usage"]["completion_tokens"]
    assert faults.sagemaker.call_count["demo"] == before + 3


BREAKS = {
    "cut": Fault(cut_after=2_000),
    "exception frame": Fault(exception_after=2_000),
    "clean end without the terminal record": Fault(end_after=2_000),
}


@pytest.mark.parametrize("fault", BREAKS.values(), ids=BREAKS)
def test_a_stream_broken_upstream_ends_in_an_error_frame_without_done(
    ledger: LedgerReader, http: httpx.Client, faults: LocalStack, fault: Fault
) -> None:
    script(faults, fault)

    reply = http.post("/v1/completions", json={**REQUEST, "stream": True})
    frames = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if line]

    assert reply.status_code == 200
    assert "[DONE]" not in reply.text
    assert set(frames[-1]) == {"error"}
    assert frames[-1]["error"]["type"] == "server_error"
    record = ledger.settled(reply.headers["x-request-id"])
    assert record.outcome == "failed"
    assert record.completion_tokens == len(frames) - 1
    assert record.prompt_tokens > 0
    assert not record.estimated


def test_the_sdk_raises_on_a_broken_stream(base_url: str, faults: LocalStack) -> None:
    script(faults, Fault(cut_after=2_000))
    with OpenAI(base_url=f"{base_url}/v1", api_key="sk-local", max_retries=0) as client:
        chunks = client.completions.create(
            model="demo", prompt="import os\n", max_tokens=20, temperature=0, stream=True
        )
        with pytest.raises(openai.APIError, match="failed to answer"):
            list(chunks)


@pytest.mark.parametrize("fault", BREAKS.values(), ids=BREAKS)
def test_a_buffered_answer_broken_upstream_is_a_status(
    ledger: LedgerReader, http: httpx.Client, faults: LocalStack, fault: Fault
) -> None:
    script(faults, fault)

    reply = http.post("/v1/completions", json=REQUEST)

    assert reply.status_code == 500
    record = ledger.settled(reply.headers["x-request-id"])
    assert record.outcome == "failed"
    assert record.completion_tokens > 0


def test_parts_of_one_byte_change_nothing(http: httpx.Client, faults: LocalStack) -> None:
    whole = http.post("/v1/completions", json=REQUEST).json()
    script(faults, Fault(split_every=1))
    split = http.post("/v1/completions", json=REQUEST).json()
    assert (split["choices"], split["usage"]) == (whole["choices"], whole["usage"])


def test_the_first_event_leaves_before_the_last_record_arrives(stack: LocalStack, faults: LocalStack) -> None:
    script(faults, Fault(delay_ms=30))
    with httpx.stream(
        "POST",
        f"{stack.base_url}/v1/completions",
        json={**REQUEST, "stream": True},
        headers={"Authorization": "Bearer sk-local"},
        timeout=30,
    ) as reply:
        moments = [time.monotonic() for _ in reply.iter_raw()]
    # twenty-odd parts, 30 ms apart: were they held back, all would arrive together
    assert moments[-1] - moments[0] > 0.3


def hang_up_after_first_frame(stack: LocalStack, request: dict[str, Any]) -> str:
    """Read the head and one frame, then close the socket; the request id."""
    host, port = stack.base_url.removeprefix("http://").split(":")
    content = json.dumps(request).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer sk-local\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        seen = b""
        while b"data: " not in seen:
            seen += connection.recv(65536)
    lines = seen.decode().split("\r\n")
    return next(line.split(": ")[1] for line in lines if line.startswith("x-request-id"))


def test_a_client_that_hangs_up_leaves_one_settled_record(
    ledger: LedgerReader, stack: LocalStack, faults: LocalStack
) -> None:
    script(faults, Fault(delay_ms=30))

    request_id = hang_up_after_first_frame(stack, {**REQUEST, "max_tokens": 200, "stream": True})

    record = ledger.settled(request_id)
    assert record.outcome == "aborted"
    assert 0 < record.completion_tokens < 200
    assert record.prompt_tokens > 0


class ShortOfTime:
    """Lambda's context with three seconds left, half of which the service keeps for itself."""

    aws_request_id = "short-of-time"

    def get_remaining_time_in_millis(self) -> int:
        return 3_000


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_silent_model_is_given_up_in_time_to_answer_and_settle(
    ledger: LedgerReader, faults: LocalStack, project_root: Path, stream: bool
) -> None:
    script(faults, Fault(delay_ms=10_000))
    event = json.loads((project_root / "events" / "openai_completions.json").read_text())
    event["requestContext"]["requestId"] = f"silent-{stream}"
    event["body"] = json.dumps({**REQUEST, "stream": stream})
    handler = pkgutil.resolve_name("completions.handlers.openai_completions:handler")

    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())
        started = time.monotonic()
        reply = handler(event, ShortOfTime())
        elapsed = time.monotonic() - started
        asyncio.set_event_loop(None)

    assert reply["statusCode"] == 504
    assert elapsed < 3
    assert ledger.settled(f"silent-{stream}").outcome == "failed"
