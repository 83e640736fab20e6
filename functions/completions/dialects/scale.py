"""Scale's ``POST /v2/completions``: OpenAI's fields and more, answered in OpenAI's form.

Sources: scaleapi/llm-engine (``api/v2/completion.py``, ``common/dtos/llms``) and the published endpoint page. What the
original leaves to its engine to refuse is a 400 here too, before any engine is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from completions.dialects.completion_fields import PARAM_NAMES, CompletionFields
from completions.dialects.dialect import AnswerHead, Dialect, ErrorHead, StreamEncoder, WireReply, WireRequest
from completions.dialects.sampling_fields import SamplingFields
from completions.dialects.scale_wire import (
    EVENT_STREAM,
    FRAME_END,
    JSON,
    STREAM_HEADERS,
    GuidedFields,
    credential,
    encode_error,
    one_of,
    parse_body,
    refuse_broken,
    schema_text,
    stream_error,
    utc_now,
)
from completions.dialects.text_completion import OBJECT, completion_id, logprobs_object, to_json
from completions.domain.completion import (
    BeamSearch,
    Choice,
    ChoiceDelta,
    Completion,
    CompletionChunk,
    CompletionRequest,
    Constraint,
    ConstraintKind,
    Logprobs,
    SamplingParams,
    Usage,
)
from completions.domain.errors import CompletionError

_PARAM_NAMES = {**PARAM_NAMES, "beam": "use_beam_search", "include_stop": "include_stop_str_in_output"}
_JSON_KINDS = (ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA)


class ResponseFormatText(BaseModel, defer_build=True):
    """No constraint."""

    type: Literal["text"]


class JsonSchema(BaseModel, defer_build=True):
    """``strict`` says nothing new: a schema is always enforced. Without ``schema`` any JSON will do."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormatJsonSchema(BaseModel, defer_build=True):
    """JSON of one form."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ResponseFormatJsonObject(BaseModel, defer_build=True):
    """Any JSON object."""

    type: Literal["json_object"]


class ScaleBody(CompletionFields, SamplingFields, GuidedFields, defer_build=False):
    """The names and types are vLLM's. ``guided_decoding_backend`` is checked and has no effect: engines now choose."""

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    response_format: ResponseFormatText | ResponseFormatJsonSchema | ResponseFormatJsonObject | None = None
    guided_decoding_backend: Literal["outlines", "lm-format-enforcer"] | None = None
    guided_whitespace_pattern: str | None = None

    def check_interactions(self) -> None:
        super().check_interactions()
        most = 16 if self.max_tokens is None else self.max_tokens
        beam = self.use_beam_search or False
        refuse_broken(
            [
                ("min_tokens", (self.min_tokens or 0) > most, "must not be greater than 'max_tokens'"),
                ("length_penalty", not beam and self.length_penalty not in (None, 1), "needs 'use_beam_search'"),
                ("early_stopping", not beam and self.early_stopping is True, "needs 'use_beam_search'"),
            ]
        )

    def constraints(self) -> dict[str, Constraint]:
        found = super().constraints()
        if isinstance(self.response_format, ResponseFormatJsonObject):
            found["response_format"] = Constraint(ConstraintKind.JSON_OBJECT)
        if isinstance(self.response_format, ResponseFormatJsonSchema):
            schema = schema_text(self.response_format.json_schema.schema_ or {}, "response_format")
            found["response_format"] = Constraint(ConstraintKind.JSON_SCHEMA, schema)
        return {
            name: replace(one, whitespace_pattern=self.guided_whitespace_pattern) if one.kind in _JSON_KINDS else one
            for name, one in found.items()
        }

    def to_canonical(self) -> CompletionRequest:
        """The canonical request. Raises ``InvalidRequestError`` for two constraints at once."""
        name, constraint = one_of(self.constraints()) or ("constraint", None)
        return self.to_request(
            sampling=SamplingParams(**self.sampling_values(), **self.more_sampling_values()),
            constraint=constraint,
            beam=self._beam() if self.use_beam_search else None,
            param_names={**_PARAM_NAMES, "constraint": name},
            **self.output_values(),
        )

    def _beam(self) -> BeamSearch:
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamSearch(penalty, self.early_stopping or False)


