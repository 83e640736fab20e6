"""OpenAI's legacy completions: ``POST /v1/completions``, ``GET /v1/models``.

Sources: openai/openai-openapi (``CreateCompletionRequest``, ``CreateCompletionResponse``, ``ErrorResponse``, ``Model``)
and what openai-python reads of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from completions.dialects.dialect import AnswerHead, Dialect, ErrorHead, Resource, StreamEncoder, WireReply, WireRequest
from completions.dialects.openai_wire import parse_body
from completions.dialects.text_completion import OBJECT, completion_id, logprobs_object, to_json
from completions.domain.catalog import ModelRoute
from completions.domain.completion import (
    Choice,
    ChoiceDelta,
    Completion,
    CompletionChunk,
    CompletionRequest,
    Logprobs,
    Usage,
)
from completions.domain.errors import (
    AuthenticationError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    DuplicateRequestError,
    InvalidRequestError,
    LimitStatus,
    MeteringError,
    MethodNotAllowedError,
    ModelNotFoundError,
    PermissionDeniedError,
    QuotaExceededError,
    RateLimitError,
    RequestTooLargeError,
    UnknownPathError,
)
from completions.domain.metering import Principal

_JSON: Final = "application/json"
_INVALID: Final = "invalid_request_error"
# class -> status, type, default code; the nearest class in the error's own line of descent decides
_ERRORS: Final[Mapping[type[CompletionError], tuple[int, str, str | None]]] = {
    InvalidRequestError: (400, _INVALID, None),
    ContextLengthError: (400, _INVALID, "context_length_exceeded"),
    RequestTooLargeError: (413, _INVALID, "request_too_large"),
    UnknownPathError: (404, _INVALID, "unknown_url"),
    MethodNotAllowedError: (405, _INVALID, "method_not_supported"),
    AuthenticationError: (401, _INVALID, None),
    PermissionDeniedError: (403, _INVALID, None),
    ModelNotFoundError: (404, _INVALID, "model_not_found"),
    RateLimitError: (429, "requests", "rate_limit_exceeded"),
    QuotaExceededError: (429, "insufficient_quota", "insufficient_quota"),
    DuplicateRequestError: (409, _INVALID, "duplicate_request"),
    BackendTimeoutError: (504, "server_error", None),
    BackendUnavailableError: (503, "server_error", None),
    MeteringError: (503, "server_error", None),
    CompletionError: (500, "server_error", None),
}


class OpenAIDialect(Dialect):
    """``extra_fields`` are request fields beyond OpenAI's own that are let through, of ``EXTRA_FIELDS``."""

    name = "openai"
    keepalive = b": waiting\n"  # a blank line behind it would make older SDKs dispatch an empty event

    def __init__(self, extra_fields: frozenset[str] = frozenset()) -> None:
        self._extra_fields = extra_fields

    def credential(self, wire: WireRequest) -> str | None:
        header = wire.headers.get("authorization", "")
        scheme, _, value = header.partition(" ")
        if not header:
            return None
        if scheme.lower() != "bearer" or not value.strip():
            raise AuthenticationError("The Authorization header must have the form 'Bearer YOUR_API_KEY'.")
        return value.strip()

    def decode(self, wire: WireRequest) -> CompletionRequest:
        return parse_body(wire.body, self._extra_fields).to_canonical()

    def encode(self, completion: Completion, request: CompletionRequest, head: AnswerHead) -> WireReply:
        body = {
            "id": completion_id(head.request_id),
            "object": OBJECT,
            "created": head.created,
            "model": completion.model,
            "choices": [_choice(choice, request) for choice in completion.choices],
            "usage": _usage(completion.usage),
        }
        return _reply(200, body, _answer_headers(head))

    def stream_encoder(self, request: CompletionRequest, head: AnswerHead) -> StreamEncoder:
        return _OpenAIStreamEncoder(request, head)

    def encode_error(self, error: CompletionError, head: ErrorHead) -> WireReply:
        status, body = _error_object(error)
        headers: dict[str, str] = {}
        if error.retry_after is not None:
            headers["retry-after"] = f"{error.retry_after:.3f}".rstrip("0").rstrip(".")
            headers["retry-after-ms"] = str(round(error.retry_after * 1000))
        if isinstance(error, QuotaExceededError | DuplicateRequestError):
            headers["x-should-retry"] = "false"
        if isinstance(error, RateLimitError) and error.status is not None:
            headers |= _limit_headers(error.status)
        return _reply(status, {"error": body}, headers)

    def model_resources(self) -> tuple[Resource, ...]:
        """``/v1/models`` and what is below it; ids may contain slashes."""
        one = "/v1/models/{model:path}"
        return (
            Resource("GET", "/v1/models", _list_models),
            Resource("GET", one, _retrieve_model),
            Resource("DELETE", one, _delete_model),
        )


