"""The transport: one SageMaker response stream for each call, whatever the container family.

Always ``InvokeEndpointWithResponseStream``: the buffered call must answer within 60 s, the stream need not, and running
token counts survive a stream that breaks.
"""

from __future__ import annotations

import hashlib
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from completions.backends.bounded_calls import BoundedCalls
from completions.backends.circuit import EndpointCircuits
from completions.backends.codec import Codec, EncodeOptions, Invocation, StreamDecoder
from completions.backends.payload_stream import document, records
from completions.backends.sagemaker_errors import CALL_FAILURES, STREAM_FAILURES, call_error, stream_error
from completions.domain.catalog import Abilities, ModelRoute
from completions.domain.completion import CompletionChunk, CompletionRequest
from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    Recourse,
    RequestTooLargeError,
)
from completions.domain.ports import AsynchronousBackend, Backend, BackendStream, Ticket, UpstreamCall

if TYPE_CHECKING:
    from mypy_boto3_sagemaker_runtime import SageMakerRuntimeClient

    from completions.backends.sagemaker_async import AsynchronousEndpoints

MAX_BODY_BYTES: Final = 6_291_456
"""SageMaker's limit; botocore does not enforce it."""
_MAX_INFERENCE_ID: Final = 64


class SageMakerBackend(Backend, AsynchronousBackend):
    """``codecs`` maps a container family to its codec; ``read_timeout`` is the client's, in seconds. Without
    ``asynchronous`` a route to an asynchronous endpoint cannot be served.

    The client must make one attempt a call (``total_max_attempts`` 1): a retry after a read timeout pays the GPU twice.
    """

    def __init__(
        self,
        client: SageMakerRuntimeClient,
        codecs: Mapping[str, Codec],
        circuits: EndpointCircuits,
        read_timeout: float,
        asynchronous: AsynchronousEndpoints | None = None,
    ) -> None:
        self._client = client
        self._asynchronous = asynchronous
        self._codecs = codecs
        self._circuits = circuits
        self._read_timeout = read_timeout
        self._calls = BoundedCalls()

    def abilities(self, route: ModelRoute) -> Abilities:
        return self._codec(route).abilities(route)

    def stream(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall) -> BackendStream:
        codec = self._codec(route)
        if route.asynchronous:
            return self._asynchronous_endpoints().stream(request, route, call, codec)
        salt = tenant_salt(call.tenant) if route.isolate_prefix_cache else None
        invocation = codec.encode(request, route, EncodeOptions(cache_salt=salt))
        require_body_fits(invocation, request, MAX_BODY_BYTES)
        arguments = _arguments(invocation, route, call.inference_id, salt)
        response = self._within(
            call.wait_seconds,
            lambda: self._circuits.call(circuit_name(route), lambda: self._invoked(arguments, codec, route, call)),
        )
        return _SageMakerStream(
            response["Body"],
            codec,
            request,
            whole=response.get("ContentType", "").partition(";")[0].strip() == "application/json",
            variant=response.get("InvokedProductionVariant"),
            read_timeout=self._read_timeout,
        )

    def submit(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall) -> Ticket:
        return self._asynchronous_endpoints().submit(request, route, call, self._codec(route))

    def collect(self, ticket: Ticket, request: CompletionRequest, route: ModelRoute) -> Sequence[CompletionChunk]:
        return self._asynchronous_endpoints().collect(ticket, request, self._codec(route))

    def _within(self, seconds: float | None, ask: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """The client's own timeout does, unless the time that is left is shorter."""
        if seconds is None or seconds >= self._read_timeout:
            return ask()
        return self._calls.within(seconds, ask, too_late=_hang_up)

    def _invoked(self, arguments: Any, codec: Codec, route: ModelRoute, call: UpstreamCall) -> Mapping[str, Any]:
        call.dispatched()
        try:
            reply: Mapping[str, Any] = self._client.invoke_endpoint_with_response_stream(**arguments)
        except CALL_FAILURES as error:
            raise call_refused(error, codec, route) from error
        return reply

    def _asynchronous_endpoints(self) -> AsynchronousEndpoints:
        if self._asynchronous is None:
            raise BackendUnavailableError(
                "The model is not available right now.",
                recourse=Recourse.ELSEWHERE,
                detail="asynchronous endpoints are not set up here",
            )
        return self._asynchronous

    def _codec(self, route: ModelRoute) -> Codec:
        codec = self._codecs.get(route.family)
        if codec is None:
            raise BackendUnavailableError(
                "The model is not available right now.",
                recourse=Recourse.ELSEWHERE,
                detail=f"no codec for family {route.family!r}",
            )
        return codec


class _SageMakerStream(BackendStream):
    def __init__(
        self,
        body: Any,
        codec: Codec,
        request: CompletionRequest,
        *,
        whole: bool,
        variant: str | None,
        read_timeout: float,
    ) -> None:
        # boto3-stubs type the body by its events alone; it is botocore's EventStream, which also closes
        self._body = body
        self._codec = codec
        self._variant = variant
        self._read_timeout = read_timeout
        self._wait_ends = math.inf
        self._aborted = False
        self._records = _records(self._parts(), whole=whole)
        self._decoder: StreamDecoder = codec.decoder(request, whole=whole)

    @property
    def variant(self) -> str | None:
        return self._variant

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> CompletionChunk:
        try:
            for record in self._records:
                chunk = self._decoder.decode(record)
                if chunk is not None:
                    return chunk
        except STREAM_FAILURES as error:
            raise stream_error(error, self._codec) from error
        if self._aborted:
            raise BackendError("The answer was given up.", detail="aborted")
        self._decoder.finish()
        raise StopIteration

    def limit_wait(self, seconds: float) -> None:
        self._wait_ends = time.monotonic() + seconds
        # botocore has no timeout for one call; the next request on this connection sets its own again
        connection = self._socket
        if connection is not None:
            connection.settimeout(min(seconds, self._read_timeout))

    def abort(self) -> None:
        self._aborted = True
        connection = self._socket
        if connection is not None:
            with suppress(OSError):  # it may just have ended by itself
                # the plain one: TLS would take its state away from the thread that reads
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    @property
    def _socket(self) -> socket.socket | None:
        connection = self._body._raw_stream.connection
        found: socket.socket | None = None if connection is None else connection.sock
        return found

    def _parts(self) -> Iterator[bytes]:
        for event in self._body:
            if "PayloadPart" in event:  # the service may add events that we do not know
                yield event["PayloadPart"]["Bytes"]
            if time.monotonic() > self._wait_ends:  # comments keep the connection alive, and are not waited for
                raise BackendTimeoutError("The model did not answer in time.", detail="no record")

    def close(self) -> None:
        self._body.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_body_fits(invocation: Invocation, request: CompletionRequest, limit: int) -> None:
    """Raises ``RequestTooLargeError`` for a body above SageMaker's ``limit`` in bytes."""
    if len(invocation.body) > limit:
        raise RequestTooLargeError(
            f"The request is {len(invocation.body)} bytes for the model; at most {limit} fit.",
            param=request.param_names.get("prompts", "prompt"),
        )


def call_refused(error: Any, codec: Codec, route: ModelRoute) -> CompletionError:
    """The canonical error of boto3's; a model that is scaled to zero says when it will have started."""
    canonical = call_error(error, codec)
    if canonical.recourse is Recourse.WHEN_STARTED:
        canonical.retry_after = route.start_seconds
    return canonical


def circuit_name(route: ModelRoute) -> str:
    """What fails together: an endpoint, or one component of it."""
    return f"{route.endpoint_name}/{route.inference_component or ''}"


def tenant_salt(tenant: str) -> str:
    """A name for the tenant that says nothing about it: 32 hexadecimal digits."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]


def inference_id(name: str) -> str:
    """``name`` where SageMaker takes it, which is up to 64 printable characters, else its SHA-256."""
    fits = 0 < len(name) <= _MAX_INFERENCE_ID and name.isascii() and name.isprintable() and not name[0].isspace()
    return name if fits else hashlib.sha256(name.encode()).hexdigest()


def _records(parts: Iterable[bytes], *, whole: bool) -> Iterator[bytes]:
    return document(parts) if whole else records(parts)


def _hang_up(reply: Mapping[str, Any]) -> None:
    reply["Body"].close()


def _arguments(invocation: Invocation, route: ModelRoute, name: str, salt: str | None) -> Any:
    arguments = {
        "EndpointName": route.endpoint_name,
        "Body": invocation.body,
        "ContentType": invocation.content_type,
        "Accept": invocation.accept,
        "CustomAttributes": invocation.custom_attributes,
        "TargetVariant": route.target_variant,
        "InferenceComponentName": route.inference_component,
        "InferenceId": inference_id(name),
        "PrefixAwareId": salt,
    }
    return {name: value for name, value in arguments.items() if value is not None}
