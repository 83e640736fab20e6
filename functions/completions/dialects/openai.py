"""OpenAI's legacy completions: ``POST /v1/completions``, ``GET /v1/models``.

Sources: openai/openai-openapi (``CreateCompletionRequest``, ``CreateCompletionResponse``, ``ErrorResponse``, ``Model``)
and what openai-python reads of an answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from completions.dialects.dialect import AnswerHead, Dialect, ModelListing, StreamEncoder, WireReply, WireRequest
from completions.dialects.openai_wire import CompletionBody, parse_body
from completions.domain.catalog import ModelRoute
from completions.domain.completion import (
    Choice,
    ChoiceDelta,
    Completion,
    CompletionChunk,
    CompletionRequest,
    Logprobs,
    Prompt,
    SamplingParams,
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
    MeteringError,
    MethodNotAllowedError,
    ModelNotFoundError,
    PermissionDeniedError,
    QuotaExceededError,
    RateLimitError,
    RequestTooLargeError,
    UnknownPathError,
)

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
_ID_ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


class OpenAIDialect(Dialect, ModelListing):
    """See the module."""

    name = "openai"

    def credential(self, wire: WireRequest) -> str | None:
        header = wire.headers.get("authorization", "")
        scheme, _, value = header.partition(" ")
        if not header:
            return None
        if scheme.lower() != "bearer" or not value.strip():
            raise AuthenticationError("The Authorization header must have the form 'Bearer YOUR_API_KEY'.")
        return value.strip()

    def decode(self, wire: WireRequest) -> CompletionRequest:
        body = parse_body(wire.body)
        _check_interactions(body)
        n = body.n or 1
        return CompletionRequest(
            model=body.model,
            prompts=_prompts(body),
            max_tokens=16 if body.max_tokens is None else body.max_tokens,
            sampling=_sampling(body),
            stop=tuple(body.stop or ()),
            n=n,
            best_of=body.best_of or n,
            echo=body.echo or False,
            logprobs=body.logprobs,
            suffix=body.suffix or None,
            stream=body.stream or False,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            end_user=body.user,
            param_names={"prompts": "prompt", "token_prompt": "prompt", "prompt_batch": "prompt"},
        )

    def encode(self, completion: Completion, request: CompletionRequest, head: AnswerHead) -> WireReply:
        body = {
            "id": _completion_id(head.request_id),
            "object": "text_completion",
            "created": head.created,
            "model": completion.model,
            "choices": [_choice(choice, request) for choice in completion.choices],
            "usage": _usage(completion.usage),
        }
        return _reply(200, body, _answer_headers(head))

    def stream_encoder(self, request: CompletionRequest, head: AnswerHead) -> StreamEncoder:
        return _OpenAIStreamEncoder(request, head)

    def encode_error(self, error: CompletionError, request_id: str) -> WireReply:
        status, body = _error_object(error)
        headers: dict[str, str] = {}
        if error.retry_after is not None:
            headers["retry-after"] = f"{error.retry_after:.3f}".rstrip("0").rstrip(".")
            headers["retry-after-ms"] = str(round(error.retry_after * 1000))
        if isinstance(error, QuotaExceededError | DuplicateRequestError):
            headers["x-should-retry"] = "false"
        return _reply(status, {"error": body}, headers)

    def encode_models(self, routes: Sequence[ModelRoute]) -> WireReply:
        return _reply(200, {"object": "list", "data": [_model(route) for route in routes]}, {})

    def encode_model(self, route: ModelRoute) -> WireReply:
        return _reply(200, _model(route), {})


class _OpenAIStreamEncoder(StreamEncoder):
    """The parts of a frame that never change are serialised once."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, request: CompletionRequest, head: AnswerHead) -> None:
        self.headers = {**_answer_headers(head), "cache-control": "no-cache", "x-accel-buffering": "no"}
        self._request = request
        self._usage: Usage | None = None
        start = {"id": _completion_id(head.request_id), "object": "text_completion", "created": head.created}
        self._start = "data: " + _json(start)[:-1] + ',"choices":['
        self._middle = f'],"model":{_json(head.model)}'
        self._end = self._middle + (',"usage":null}\n\n' if request.include_usage else "}\n\n")

    def chunk(self, chunk: CompletionChunk) -> bytes:
        self._usage = chunk.usage or self._usage
        frames = [
            f"{self._start}{_json(_choice(delta, self._request))}{self._end}"
            for delta in chunk.choices
            if delta.text or delta.logprobs is not None or delta.finish_reason is not None
        ]
        return "".join(frames).encode()

    def done(self) -> bytes:
        end = "data: [DONE]\n\n"
        if self._request.include_usage and self._usage is not None:
            end = f'{self._start}{self._middle},"usage":{_json(_usage(self._usage))}}}\n\n{end}'
        return end.encode()

    def error(self, error: CompletionError) -> bytes:
        return f"data: {_json({'error': _error_object(error)[1]})}\n\n".encode()


def _check_interactions(body: CompletionBody) -> None:
    """The rules that hold between fields."""
    n = body.n or 1
    best_of = body.best_of or n
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.", param="stream_options"
        )
    if best_of < n:
        raise InvalidRequestError("'best_of' must be at least 'n'.", param="best_of")
    if body.stream and best_of > n:
        raise InvalidRequestError("Results of 'best_of' greater than 'n' cannot be streamed.", param="best_of")
    if body.logit_bias and not all(key.isascii() and key.isdecimal() for key in body.logit_bias):
        raise InvalidRequestError("The keys of 'logit_bias' must be token ids.", param="logit_bias")


def _prompts(body: CompletionBody) -> tuple[Prompt, ...]:
    value = body.prompt
    if value is None or isinstance(value, str):
        return (value or "",)
    if isinstance(value[0], int):
        return (tuple(token for token in value if isinstance(token, int)),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in value if not isinstance(item, int))


def _sampling(body: CompletionBody) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        seed=body.seed,
    )


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
    values = asdict(logprobs)
    values["text_offset"] = [offset + shift for offset in logprobs.text_offset]
    return values


def _usage(usage: Usage) -> dict[str, Any]:
    values: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens:
        values["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return values


def _model(route: ModelRoute) -> dict[str, Any]:
    return {"id": route.model_id, "object": "model", "created": route.created, "owned_by": route.owned_by}


def _error_object(error: CompletionError) -> tuple[int, dict[str, str | None]]:
    row = next(_ERRORS[kind] for kind in type(error).__mro__ if kind in _ERRORS)
    status, kind, code = row
    return status, {"message": error.message, "type": kind, "param": error.param, "code": error.code or code}


def _answer_headers(head: AnswerHead) -> dict[str, str]:
    return {
        "openai-version": "2020-10-01",
        "openai-processing-ms": str(head.elapsed_ms),
    }


def _completion_id(request_id: str) -> str:
    """``cmpl-`` and 29 alphanumerics, always the same for one logical request."""
    number = int.from_bytes(hashlib.sha256(request_id.encode()).digest())
    letters = []
    for _ in range(29):
        number, digit = divmod(number, len(_ID_ALPHABET))
        letters.append(_ID_ALPHABET[digit])
    return "cmpl-" + "".join(letters)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _reply(status: int, body: object, headers: Mapping[str, str]) -> WireReply:
    return WireReply(status, _json(body).encode(), _JSON, headers)