class _OpenAIStreamEncoder(StreamEncoder):
    """The parts of a frame that never change are serialised once."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, request: CompletionRequest, head: AnswerHead) -> None:
        self.headers = {**_answer_headers(head), "cache-control": "no-cache", "x-accel-buffering": "no"}
        self._request = request
        self._usage: Usage | None = None
        start = {"id": completion_id(head.request_id), "object": OBJECT, "created": head.created}
        self._start = "data: " + to_json(start)[:-1] + ',"choices":['
        self._middle = f'],"model":{to_json(head.model)}'
        self._end = self._middle + (',"usage":null}\n\n' if request.include_usage else "}\n\n")

    def chunk(self, chunk: CompletionChunk) -> bytes:
        self._usage = chunk.usage or self._usage
        frames = [
            f"{self._start}{self._choice(delta)}{self._end}"
            for delta in chunk.choices
            if delta.text or delta.logprobs is not None or delta.finish_reason is not None
        ]
        return "".join(frames).encode()

    def _choice(self, delta: ChoiceDelta) -> str:
        if delta.logprobs is not None:
            return to_json(_choice(delta, self._request))
        reason = "null" if delta.finish_reason is None else to_json(delta.finish_reason)
        text = to_json(delta.text)
        return f'{{"text":{text},"index":{delta.index},"logprobs":null,"finish_reason":{reason}}}'

    def done(self) -> bytes:
        end = "data: [DONE]\n\n"
        if self._request.include_usage and self._usage is not None:
            end = f'{self._start}{self._middle},"usage":{to_json(_usage(self._usage))}}}\n\n{end}'
        return end.encode()

    def error(self, error: CompletionError) -> bytes:
        return f"data: {to_json({'error': _error_object(error)[1]})}\n\n".encode()


def _limit_headers(status: LimitStatus) -> dict[str, str]:
    if status.kind == "nano-dollars":  # OpenAI has no such headers
        return {}
    return {
        f"x-ratelimit-limit-{status.kind}": str(status.limit),
        f"x-ratelimit-remaining-{status.kind}": str(status.remaining),
        f"x-ratelimit-reset-{status.kind}": _duration(status.reset_seconds),
    }


def _duration(seconds: float) -> str:
    """``17ms``, ``6m0s``, ``1h0m0s``: how OpenAI writes the time until a limit is full again."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _choice(choice: Choice | ChoiceDelta, request: CompletionRequest) -> dict[str, Any]:
    return {
        "text": choice.text,
        "index": choice.index,
        "logprobs": None if choice.logprobs is None else _logprobs(choice.logprobs, choice.index, request),
        "finish_reason": choice.finish_reason,
    }


def _logprobs(logprobs: Logprobs, index: int, request: CompletionRequest) -> dict[str, Any]:
    """Offsets count from the start of the prompt, as OpenAI's do; the canonical ones count from the returned text.

    The characters of a token-id prompt are not known here, and count as none.
    """
    prompt = request.prompts[index // request.n]
    shift = 0 if request.echo or not isinstance(prompt, str) else len(prompt)
    return logprobs_object(logprobs, shift)


def _usage(usage: Usage) -> dict[str, Any]:
    values: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens:
        values["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return values


def _list_models(wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
    return _reply(200, {"object": "list", "data": [_model(route) for route in routes]}, {})


def _retrieve_model(wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
    name = wire.path_parameters["model"]
    for route in routes:
        if name in (route.model_id, *route.aliases):
            return _reply(200, _model(route), {})
    raise ModelNotFoundError(f"The model '{name[:200]}' does not exist.", param="model")


def _delete_model(wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
    raise PermissionDeniedError("Models are deployed and removed by the operator, not through this API.")


def _model(route: ModelRoute) -> dict[str, Any]:
    return {"id": route.model_id, "object": "model", "created": route.created, "owned_by": route.owned_by}


def _error_object(error: CompletionError) -> tuple[int, dict[str, str | None]]:
    row = next(_ERRORS[kind] for kind in type(error).__mro__ if kind in _ERRORS)
    status, kind, code = row
    return status, {"message": error.message, "type": kind, "param": error.param, "code": error.code or code}


def _answer_headers(head: AnswerHead) -> dict[str, str]:
    limits: dict[str, str] = {}
    for status in reversed(head.limits):  # of two that count the same, the shorter one is told
        limits |= _limit_headers(status)
    return {
        "openai-version": "2020-10-01",
        "openai-processing-ms": str(head.elapsed_ms),
        **limits,
    }


def _reply(status: int, body: object, headers: Mapping[str, str]) -> WireReply:
    return WireReply(status, to_json(body).encode(), _JSON, headers)
