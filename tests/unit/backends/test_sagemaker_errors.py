"""The SageMaker transport's failures, through a real boto3 client over HTTP.

Source: the service model of ``sagemaker-runtime`` and the behaviour of boto3 on a broken response stream.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread, Timer
from typing import Any

import pytest

from completions.backends.circuit import EndpointCircuits
from completions.backends.sagemaker import SageMakerBackend
from completions.backends.vllm import VllmCodec
from completions.clients import build_sagemaker_client
from completions.domain.completion import CompletionChunk
from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    InvalidRequestError,
    RateLimitError,
    RequestTooLargeError,
    ServiceError,
    TruncatedStreamError,
)
from completions.domain.ports import UpstreamCall
from completions.settings import Settings
from completions_cli.local import event_stream
from completions_cli.local.faults import Fault, Refusal, Replacement
from completions_cli.local.sagemaker_runtime import SageMakerRuntime
from fakes import request, route

ENDPOINT = "demo-endpoint"
SECRET = "CUDA error in /opt/ml/model"
TOKEN = b'data: {"choices":[{"index":0,"text":"c","logprobs":null,"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"text":"d","logprobs":null,"finish_reason":"stop"}]}\n\n'
ANSWER = TOKEN + FINISH + b"data: [DONE]\n\n"


@dataclass
class Container:
    """An HTTP server that gives the same answer to every POST, after ``hold`` is set."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream"})
    body: bytes = ANSWER
    hold: Event = field(default_factory=Event)
    calls: int = 0
    url: str = ""


@contextmanager
def running(container: Container) -> Iterator[Container]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            container.calls += 1
            self.rfile.read(int(self.headers["Content-Length"]))
            container.hold.wait(10)
            self.send_response(container.status)
            for name, value in container.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(container.body)))
            self.end_headers()
            self.wfile.write(container.body)

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as server:
        container.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield container
        finally:
            container.hold.set()
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def answering() -> Iterator[Container]:
    container = Container()
    container.hold.set()
    with running(container) as it:
        yield it


@pytest.fixture
def runtime(answering: Container) -> Iterator[SageMakerRuntime]:
    with SageMakerRuntime({ENDPOINT: answering.url}) as it:
        yield it


