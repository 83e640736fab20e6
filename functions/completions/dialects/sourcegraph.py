"""Sourcegraph's completions: ``POST /.api/completions/code`` and ``POST /.api/completions/stream``.

Sources: sourcegraph/openapi (``CompletionRequest``, ``CompletionResponse``), the server's last public snapshot, and
what Cody's clients send and read. Errors are plain text that ends in a line feed; JSON is escaped as Go does it.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from email.utils import formatdate
from typing import Any, Final

from completions.dialects.dialect import AnswerHead, Dialect, ErrorHead, StreamEncoder, WireReply, WireRequest
from completions.dialects.sourcegraph_wire import (
    HUMAN_TURN,
    MessagesError,
    UnsupportedVersionError,
    api_version,
    chat_prompt,
    code_prompt,
    deadline_ms,
    go_json,
    model_names,
    parse_body,
)
from completions.dialects.text_completion import logprobs_object
from completions.domain.completion import (
    ChoiceDelta,
    Completion,
    CompletionChunk,
    CompletionRequest,
    FinishReason,
    Logprobs,
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
    RateLimitError,
    RequestTooLargeError,
    ServiceError,
    UnknownPathError,
)

TEXT: Final = "text/plain; charset=utf-8"
VARY: Final[Mapping[str, str]] = {"vary": "Authorization"}

_EVENTS: Final = "text/event-stream"  # with a charset behind it, Cody reads the answer as one JSON document
_EVENT_HEADERS: Final[Mapping[str, str]] = {
    "cache-control": "no-cache",
    "connection": "keep-alive",
    "x-accel-buffering": "no",
    **VARY,
}
_DONE: Final = b"event: done\ndata: {}\n\n"
_CODE_MAX_TOKENS: Final = 256
_CHAT_MAX_TOKENS: Final = 1024
_DELTA_VERSION: Final = 2
_MALFORMED: Final = "malformed_credential"
_UNKNOWN: Final = "invalid_api_key"
_PARAMETER: Final = re.compile(r'\s*([\w-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+))\s*(?:,|$)')
_PARAM_NAMES: Final = {
    "prompts": "messages",
    "max_tokens": "maxTokensToSample",
    "stop": "stopSequences",
    "top_k": "topK",
    "top_p": "topP",
}
# the nearest class in the error's own line of descent decides
_STATUS: Final[Mapping[type[CompletionError], int]] = {
    InvalidRequestError: 400,
    RequestTooLargeError: 413,
    UnknownPathError: 404,
    MethodNotAllowedError: 405,
    UnsupportedVersionError: 406,
    MessagesError: 400,  # the original passes it on and answers 500
    AuthenticationError: 401,
    PermissionDeniedError: 403,
    ModelNotFoundError: 400,
    RateLimitError: 429,
    DuplicateRequestError: 409,
    BackendTimeoutError: 504,
    BackendUnavailableError: 503,
    MeteringError: 503,
    CompletionError: 500,
}


class SourcegraphDialect(Dialect):
    """One of the two routes. ``streamed`` is the chat route, which streams unless told otherwise and takes a whole
    conversation; the other one takes a single message. ``default_model`` answers requests that name none."""

    name = "sourcegraph"
    keepalive = None  # its clients know no comments

    def __init__(self, streamed: bool, default_model: str | None = None) -> None:
        self._streamed = streamed
        self._default_model = default_model

    def credential(self, wire: WireRequest) -> str | None:
        if token := wire.query.get("token"):
            return token
        scheme, _, value = wire.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            return _basic_user(value.strip())
        if scheme in ("token", "token-sudo"):
            return _header_token(scheme, value.strip())
        return None

    def decode(self, wire: WireRequest) -> CompletionRequest:
        version = api_version(wire)
        body = parse_body(wire.body)
        names = model_names(body.model or self._default_model or "")
        if not names:
            raise InvalidRequestError("no model was named, and no default model is configured", param="model")
        stream = self._streamed if body.stream is None else body.stream
        try:
            prompt = chat_prompt(body.messages, version) if self._streamed else code_prompt(body.messages)
        except MessagesError as error:
            error.streamed = stream
            raise
        stops = (*body.stops, HUMAN_TURN) if self._streamed else body.stops
        return CompletionRequest(
            model=names[0],
            other_models=names[1:],
            prompts=(prompt,),
            max_tokens=body.max_tokens if body.max_tokens > 0 else self._default_max_tokens,
            sampling=body.sampling,
            stop=tuple(dict.fromkeys(stops)),
            logprobs=body.logprobs,
            stream=stream,
            cumulative=version < _DELTA_VERSION,
            deadline_ms=deadline_ms(wire, body),
            param_names=_PARAM_NAMES,
        )

    def encode(self, completion: Completion, request: CompletionRequest, head: AnswerHead) -> WireReply:
        choice, usage = completion.choices[0], completion.usage
        body: dict[str, Any] = {"completion": choice.text, "stopReason": choice.finish_reason}
        if choice.logprobs is not None:
            body["logprobs"] = logprobs_object(choice.logprobs)
        body["usage"] = {
            "completion_tokens": usage.completion_tokens,
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.total_tokens,
        }
        return WireReply(200, go_json(body).encode(), "application/json", VARY)

    def stream_encoder(self, request: CompletionRequest, head: AnswerHead) -> StreamEncoder:
        return _CumulativeEncoder() if request.cumulative else _DeltaEncoder()

    def encode_error(self, error: CompletionError, head: ErrorHead) -> WireReply:
        if _is_event(error, head):
            return WireReply(200, _broken(error), _EVENTS, _EVENT_HEADERS)
        status = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
        headers = {"x-content-type-options": "nosniff", **VARY}
        text = _text(error)
        if error.retry_after is not None:
            headers["retry-after"] = formatdate(math.ceil(head.now + error.retry_after), usegmt=True)
        if isinstance(error, RateLimitError) and error.status is not None:
            limit, remaining = error.status.limit, max(error.status.remaining, 0)
            headers |= {"x-ratelimit-limit": str(limit), "x-ratelimit-remaining": str(remaining)}
            scope = "chat_completions" if self._streamed else "code_completions"
            text += f" Limit of {scope}: {limit - remaining} out of {limit} {error.status.kind} used."
        if isinstance(error, RateLimitError) and "retry-after" in headers:
            text += f" Retry after {headers['retry-after']}."
        return WireReply(status, f"{text}\n".encode(), TEXT, headers)

    @property
    def _default_max_tokens(self) -> int:
        return _CHAT_MAX_TOKENS if self._streamed else _CODE_MAX_TOKENS


class _EventEncoder(StreamEncoder):
    """Cody raises an error for an answer without a single ``completion`` event, so there always is one."""

    media_type = _EVENTS
    headers = _EVENT_HEADERS

    def __init__(self) -> None:
        self._silent = True

    def chunk(self, chunk: CompletionChunk) -> bytes:
        deltas = [delta for delta in chunk.choices if delta.text or delta.logprobs is not None or delta.finish_reason]
        if deltas:
            self._silent = False
        return b"".join(self._event(delta) for delta in deltas)

    def done(self) -> bytes:
        return (self._event(ChoiceDelta(0, "", None, FinishReason.STOP)) if self._silent else b"") + _DONE

    def error(self, error: CompletionError) -> bytes:
        return _broken(error)

    @abstractmethod
    def _event(self, delta: ChoiceDelta) -> bytes:
        """The frame of one delta."""


class _DeltaEncoder(_EventEncoder):
    """Version 2 and later: each event is what is new."""

    def _event(self, delta: ChoiceDelta) -> bytes:
        data: dict[str, Any] = {"deltaText": delta.text}
        if delta.finish_reason is not None:
            data["stopReason"] = delta.finish_reason
        if delta.logprobs is not None:
            data["logprobs"] = logprobs_object(delta.logprobs)
        return f"event: completion\ndata: {go_json(data)}\n\n".encode()


class _CumulativeEncoder(_EventEncoder):
    """Before version 2: each event is all there is so far. What was escaped once is kept and only copied."""

    def __init__(self) -> None:
        super().__init__()
        self._text = bytearray()
        self._logprobs: dict[str, bytearray] = {}

    def _event(self, delta: ChoiceDelta) -> bytes:
        self._text += go_json(delta.text)[1:-1].encode()
        if delta.logprobs is not None:
            self._add_logprobs(delta.logprobs)
        reason = go_json(delta.finish_reason or "").encode()
        parts = (b'event: completion\ndata: {"completion":"', self._text, b'","stopReason":', reason)
        return b"".join((*parts, *self._logprobs_parts(), b"}\n\n"))

    def _add_logprobs(self, logprobs: Logprobs) -> None:
        for name, values in logprobs_object(logprobs).items():
            items = go_json(values)[1:-1].encode()
            array = self._logprobs.setdefault(name, bytearray())
            array += b"," + items if array and items else items

    def _logprobs_parts(self) -> list[bytes | bytearray]:
        parts: list[bytes | bytearray] = []
        for name, array in self._logprobs.items():
            parts += [b"," if parts else b',"logprobs":{', f'"{name}":['.encode(), array, b"]"]
        return [*parts, b"}"] if parts else parts


def _basic_user(value: str) -> str:
    """The token is the user name; there is no password."""
    try:
        user = base64.b64decode(value, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        user = ""
    return user or _malformed()


def _header_token(scheme: str, value: str) -> str:
    """The bare token, or ``token="…"`` among parameters. The sudo scheme knows the second form alone."""
    if "=" not in value.rstrip("="):
        return value if value and scheme == "token" else _malformed()
    parameters: dict[str, str] = {}
    place = 0
    while match := _PARAMETER.match(value, place):
        parameters[match[1].lower()] = match[2] or match[3] or ""
        place = match.end()
    return re.sub(r"\\(.)", r"\1", parameters.get("token", "")) or _malformed()


def _malformed() -> str:
    raise AuthenticationError("Invalid Authorization header.", code=_MALFORMED)


def _is_event(error: CompletionError, head: ErrorHead) -> bool:
    """Whether the original would have begun its stream, and with it status 200, before it found the fault."""
    if isinstance(error, MessagesError):
        return error.streamed
    asked = head.request is not None and head.request.stream
    return asked and isinstance(error, ServiceError | ContextLengthError)


def _broken(error: CompletionError) -> bytes:
    return f"event: error\ndata: {go_json({'error': _text(error)})}\n\n".encode() + _DONE


def _text(error: CompletionError) -> str:
    """Cody knows two faults by their words."""
    if isinstance(error, AuthenticationError) and error.code == _UNKNOWN:
        return "Invalid access token."
    if isinstance(error, AuthenticationError) and error.code is None:
        return "No access token was sent. Send one in the header 'Authorization: token YOUR_ACCESS_TOKEN'."
    if isinstance(error, ContextLengthError) and "token limit" not in error.message:
        return f"The model's token limit is exceeded. {error.message}"
    return error.message
