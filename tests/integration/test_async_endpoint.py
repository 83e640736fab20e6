"""A model behind an asynchronous endpoint, through the gateway: the same answers, all at once."""

from __future__ import annotations

import asyncio
import json
import pkgutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openai import OpenAI

from completions.clients import build_dynamodb_client, build_s3_client
from completions.domain.catalog import ModelRoute
from completions.registry.dynamodb import put_model
from completions.registry.items import MODEL_PARTITION
from completions_cli.local.async_inference import AsyncInference
from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import LocalStack
from completions_cli.local.tables import moto_dynamodb
from ledger_reader import LedgerReader

MODELS = {family: f"demo-{family}-async" for family in ("vllm", "lmi", "tgi")}
MODEL = MODELS["vllm"]
REQUEST = {"model": MODEL, "prompt": "import os\n", "max_tokens": 20, "temperature": 0}
HEADERS = {"Authorization": "Bearer sk-local"}


@pytest.fixture(scope="module")
def queued(stack: LocalStack) -> Iterator[LocalStack]:
    """The stack with one more model of each family, whose endpoint has a queue; S3 is a server of its own, by moto."""
    table = stack.environment["REGISTRY_TABLE"]
    with (
        moto_dynamodb() as s3_url,
        pytest.MonkeyPatch.context() as patch,
        closing(build_dynamodb_client()) as dynamodb,
    ):
        patch.setenv("AWS_ENDPOINT_URL_S3", s3_url)  # read by each function when it first needs S3
        with closing(build_s3_client()) as s3:
            s3.create_bucket(Bucket="async-output")
            queue = AsyncInference(s3, "async-output")
            for family, name in MODELS.items():
                stack.sagemaker.containers[name] = stack.sagemaker.containers[f"demo-{family}"]
                stack.sagemaker.queues[name] = queue
                route = ModelRoute(name, name, family, context_length=8192, created=1_764_547_200, asynchronous=True)
                put_model(dynamodb, table, route)
            yield stack
            for name in MODELS.values():
                dynamodb.delete_item(TableName=table, Key={"pk": {"S": MODEL_PARTITION}, "sk": {"S": name}})
                del stack.sagemaker.queues[name], stack.sagemaker.containers[name]
            queue.stop()


@pytest.fixture
def calls(queued: LocalStack) -> Iterator[LocalStack]:
    """The stack, its count of calls at zero."""
    for name in MODELS.values():
        queued.sagemaker.call_count[name] = 0
    yield queued
    queued.sagemaker.faults.replace(MODEL, [])


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, headers=HEADERS, timeout=30) as client:
        yield client


@pytest.mark.parametrize("family", MODELS)
def test_a_whole_answer_is_the_one_a_streaming_endpoint_gives(
    http: httpx.Client, calls: LocalStack, ledger: LedgerReader, family: str
) -> None:
    model = MODELS[family]
    at_once = http.post("/v1/completions", json={**REQUEST, "model": f"demo-{family}"}).json()

    reply = http.post("/v1/completions", json={**REQUEST, "model": model})

    assert reply.status_code == 200
    assert reply.json()["model"] == model
    assert (reply.json()["choices"], reply.json()["usage"]) == (at_once["choices"], at_once["usage"])
    assert reply.json()["usage"]["completion_tokens"] == 20
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.outcome, record.endpoint, record.completion_tokens) == ("succeeded", model, 20)
    assert calls.sagemaker.call_count[model] == 1


def test_a_streamed_answer_is_the_same_text_in_one_event(
    base_url: str, calls: LocalStack, ledger: LedgerReader
) -> None:
    with OpenAI(base_url=f"{base_url}/v1", api_key="sk-local", max_retries=0) as client:
        prompt: dict[str, Any] = {"prompt": "import os\n", "max_tokens": 20, "temperature": 0}
        whole = client.completions.create(model="demo", **prompt)
        raw = client.completions.with_raw_response.create(
            model=MODEL, stream=True, stream_options={"include_usage": True}, **prompt
        )
        chunks = list(raw.parse())
        request_id = raw.headers["x-request-id"]

    texts = [choice.text for chunk in chunks for choice in chunk.choices if choice.text]
    assert texts == [whole.choices[0].text]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage
    record = ledger.settled(request_id)
    assert (record.outcome, record.completion_tokens) == ("succeeded", 20)
    assert calls.sagemaker.call_count[MODEL] == 1