class ScaleDialect(Dialect):
    """See the module. ``now`` is the time that error frames tell."""

    name = "scale"
    keepalive = b": waiting\r\n\r\n"

    def __init__(self, now: Callable[[], datetime] = utc_now) -> None:
        self._now = now

    def credential(self, wire: WireRequest) -> str | None:
        return credential(wire)

    def decode(self, wire: WireRequest) -> CompletionRequest:
        body = parse_body(ScaleBody, wire.body)
        body.check_interactions()
        return body.to_canonical()

    def encode(self, completion: Completion, request: CompletionRequest, head: AnswerHead) -> WireReply:
        body = {
            "id": completion_id(head.request_id),
            "choices": [_choice(choice) for choice in completion.choices],
            "created": head.created,
            "model": completion.model,
            "system_fingerprint": None,
            "object": OBJECT,
            "usage": _usage(completion.usage),
        }
        return WireReply(200, to_json(body).encode(), JSON, {})

    def stream_encoder(self, request: CompletionRequest, head: AnswerHead) -> StreamEncoder:
        return _ScaleStreamEncoder(request, head, self._now)

    def encode_error(self, error: CompletionError, head: ErrorHead) -> WireReply:
        return encode_error(error, head)


class _ScaleStreamEncoder(StreamEncoder):
    """What is null in a buffered answer is left out of a streamed one. The constant parts are serialised once."""

    media_type = EVENT_STREAM

    def __init__(self, request: CompletionRequest, head: AnswerHead, now: Callable[[], datetime]) -> None:
        self.headers = STREAM_HEADERS
        self._request_id = head.request_id
        self._now = now
        self._usage: Usage | None = None
        self._include_usage = request.include_usage
        self._start = f'data: {{"id":{to_json(completion_id(head.request_id))},"choices":['
        self._middle = "]," + to_json({"created": head.created, "model": head.model, "object": OBJECT})[1:-1]
        self._end = self._middle + "}" + FRAME_END

    def chunk(self, chunk: CompletionChunk) -> bytes:
        self._usage = chunk.usage or self._usage
        frames = [
            f"{self._start}{to_json(_present(_choice(delta)))}{self._end}"
            for delta in chunk.choices
            if delta.text or delta.logprobs is not None or delta.finish_reason is not None
        ]
        return "".join(frames).encode()

    def done(self) -> bytes:
        end = f"data: [DONE]{FRAME_END}"
        if self._include_usage and self._usage is not None:
            usage = to_json(_present(_usage(self._usage)))
            end = f'{self._start}{self._middle},"usage":{usage}}}{FRAME_END}{end}'
        return end.encode()

    def error(self, error: CompletionError) -> bytes:
        body = {"error": stream_error(error, self._request_id, self._now())}
        return f"data: {to_json(body)}{FRAME_END}".encode()


def _choice(choice: Choice | ChoiceDelta) -> dict[str, Any]:
    return {
        "finish_reason": choice.finish_reason,
        "index": choice.index,
        "logprobs": None if choice.logprobs is None else _logprobs(choice.logprobs),
        "text": choice.text,
    }


def _logprobs(logprobs: Logprobs) -> dict[str, Any]:
    """In the original's order, and with the engine's offsets, which count from the returned text."""
    return dict(sorted(logprobs_object(logprobs).items()))


def _usage(usage: Usage) -> dict[str, Any]:
    cached = {"audio_tokens": 0, "cached_tokens": usage.cached_tokens} if usage.cached_tokens else None
    return {
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.total_tokens,
        "completion_tokens_details": None,
        "prompt_tokens_details": cached,
    }


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