@pytest.fixture
def backend(runtime: SageMakerRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[SageMakerBackend]:
    with connected(runtime.url, monkeypatch) as it:
        yield it


@contextmanager
def connected(
    url: str, monkeypatch: pytest.MonkeyPatch, read_timeout: float = 10, failures: int = 1_000_000
) -> Iterator[SageMakerBackend]:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", url)
    settings = Settings(registry_table="keys", usage_table="usage", upstream_read_timeout=read_timeout)
    with closing(build_sagemaker_client(settings)) as client:
        yield SageMakerBackend(client, {"vllm": VllmCodec()}, EndpointCircuits(failures, 30), read_timeout)


CALL = UpstreamCall("request-1", "team:search")


def failure(backend: SageMakerBackend) -> CompletionError:
    """What the call, or the reading of its answer, raises."""
    with pytest.raises(CompletionError) as caught:
        read(backend)
    return caught.value


def read(backend: SageMakerBackend, chunks: list[CompletionChunk] | None = None) -> str:
    chunks = [] if chunks is None else chunks
    with backend.stream(request(), route(), CALL) as stream:
        for chunk in stream:
            chunks.append(chunk)
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def model_error(status: int, message: str) -> Fault:
    return Fault(refusal=Refusal(kind="model_error", status=status, message=message))


def vllm_error(status: int, message: str, param: str | None = None) -> str:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": param, "code": status}})


def test_an_answer_is_read_to_its_end(backend: SageMakerBackend) -> None:
    assert read(backend) == "cd"


@pytest.mark.parametrize(
    ("refusal", "kind", "retried"),
    [
        (Refusal(kind="throttled"), RateLimitError, True),
        (Refusal(kind="not_ready"), BackendUnavailableError, True),
        (Refusal(kind="no_capacity"), BackendUnavailableError, True),
        (Refusal(kind="unavailable"), BackendUnavailableError, True),
        (Refusal(kind="internal"), BackendError, False),
        (Refusal(kind="model_error", status=429, message=vllm_error(429, SECRET)), BackendUnavailableError, True),
        (Refusal(kind="model_error", status=503, message=vllm_error(503, SECRET)), BackendUnavailableError, True),
        (Refusal(kind="model_error", status=500, message=vllm_error(500, SECRET)), BackendError, False),
        (Refusal(kind="model_error", status=502, message=SECRET), BackendError, False),
        (Refusal(kind="model_error", status=0, message=SECRET), BackendTimeoutError, False),
    ],
    ids=lambda value: f"{value.kind}-{value.status}" if isinstance(value, Refusal) else None,
)
def test_a_refused_call_is_its_canonical_error_after_one_attempt(
    backend: SageMakerBackend, runtime: SageMakerRuntime, refusal: Refusal, kind: type[CompletionError], retried: bool
) -> None:
    runtime.faults.replace(ENDPOINT, [Fault(refusal=refusal)])
    error = failure(backend)
    assert (type(error), error.retry_after is not None) == (kind, retried)
    assert SECRET not in error.message
    assert runtime.call_count[ENDPOINT] == 1


def test_a_model_scaled_to_zero_says_how_long_it_takes_to_start(
    backend: SageMakerBackend, runtime: SageMakerRuntime
) -> None:
    runtime.faults.replace(ENDPOINT, [Fault(refusal=Refusal(kind="no_capacity"))])
    retry_after = failure(backend).retry_after
    assert retry_after is not None
    assert retry_after == route().start_seconds


@pytest.mark.parametrize("status", [400, 422])
def test_a_rule_of_the_container_is_told_to_the_caller(
    backend: SageMakerBackend, runtime: SageMakerRuntime, status: int
) -> None:
    runtime.faults.replace(ENDPOINT, [model_error(status, vllm_error(status, "top_p must be in (0, 1].", "top_p"))])
    error = failure(backend)
    assert (type(error), error.message, error.param) == (InvalidRequestError, "top_p must be in (0, 1].", "top_p")


def test_a_prompt_beyond_the_context_is_a_context_length_error(
    backend: SageMakerBackend, runtime: SageMakerRuntime
) -> None:
    message = "This model's maximum context length is 512 tokens. However, your request has 600 input tokens."
    runtime.faults.replace(ENDPOINT, [model_error(400, vllm_error(400, message))])
    error = failure(backend)
    assert (type(error), error.message) == (ContextLengthError, message)


def test_a_refusal_cut_off_at_two_kilobytes_is_still_the_callers(
    backend: SageMakerBackend, runtime: SageMakerRuntime
) -> None:
    runtime.faults.replace(ENDPOINT, [model_error(400, vllm_error(400, "x" * 4000))])
    error = failure(backend)
    assert type(error) is InvalidRequestError
    assert error.message


def test_an_unknown_endpoint_is_unavailable_and_not_named(backend: SageMakerBackend) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        backend.stream(request(), route(endpoint_name="no-such-endpoint"), CALL)
    assert "no-such-endpoint" not in caught.value.message


@pytest.mark.parametrize(
    ("status", "code", "message", "kind"),
    [
        (530, "InternalDependencyException", SECRET, BackendError),
        (400, "ValidationError", "Inference Component Name header is required", BackendUnavailableError),
        (400, "ValidationError", "Inference Component Name header is not allowed", BackendUnavailableError),
        (
            403,
            "AccessDeniedException",
            f"User: arn:aws:iam::1:role/x is not authorized {SECRET}",
            BackendUnavailableError,
        ),
        (
            403,
            "ExpiredTokenException",
            "The security token included in the request is expired",
            BackendUnavailableError,
        ),
        (418, "UnheardOfException", SECRET, BackendError),
    ],
)
def test_a_refusal_by_the_platform_never_shows_its_text(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, message: str, kind: type[CompletionError]
) -> None:
    platform = Container(status, {"x-amzn-ErrorType": code}, json.dumps({"message": message}).encode())
    platform.hold.set()
    with running(platform), connected(platform.url, monkeypatch) as backend:
        error = failure(backend)
    assert type(error) is kind
    assert message not in error.message
    assert platform.calls == 1


def modelled_error(original_status: int, message: str, original: str) -> Container:
    """A ``ModelError`` as SageMaker words it: the container's own answer stands in ``Message`` as well."""
    fields = {"Message": message, "OriginalStatusCode": original_status, "OriginalMessage": original}
    container = Container(424, {"x-amzn-ErrorType": "ModelError"}, json.dumps(fields).encode())
    container.hold.set()
    return container


def test_an_invocation_that_timed_out_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        'Received server error (0) from primary with message "Your invocation timed out while waiting for a response '
        'from container primary."'
    )
    with running(modelled_error(0, message, "")) as platform, connected(platform.url, monkeypatch) as backend:
        assert type(failure(backend)) is BackendTimeoutError


def test_a_refusal_that_only_mentions_a_time_out_is_not_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    original = vllm_error(400, "the grammar compiler timed out", "structured_outputs")
    message = f'Received client error (400) from primary with message "{original}".'
    with running(modelled_error(400, message, original)) as platform, connected(platform.url, monkeypatch) as backend:
        assert type(failure(backend)) is InvalidRequestError