def test_choices_of_one_call_come_together(http: httpx.Client, calls: LocalStack) -> None:
    body = {**REQUEST, "prompt": ["import os\n", "def main():\n"], "n": 2, "seed": 7, "temperature": 1}
    at_once = http.post("/v1/completions", json={**body, "model": "demo"}).json()
    reply = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert (reply["choices"], reply["usage"]) == (at_once["choices"], at_once["usage"])
    assert calls.sagemaker.call_count[MODEL] == 1


CONTAINER_REFUSES = json.dumps(
    {"error": {"message": "top_p must be in (0, 1].", "type": "BadRequestError", "param": "top_p", "code": 400}}
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("message", "status", "told", "outcome"),
    [
        (CONTAINER_REFUSES, 400, "top_p must be in", "refused"),
        ("CUDA secret-detail", 500, "failed to answer", "failed"),
    ],
    ids=["the container refuses", "the container fails"],
)
def test_a_failure_object_is_a_status_and_one_record(
    http: httpx.Client,
    calls: LocalStack,
    ledger: LedgerReader,
    message: str,
    status: int,
    told: str,
    outcome: str,
    stream: bool,
) -> None:
    calls.sagemaker.faults.replace(MODEL, [Fault(refusal=Refusal(kind="model_error", status=status, message=message))])

    reply = http.post("/v1/completions", json={**REQUEST, "stream": stream})

    assert reply.status_code == status
    assert told in reply.json()["error"]["message"]
    assert "secret-detail" not in reply.text
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == (outcome, 0, 0)
    assert calls.sagemaker.call_count[MODEL] == 1


def test_a_throttled_submission_is_sent_again_and_answered(
    http: httpx.Client, calls: LocalStack, ledger: LedgerReader
) -> None:
    calls.sagemaker.faults.replace(MODEL, [Fault(refusal=Refusal(kind="throttled"))])
    reply = http.post("/v1/completions", json=REQUEST)
    assert reply.status_code == 200
    assert ledger.settled(reply.headers["x-request-id"]).completion_tokens == 20
    assert calls.sagemaker.call_count[MODEL] == 2


def test_a_body_that_neither_fits_nor_may_be_stored_is_refused_before_any_call(
    http: httpx.Client, calls: LocalStack, ledger: LedgerReader
) -> None:
    reply = http.post("/v1/completions", json={**REQUEST, "prompt": "x" * 130_000})
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"
    assert "128000" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "prompt"
    assert ledger.settled(reply.headers["x-request-id"]).outcome == "refused"
    assert calls.sagemaker.call_count[MODEL] == 0


class ShortOfTime:
    """Lambda's context with four seconds left, some of which the service keeps for itself."""

    aws_request_id = "short-of-time"

    def get_remaining_time_in_millis(self) -> int:
        return 4_000


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_is_late_is_given_up_in_time_and_not_asked_for_again(
    calls: LocalStack, ledger: LedgerReader, project_root: Path, stream: bool
) -> None:
    calls.sagemaker.faults.replace(MODEL, [Fault(delay_ms=60_000)])
    event = json.loads((project_root / "events" / "openai_completions.json").read_text())
    event["requestContext"]["requestId"] = f"late-{stream}"
    event["body"] = json.dumps({**REQUEST, "stream": stream})
    handler = pkgutil.resolve_name("completions.handlers.openai_completions:handler")

    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())
        started = time.monotonic()
        reply = handler(event, ShortOfTime())
        elapsed = time.monotonic() - started
        asyncio.set_event_loop(None)

    assert reply["statusCode"] == 504
    assert elapsed < 4
    assert ledger.settled(f"late-{stream}").outcome == "failed"
    assert calls.sagemaker.call_count[MODEL] == 1
