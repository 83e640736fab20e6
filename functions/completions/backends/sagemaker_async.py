"""SageMaker asynchronous endpoints: a queue in front of the container, and the answer as an object in S3.

``InvokeEndpointAsync`` is accepted at once (202) and names the two places where the end will appear: the output, which
is the container's whole document and never a stream, or the failure. Both are looked at until one is there. The answer
is one chunk, also for a caller who streams.

Prompts and completions are never stored by this service, but an asynchronous endpoint is SageMaker's own storing: it
writes every completion to the output path of the endpoint's configuration. A body of up to 128,000 bytes travels inside
the call; only a longer one is uploaded, under the prefix the operator names, and is not deleted here, for the endpoint
may read it after everybody has stopped waiting. So the buckets of both need a lifecycle rule. Without a failure path in
its configuration (``S3FailurePath``) an endpoint tells nobody of a failure, and the call runs into its deadline.

An invocation cannot be called off, so SageMaker is told for how long its answer is waited for. After a deadline nothing
is submitted again. Limits: the service model of ``sagemaker-runtime``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from uuid import uuid4

from botocore.exceptions import ClientError
from pydantic_core import from_json

from completions.backends.bounded_calls import BoundedCalls
from completions.backends.circuit import EndpointCircuits
from completions.backends.codec import Codec, EncodeOptions, Invocation, StreamDecoder
from completions.backends.s3_answers import AnswerBox, Found, S3Location, upload
from completions.backends.sagemaker import call_refused, circuit_name, inference_id, tenant_salt
from completions.backends.sagemaker_errors import CALL_FAILURES, call_error
from completions.domain.catalog import ModelRoute
from completions.domain.completion import CompletionChunk, CompletionRequest
from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    Recourse,
    RequestTooLargeError,
)
from completions.domain.events import RetryLaterError
from completions.domain.ports import BackendStream, Clock, Ticket, UpstreamCall
from completions.domain.submissions import UnansweredError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sagemaker_runtime import SageMakerRuntimeClient

_T = TypeVar("_T")

MAX_INLINE_BYTES: Final = 128_000
LONGEST_WAIT_SECONDS: Final = 900.0
"""Where neither caller nor route says less: what a Lambda function has, and SageMaker's own default for processing."""
LONGEST_STAY_SECONDS: Final = 3_600.0
"""SageMaker's longest processing; an answer that is fetched later may take so long."""
_SUBMIT_SECONDS: Final = 30.0
_FIRST_POLL_SECONDS: Final = 0.25
_SLOWEST_POLL_SECONDS: Final = 2.0
_LAST_LOOK_SECONDS: Final = 0.25
"""What the look at the very deadline may take beyond it."""
_QUEUE_SECONDS: Final = (60, 21_600)
_PROCESSING_SECONDS: Final = (1, 3_600)
_MOST_WAITING: Final = 64
_WRAPPED_FAILURE: Final = re.compile(
    r'Received (?:client|server) error \((\d+)\) from \S+ with message "(.*)"', re.DOTALL
)


