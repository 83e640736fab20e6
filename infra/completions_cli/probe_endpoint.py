"""Asking an endpoint for a probe: through the codec and the transport of every request, and below both, as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from completions.backends.codec import Codec, EncodeOptions
from completions.backends.payload_stream import DONE, document, records
from completions.backends.sagemaker import call_refused
from completions.backends.sagemaker_errors import CALL_FAILURES, STREAM_FAILURES, stream_error
from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionRequest, FinishReason, SamplingParams, Usage
from completions.domain.errors import BackendError, CompletionError
from completions.domain.ports import Backend, UpstreamCall

if TYPE_CHECKING:
    from mypy_boto3_sagemaker_runtime import SageMakerRuntimeClient

PROMPT: Final = "import os\nimport sys\n\n\ndef main():\n"
MULTIBYTE_PROMPT: Final = "# Grüße aus Köln, 世界 🌍, naïve café\n# Grüße aus Köln, 世界"
_MAX_RAW_BYTES: Final = 1_000_000
_CALL: Final = UpstreamCall(inference_id="completions-probe", tenant="completions-probe")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. ``pieces`` are the texts of the first choice's records, ``tokens`` its tokens where
    log-probabilities were asked for, ``logprobs`` theirs; ``finish`` is by choice."""

    pieces: tuple[str, ...]
    finish: dict[int, FinishReason]
    usage: Usage | None
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float | None, ...] = ()

    @property
    def text(self) -> str:
        """The first choice's."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """What came for a call. ``status`` is the container's own, 200 for a stream; ``body`` its bytes, of which an
    error's may be cut off; ``error`` what the codec makes of them, ``None`` when it reads them as an answer."""

    status: int
    content_type: str
    body: bytes
    error: CompletionError | None

    @property
    def lines(self) -> list[bytes]:
        """The lines that are not blank."""
        return [line for line in self.body.splitlines() if line.strip()]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON objects among the stream's records."""
        found = []
        for record in records([self.body]):
            try:
                value = json.loads(record)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found

    @property
    def ends_with_done(self) -> bool:
        """Whether ``[DONE]`` is the last record."""
        return [*records([self.body])][-1:] == [DONE]


@dataclass(slots=True)
class Endpoint:
    """``route``'s endpoint. ``prompt_tokens`` and ``generated_tokens`` add up what the answers say they cost."""

    route: ModelRoute
    codec: Codec
    backend: Backend
    client: SageMakerRuntimeClient
    prompt_tokens: int = field(default=0, init=False)
    generated_tokens: int = field(default=0, init=False)

    def honours(self, parameter: Parameter) -> bool:
        """Whether the container itself is asked for it."""
        return self.backend.abilities(self.route).capabilities[parameter] is Capability.HONOURED

    def ask(self, request: CompletionRequest) -> Answer:
        """The answer, as the service would read it. Raises ``CompletionError``."""
        pieces: list[str] = []
        tokens: list[str] = []
        logprobs: list[float | None] = []
        finish: dict[int, FinishReason] = {}
        usage: Usage | None = None
        try:
            with self.backend.stream(request, self.route, _CALL) as stream:
                for chunk in stream:
                    usage = chunk.usage or usage
                    for delta in chunk.choices:
                        if delta.finish_reason is not None:
                            finish[delta.index] = delta.finish_reason
                        if delta.index == 0:
                            pieces.append(delta.text)
                            tokens += delta.logprobs.tokens if delta.logprobs else ()
                            logprobs += delta.logprobs.token_logprobs if delta.logprobs else ()
        finally:
            self._spend(usage)
        return Answer(tuple(pieces), finish, usage, tuple(tokens), tuple(logprobs))

    def ask_raw(self, request: CompletionRequest, route: ModelRoute | None = None) -> RawAnswer:
        """The bytes of the answer to what the codec makes of ``request``. Raises ``CompletionError`` when SageMaker,
        and not the container, turned the call away."""
        route = route or self.route
        invocation = self.codec.encode(request, route, EncodeOptions())
        arguments: Any = {
            "EndpointName": route.endpoint_name,
            "Body": invocation.body,
            "ContentType": invocation.content_type,
            "Accept": invocation.accept,
            "CustomAttributes": invocation.custom_attributes,
            "TargetVariant": route.target_variant,
            "InferenceComponentName": route.inference_component,
        }
        try:
            response = self.client.invoke_endpoint_with_response_stream(
                **{name: value for name, value in arguments.items() if value is not None}
            )
        except CALL_FAILURES as error:
            return self._refused(error, route)
        body: Any = response["Body"]
        try:
            data = b"".join(_limited(event["PayloadPart"]["Bytes"] for event in body))
        except STREAM_FAILURES as error:
            raise stream_error(error, self.codec) from error
        finally:
            body.close()
        kind = response.get("ContentType", "")
        whole = kind.partition(";")[0].strip() == "application/json"
        return RawAnswer(200, kind, data, self._decoded(request, data, whole=whole))

    def _refused(self, error: Any, route: ModelRoute) -> RawAnswer:
        canonical = call_refused(error, self.codec, route)
        response = getattr(error, "response", {})
        if response.get("Error", {}).get("Code") != "ModelError":
            raise canonical from error
        status = int(response.get("OriginalStatusCode") or 0)
        return RawAnswer(status, "", str(response.get("OriginalMessage") or "").encode(), canonical)

    def _decoded(self, request: CompletionRequest, data: bytes, *, whole: bool) -> CompletionError | None:
        decoder = self.codec.decoder(request, whole=whole)
        usage: Usage | None = None
        try:
            for record in document([data]) if whole else records([data]):
                chunk = decoder.decode(record)
                usage = (chunk.usage if chunk else None) or usage
            decoder.finish()
        except CompletionError as error:
            return error
        finally:
            self._spend(usage)
        return None

    def _spend(self, usage: Usage | None) -> None:
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens
            self.generated_tokens += usage.completion_tokens


def probe_request(max_tokens: int, **fields: Any) -> CompletionRequest:
    """The probe's own prompt, greedy unless ``fields`` say otherwise."""
    known = CompletionRequest(
        "probe", (PROMPT,), max_tokens=max_tokens, sampling=SamplingParams(temperature=0.0), stream=True
    )
    return replace(known, **fields)


def looks_like(raw: RawAnswer) -> str | None:
    """Whose wire format this is, as far as the bytes tell."""
    if raw.status != 200:
        return _error_looks_like(raw.body)
    first = next(iter(raw.records), {})
    if "token" in first:
        return "LMI's own schema" if raw.content_type.startswith("application/jsonlines") else "TGI's own schema"
    if "choices" in first:
        if raw.content_type.startswith("application/jsonlines"):
            return "LMI with the OpenAI body"
        choices = first["choices"]
        empty_reason = isinstance(choices, list) and choices and choices[0].get("finish_reason") == ""
        return "TGI with the OpenAI body" if empty_reason else "vLLM, or another OpenAI server"
    return None


def _error_looks_like(body: bytes) -> str | None:
    try:
        error = json.loads(body)
    except ValueError:
        return None
    if not isinstance(error, dict):
        return None
    if "error_type" in error:
        return "TGI"
    if isinstance(error.get("error"), dict) or error.get("object") == "error" or "detail" in error:
        return "vLLM, or another OpenAI server"
    return "LMI" if "code" in error else None


def _limited(parts: Iterator[bytes]) -> Iterator[bytes]:
    size = 0
    for part in parts:
        size += len(part)
        if size > _MAX_RAW_BYTES:
            raise BackendError("The model's answer could not be read.", detail="far too long for so few tokens")
        yield part
