"""Asynchronous endpoints through real boto3 clients over HTTP: the stand-in's queue, and moto's S3.

Source: the service model of ``sagemaker-runtime`` (``InvokeEndpointAsync``).

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from completions.backends.circuit import EndpointCircuits
from completions.backends.codec import EncodeOptions
from completions.backends.s3_answers import S3Location
from completions.backends.sagemaker import SageMakerBackend, tenant_salt
from completions.backends.sagemaker_async import AsynchronousEndpoints, poll_intervals
from completions.backends.vllm import VllmCodec
from completions.clients import build_sagemaker_client
from completions.domain.catalog import ModelRoute
from completions.domain.completion import ChoiceDelta, CompletionChunk, FinishReason, Usage
from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    InvalidRequestError,
    RateLimitError,
    Recourse,
    RequestTooLargeError,
    TruncatedStreamError,
)
from completions.domain.events import RetryLaterError
from completions.domain.ports import Ticket, UpstreamCall
from completions.domain.submissions import UnansweredError
from completions.settings import Settings, SettingsError, read_settings
from completions_cli.local.async_inference import AsyncInference
from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.sagemaker_runtime import SageMakerRuntime
from completions_cli.local.tables import moto_dynamodb
from fakes import ManualClock, request, route
from scripted_http import Reply, ScriptedServer, scripted_server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ENDPOINT = "demo-endpoint"
PLAIN = "plain-endpoint"
OUTPUT_BUCKET = "async-output"
INPUTS = S3Location("async-input", "prompts")
ROUTE = route(asynchronous=True)
CALL = UpstreamCall("request-1", "team:search")
DOCUMENT = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1_764_547_200,
        "model": "/opt/ml/model",
        "choices": [{"index": 0, "text": "x):\n", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": 4, "total_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": None},
    }
).encode()
ANSWER = CompletionChunk((ChoiceDelta(0, "x):\n", None, FinishReason.STOP),), Usage(4, 3))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Client]:
    with moto_dynamodb() as url, closing(boto3.client("s3", endpoint_url=url)) as client:
        client.create_bucket(Bucket=OUTPUT_BUCKET)
        client.create_bucket(Bucket=INPUTS.bucket)
        yield client


@pytest.fixture
def container() -> Iterator[ScriptedServer]:
    with scripted_server(lambda _: Reply(200, DOCUMENT, {"Content-Type": "application/json"})) as server:
        yield server


@pytest.fixture
def runtime(container: ScriptedServer, s3: S3Client) -> Iterator[SageMakerRuntime]:
    """One endpoint with a queue and one without."""
    queue = AsyncInference(s3, OUTPUT_BUCKET)
    with SageMakerRuntime({ENDPOINT: container.url, PLAIN: container.url}) as it:
        it.queues[ENDPOINT] = queue
        yield it
    queue.stop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@dataclass
class Connect:
    """Makes backends over real clients; ``s3_clients`` counts how often one of S3 was asked for."""

    clock: ManualClock
    s3: S3Client
    cleanup: ExitStack
    s3_clients: int = 0

    def __call__(
        self, runtime_url: str, *, inputs: S3Location | None = None, failures: int = 1_000_000, read_timeout: float = 10
    ) -> SageMakerBackend:
        settings = Settings(registry_table="keys", usage_table="usage", upstream_read_timeout=read_timeout)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", runtime_url)
            client = self.cleanup.enter_context(closing(build_sagemaker_client(settings)))
        circuits = EndpointCircuits(failures, 30)
        endpoints = AsynchronousEndpoints(client, self._new_s3_client, circuits, self.clock, inputs)
        return SageMakerBackend(client, {"vllm": VllmCodec()}, circuits, read_timeout, endpoints)

    def _new_s3_client(self) -> S3Client:
        self.s3_clients += 1
        return self.s3


@pytest.fixture
def connect(clock: ManualClock, s3: S3Client) -> Iterator[Connect]:
    with ExitStack() as cleanup:
        yield Connect(clock, s3, cleanup)


@pytest.fixture
def backend(connect: Connect, runtime: SageMakerRuntime) -> SageMakerBackend:
    return connect(runtime.url)


def read(backend: SageMakerBackend, asked: ModelRoute = ROUTE, **overrides: Any) -> list[CompletionChunk]:
    with backend.stream(request(**overrides), asked, CALL) as stream:
        return list(stream)


def failure(backend: SageMakerBackend, asked: ModelRoute = ROUTE, **overrides: Any) -> CompletionError:
    with pytest.raises(CompletionError) as caught:
        read(backend, asked, **overrides)
    return caught.value


def vllm_error(status: int, message: str, param: str | None = None) -> str:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": param, "code": status}})


def test_the_output_object_is_one_chunk_and_the_end(backend: SageMakerBackend) -> None:
    assert read(backend) == [ANSWER]


def test_the_container_is_asked_once_for_an_unstreamed_document(
    backend: SageMakerBackend, runtime: SageMakerRuntime, container: ScriptedServer
) -> None:
    read(backend)
    (asked,) = container.received
    assert json.loads(asked.body)["prompt"] == "def f("
    assert "stream" not in json.loads(asked.body)
    assert (asked.headers["content-type"], asked.headers["accept"]) == ("application/json", "application/json")
    assert asked.headers["x-amzn-sagemaker-custom-attributes"] == "route=/v1/completions"
    assert asked.headers["x-amzn-sagemaker-inference-id"] == "request-1"
    assert runtime.call_count[ENDPOINT] == 1


@pytest.mark.parametrize(("isolated", "salt"), [(True, tenant_salt("team:search")), (False, None)])
def test_a_tenants_prompts_are_kept_apart_where_the_route_says_so(
    backend: SageMakerBackend, container: ScriptedServer, isolated: bool, salt: str | None
) -> None:
    read(backend, route(asynchronous=True, isolate_prefix_cache=isolated))
    assert json.loads(container.received[0].body).get("cache_salt") == salt


@pytest.mark.parametrize(
    ("wait", "in_queue", "processing"),
    [(None, "900", "900"), (5_000, "900", "900"), (100.2, "101", "101"), (2.5, "60", "3")],
)
def test_sagemaker_is_told_how_long_the_answer_is_waited_for_within_its_limits(
    backend: SageMakerBackend, runtime: SageMakerRuntime, wait: float | None, in_queue: str, processing: str
) -> None:
    with backend.stream(request(), ROUTE, UpstreamCall("request-1", "team:search", wait)) as stream:
        list(stream)
    headers = runtime.recent_calls[0].headers
    assert headers["x-amzn-sagemaker-requestttlseconds"] == in_queue
    assert headers["x-amzn-sagemaker-invocationtimeoutseconds"] == processing


def test_a_clients_own_read_timeout_does_not_bound_the_wait_for_the_answer(
    connect: Connect, runtime: SageMakerRuntime, clock: ManualClock
) -> None:
    runtime.faults.replace(ENDPOINT, [Fault(delay_ms=300)])
    assert read(connect(runtime.url, read_timeout=1)) == [ANSWER]
    assert sum(clock.slept) > 1


def test_the_intervals_between_looks_double_from_a_quarter_second_to_two() -> None:
    assert list(islice(poll_intervals(), 6)) == [0.25, 0.5, 1, 2, 2, 2]


def test_an_answer_that_never_comes_is_a_timeout_at_the_limit_after_one_submission(
    backend: SageMakerBackend, runtime: SageMakerRuntime, clock: ManualClock
) -> None:
    runtime.faults.replace(ENDPOINT, [Fault(delay_ms=60_000)])
    with backend.stream(request(), ROUTE, CALL) as stream:
        stream.limit_wait(10)
        with pytest.raises(BackendTimeoutError) as caught:
            next(stream)
    assert clock.slept == [0.25, 0.5, 1, 2, 2, 2, 2, 0.25]
    assert caught.value.recourse is Recourse.NONE
    assert caught.value.detail == "no object in S3: answer NoSuchKey, failure NoSuchKey"
    assert runtime.call_count[ENDPOINT] == 1


def test_without_any_limit_the_wait_is_as_long_as_a_function_can_run(connect: Connect, clock: ManualClock) -> None:
    with scripted_server(lambda _: accepted("never.out")) as it:
        assert type(failure(connect(it.url))) is BackendTimeoutError
    assert sum(clock.slept) == 900


def test_an_output_without_a_word_is_a_truncated_answer(connect: Connect, s3: S3Client) -> None:
    s3.put_object(Bucket=OUTPUT_BUCKET, Key="empty.out", Body=b"\n")
    with scripted_server(lambda _: accepted("empty.out")) as it:
        assert type(failure(connect(it.url))) is TruncatedStreamError


def test_an_endpoint_without_a_failure_path_still_answers(connect: Connect, s3: S3Client) -> None:
    s3.put_object(Bucket=OUTPUT_BUCKET, Key="here.out", Body=DOCUMENT)
    with scripted_server(lambda _: accepted("here.out")) as it:
        assert read(connect(it.url)) == [ANSWER]


def accepted(key: str) -> Reply:
    """SageMaker's acceptance, for an endpoint whose configuration has no failure path."""
    headers = {"X-Amzn-SageMaker-OutputLocation": f"s3://{OUTPUT_BUCKET}/{key}"}
    return Reply(202, b'{"InferenceId": "1"}', headers)


