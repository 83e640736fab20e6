"""A model that starts, one that stands in for another, an endpoint that is left alone, and what SageMaker is told."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import boto3
import httpx2 as httpx
import pytest
from openai import OpenAI
from openai.types import Completion
from starlette.testclient import TestClient

from completions.bootstrap import build_parts, openai_completions_app
from completions.domain.catalog import ModelRoute
from completions.domain.metering import Principal
from completions.registry.dynamodb import put_key, put_model
from completions.settings import read_settings
from completions.web.auth import secret_digest
from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.sagemaker_runtime import Call
from completions_cli.local.stack import LocalStack
from ledger_reader import LedgerReader
from speakers import BASIC, SPEAKERS, TOKENS, data_frames, openai_body

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

START_SECONDS = 90
STARTING = Refusal(kind="no_capacity")
WAITING = {"openai": b": waiting\n", "scale": b": waiting\r\n\r\n", "scale-v1": b": waiting\r\n\r\n"}
"""The comment each dialect sends while it waits; Sourcegraph's clients know none."""

ROUTE = ModelRoute(
    "waiting", "waiting", "vllm", context_length=8192, created=1_700_000_000, start_seconds=START_SECONDS
)
ROUTES = (
    replace(ROUTE, wait_for_start=True),
    replace(ROUTE, model_id="impatient", endpoint_name="impatient"),
    replace(ROUTE, model_id="covered", endpoint_name="covered", wait_for_start=True, fallbacks=("broken", "stand-in")),
    replace(ROUTE, model_id="broken", endpoint_name="broken"),
    replace(ROUTE, model_id="stand-in", endpoint_name="stand-in"),
    replace(ROUTE, model_id="flaky", endpoint_name="flaky"),
    replace(ROUTE, model_id="relieved", endpoint_name="flaky", fallbacks=("stand-in",)),
    replace(ROUTE, model_id="shared-cache", endpoint_name="stand-in", isolate_prefix_cache=False),
)
KEYS = {
    "sk-blue-1": Principal("blue-1", "ada", "blue"),
    "sk-blue-2": Principal("blue-2", "bob", "blue"),
    "sk-red": Principal("red", "ada", "red"),
    "sk-alone": Principal("alone", "ada"),
}


@pytest.fixture(scope="module")
def dynamodb() -> Iterator[DynamoDBClient]:
    with closing(boto3.client("dynamodb")) as client:
        yield client


@pytest.fixture(scope="module")
def models(stack: LocalStack, dynamodb: DynamoDBClient) -> LocalStack:
    """The stack with ``ROUTES`` and ``KEYS``; every endpoint has the vLLM container behind it."""
    table = stack.environment["REGISTRY_TABLE"]
    for route in ROUTES:
        put_model(dynamodb, table, route)
        stack.sagemaker.containers[route.endpoint_name] = stack.sagemaker.containers["demo"]
    for secret, principal in KEYS.items():
        put_key(dynamodb, table, secret_digest(secret), principal)
    return stack


@pytest.fixture
def scripted(models: LocalStack, faults: LocalStack) -> LocalStack:
    """The same, its fault scripts cleared afterwards."""
    return models


@pytest.fixture
def http(stack: LocalStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.base_url, timeout=30) as client:
        yield client


@pytest.fixture
def reference(http: httpx.Client) -> str:
    return SPEAKERS["openai"].text(SPEAKERS["openai"].ask(http, stream=False))


