"""vLLM's OpenAI-compatible completions, as the AWS vLLM images serve them on SageMaker.

Transcribes vLLM 0.27: ``vllm/entrypoints/openai/completion/protocol.py`` and ``serving.py``. The attributes header
``route=/v1/completions`` reaches the real route, whose error messages and ``model`` field survive; images without that
middleware ignore it and answer on ``/invocations``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from completions.backends.codec import Codec, Invocation, StreamDecoder
from completions.backends.payload_stream import DONE
from completions.backends.token_offsets import TokenOffsets
from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import (
    ChoiceDelta,
    CompletionChunk,
    CompletionRequest,
    Constraint,
    ConstraintKind,
    FinishReason,
    Logprobs,
    Prompt,
    SamplingParams,
    Usage,
)
from completions.domain.errors import (
    BackendError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    InvalidRequestError,
    TruncatedStreamError,
)

ROUTE_ATTRIBUTE: Final = "route=/v1/completions"

_EMULATED: Final = (Parameter.SUFFIX, Parameter.BEST_OF)
# vLLM reads an unknown key as nothing at all, so what it has no field for must be refused here.
_REFUSED: Final = (Parameter.BEAM,)
_CAPABILITIES: Final[Mapping[Parameter, Capability]] = MappingProxyType(
    dict.fromkeys(Parameter, Capability.HONOURED)
    | dict.fromkeys(_EMULATED, Capability.EMULATED)
    | dict.fromkeys(_REFUSED, Capability.REFUSED)
)

_FINISH_REASONS: Final = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}
_SMALLEST_TOP_P: Final = 1e-6
_STRUCTURED_OUTPUTS: Final = (0, 12)
_STRUCTURED_KEYS: Final = {
    ConstraintKind.JSON_OBJECT: "json_object",
    ConstraintKind.JSON_SCHEMA: "json",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.CHOICE: "choice",
    ConstraintKind.GRAMMAR: "grammar",
}


class _WireLogprobs(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)  # vLLM writes -9999.0 for minus infinity

    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None
    text_offset: tuple[int, ...] = ()


class _WireChoice(BaseModel):
    index: int
    text: str
    logprobs: _WireLogprobs | None = None
    finish_reason: str | None = None


class _WirePromptTokensDetails(BaseModel):
    cached_tokens: int | None = None


class _WireUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _WirePromptTokensDetails | None = None


class _WireError(BaseModel):
    message: str = ""
    code: int | str | None = None
    param: str | None = None


class _WireRecord(BaseModel):
    choices: tuple[_WireChoice, ...] | None = None
    usage: _WireUsage | None = None
    error: _WireError | str | None = None
    # the flat form of older versions: {"object": "error", "message": ..., "code": 400}
    object: str = ""
    message: str = ""
    code: int | str | None = None
    param: str | None = None

    def failure(self) -> _WireError | None:
        """The error this record stands for, in whichever of the three shapes it came."""
        if isinstance(self.error, str):
            return _WireError(message=self.error)
        if self.error is not None:
            return self.error
        if self.object == "error" or self.choices is None:
            return _WireError(message=self.message, code=self.code, param=self.param)
        return None


class VllmCodec(Codec):
    """See the module."""

    max_stops = 4  # from 0.33 on; earlier versions take any number

    def capabilities(self, route: ModelRoute) -> Mapping[Parameter, Capability]:
        return _CAPABILITIES

    def encode(self, request: CompletionRequest, route: ModelRoute) -> Invocation:
        # The prompt stands first: SageMaker's prefix-aware routing compares the first bytes of the body.
        body: dict[str, Any] = {"prompt": _prompt_value(request.prompts, route)}
        if route.served_model is not None:
            body["model"] = route.served_model
        body |= {
            "max_tokens": request.max_tokens,
            "n": request.n,
            "echo": request.echo,
            "skip_special_tokens": request.skip_special_tokens,
            "spaces_between_special_tokens": request.spaces_between_special_tokens,
            "add_special_tokens": request.add_special_tokens,
            "include_stop_str_in_output": request.include_stop,
            **_sampling_values(request.sampling, request.n),
        }
        if request.stop:
            body["stop"] = request.stop
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
        if request.constraint is not None:
            body |= _constraint_values(request.constraint, route.family_version)
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return Invocation(
            body=json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(),
            custom_attributes=route.custom_attributes or ROUTE_ATTRIBUTE,
        )

    def decoder(self, request: CompletionRequest) -> StreamDecoder:
        return _VllmStreamDecoder(request.n, scores_only=request.max_tokens == 0)

    def decode_error(self, status: int, body: str) -> CompletionError:
        try:
            failure = _WireRecord.model_validate_json(body).failure() or _WireError()
        except ValidationError:
            failure = _WireError()
        return _error(status, failure)


class _VllmStreamDecoder(StreamDecoder):
    def __init__(self, n: int, *, scores_only: bool) -> None:
        self._n = n
        self._scores_only = scores_only
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
                "The model's answer could not be read.", detail=f"not a vLLM record: {error.error_count()} faults"
            ) from None
        if (failure := wire.failure()) is not None:
            raise _error(_status(failure), failure)
        choices = wire.choices or ()
        return CompletionChunk(
            choices=tuple([self._delta(choice) for choice in choices]),
            usage=None if wire.usage is None else self._running_usage(choices, wire.usage),
        )

    def _delta(self, choice: _WireChoice) -> ChoiceDelta:
        delta = _delta(choice)
        if delta.logprobs is not None:
            offsets = self._offsets.setdefault(choice.index, TokenOffsets()).place(delta.logprobs.tokens)
            delta = replace(delta, logprobs=replace(delta.logprobs, text_offset=offsets))
        if self._scores_only and delta.finish_reason is not None:
            # vLLM generates one token and hides it, but its finish reason would tell what it was
            return replace(delta, finish_reason=FinishReason.LENGTH)
        return delta

    def finish(self) -> None:
        if not self._done:
            raise TruncatedStreamError

    def _running_usage(self, choices: tuple[_WireChoice, ...], usage: _WireUsage) -> Usage:
        """Totals so far. The usage beside a choice counts that choice and its prompt alone; the last record, which has
        no choices, counts them all."""
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        if not choices:
            return Usage(usage.prompt_tokens, usage.completion_tokens, cached)
        for choice in choices:
            self._prompt_tokens[choice.index // self._n] = usage.prompt_tokens
            self._cached_tokens[choice.index // self._n] = cached
            self._completion_tokens[choice.index] = usage.completion_tokens
        return Usage(
            sum(self._prompt_tokens.values()), sum(self._completion_tokens.values()), sum(self._cached_tokens.values())
        )


def _prompt_value(prompts: tuple[Prompt, ...], route: ModelRoute) -> object:
    # an empty prompt means the start of a document, which vLLM wants spelled out
    values = [prompt or route.document_start or "" for prompt in prompts]
    return values[0] if len(values) == 1 else values


def _constraint_values(constraint: Constraint, version: str | None) -> dict[str, Any]:
    """``structured_outputs`` since 0.12, to which the older ``guided_*`` mean nothing; an undeclared version is new."""
    value: Any = constraint.choices if constraint.kind is ConstraintKind.CHOICE else constraint.value
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        value = json.loads(constraint.value or "{}")
    spacing = constraint.whitespace_pattern
    if version is None or _version(version) >= _STRUCTURED_OUTPUTS:
        if constraint.kind is ConstraintKind.JSON_OBJECT:
            value = True
        values = {_STRUCTURED_KEYS[constraint.kind]: value}
        return {"structured_outputs": values if spacing is None else {**values, "whitespace_pattern": spacing}}
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"response_format": {"type": "json_object"}}
    guided = {f"guided_{_STRUCTURED_KEYS[constraint.kind]}": value}
    return guided if spacing is None else {**guided, "guided_whitespace_pattern": spacing}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _sampling_values(sampling: SamplingParams, n: int) -> dict[str, Any]:
    """Every value explicit: an absent one would fall back to the model's generation_config.json."""
    values: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or _SMALLEST_TOP_P,  # vLLM excludes 0, which means: the likeliest token alone
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.temperature == 0 and n > 1:
        # vLLM refuses several greedy candidates; sampling from the likeliest token alone is the same thing
        values |= {"temperature": 1.0, "top_k": 1}
    if sampling.seed is not None:
        values["seed"] = sampling.seed
    if sampling.logit_bias:
        values["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.stop_token_ids:
        values["stop_token_ids"] = sampling.stop_token_ids
    return values


def _delta(choice: _WireChoice) -> ChoiceDelta:
    finish_reason = None
    if choice.finish_reason:
        finish_reason = _FINISH_REASONS.get(choice.finish_reason)
        if finish_reason is None:  # "abort" and "error" are failures; so is a word nobody knows
            raise BackendError("The model gave up on its answer.", detail=f"finish_reason {choice.finish_reason[:40]}")
    wire = choice.logprobs
    if wire is None or not wire.tokens:
        return ChoiceDelta(choice.index, choice.text, None, finish_reason)
    top = wire.top_logprobs or (None,) * len(wire.tokens)
    if not len(wire.tokens) == len(wire.token_logprobs) == len(top) == len(wire.text_offset):
        raise BackendError("The model's answer could not be read.", detail="log-probability arrays of unequal length")
    return ChoiceDelta(
        choice.index, choice.text, Logprobs(wire.tokens, wire.token_logprobs, top, wire.text_offset), finish_reason
    )


def _status(failure: _WireError) -> int:
    return failure.code if isinstance(failure.code, int) else 500


def _error(status: int, failure: _WireError) -> CompletionError:
    # vLLM appends the offending value, which may be the caller's text
    message = failure.message.partition(" (parameter=")[0]
    if "maximum context length" in message:
        return ContextLengthError(message, param="prompt")
    if status in (400, 422) and message and "input_value" not in message and "'input'" not in message:
        # pydantic's reports quote the caller's own text; every other message is vLLM's and names the rule
        return InvalidRequestError(message, param=failure.param and failure.param.removeprefix("body."))
    if status in (400, 413, 422):
        return InvalidRequestError("The model's container refused the request.", detail=f"container status {status}")
    if status in (429, 503):
        return BackendUnavailableError("The model is overloaded.", retry_after=1, detail=f"container status {status}")
    return BackendError("The model failed to answer.", detail=f"container status {status}")