def test_a_closed_port_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with connected(f"http://127.0.0.1:{port}", monkeypatch) as backend:
        error = failure(backend)
    assert type(error) is BackendUnavailableError
    assert error.retry_after is not None


def test_a_container_that_never_answers_is_a_timeout_after_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Container()) as silent, connected(silent.url, monkeypatch, read_timeout=0.2) as backend:
        error = failure(backend)
        assert silent.calls == 1
    assert type(error) is BackendTimeoutError


def test_a_stream_that_falls_silent_is_a_timeout(runtime: SageMakerRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.faults.replace(ENDPOINT, [Fault(split_every=len(TOKEN), delay_ms=600)])
    with connected(runtime.url, monkeypatch, read_timeout=0.2) as backend:
        assert type(failure(backend)) is BackendTimeoutError
    assert runtime.call_count[ENDPOINT] == 1


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(exception_after=len(TOKEN)), BackendError),
        (Fault(exception_after=len(TOKEN), exception_code="ModelInvocationTimeExceeded"), BackendError),
        (Fault(cut_after=len(TOKEN)), BackendError),
        (Fault(cut_after=len(TOKEN) + 7), BackendError),
    ],
    ids=["broken", "time exceeded", "cut", "cut inside a record"],
)
def test_a_stream_that_breaks_gives_its_chunks_and_then_fails(
    backend: SageMakerBackend, runtime: SageMakerRuntime, fault: Fault, kind: type[ServiceError]
) -> None:
    runtime.faults.replace(ENDPOINT, [fault])
    chunks: list[CompletionChunk] = []
    with pytest.raises(kind):
        read(backend, chunks)
    assert [choice.text for chunk in chunks for choice in chunk.choices] == ["c"]
    assert runtime.call_count[ENDPOINT] == 1