def until(holds: Callable[[], bool], seconds: float = 15) -> None:
    """Wait for what other threads bring about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# A model that starts


@pytest.mark.parametrize("dialect", WAITING)
def test_a_stream_is_kept_alive_with_comments_until_the_model_has_started(
    scripted: LocalStack, ledger: LedgerReader, http: httpx.Client, reference: str, dialect: str
) -> None:
    scripted.sagemaker.faults.replace("waiting", [Fault(refusal=STARTING, calls=3)])
    before = scripted.sagemaker.call_count["waiting"]

    reply = SPEAKERS[dialect].ask(http, stream=True, model="waiting")

    assert reply.status_code == 200
    comments, events = reply.content[: reply.content.index(b"data:")], reply.content
    assert comments == WAITING[dialect] * 2  # the third refusal is the second that is waited for
    assert events.count(b": waiting") == 2
    assert SPEAKERS[dialect].joined(reply) == reference
    assert reply.text.endswith(SPEAKERS[dialect].end)
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.outcome, record.attempts, record.completion_tokens) == ("succeeded", 4, TOKENS)
    assert scripted.sagemaker.call_count["waiting"] == before + 4


def test_the_official_sdk_reads_past_the_comments(scripted: LocalStack, reference: str) -> None:
    scripted.sagemaker.faults.replace("waiting", [Fault(refusal=STARTING, calls=3)])
    with OpenAI(base_url=f"{scripted.base_url}/v1", api_key="sk-local", max_retries=0) as sdk:
        fields = openai_body(True, "waiting")
        chunks = list(sdk.completions.create(**fields))
    assert all(isinstance(chunk, Completion) for chunk in chunks)
    assert "".join(chunk.choices[0].text for chunk in chunks) == reference


def test_comments_leave_while_the_model_is_still_starting(scripted: LocalStack, http: httpx.Client) -> None:
    scripted.sagemaker.faults.replace("waiting", [Fault(refusal=STARTING, calls=8)])
    speaker = SPEAKERS["openai"]
    with http.stream("POST", speaker.path, json=speaker.body(True, "waiting"), headers=speaker.headers) as reply:
        moments = [(time.monotonic(), piece) for piece in reply.iter_raw()]
    first, last = moments[0], moments[-1]
    assert first[1].startswith(WAITING["openai"])
    assert last[0] - first[0] > 0.05 * 5  # polls of START_POLL_SECONDS lie between


@pytest.mark.parametrize("dialect", ["openai", "scale", "scale-v1"])
def test_a_buffered_caller_is_told_when_to_come_back(
    scripted: LocalStack, ledger: LedgerReader, http: httpx.Client, dialect: str
) -> None:
    scripted.sagemaker.faults.replace("waiting", [Fault(refusal=STARTING, calls=None)])
    reply = SPEAKERS[dialect].ask(http, stream=False, model="waiting")
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == str(START_SECONDS)
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.outcome, record.attempts, record.completion_tokens) == ("failed", 1, 0)


def test_sourcegraph_is_told_the_moment_to_come_back(scripted: LocalStack, http: httpx.Client) -> None:
    scripted.sagemaker.faults.replace("waiting", [Fault(refusal=STARTING, calls=None)])
    reply = SPEAKERS["sourcegraph-delta"].ask(http, stream=False, model="waiting")
    assert reply.status_code == 503
    seconds = (parsedate_to_datetime(reply.headers["retry-after"]) - datetime.now(UTC)).total_seconds()
    assert START_SECONDS - 10 < seconds <= START_SECONDS + 1


def test_a_sourcegraph_stream_fails_at_once_for_its_clients_know_no_comments(
    scripted: LocalStack, ledger: LedgerReader, http: httpx.Client
) -> None:
    scripted.sagemaker.faults.replace("waiting", [Fault(refusal=STARTING, calls=None)])
    reply = SPEAKERS["sourcegraph-delta"].ask(http, stream=True, model="waiting")
    assert reply.text.startswith("event: error")
    assert "waiting\n" not in reply.text
    assert ledger.settled(reply.headers["x-request-id"]).attempts == 1


def test_a_stream_that_is_delivered_at_once_cannot_wait(scripted: LocalStack, buffered_url: str) -> None:
    scripted.sagemaker.faults.replace("waiting", [Fault(refusal=STARTING, calls=None)])
    with httpx.Client(base_url=buffered_url, timeout=30) as http:
        reply = SPEAKERS["openai"].ask(http, stream=True, model="waiting")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, str(START_SECONDS))


def test_a_model_that_does_not_let_callers_wait_sends_streams_away_too(
    scripted: LocalStack, http: httpx.Client
) -> None:
    scripted.sagemaker.faults.replace("impatient", [Fault(refusal=STARTING, calls=None)])
    reply = SPEAKERS["openai"].ask(http, stream=True, model="impatient")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, str(START_SECONDS))


def test_a_start_that_fails_ends_the_stream_in_an_error(
    scripted: LocalStack, ledger: LedgerReader, http: httpx.Client
) -> None:
    script = [Fault(refusal=STARTING, calls=2), Fault(refusal=Refusal(kind="internal"), calls=None)]
    scripted.sagemaker.faults.replace("waiting", script)
    reply = SPEAKERS["openai"].ask(http, stream=True, model="waiting")
    assert reply.status_code == 200
    assert "[DONE]" not in reply.text
    (frame,) = data_frames(reply)
    assert set(frame) == {"error"}
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.outcome, record.attempts, record.completion_tokens) == ("failed", 3, 0)


def test_a_caller_who_leaves_while_waiting_is_one_aborted_record_and_no_further_call(
    scripted: LocalStack, ledger: LedgerReader
) -> None:
    scripted.sagemaker.faults.replace("waiting", [Fault(refusal=STARTING, calls=None)])
    before = set(ledger.states("waiting"))
    address = urlsplit(scripted.base_url)
    content = json.dumps(openai_body(True, "waiting")).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer sk-local\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=10) as connection:
        connection.sendall(head.encode() + content)
        seen = b""
        while b": waiting" not in seen:
            seen += connection.recv(4096)
        request_id = seen.split(b"x-request-id: ")[1].split(b"\r\n")[0].decode()

    record = ledger.settled(request_id)
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("aborted", 0, 0)
    assert set(ledger.states("waiting")) - before == {record.pk}
    calls = scripted.sagemaker.call_count["waiting"]
    time.sleep(0.3)  # six polls
    assert scripted.sagemaker.call_count["waiting"] == calls


# Models that stand in for others


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_reply_names_the_model_that_stood_in_and_the_record_both(
    scripted: LocalStack, ledger: LedgerReader, http: httpx.Client, reference: str, stream: bool
) -> None:
    scripted.sagemaker.faults.replace("covered", [Fault(refusal=STARTING)])
    scripted.sagemaker.faults.replace("broken", [Fault(refusal=Refusal(kind="not_found"))])
    reply = SPEAKERS["openai"].ask(http, stream=stream, model="covered")
    assert reply.status_code == 200
    names = {frame["model"] for frame in data_frames(reply)} if stream else {reply.json()["model"]}
    assert names == {"stand-in"}
    text = SPEAKERS["openai"].joined(reply) if stream else SPEAKERS["openai"].text(reply)
    assert text == reference
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.requested_model, record.model, record.endpoint) == ("covered", "stand-in", "stand-in")
    assert (record.outcome, record.attempts, record.completion_tokens) == ("succeeded", 3, TOKENS)


def test_where_nobody_can_stand_in_the_first_models_failure_is_told(
    scripted: LocalStack, ledger: LedgerReader, http: httpx.Client
) -> None:
    scripted.sagemaker.faults.replace("covered", [Fault(refusal=STARTING)])
    for name in ("broken", "stand-in"):
        scripted.sagemaker.faults.replace(name, [Fault(refusal=Refusal(kind="not_found"))])
    reply = SPEAKERS["openai"].ask(http, stream=False, model="covered")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, str(START_SECONDS))
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.requested_model, record.outcome, record.attempts) == ("covered", "failed", 3)


# An endpoint that is left alone


@pytest.fixture
def wary(scripted: LocalStack) -> Iterator[TestClient]:
    """An app of its own over the real parts, which leaves an endpoint alone after two failures in a row."""
    settings = read_settings({**scripted.environment, "CIRCUIT_FAILURES": "2", "CIRCUIT_SECONDS": "4"})
    with TestClient(openai_completions_app(build_parts(settings)), headers={"Authorization": "Bearer sk-local"}) as app:
        yield app


def test_an_endpoint_that_keeps_failing_is_left_alone_and_then_tried_again(
    scripted: LocalStack, ledger: LedgerReader, wary: TestClient
) -> None:
    broken = Fault(refusal=Refusal(kind="model_error", status=500), calls=2)
    scripted.sagemaker.faults.replace("flaky", [broken])
    before = scripted.sagemaker.call_count["flaky"]
    statuses = [wary.post("/v1/completions", json=openai_body(False, "flaky")).status_code for _ in range(2)]
    assert statuses == [500, 500]

    refused = wary.post("/v1/completions", json=openai_body(False, "flaky"))
    assert refused.status_code == 503
    assert 1 <= int(refused.headers["retry-after"]) <= 4
    assert scripted.sagemaker.call_count["flaky"] == before + 2
    record = ledger.settled(refused.headers["x-request-id"])
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("failed", 0, 0)

    relieved = wary.post("/v1/completions", json=openai_body(False, "relieved"))
    assert (relieved.status_code, relieved.json()["model"]) == (200, "stand-in")
    assert scripted.sagemaker.call_count["flaky"] == before + 2

    until(lambda: wary.post("/v1/completions", json=openai_body(False, "flaky")).status_code == 200)
    assert scripted.sagemaker.call_count["flaky"] == before + 3


# What SageMaker is told about a request


@dataclass(frozen=True)
class Told:
    """A reply, and the call behind it."""

    reply: httpx.Response
    call: Call


@pytest.fixture
def told(scripted: LocalStack, http: httpx.Client) -> Callable[..., Told]:
    """Asks with a key, a model and further headers."""

    def ask(key: str, model: str = "stand-in", **headers: str) -> Told:
        sent = {"Authorization": f"Bearer {key}", **headers}
        reply = http.post("/v1/completions", json={**openai_body(False, model), "user": "zq-user"}, headers=sent)
        assert reply.status_code == 200, reply.text
        return Told(reply, scripted.sagemaker.recent_calls[-1])

    return ask


def test_the_inference_id_is_the_request_id(told: Callable[..., Told]) -> None:
    one = told("sk-local")
    assert one.call.headers["x-amzn-sagemaker-inference-id"] == one.reply.headers["x-request-id"]


def test_keys_of_one_team_share_the_prefix_cache_and_no_others_do(told: Callable[..., Told]) -> None:
    salts = {}
    for key in KEYS:
        call = told(key).call
        salts[key] = call.headers["x-amzn-sagemaker-prefix-aware-id"]
        assert json.loads(call.body)["cache_salt"] == salts[key]
    assert salts["sk-blue-1"] == salts["sk-blue-2"]
    assert len({salts["sk-blue-1"], salts["sk-red"], salts["sk-alone"]}) == 3
    assert not any(name in salt for salt in salts.values() for name in ("blue", "red", "ada", "bob"))


def test_a_model_may_share_its_prefix_cache_among_all(told: Callable[..., Told]) -> None:
    call = told("sk-blue-1", "shared-cache").call
    assert "x-amzn-sagemaker-prefix-aware-id" not in call.headers
    assert "cache_salt" not in json.loads(call.body)


def test_nothing_that_a_caller_puts_into_headers_reaches_sagemaker(told: Callable[..., Told]) -> None:
    smuggled = {
        "X-Amzn-SageMaker-Custom-Attributes": "route=/v1/load_lora_adapter,zq-smuggled",
        "X-Amzn-SageMaker-Target-Variant": "zq-smuggled",
        "X-Amzn-SageMaker-Inference-Component": "zq-smuggled",
        "X-Amzn-SageMaker-Session-Id": "zq-smuggled",
        "X-Amzn-SageMaker-Inference-Id": "zq-smuggled",
        "X-Amzn-SageMaker-Adapter-Identifier": "zq-smuggled",
        "X-Request-Id": "zq-smuggled",
        "OpenAI-Organization": "zq-smuggled",
        "Cookie": "zq-smuggled",
        "X-Custom": "zq-smuggled",
    }
    call = told("sk-blue-1", **smuggled).call
    assert call.headers["x-amzn-sagemaker-custom-attributes"] == "route=/v1/completions"
    everything = call.body.decode() + "".join(name + value for name, value in call.headers.items())
    assert "zq-" not in everything
    assert "load_lora_adapter" not in everything
    assert "sk-blue-1" not in everything
    assert "blue-1" not in everything


def test_a_request_of_several_calls_names_each_of_them(
    scripted: LocalStack, http: httpx.Client, stack: LocalStack
) -> None:
    body = {**openai_body(False, "demo-tgi"), "n": 3, "temperature": 1}
    reply = http.post("/v2/completions", json=body, headers=BASIC)
    calls = [scripted.sagemaker.recent_calls[number] for number in (-3, -2, -1)]
    names = {call.headers["x-amzn-sagemaker-inference-id"] for call in calls}
    request_id = reply.headers["x-request-id"]
    assert names == {request_id, f"{request_id}-1", f"{request_id}-2"}