def test_an_acceptance_without_an_output_address_is_a_failure_after_one_attempt(connect: Connect) -> None:
    with scripted_server(lambda _: Reply(202, b'{"InferenceId": "1"}')) as it:
        assert type(failure(connect(it.url))) is BackendError
        assert len(it.received) == 1


def test_a_failure_object_with_the_containers_error_is_that_error(
    backend: SageMakerBackend, runtime: SageMakerRuntime
) -> None:
    message = vllm_error(400, "top_p must be in (0, 1].", "top_p")
    runtime.faults.replace(ENDPOINT, [Fault(refusal=Refusal(kind="model_error", status=400, message=message))])
    error = failure(backend)
    assert (type(error), error.message, error.param) == (InvalidRequestError, "top_p must be in (0, 1].", "top_p")
    assert runtime.call_count[ENDPOINT] == 1


@pytest.mark.parametrize(
    ("refusal", "kind", "recourse"),
    [
        (Refusal(kind="throttled"), RateLimitError, Recourse.AGAIN),
        (Refusal(kind="unavailable"), BackendUnavailableError, Recourse.AGAIN),
        (Refusal(kind="internal"), BackendError, Recourse.NONE),
    ],
    ids=lambda value: value.kind if isinstance(value, Refusal) else None,
)
def test_a_refused_submission_is_its_canonical_error_after_one_attempt(
    backend: SageMakerBackend,
    runtime: SageMakerRuntime,
    refusal: Refusal,
    kind: type[CompletionError],
    recourse: Recourse,
) -> None:
    runtime.faults.replace(ENDPOINT, [Fault(refusal=refusal)])
    error = failure(backend)
    assert (type(error), error.recourse) == (kind, recourse)
    assert runtime.call_count[ENDPOINT] == 1


