"""Records of the OpenAI-compatible completion stream, in every shape the servers behind it have been seen to use.

Transcribes vLLM 0.27 (``vllm/entrypoints/openai/completion/serving.py``); errors come nested, flat, or as plain text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from completions.backends.codec import StreamDecoder
from completions.backends.payload_stream import DONE
from completions.backends.token_offsets import TokenOffsets
from completions.backends.wire_types import TokenCount
from completions.domain.completion import (
    ChoiceDelta,
    CompletionChunk,
    CompletionRequest,
    FinishReason,
    Logprobs,
    Usage,
)
from completions.domain.errors import (
    BackendError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    InvalidRequestError,
    Recourse,
    TruncatedStreamError,
)

_FINISH_REASONS: Final = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}


class _WireToken(BaseModel, defer_build=True):
    model_config = ConfigDict(allow_inf_nan=False)

    token: str
    logprob: float
    bytes: tuple[Annotated[int, Field(ge=0, le=255)], ...] | None = None
    top_logprobs: tuple[_WireToken, ...] = ()

    @property
    def text(self) -> str:
        """One that is no text by itself as the completions layout escapes it, or several would look alike."""
        if self.bytes is None:
            return self.token
        try:
            return bytes(self.bytes).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes)


_NOT_FOR_CALLERS: Final = ("input_value", "'input'", "/opt/", "/models/", "s3://")
"""pydantic's reports quote the caller's own text, and paths are the operator's; every other message names a rule."""


class _WireLogprobs(BaseModel, defer_build=True):
    """The four arrays, or the chat layout's ``content``, which llama.cpp answers completions with."""

    model_config = ConfigDict(allow_inf_nan=False)  # vLLM writes -9999.0 for minus infinity

    content: tuple[_WireToken, ...] | None = None
    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None
    text_offset: tuple[int, ...] = ()


class _WireChoice(BaseModel, defer_build=True):
    index: int
    text: str
    logprobs: _WireLogprobs | None = None
    finish_reason: str | None = None


class _WirePromptTokensDetails(BaseModel, defer_build=True):
    cached_tokens: TokenCount | None = None


class _WireUsage(BaseModel, defer_build=True):
    prompt_tokens: TokenCount
    completion_tokens: TokenCount = 0
    prompt_tokens_details: _WirePromptTokensDetails | None = None


class WireError(BaseModel, defer_build=True):
    """What a server says about a failure."""

    message: str = ""
    code: int | str | None = None
    param: str | None = None
    type: str | None = None
    http_status_code: int | None = None


class _WireRecord(BaseModel):
    choices: tuple[_WireChoice, ...] | None = None
    usage: _WireUsage | None = None
    error: WireError | str | None = None
    # the flat form of older versions: {"object": "error", "message": ..., "code": 400}
    object: str = ""
    message: str = ""
    code: int | str | None = None
    param: str | None = None
    type: str | None = None

    def failure(self) -> WireError | None:
        """The error this record stands for, in whichever of the three shapes it came."""
        if isinstance(self.error, str):
            return WireError(message=self.error, code=self.code)
        if self.error is not None:
            return self.error
        if self.object == "error" or self.choices is None:
            return WireError(message=self.message, code=self.code, param=self.param, type=self.type)
        return None