@pytest.mark.parametrize("kind", ["ModelStreamError", "InternalStreamFailure"])
def test_an_exception_frame_never_shows_its_text(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    frames = event_stream.payload_part(TOKEN) + event_stream.exception(kind, {"Message": SECRET})
    platform = Container(headers={"Content-Type": event_stream.MEDIA_TYPE}, body=frames)
    platform.hold.set()
    with running(platform), connected(platform.url, monkeypatch) as backend:
        error = failure(backend)
    assert type(error) is BackendError
    assert SECRET not in error.message


@pytest.mark.parametrize("kept", [0, len(TOKEN), len(TOKEN + FINISH)])
def test_a_stream_without_its_terminal_record_is_truncated(
    backend: SageMakerBackend, runtime: SageMakerRuntime, kept: int
) -> None:
    runtime.faults.replace(ENDPOINT, [Fault(end_after=kept)])
    assert type(failure(backend)) is TruncatedStreamError


def test_a_body_above_sagemakers_limit_is_never_sent(backend: SageMakerBackend, runtime: SageMakerRuntime) -> None:
    with pytest.raises(RequestTooLargeError):
        backend.stream(request(prompts=("x" * 6_291_457,)), route(), CALL)
    assert runtime.call_count[ENDPOINT] == 0


def test_a_body_the_platform_finds_too_large_is_the_callers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Container(413, {"x-amzn-ErrorType": "RequestEntityTooLarge"}, b'{"message":"too large"}')
    platform.hold.set()
    with running(platform), connected(platform.url, monkeypatch) as backend:
        assert type(failure(backend)) is RequestTooLargeError


def test_a_family_without_a_codec_is_unavailable(backend: SageMakerBackend) -> None:
    with pytest.raises(BackendUnavailableError):
        backend.stream(request(), route(family="unheard-of"), CALL)


def test_the_call_carries_the_routes_names_and_the_request_id(
    backend: SageMakerBackend, runtime: SageMakerRuntime
) -> None:
    target = route(target_variant="Green", inference_component="adapter-1", custom_attributes="route=/v1/x")
    backend.stream(request(), target, CALL).close()
    headers = runtime.recent_calls[-1].headers
    assert headers["x-amzn-sagemaker-target-variant"] == "Green"
    assert headers["x-amzn-sagemaker-inference-component"] == "adapter-1"
    assert headers["x-amzn-sagemaker-custom-attributes"] == "route=/v1/x"
    assert headers["x-amzn-sagemaker-inference-id"] == "request-1"


def test_the_stream_names_the_variant_that_answers(backend: SageMakerBackend) -> None:
    with backend.stream(request(), route(), CALL) as stream:
        assert stream.variant == "AllTraffic"


def test_a_call_is_counted_when_it_goes_out_and_not_before(
    backend: SageMakerBackend, runtime: SageMakerRuntime
) -> None:
    sent: list[int] = []
    call = replace(CALL, dispatched=lambda: sent.append(1))
    with pytest.raises(RequestTooLargeError):
        backend.stream(request(prompts=("x" * 6_291_457,)), route(), call)
    assert (len(sent), runtime.call_count[ENDPOINT]) == (0, 0)
    backend.stream(request(), route(), call).close()
    assert (len(sent), runtime.call_count[ENDPOINT]) == (1, 1)


def test_a_call_the_circuit_holds_back_is_none(runtime: SageMakerRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    call = replace(CALL, dispatched=lambda: sent.append(1))
    runtime.faults.replace(ENDPOINT, [Fault(refusal=Refusal(kind="internal"), calls=None)])
    with connected(runtime.url, monkeypatch, failures=2) as backend:
        for _ in range(4):
            with pytest.raises(CompletionError):
                backend.stream(request(), route(inference_component="held-back"), call)  # a circuit of its own
    assert len(sent) == runtime.call_count[ENDPOINT] == 2


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def document(**fields: object) -> bytes:
    choice = {"index": 0, "text": "cd", "finish_reason": "stop"}
    whole = {"object": "text_completion", "choices": [choice], "usage": USAGE, **fields}
    return json.dumps(whole, indent=2).encode()


def test_a_container_that_answers_a_stream_call_with_one_document_is_read(
    backend: SageMakerBackend, runtime: SageMakerRuntime
) -> None:
    answer = Replacement(body=document(), content_type="application/json; charset=utf-8")
    runtime.faults.replace(ENDPOINT, [Fault(replacement=answer, split_every=7)])
    assert read(backend) == "cd"


@pytest.mark.parametrize("count", [-1, 2**31 + 1, 10**26])
def test_a_count_that_cannot_be_is_no_answer(backend: SageMakerBackend, runtime: SageMakerRuntime, count: int) -> None:
    answer = Replacement(body=document(usage={**USAGE, "prompt_tokens": count}), content_type="application/json")
    runtime.faults.replace(ENDPOINT, [Fault(replacement=answer)])
    assert type(failure(backend)) is BackendError


def framed(frames: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[str, CompletionError | None]:
    """What is read of a response whose event stream is ``frames``, and how it ends."""
    platform = Container(200, {"Content-Type": event_stream.MEDIA_TYPE}, frames)
    platform.hold.set()
    chunks: list[CompletionChunk] = []
    with running(platform), connected(platform.url, monkeypatch) as backend:
        try:
            return read(backend, chunks), None
        except CompletionError as error:
            return "".join(choice.text for chunk in chunks for choice in chunk.choices), error


def test_a_frame_that_is_damaged_on_the_way_is_a_failed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    good = event_stream.payload_part(TOKEN)
    damaged = bytearray(event_stream.payload_part(FINISH))
    damaged[-6] ^= 1
    text, error = framed(good + bytes(damaged), monkeypatch)
    assert (text, type(error)) == ("c", BackendError)


def test_a_frame_of_a_kind_that_is_not_known_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {":event-type": "Later", ":content-type": "application/json", ":message-type": "event"}
    frames = event_stream.payload_part(ANSWER[:20]) + event_stream.message(headers, b"{}")
    text, error = framed(frames + event_stream.payload_part(ANSWER[20:]), monkeypatch)
    assert (text, error) == ("cd", None)


def test_a_callers_short_patience_says_nothing_about_the_endpoint(
    runtime: SageMakerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = replace(CALL, wait_seconds=0.05)
    target = route(inference_component="slow-for-some")
    runtime.faults.replace(ENDPOINT, [Fault(head_delay_ms=300, calls=4)])
    with connected(runtime.url, monkeypatch, failures=2) as backend:
        for _ in range(4):
            with pytest.raises(BackendTimeoutError):
                backend.stream(request(), target, impatient)
        backend.stream(request(), target, CALL).close()


def test_an_answer_that_is_given_up_ends_while_it_is_waited_for(
    backend: SageMakerBackend, runtime: SageMakerRuntime
) -> None:
    runtime.faults.replace(ENDPOINT, [Fault(stall_after=len(TOKEN), stall_ms=20_000)])
    with backend.stream(request(), route(), CALL) as stream:
        next(stream)
        timer = Timer(0.1, stream.abort)
        timer.start()
        began = time.monotonic()
        with pytest.raises(BackendError):
            list(stream)
        timer.join()
    assert time.monotonic() - began < 10
