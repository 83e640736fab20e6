"""LMI's own schema, ``inputs`` and ``parameters``: one text prompt in, one choice out. For compatibility only.

Two handlers read it, and differ in nearly everything:

- the asynchronous vLLM handler (default from LMI 17 on) renames a few parameters and hands every other key to vLLM's
  completion request, constraints included. Of the log-probabilities it tells the chosen token's own, and of a record
  that holds several tokens the first one's;
- the rolling batch (default up to LMI 16; here with vLLM under it) takes the parameters it documents and drops the
  rest. It puts its text together from the tokens', so a stop text, a stop token and special tokens stay in it whatever
  is asked: stop texts are cut on our side, a route names its end-of-text token in ``stop_tokens``, and the parameters
  about special tokens are refused. It has no prefix cache salt.

Only an asynchronous handler's stream tells the prompt's length; all other usage is partly an estimate and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from completions.backends.codec import (
    Codec,
    EncodeOptions,
    Invocation,
    RouteFault,
    StreamDecoder,
    override_faults,
    route_abilities,
)
from completions.backends.completion_body import body_bytes, prompt_value, vllm_body
from completions.backends.lmi_container import (
    container_failure,
    failure_in_record,
    structured_outputs,
    version_faults,
)
from completions.backends.token_offsets import TokenOffsets
from completions.backends.wire_types import BUILT_WHEN_USED, TokenCount
from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import (
    ChoiceDelta,
    CompletionChunk,
    CompletionRequest,
    FinishReason,
    Logprobs,
    Usage,
)
from completions.domain.errors import BackendError, CompletionError, InvalidRequestError, TruncatedStreamError
from completions.domain.estimates import estimated_prompt_tokens

_EMULATED: Final = (
    Parameter.PROMPT_BATCH,
    Parameter.N,
    Parameter.BEST_OF,
    Parameter.ECHO,
    Parameter.SUFFIX,
)
# the rolling batch refuses token ids; whether the asynchronous handler takes them is not known
_REFUSED: Final = (Parameter.TOKEN_PROMPT, Parameter.BEAM)
_ASYNC: Final = Abilities(
    capabilities=MappingProxyType(
        dict.fromkeys(Parameter, Capability.HONOURED)
        | dict.fromkeys(_EMULATED, Capability.EMULATED)
        | dict.fromkeys(_REFUSED, Capability.REFUSED)
    ),
    max_stops=4,  # vLLM's, from 0.33 on; earlier versions take any number
    max_logprobs=0,
)
_ROLLING_HONOURED: Final = (
    Parameter.LOGPROBS,
    Parameter.TEMPERATURE,
    Parameter.TOP_P,
    Parameter.TOP_K,
    Parameter.MIN_P,
    Parameter.SEED,
    Parameter.PRESENCE_PENALTY,
    Parameter.FREQUENCY_PENALTY,
    Parameter.REPETITION_PENALTY,
    Parameter.IGNORE_EOS,
)
_ROLLING: Final = Abilities(
    capabilities=MappingProxyType(
        dict.fromkeys(Parameter, Capability.REFUSED)
        | dict.fromkeys(_ROLLING_HONOURED, Capability.HONOURED)
        | dict.fromkeys((*_EMULATED, Parameter.STOP, Parameter.INCLUDE_STOP), Capability.EMULATED)
    ),
    max_stops=4,
    max_logprobs=0,
)
_RENAMED: Final = {"max_tokens": "max_new_tokens", "ignore_eos": "ignore_eos_token"}
# said elsewhere in the body or by ``details``, or the service's business
_NOT_FOR_ASYNC: Final = frozenset({"prompt", "n", "echo", "logprobs"})
_FOR_ROLLING: Final = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "ignore_eos",
    }
)
_FINISH_REASONS: Final = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}


class LmiInputsCodec(Codec):
    """See the module. ``rolling`` is the rolling batch's reading of the schema, otherwise the asynchronous one's."""

    def __init__(self, *, rolling: bool = False) -> None:
        self._rolling = rolling
        self._abilities = _ROLLING if rolling else _ASYNC

    def abilities(self, route: ModelRoute) -> Abilities:
        return route_abilities(self._abilities, route)

    def route_faults(self, route: ModelRoute) -> Sequence[RouteFault]:
        faults = [
            *override_faults(self._abilities.capabilities, route),
            *version_faults(route, rolling=self._rolling),
        ]
        if route.served_model is not None:
            faults.append(RouteFault("served_model", "the schema has no model name; an adapter goes by 'adapter'"))
        return faults

    def encode(self, request: CompletionRequest, route: ModelRoute, options: EncodeOptions) -> Invocation:
        if len(request.prompts) != 1 or not isinstance(request.prompts[0], str) or request.n != 1:
            raise InvalidRequestError("The model's container takes one text prompt and returns one choice a call.")
        body: dict[str, Any] = {
            "inputs": prompt_value(request.prompts, route),
            "parameters": self._parameters(request, route, options),
            "stream": options.streamed,
        }
        if route.adapter is not None:
            body["adapters"] = route.adapter
        return Invocation(
            body_bytes(body),
            # the handlers answer so by the body's ``stream`` alone; this only says what is expected
            accept="application/jsonlines" if options.streamed else "application/json",
            custom_attributes=route.custom_attributes,
        )

    def decoder(self, request: CompletionRequest, *, whole: bool = False) -> StreamDecoder:
        return _InputsDecoder(request, whole=whole, rolling=self._rolling)

    def decode_error(self, status: int, body: str) -> CompletionError:
        return container_failure(status, body)

    def _parameters(self, request: CompletionRequest, route: ModelRoute, options: EncodeOptions) -> dict[str, Any]:
        """Every value explicit: 30 tokens is the schema's default, greedy the older rolling batches'. ``details``
        brings the reason for the end and the count of tokens."""
        # the rolling batch is never sent a constraint, so its version does not matter
        newer = self._rolling or structured_outputs(route)
        values = vllm_body(request, route, model=None, structured_outputs=newer)
        parameters = {_RENAMED.get(name, name): value for name, value in values.items() if self._sends(name)}
        parameters |= {"do_sample": request.sampling.temperature > 0, "details": True}
        if self._rolling and request.stop:
            parameters["stop_sequences"] = request.stop
        if not self._rolling and options.cache_salt is not None:
            parameters["cache_salt"] = options.cache_salt
        return parameters

    def _sends(self, name: str) -> bool:
        return name in _FOR_ROLLING if self._rolling else name not in _NOT_FOR_ASYNC


class _WireToken(BaseModel, defer_build=True):
    model_config = ConfigDict(allow_inf_nan=False)

    text: str
    logprob: float | None = Field(None, validation_alias=AliasChoices("logprob", "log_prob"))


class _WireDetails(BaseModel, defer_build=True):
    # one page of the documentation has the key with a space
    finish_reason: str | int | None = Field(None, validation_alias=AliasChoices("finish_reason", "finish reason"))
    generated_tokens: TokenCount | None = None
    input_length: TokenCount | None = None
    tokens: tuple[_WireToken, ...] | None = None


class _WireRecord(BaseModel, defer_build=True):
    index: int = 0
    token: _WireToken | None = None
    generated_text: str | None = None
    details: _WireDetails | None = None
    # what a failure is told by; its own words are read elsewhere
    error: object = None
    code: object = None


_RECORD: Final[TypeAdapter[_WireRecord | list[_WireRecord]]] = TypeAdapter(
    _WireRecord | list[_WireRecord], config=BUILT_WHEN_USED
)


class _InputsDecoder(StreamDecoder):
    """A stream of tokens whose last one comes with the whole text, or one ``whole`` document."""

    def __init__(self, request: CompletionRequest, *, whole: bool, rolling: bool) -> None:
        self._request = request
        self._whole = whole
        self._rolling = rolling
        self._prompt_tokens = estimated_prompt_tokens(request.prompts)
        self._offsets = TokenOffsets()
        self._tokens = 0
        self._ended = False

    def decode(self, record: bytes) -> CompletionChunk | None:
        wire = _read(record)
        details = wire.details or _WireDetails()
        if (self._rolling or not self._whole) and details.finish_reason == "error":
            # one bad step fails every request in the batch, so this is never put down to the caller
            raise BackendError("The model failed to answer.", detail="finish_reason error")
        if wire.error is not None or wire.code is not None:
            raise failure_in_record(record) or _unreadable("an error of no known form")
        return self._document(wire, details) if self._whole else self._token(wire, details)

    def finish(self) -> None:
        if not self._ended:
            raise TruncatedStreamError

    def _token(self, wire: _WireRecord, details: _WireDetails) -> CompletionChunk:
        if wire.token is None:
            raise _unreadable("a record without a token")
        self._tokens += 1
        reason = None
        usage = Usage(self._prompt_tokens, self._tokens, estimated=True)
        if wire.generated_text is not None:
            reason = _finish_reason(details.finish_reason)
            usage = self._stream_usage(details)
            self._ended = True
        delta = ChoiceDelta(wire.index, wire.token.text, self._logprobs((wire.token,)), reason)
        return CompletionChunk((delta,), usage)

    def _stream_usage(self, details: _WireDetails) -> Usage:
        generated, prompt = details.generated_tokens, details.input_length
        if generated is None:
            return Usage(self._prompt_tokens if prompt is None else prompt, self._tokens, estimated=True)
        if not self._rolling:
            generated = max(0, generated - 1)  # the asynchronous handler counts one too many
        if prompt is None:
            return Usage(self._prompt_tokens, generated, estimated=True)
        return Usage(prompt, generated)

    def _document(self, wire: _WireRecord, details: _WireDetails) -> CompletionChunk:
        if wire.generated_text is None or details.generated_tokens is None:
            raise _unreadable("a document without its text or its count of tokens")
        reason = _finish_reason(details.finish_reason) if self._rolling else self._stop_reason(details)
        self._ended = True
        delta = ChoiceDelta(wire.index, wire.generated_text, self._logprobs(details.tokens or ()), reason)
        return CompletionChunk((delta,), Usage(self._prompt_tokens, details.generated_tokens, estimated=True))

    def _stop_reason(self, details: _WireDetails) -> FinishReason:
        """The asynchronous handler gives vLLM's ``stop_reason``: the stop text or token that was met, which may be any
        word, and nothing for an answer that ended of itself or was too long."""
        cut = details.finish_reason is None and (details.generated_tokens or 0) >= self._request.max_tokens
        return FinishReason.LENGTH if cut else FinishReason.STOP

    def _logprobs(self, tokens: tuple[_WireToken, ...]) -> Logprobs | None:
        """As vLLM tells them for ``logprobs: 0``: the chosen token stands alone among its alternatives."""
        if self._request.logprobs is None or not tokens:
            return None
        texts = tuple(token.text for token in tokens)
        values = tuple(token.logprob for token in tokens)
        top = tuple(None if value is None else {text: value} for text, value in zip(texts, values, strict=True))
        return Logprobs(texts, values, top, self._offsets.place(texts))


def _read(record: bytes) -> _WireRecord:
    try:
        wire = _RECORD.validate_json(record)
    except ValidationError as error:
        raise _unreadable(f"not a record of this schema: {error.error_count()} faults") from None
    if isinstance(wire, _WireRecord):
        return wire
    if len(wire) != 1:  # ``tgi_compat`` wraps its document in a list
        raise _unreadable(f"a list of {len(wire)} documents")
    return wire[0]


def _finish_reason(word: str | int | None) -> FinishReason:
    reason = _FINISH_REASONS.get(word) if isinstance(word, str) else None
    if reason is None:  # "abort" is a failure; so is a word nobody knows, and none at all
        raise BackendError("The model gave up on its answer.", detail=f"finish_reason {str(word)[:40]}")
    return reason


def _unreadable(detail: str) -> BackendError:
    return BackendError("The model's answer could not be read.", detail=detail)
