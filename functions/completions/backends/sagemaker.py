"""The transport: one SageMaker response stream per canonical request, whatever the container family.

Always ``InvokeEndpointWithResponseStream``: the buffered call must answer within 60 s, the stream need not, and running
token counts survive a stream that breaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from completions.backends.codec import Codec, Invocation, StreamDecoder
from completions.backends.payload_stream import records
from completions.backends.sagemaker_errors import CALL_FAILURES, STREAM_FAILURES, call_error, stream_error
from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionChunk, CompletionRequest
from completions.domain.errors import BackendUnavailableError, RequestTooLargeError
from completions.domain.ports import Backend, BackendStream

if TYPE_CHECKING:
    from mypy_boto3_sagemaker_runtime import SageMakerRuntimeClient

MAX_BODY_BYTES: Final = 6_291_456
"""SageMaker's limit; botocore does not enforce it."""


class SageMakerBackend(Backend):
    """``codecs`` maps a container family to its codec; ``read_timeout`` is the client's, in seconds.

    The client must make one attempt a call (``total_max_attempts`` 1): a retry after a read timeout pays the GPU twice.
    """

    def __init__(self, client: SageMakerRuntimeClient, codecs: Mapping[str, Codec], read_timeout: float) -> None:
        self._client = client
        self._codecs = codecs
        self._read_timeout = read_timeout

    def capabilities(self, route: ModelRoute) -> Mapping[Parameter, Capability]:
        return {**self._codec(route).capabilities(route), **route.capabilities}

    def max_stops(self, route: ModelRoute) -> int | None:
        return self._codec(route).max_stops

    def stream(self, request: CompletionRequest, route: ModelRoute, request_id: str) -> BackendStream:
        codec = self._codec(route)
        invocation = codec.encode(request, route)
        if len(invocation.body) > MAX_BODY_BYTES:
            raise RequestTooLargeError(
                f"The request is {len(invocation.body)} bytes for the model; at most {MAX_BODY_BYTES} fit.",
                param=request.param_names.get("prompts", "prompt"),
            )
        arguments = _arguments(invocation, route, request_id)
        try:
            response = self._client.invoke_endpoint_with_response_stream(**arguments)
        except CALL_FAILURES as error:
            raise call_error(error, codec) from error
        return _SageMakerStream(
            response["Body"],
            codec,
            codec.decoder(request),
            variant=response.get("InvokedProductionVariant"),
            read_timeout=self._read_timeout,
        )

    def _codec(self, route: ModelRoute) -> Codec:
        codec = self._codecs.get(route.family)
        if codec is None:
            raise BackendUnavailableError(
                "The model is not available right now.", detail=f"no codec for family {route.family!r}"
            )
        return codec


class _SageMakerStream(BackendStream):
    def __init__(
        self, body: Any, codec: Codec, decoder: StreamDecoder, *, variant: str | None, read_timeout: float
    ) -> None:
        # boto3-stubs type the body by its events alone; it is botocore's EventStream, which also closes
        self._body = body
        self._codec = codec
        self._variant = variant
        self._read_timeout = read_timeout
        self._records = records(event["PayloadPart"]["Bytes"] for event in body)
        self._decoder = decoder

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
        self._decoder.finish()
        raise StopIteration

    def limit_wait(self, seconds: float) -> None:
        # botocore has no timeout for one call; the next request on this connection sets its own again
        connection = self._body._raw_stream.connection
        if connection is not None and connection.sock is not None:
            connection.sock.settimeout(min(seconds, self._read_timeout))

    def close(self) -> None:
        self._body.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _arguments(invocation: Invocation, route: ModelRoute, request_id: str) -> Any:
    arguments = {
        "EndpointName": route.endpoint_name,
        "Body": invocation.body,
        "ContentType": invocation.content_type,
        "Accept": invocation.accept,
        "CustomAttributes": invocation.custom_attributes,
        "TargetVariant": route.target_variant,
        "InferenceComponentName": route.inference_component,
        "InferenceId": request_id,
    }
    return {name: value for name, value in arguments.items() if value is not None}