@pytest.mark.parametrize(
    "overrides", [{"endpoint_name": PLAIN}, {"inference_component": "component"}, {"target_variant": "Blue"}]
)
def test_a_route_that_cannot_be_invoked_asynchronously_is_a_wrong_registry_entry(
    backend: SageMakerBackend, container: ScriptedServer, overrides: dict[str, str]
) -> None:
    error = failure(backend, route(asynchronous=True, **overrides))
    assert (type(error), error.recourse) == (BackendUnavailableError, Recourse.ELSEWHERE)
    assert container.received == []


def test_a_backend_without_asynchronous_endpoints_refuses_their_routes(backend: SageMakerBackend) -> None:
    with closing(build_sagemaker_client(Settings(registry_table="keys", usage_table="usage"))) as client:
        plain = SageMakerBackend(client, {"vllm": VllmCodec()}, EndpointCircuits(5, 30), 10)
        error = failure(plain)
    assert (type(error), error.recourse) == (BackendUnavailableError, Recourse.ELSEWHERE)


def test_failed_submissions_open_the_endpoints_circuit(connect: Connect, runtime: SageMakerRuntime) -> None:
    backend = connect(runtime.url, failures=2)
    name = str(uuid.uuid4())  # failures are counted by name for the whole process
    runtime.containers[name] = runtime.containers[ENDPOINT]
    runtime.faults.replace(name, [Fault(refusal=Refusal(kind="internal"), calls=None)])
    kinds = [type(failure(backend, route(asynchronous=True, endpoint_name=name))) for _ in range(3)]
    assert kinds == [BackendError, BackendError, BackendUnavailableError]
    assert runtime.call_count[name] == 2