class AsynchronousEndpoints:
    """``client`` must make one attempt a call. ``new_s3_client`` is called when an asynchronous route is first used,
    for S3's service model takes time to load; ``inputs`` is where long bodies are put, ``None`` to refuse them."""

    def __init__(
        self,
        client: SageMakerRuntimeClient,
        new_s3_client: Callable[[], S3Client],
        circuits: EndpointCircuits,
        clock: Clock,
        inputs: S3Location | None = None,
    ) -> None:
        self._client = client
        self._new_s3_client = new_s3_client
        self._circuits = circuits
        self._clock = clock
        self._inputs = inputs
        self._s3_client: S3Client | None = None
        self._creating = Lock()
        self._calls = BoundedCalls()

    def stream(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall, codec: Codec) -> BackendStream:
        """Submit the request once, and return when it is in the queue; as ``Backend.stream``.

        Raises ``RequestTooLargeError`` for a body that neither fits the call nor may be uploaded.
        """
        wait = LONGEST_WAIT_SECONDS if call.wait_seconds is None else min(call.wait_seconds, LONGEST_WAIT_SECONDS)
        places = self._dispatched(request, route, call, codec, stay=wait, left=wait)
        return _AsynchronousAnswer(AnswerBox(self._s3(), *places), codec, request, self._clock, self._calls)

    def submit(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall, codec: Codec) -> Ticket:
        """As ``stream``, for an answer that is fetched later: it may take ``call.wait_seconds``, up to an hour."""
        stay = LONGEST_STAY_SECONDS if call.wait_seconds is None else min(call.wait_seconds, LONGEST_STAY_SECONDS)
        answer, failure = self._dispatched(request, route, call, codec, stay=stay, left=_SUBMIT_SECONDS)
        return Ticket(answer.uri, None if failure is None else failure.uri)

    def collect(self, ticket: Ticket, request: CompletionRequest, codec: Codec) -> Sequence[CompletionChunk]:
        """The chunks of what is there now; as ``AsynchronousBackend.collect``."""
        failure = None if ticket.failure is None else S3Location.parse(ticket.failure)
        box = AnswerBox(self._s3(), S3Location.parse(ticket.answer), failure)
        found = box.look()
        if found is None:
            if not box.is_sure:
                raise RetryLaterError(f"the answer cannot be looked for: {box.last_seen}", _SLOWEST_POLL_SECONDS)
            raise UnansweredError(
                "The model has not answered yet.", retry_after=_SLOWEST_POLL_SECONDS, detail=box.last_seen
            )
        decoder = codec.decoder(request, whole=True)
        chunk = _chunk(found, codec, decoder)
        decoder.finish()
        return [] if chunk is None else [chunk]

    def _dispatched(
        self,
        request: CompletionRequest,
        route: ModelRoute,
        call: UpstreamCall,
        codec: Codec,
        *,
        stay: float,
        left: float,
    ) -> tuple[S3Location, S3Location | None]:
        """Where the end will be of a request that is in the queue now. It may stay there, and then in the container,
        for ``stay`` seconds; handing it in takes no more than ``left``."""
        _require_plain_endpoint(route)
        salt = tenant_salt(call.tenant) if route.isolate_prefix_cache else None
        invocation = codec.encode(request, route, EncodeOptions(cache_salt=salt, streamed=False))
        deadline = self._clock.monotonic() + left
        payload = self._payload(self._s3(), invocation, request, deadline)
        arguments = _arguments(invocation, route, call.inference_id, stay) | payload

        def submit() -> Mapping[str, Any]:
            call.dispatched()
            return self._submitted(arguments, codec, route)

        left = self._left(deadline)
        return _places(self._calls.within(left, lambda: self._circuits.call(circuit_name(route), submit)))

    def _payload(
        self, s3: S3Client, invocation: Invocation, request: CompletionRequest, deadline: float
    ) -> dict[str, Any]:
        size = len(invocation.body)
        if size <= MAX_INLINE_BYTES:
            return {"Body": invocation.body}
        if self._inputs is None:
            raise RequestTooLargeError(
                f"The request is {size} bytes for the model; at most {MAX_INLINE_BYTES} fit, unless the operator of "
                "this service sets ASYNC_INPUT_S3_URI.",
                param=request.param_names.get("prompts", "prompt"),
            )
        # never a name a caller had a say in: two requests of one name would read each other's prompts
        place = self._inputs.below(f"{uuid4()}.json")
        self._calls.within(self._left(deadline), lambda: upload(s3, place, invocation.body, invocation.content_type))
        return {"InputLocation": place.uri}

    def _submitted(self, arguments: Any, codec: Codec, route: ModelRoute) -> Mapping[str, Any]:
        try:
            return self._client.invoke_endpoint_async(**arguments)
        except CALL_FAILURES as error:
            raise call_refused(error, codec, route) from error

    def _left(self, deadline: float) -> float:
        return max(deadline - self._clock.monotonic(), 0)

    def _s3(self) -> S3Client:
        with self._creating:  # making a client is the one thing boto3 does not do from several threads
            if self._s3_client is None:
                self._s3_client = self._new_s3_client()
            return self._s3_client


