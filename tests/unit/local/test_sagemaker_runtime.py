"""The SageMaker stand-in as boto3 sees it: what it hands on, what it answers, and each way it misbehaves.

Source: the service model of ``sagemaker-runtime`` and the behaviour of boto3 on a broken response stream.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import boto3
import pytest
import urllib3
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError, EventStreamError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from completions_cli.local.faults import Fault, Refusal, Replacement
from completions_cli.local.sagemaker_runtime import SageMakerRuntime
from completions_cli.local.server import bind, serving

if TYPE_CHECKING:
    from mypy_boto3_sagemaker_runtime import SageMakerRuntimeClient

ANSWER = "data: 1\n\ndata: 2\n\n"


async def container(request: Request) -> Response:
    """Answers ``ANSWER``; for ``headers`` what it was sent, for ``bad`` a failure of its own."""
    body = await request.body()
    if body == b"bad":
        return Response("wrong value", status_code=400)
    if body == b"headers":
        return JSONResponse(dict(request.headers))
    return StreamingResponse(iter([ANSWER]), media_type="text/event-stream")


@pytest.fixture(scope="module")
def runtime() -> Iterator[SageMakerRuntime]:
    app = Starlette(routes=[Route("/invocations", container, methods=["POST"])])
    # one endpoint for whatever else, and one for each test that counts who hangs up on it
    endpoints = ("demo", "endless", "silent", "calm")
    with (
        serving(app, bind(0)) as url,
        SageMakerRuntime(dict.fromkeys(endpoints, f"{url}/invocations")) as running,
    ):
        yield running


@pytest.fixture
def script(runtime: SageMakerRuntime) -> Callable[..., None]:
    def replace(*faults: Fault) -> None:
        runtime.faults.replace("demo", list(faults))

    return replace


@pytest.fixture(scope="module")
def client(runtime: SageMakerRuntime) -> Iterator[SageMakerRuntimeClient]:
    config = Config(retries={"mode": "standard", "total_max_attempts": 1}, read_timeout=10)
    with closing(boto3.client("sagemaker-runtime", endpoint_url=runtime.url, config=config)) as made:
        yield made


def streamed(
    client: SageMakerRuntimeClient, body: bytes = b"{}", endpoint: str = "demo"
) -> Generator[bytes, None, None]:
    reply = client.invoke_endpoint_with_response_stream(EndpointName=endpoint, Body=body)
    with closing(reply["Body"]) as events:
        for event in events:
            yield event["PayloadPart"]["Bytes"]


def test_good_behaviour_is_the_containers_own_answer(client: SageMakerRuntimeClient) -> None:
    assert b"".join(streamed(client)) == ANSWER.encode()
    assert client.invoke_endpoint(EndpointName="demo", Body=b"{}")["Body"].read() == ANSWER.encode()


def test_a_call_is_recorded_with_its_headers_and_body(
    runtime: SageMakerRuntime, client: SageMakerRuntimeClient
) -> None:
    before = runtime.call_count["demo"]
    client.invoke_endpoint(EndpointName="demo", Body=b"headers", CustomAttributes="route=/x", InferenceId="i-1")
    call = runtime.recent_calls[-1]
    assert runtime.call_count["demo"] == before + 1
    assert (call.endpoint, call.operation, call.body) == ("demo", "invocations", b"headers")
    assert call.headers["x-amzn-sagemaker-custom-attributes"] == "route=/x"


def test_the_container_sees_sagemakers_headers_and_no_credentials(client: SageMakerRuntimeClient) -> None:
    reply = client.invoke_endpoint(EndpointName="demo", Body=b"headers", CustomAttributes="route=/x")
    seen = json.loads(reply["Body"].read())
    assert seen["x-amzn-sagemaker-custom-attributes"] == "route=/x"
    assert "authorization" not in seen


REFUSALS = {
    "throttled": (400, "ThrottlingException", ""),
    "not_ready": (429, "ModelNotReadyException", "not ready"),
    "no_capacity": (400, "ValidationError", "has no capacity"),
    "not_found": (400, "ValidationError", "Endpoint demo of account 123456789012 not found."),
    "access_denied": (403, "AccessDeniedException", "not authorized to perform: sagemaker:InvokeEndpoint"),
    "unavailable": (503, "ServiceUnavailable", "unavailable"),
    "internal": (500, "InternalFailure", "internal"),
    "internal_dependency": (530, "InternalDependencyException", "dependency"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_has_sagemakers_status_and_code(
    client: SageMakerRuntimeClient, script: Callable[..., None], kind: Any
) -> None:
    status, code, words = REFUSALS[kind]
    script(Fault(refusal=Refusal(kind=kind)))
    with pytest.raises(ClientError) as caught:
        list(streamed(client))
    response = caught.value.response
    assert response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert response["Error"]["Code"] == code
    assert words in (response["Error"]["Message"] or "")


def test_an_endpoint_that_is_not_there_is_refused_like_the_scripted_one(client: SageMakerRuntimeClient) -> None:
    with pytest.raises(ClientError, match=r"Endpoint other of account 123456789012 not found\."):
        list(streamed(client, endpoint="other"))


def test_the_containers_failure_is_a_model_error(client: SageMakerRuntimeClient) -> None:
    with pytest.raises(ClientError) as caught:
        list(streamed(client, b"bad"))
    response: Any = caught.value.response
    assert (response["Error"]["Code"], response["OriginalStatusCode"]) == ("ModelError", 400)
    assert response["OriginalMessage"] == "wrong value"


def test_a_reset_connection_answers_nothing(client: SageMakerRuntimeClient, script: Callable[..., None]) -> None:
    script(Fault(refusal=Refusal(kind="connection_reset")))
    with pytest.raises(ConnectionClosedError):
        list(streamed(client))


def test_the_head_can_be_late(client: SageMakerRuntimeClient, script: Callable[..., None]) -> None:
    script(Fault(head_delay_ms=120))
    started = time.monotonic()
    assert next(streamed(client)) == ANSWER.encode()
    assert time.monotonic() - started >= 0.12


def test_a_stream_can_stall_and_go_on(client: SageMakerRuntimeClient, script: Callable[..., None]) -> None:
    script(Fault(stall_after=9, stall_ms=120))
    arrived = [(part, time.monotonic()) for part in streamed(client)]
    assert [part for part, _ in arrived] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert arrived[1][1] - arrived[0][1] >= 0.1


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault(exception_after=9), "ModelStreamError"),
        (Fault(exception_after=9, exception_kind="InternalStreamFailure"), "InternalStreamFailure"),
    ],
)
def test_an_exception_frame_is_raised_by_its_name(
    client: SageMakerRuntimeClient, script: Callable[..., None], fault: Fault, code: str
) -> None:
    script(fault)
    parts = streamed(client)
    assert next(parts) == b"data: 1\n\n"
    with pytest.raises(EventStreamError) as caught:
        next(parts)
    assert caught.value.response["Error"]["Code"] == code


def test_a_cut_connection_is_a_protocol_error(client: SageMakerRuntimeClient, script: Callable[..., None]) -> None:
    script(Fault(cut_after=9))
    with pytest.raises(urllib3.exceptions.HTTPError):
        list(streamed(client))


def test_a_replacement_stands_in_for_the_containers_answer(
    client: SageMakerRuntimeClient, script: Callable[..., None]
) -> None:
    replaced = Fault(replacement=Replacement(body=b"\xff{", repeat=3, content_type="text/plain"), calls=2)
    script(replaced)
    reply = client.invoke_endpoint_with_response_stream(EndpointName="demo", Body=b"{}")
    assert reply["ContentType"] == "text/plain"
    assert b"".join(event["PayloadPart"]["Bytes"] for event in reply["Body"]) == b"\xff{\xff{\xff{"
    assert client.invoke_endpoint(EndpointName="demo", Body=b"{}")["Body"].read() == b"\xff{\xff{\xff{"


def test_an_endless_line_is_made_as_it_is_read(runtime: SageMakerRuntime, client: SageMakerRuntimeClient) -> None:
    fault = Fault(replacement=Replacement(body=b"a" * 65536, repeat=10**9))
    runtime.faults.replace("endless", [fault])
    with closing(streamed(client, endpoint="endless")) as parts:
        read = sum(len(next(parts)) for _ in range(32))
    assert read == 32 * 65536
    until(lambda: runtime.hang_ups["endless"] == 1)


@pytest.mark.parametrize("fault", [Fault(head_delay_ms=60_000), Fault(stall_after=9, stall_ms=60_000)])
def test_a_caller_who_leaves_while_nothing_is_sent_is_counted_at_once(runtime: SageMakerRuntime, fault: Fault) -> None:
    before = runtime.hang_ups["silent"]
    runtime.faults.replace("silent", [fault])
    url = f"{runtime.url}/endpoints/silent/invocations-response-stream"
    with urllib3.PoolManager() as pool, pytest.raises(urllib3.exceptions.HTTPError):
        pool.request("POST", url, body=b"{}", timeout=0.2, retries=False)
    until(lambda: runtime.hang_ups["silent"] == before + 1)


def test_a_complete_answer_is_no_hang_up(runtime: SageMakerRuntime, client: SageMakerRuntimeClient) -> None:
    assert b"".join(streamed(client, endpoint="calm")) == ANSWER.encode()
    assert runtime.call_count["calm"] == 1
    assert runtime.hang_ups["calm"] == 0


def put(runtime: SageMakerRuntime, endpoint: str, body: object) -> tuple[int, Any]:
    with urllib3.PoolManager() as pool:
        reply = pool.request("PUT", f"{runtime.url}/faults/{endpoint}", body=json.dumps(body).encode())
        return reply.status, reply.json()


def test_a_script_can_be_set_over_http(runtime: SageMakerRuntime, client: SageMakerRuntimeClient) -> None:
    body = base64.b64encode(b"data: 9\n\n").decode()
    assert put(runtime, "demo", [{"replacement": {"body": body}}]) == (200, {"faults": 1})
    assert b"".join(streamed(client)) == b"data: 9\n\n"
    assert b"".join(streamed(client)) == ANSWER.encode()


def test_a_script_that_cannot_be_read_or_has_no_endpoint_is_refused(runtime: SageMakerRuntime) -> None:
    assert put(runtime, "demo", [{"delay": 1}])[0] == 400
    assert put(runtime, "other", [])[0] == 404


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)