class CompletionRecordDecoder(StreamDecoder):
    """A stream of chunks that ends with ``[DONE]``, or one ``whole`` document.

    ``failure`` makes the canonical error of a failure record, given the HTTP status it should have had; by default as
    vLLM means it.
    """

    def __init__(
        self,
        request: CompletionRequest,
        *,
        whole: bool = False,
        failure: Callable[[int, WireError], CompletionError] | None = None,
    ) -> None:
        self._failure = failure or failure_error
        self._n = request.n
        self._one_choice = request.choice_count == 1
        self._scores_only = request.max_tokens == 0
        self._whole = whole
        self._offsets: dict[int, TokenOffsets] = {}
        self._done = False
        self._prompt_tokens: dict[int, int] = {}
        self._completion_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}

    def decode(self, record: bytes) -> CompletionChunk | None:
        if record == DONE:
            self._done = True
            return None
        try:
            wire = _WireRecord.model_validate_json(record)
        except ValidationError as error:
            raise BackendError(
                "The model's answer could not be read.", detail=f"not a completion record: {error.error_count()} faults"
            ) from None
        if (failure := wire.failure()) is not None:
            raise self._failure(_status(failure), failure)
        choices = wire.choices or ()
        self._done = self._done or self._whole
        return CompletionChunk(
            choices=tuple([self._delta(choice) for choice in choices]),
            usage=None if wire.usage is None else self._running_usage(choices, wire.usage),
        )

    def finish(self) -> None:
        if not self._done:
            raise TruncatedStreamError

    def _delta(self, choice: _WireChoice) -> ChoiceDelta:
        delta = _delta(choice)
        if delta.logprobs is not None:
            offsets = self._offsets.setdefault(choice.index, TokenOffsets()).place(delta.logprobs.tokens)
            delta = replace(delta, logprobs=replace(delta.logprobs, text_offset=offsets))
        if self._scores_only and delta.finish_reason is not None:
            # vLLM generates one token and hides it, but its finish reason would tell what it was
            return replace(delta, finish_reason=FinishReason.LENGTH)
        return delta

    def _running_usage(self, choices: tuple[_WireChoice, ...], usage: _WireUsage) -> Usage:
        """Totals so far. The usage beside a streamed choice counts that choice and its prompt alone; the last record,
        which has no choices, and a whole document count them all."""
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        if self._whole or not choices or self._one_choice:
            return Usage(usage.prompt_tokens, usage.completion_tokens, cached)
        for choice in choices:
            self._prompt_tokens[choice.index // self._n] = usage.prompt_tokens
            self._cached_tokens[choice.index // self._n] = cached
            self._completion_tokens[choice.index] = usage.completion_tokens
        return Usage(
            sum(self._prompt_tokens.values()), sum(self._completion_tokens.values()), sum(self._cached_tokens.values())
        )


def error_in_body(body: str) -> WireError:
    """The failure a response body tells of; an empty one when it cannot be read."""
    try:
        return _WireRecord.model_validate_json(body).failure() or WireError()
    except ValidationError:
        return WireError()


def failure_error(status: int, failure: WireError) -> CompletionError:
    """The canonical error of a server's failure under the HTTP ``status`` it has or should have had."""
    # vLLM appends the offending value, which may be the caller's text
    message = failure.message.partition(" (parameter=")[0]
    if "maximum context length" in message:
        return ContextLengthError(message, param="prompt")
    if status in (400, 422) and message and not any(sign in message for sign in _NOT_FOR_CALLERS):
        return InvalidRequestError(message, param=failure.param and failure.param.removeprefix("body."))
    if status in (400, 413, 422):
        return InvalidRequestError("The model's container refused the request.", detail=f"container status {status}")
    if status == 404:  # no such adapter or served model: the registry's entry is wrong, not the request
        return BackendUnavailableError(
            "The model is not available right now.", recourse=Recourse.ELSEWHERE, detail="container status 404"
        )
    if status in (429, 503):
        return BackendUnavailableError(
            "The model is overloaded.",
            retry_after=1,
            recourse=Recourse.AGAIN,
            detail=f"container status {status}",
        )
    return BackendError("The model failed to answer.", detail=f"container status {status}")


def _delta(choice: _WireChoice) -> ChoiceDelta:
    finish_reason = None
    if choice.finish_reason:
        finish_reason = _FINISH_REASONS.get(choice.finish_reason)
        if finish_reason is None:  # "abort" and "error" are failures; so is a word nobody knows
            raise BackendError("The model gave up on its answer.", detail=f"finish_reason {choice.finish_reason[:40]}")
    # TGI streams the text of the token that ends the answer, which is no part of it
    text = "" if choice.finish_reason == "eos_token" else choice.text
    wire = choice.logprobs
    if wire is not None and wire.content is not None:
        return ChoiceDelta(choice.index, text, _chat_logprobs(wire.content), finish_reason)
    if wire is None or not wire.tokens:
        return ChoiceDelta(choice.index, text, None, finish_reason)
    top = wire.top_logprobs or (None,) * len(wire.tokens)
    offsets = wire.text_offset or (0,) * len(wire.tokens)  # counted here anyway, so a server may leave them out
    if not len(wire.tokens) == len(wire.token_logprobs) == len(top) == len(offsets):
        raise BackendError("The model's answer could not be read.", detail="log-probability arrays of unequal length")
    return ChoiceDelta(choice.index, text, Logprobs(wire.tokens, wire.token_logprobs, top, offsets), finish_reason)


def _chat_logprobs(content: tuple[_WireToken, ...]) -> Logprobs | None:
    if not content:
        return None
    tokens = tuple(entry.text for entry in content)
    return Logprobs(
        tokens=tokens,
        token_logprobs=tuple(entry.logprob for entry in content),
        top_logprobs=tuple({top.text: top.logprob for top in entry.top_logprobs} for entry in content),
        text_offset=(0,) * len(tokens),
    )


def _status(failure: WireError) -> int:
    if failure.http_status_code is not None:
        return failure.http_status_code
    return failure.code if isinstance(failure.code, int) else 500