class _AsynchronousAnswer(BackendStream):
    """Waits for the end of one invocation at the first reading; the variant that answers is not told."""

    def __init__(
        self, box: AnswerBox, codec: Codec, request: CompletionRequest, clock: Clock, calls: BoundedCalls
    ) -> None:
        self._box = box
        self._codec = codec
        self._clock = clock
        self._calls = calls
        self._decoder: StreamDecoder = codec.decoder(request, whole=True)
        self._most_seconds = LONGEST_WAIT_SECONDS
        self._read = False
        self._aborted = False

    @property
    def variant(self) -> str | None:
        return None

    def limit_wait(self, seconds: float) -> None:
        self._most_seconds = min(seconds, LONGEST_WAIT_SECONDS)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> CompletionChunk:
        if not self._read:
            found = self._awaited()
            self._read = True
            chunk = _chunk(found, self._codec, self._decoder)
            if chunk is not None:
                return chunk
        self._decoder.finish()
        raise StopIteration

    def _awaited(self) -> Found:
        deadline = self._clock.monotonic() + self._most_seconds
        for interval in poll_intervals():
            left = deadline - self._clock.monotonic()
            if left <= 0:
                break
            self._clock.sleep(min(interval, left))
            if self._aborted:
                raise BackendError("The answer was given up.", detail="aborted")
            left = deadline - self._clock.monotonic()
            found = self._calls.within(max(left, _LAST_LOOK_SECONDS), self._box.look)
            if found is not None:
                return found
        raise BackendTimeoutError("The model did not answer in time.", detail=f"no object in S3: {self._box.last_seen}")

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        """Nothing is held between two looks, and the invocation cannot be called off."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chunk(found: Found, codec: Codec, decoder: StreamDecoder) -> CompletionChunk | None:
    """The answer, decoded. Raises the failure that is there instead."""
    if found.failed:
        raise failure_error(found.content, codec)
    return decoder.decode(found.content) if found.content else None


def poll_intervals() -> Iterator[float]:
    """Seconds before each look, without end: 0.25, doubling up to 2."""
    interval = _FIRST_POLL_SECONDS
    while True:
        yield interval
        interval = min(2 * interval, _SLOWEST_POLL_SECONDS)


def failure_error(content: bytes, codec: Codec) -> CompletionError:
    """The canonical error of a failure object.

    It holds what the container answered, bare or in SageMaker's sentence about it. The bare form has lost its HTTP
    status: the code in the body stands in for it, and 500 where there is none.
    """
    text = content.decode(errors="replace")
    wrapped = _WRAPPED_FAILURE.search(text)
    status, body = (int(wrapped[1]), wrapped[2]) if wrapped else (_status_in(text), text)
    response: Any = {
        "Error": {"Code": "ModelError", "Message": text},
        "OriginalStatusCode": status,
        "OriginalMessage": body,
    }
    return call_error(ClientError(response, "InvokeEndpointAsync"), codec)


def _status_in(text: str) -> int:
    try:
        body = from_json(text)
    except ValueError:
        return 500
    nested = body.get("error") if isinstance(body, dict) else None
    for level in (nested, body):
        code = level.get("code") if isinstance(level, dict) else None
        if isinstance(code, int) and 400 <= code <= 599:
            return code
    return 500


def _places(response: Mapping[str, Any]) -> tuple[S3Location, S3Location | None]:
    """Where the answer and the failure will be. Raises ``BackendError`` when the first is not named."""
    failure = response.get("FailureLocation")
    try:
        return S3Location.parse(response.get("OutputLocation") or ""), S3Location.parse(failure) if failure else None
    except ValueError:
        raise BackendError("The model failed to answer.", detail="no S3 address for the output") from None


def _require_plain_endpoint(route: ModelRoute) -> None:
    """Raises ``BackendUnavailableError`` for a registry entry that ``InvokeEndpointAsync`` has no words for."""
    if route.inference_component is not None or route.target_variant is not None:
        raise BackendUnavailableError(
            "The model is not available right now.",
            recourse=Recourse.ELSEWHERE,
            detail="an asynchronous endpoint takes neither inference_component nor target_variant",
        )


def _arguments(invocation: Invocation, route: ModelRoute, name: str, wait: float) -> dict[str, Any]:
    arguments = {
        "EndpointName": route.endpoint_name,
        "ContentType": invocation.content_type,
        "Accept": invocation.accept,
        "CustomAttributes": invocation.custom_attributes,
        "InferenceId": inference_id(name),
        "RequestTTLSeconds": _clamped(wait, _QUEUE_SECONDS),
        "InvocationTimeoutSeconds": _clamped(wait, _PROCESSING_SECONDS),
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _clamped(seconds: float, limits: tuple[int, int]) -> int:
    least, most = limits
    return min(max(math.ceil(seconds), least), most)