def test_a_runtime_that_does_not_reply_is_given_up_in_time(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        backend = connect(f"http://127.0.0.1:{mute.getsockname()[1]}", read_timeout=5)
        started = time.monotonic()
        with pytest.raises(BackendTimeoutError):
            backend.stream(request(), ROUTE, UpstreamCall("request-1", "team:search", 0.2))
        assert time.monotonic() - started < 3


def test_a_runtime_that_cannot_be_reached_may_be_asked_again(connect: Connect) -> None:
    error = failure(connect("http://127.0.0.1:1"))
    assert (type(error), error.recourse) == (BackendUnavailableError, Recourse.AGAIN)


def test_s3s_client_is_made_once_when_it_is_first_needed(connect: Connect, runtime: SageMakerRuntime) -> None:
    backend = connect(runtime.url)
    assert connect.s3_clients == 0
    read(backend)
    read(backend)
    assert connect.s3_clients == 1


def prompt_for(body_bytes: int) -> tuple[str, ...]:
    """A prompt whose request body has exactly so many bytes."""
    options = EncodeOptions(cache_salt=tenant_salt(CALL.tenant), streamed=False)
    empty = VllmCodec().encode(request(prompts=("",)), ROUTE, options).body
    return ("x" * (body_bytes - len(empty)),)


def stored_inputs(s3: S3Client) -> list[str]:
    return [item["Key"] for item in s3.list_objects_v2(Bucket=INPUTS.bucket).get("Contents", [])]


@pytest.mark.parametrize("inputs", [None, INPUTS], ids=["no bucket for inputs", "a bucket for inputs"])
def test_a_body_of_128_000_bytes_travels_inside_the_call(
    connect: Connect, runtime: SageMakerRuntime, s3: S3Client, inputs: S3Location | None
) -> None:
    before = stored_inputs(s3)
    assert read(connect(runtime.url, inputs=inputs), prompts=prompt_for(128_000)) == [ANSWER]
    assert len(runtime.recent_calls[0].body) == 128_000
    assert stored_inputs(s3) == before


def test_one_byte_more_is_refused_where_no_bucket_is_set(backend: SageMakerBackend, runtime: SageMakerRuntime) -> None:
    error = failure(backend, prompts=prompt_for(128_001), param_names={"prompts": "code"})
    assert (type(error), error.param) == (RequestTooLargeError, "code")
    assert "128001 bytes" in error.message
    assert "ASYNC_INPUT_S3_URI" in error.message
    assert runtime.call_count[ENDPOINT] == 0


def test_one_byte_more_is_uploaded_under_the_operators_prefix(
    connect: Connect, runtime: SageMakerRuntime, container: ScriptedServer, s3: S3Client
) -> None:
    before = stored_inputs(s3)
    backend = connect(runtime.url, inputs=INPUTS)
    assert read(backend, prompts=prompt_for(128_001)) == [ANSWER]
    (key,) = set(stored_inputs(s3)) - set(before)
    assert key.startswith("prompts/")
    (call,) = runtime.recent_calls
    assert call.body == b""
    assert call.headers["x-amzn-sagemaker-inputlocation"] == f"s3://async-input/{key}"
    assert len(container.received[0].body) == 128_001


def test_the_same_request_twice_is_uploaded_under_two_names(
    connect: Connect, runtime: SageMakerRuntime, s3: S3Client
) -> None:
    before = stored_inputs(s3)
    backend = connect(runtime.url, inputs=INPUTS)
    for _ in range(2):
        read(backend, prompts=prompt_for(128_001))
    assert len(set(stored_inputs(s3)) - set(before)) == 2


def test_an_input_that_cannot_be_stored_is_never_submitted(connect: Connect, runtime: SageMakerRuntime) -> None:
    backend = connect(runtime.url, inputs=S3Location("no-such-bucket", ""))
    error = failure(backend, prompts=prompt_for(128_001))
    assert (type(error), error.recourse) == (BackendUnavailableError, Recourse.ELSEWHERE)
    assert "no-such-bucket" not in error.message
    assert runtime.call_count[ENDPOINT] == 0


@pytest.mark.parametrize("uri", ["s3://my-prompts", "s3://my-prompts/", "s3://my-prompts/async/in"])
def test_the_bucket_for_inputs_is_a_setting(uri: str) -> None:
    tables = {"REGISTRY_TABLE": "keys", "USAGE_TABLE": "usage"}
    assert read_settings(tables).async_input_s3_uri is None
    assert read_settings(tables | {"ASYNC_INPUT_S3_URI": uri}).async_input_s3_uri == uri


@pytest.mark.parametrize("uri", ["my-prompts", "https://my-prompts.s3.amazonaws.com/", "s3://", "s3://UPPER/x"])
def test_a_setting_that_is_no_bucket_is_refused_at_start(uri: str) -> None:
    with pytest.raises(SettingsError, match="ASYNC_INPUT_S3_URI"):
        read_settings({"REGISTRY_TABLE": "keys", "USAGE_TABLE": "usage", "ASYNC_INPUT_S3_URI": uri})


def test_an_answer_that_is_fetched_later_is_there_or_not_or_cannot_be_told(
    backend: SageMakerBackend, connect: Connect, runtime: SageMakerRuntime
) -> None:
    ticket = Ticket(f"s3://{OUTPUT_BUCKET}/never.out")
    with pytest.raises(UnansweredError) as raised:
        backend.collect(ticket, request(), ROUTE)
    assert raised.value.detail == "answer NoSuchKey"
    with scripted_server(lambda _: Reply(503, b"")) as busy:
        config = Config(retries={"total_max_attempts": 1})
        connect.s3 = connect.cleanup.enter_context(closing(boto3.client("s3", endpoint_url=busy.url, config=config)))
        with pytest.raises(RetryLaterError):
            connect(runtime.url).collect(ticket, request(), ROUTE)
