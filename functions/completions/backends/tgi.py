"""Hugging Face TGI's own body, ``{"inputs", "parameters", "stream"}``, with token details.

Transcribes TGI 3.3: ``router/src/{lib,server,validation}.rs``. TGI matches a stop text only where a token ends and
leaves it in the answer, so stop texts are cut here; it is told them to end early.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from completions.backends.codec import (
    Codec,
    EncodeOptions,
    Invocation,
    RouteFault,
    StreamDecoder,
    override_faults,
    route_abilities,
)
from completions.backends.completion_body import body_bytes, prompt_value
from completions.backends.payload_stream import DONE
from completions.backends.tgi_rules import (
    MAX_STOPS,
    Failure,
    failure_in_body,
    nucleus_values,
    seed_values,
    tgi_error,
)
from completions.backends.token_offsets import TokenOffsets
from completions.backends.wire_types import BUILT_WHEN_USED, TokenCount
from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import (
    ChoiceDelta,
    CompletionChunk,
    CompletionRequest,
    Constraint,
    ConstraintKind,
    FinishReason,
    Logprobs,
    Usage,
)
from completions.domain.errors import BackendError, CompletionError, InvalidRequestError, TruncatedStreamError
from completions.domain.estimates import estimated_prompt_tokens

_HONOURED: Final = (
    Parameter.TEMPERATURE,
    Parameter.TOP_P,
    Parameter.TOP_K,
    Parameter.SEED,
    Parameter.FREQUENCY_PENALTY,
    Parameter.REPETITION_PENALTY,
    Parameter.LOGPROBS,
    Parameter.REGEX,
    Parameter.JSON_SCHEMA,
    Parameter.CHOICE,
)
_EMULATED: Final = (
    Parameter.N,
    Parameter.PROMPT_BATCH,
    Parameter.BEST_OF,
    Parameter.ECHO,
    Parameter.SUFFIX,
    Parameter.STOP,
    Parameter.INCLUDE_STOP,
    # TGI has no such field: it marks special tokens, and the decoder drops or keeps their text
    Parameter.SKIP_SPECIAL_TOKENS,
)
# TGI reads an unknown key as nothing at all, so everything else must be refused here
_ABILITIES: Final = Abilities(
    capabilities=MappingProxyType(
        dict.fromkeys(Parameter, Capability.REFUSED)
        | dict.fromkeys(_HONOURED, Capability.HONOURED)
        | dict.fromkeys(_EMULATED, Capability.EMULATED)
    ),
    max_stops=MAX_STOPS,
    max_logprobs=5,  # MAX_TOP_N_TOKENS' default
)
_MAX_TOP_K: Final = 2**31 - 1
_FINISH_REASONS: Final = {
    "length": FinishReason.LENGTH,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
}
_MINUS_INFINITY: Final = -9999.0
_REGEX_CHARACTERS: Final = re.compile(r"([\\.^$*+?{}\[\]|()])")
_UNREADABLE: Final = "The model's answer could not be read."


class TgiCodec(Codec):
    """See the module. TGI has no word for a prefix-cache salt, so tenants share its prefix cache."""

    def abilities(self, route: ModelRoute) -> Abilities:
        return route_abilities(_ABILITIES, route)

    def route_faults(self, route: ModelRoute) -> Sequence[RouteFault]:
        faults = override_faults(_ABILITIES.capabilities, route)
        if route.served_model is not None:
            faults.append(
                RouteFault("served_model", "TGI's own body has no model name; an adapter goes into 'adapter'")
            )
        return faults

    def encode(self, request: CompletionRequest, route: ModelRoute, options: EncodeOptions) -> Invocation:
        body = {
            "inputs": prompt_value(request.prompts, route),  # first: SageMaker compares prefixes
            "parameters": _parameters(request, route),
            "stream": options.streamed,
        }
        return Invocation(body_bytes(body), custom_attributes=route.custom_attributes)

    def decoder(self, request: CompletionRequest, *, whole: bool = False) -> StreamDecoder:
        return _WholeDecoder(request) if whole else _StreamDecoder(request)

    def decode_error(self, status: int, body: str) -> CompletionError:
        return failure_in_body(status, body)


def _parameters(request: CompletionRequest, route: ModelRoute) -> dict[str, Any]:
    """Every value explicit; ``return_full_text`` by default depends on the kind of model, and is true for most."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": request.max_tokens,
        "return_full_text": False,
        "details": True,
        "decoder_input_details": False,
        **_sampling_values(request),
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **seed_values(sampling),
    }
    if request.stop:
        parameters["stop"] = request.stop[:MAX_STOPS]  # the rest is cut here, as all of them are
    if request.logprobs:  # 0 is the chosen token alone, which the details always name
        parameters["top_n_tokens"] = request.logprobs
    if request.constraint is not None:
        parameters["grammar"] = _grammar(request.constraint, request.param_names)
    if route.adapter is not None:
        parameters["adapter_id"] = route.adapter
    return parameters


def _sampling_values(request: CompletionRequest) -> dict[str, Any]:
    """TGI refuses temperature 0, and is greedy at temperature 1 unless it is told to sample; any other value of these
    fields has it sample, so a greedy request names none."""
    sampling = request.sampling
    if sampling.temperature == 0:
        return {"do_sample": False}
    values = {"do_sample": True, "temperature": sampling.temperature, **nucleus_values(sampling)}
    if sampling.top_k is not None:
        values["top_k"] = min(sampling.top_k, _MAX_TOP_K)
    return values


def _grammar(constraint: Constraint, names: Mapping[str, str]) -> dict[str, Any]:
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        schema = json.loads(constraint.value or "{}")
        if not isinstance(schema, dict) or "properties" not in schema:
            name = names.get("constraint", str(ConstraintKind.JSON_SCHEMA))
            raise InvalidRequestError(
                f"This model takes a JSON schema of an object alone: '{name}' must have 'properties'.", param=name
            )
        return {"type": "json", "value": schema}
    if constraint.kind is ConstraintKind.CHOICE:
        # only what every regular expression dialect takes for an operator: some refuse to escape anything else
        choices = (_REGEX_CHARACTERS.sub(r"\\\1", choice) for choice in constraint.choices)
        return {"type": "regex", "value": f"({'|'.join(choices)})"}
    return {"type": "regex", "value": constraint.value or ""}


class _WireToken(BaseModel, defer_build=True):
    model_config = ConfigDict(allow_inf_nan=False)

    text: str
    logprob: float | None = None  # Rust writes an infinite number as null
    special: bool = False

    @property
    def score(self) -> float:
        return _MINUS_INFINITY if self.logprob is None else self.logprob


class _WireDetails(BaseModel, defer_build=True):
    finish_reason: str
    generated_tokens: TokenCount
    input_length: TokenCount | None = None
    # of a whole answer alone
    tokens: tuple[_WireToken, ...] = ()
    top_tokens: tuple[tuple[_WireToken, ...], ...] | None = None
    prefill: tuple[Any, ...] | None = None

    @property
    def reason(self) -> FinishReason:
        reason = _FINISH_REASONS.get(self.finish_reason)
        if reason is None:
            raise BackendError("The model gave up on its answer.", detail=f"finish_reason {self.finish_reason[:40]}")
        return reason


class _WireEvent(BaseModel, defer_build=True):
    token: _WireToken
    top_tokens: tuple[_WireToken, ...] | None = None
    generated_text: str | None = None
    details: _WireDetails | None = None


class _WireAnswer(BaseModel, defer_build=True):
    generated_text: str
    details: _WireDetails


_EVENT: Final[TypeAdapter[_WireEvent | Failure]] = TypeAdapter(_WireEvent | Failure, config=BUILT_WHEN_USED)
_ANSWER: Final[TypeAdapter[_WireAnswer | tuple[_WireAnswer] | Failure]] = TypeAdapter(
    _WireAnswer | tuple[_WireAnswer] | Failure, config=BUILT_WHEN_USED
)


class _StreamDecoder(StreamDecoder):
    """An event a token, and no ``[DONE]``: the event with the whole text is the last one."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._prompt_tokens = estimated_prompt_tokens(request.prompts)
        self._offsets = TokenOffsets()
        self._generated = 0
        self._done = False

    def decode(self, record: bytes) -> CompletionChunk | None:
        if record == DONE:  # not TGI's, but what a proxy in front of it may add
            return None
        event = _read(_EVENT, record)
        self._generated += 1
        details = event.details
        if event.generated_text is None:
            reason = None
            usage = Usage(self._prompt_tokens, self._generated, estimated=True)
        elif details is None:
            raise BackendError(_UNREADABLE, detail="a last event without details")
        else:
            self._done = True
            reason = details.reason
            usage = _usage(details.input_length, details.generated_tokens, self._prompt_tokens)
        ends = details is not None and details.finish_reason == "eos_token"
        kept = _is_kept(event.token, self._request, ends=ends)
        logprobs = _logprobs([(event.token, event.top_tokens or ())], self._request, self._offsets) if kept else None
        return CompletionChunk((ChoiceDelta(0, event.token.text if kept else "", logprobs, reason),), usage)

    def finish(self) -> None:
        if not self._done:
            raise TruncatedStreamError


class _WholeDecoder(StreamDecoder):
    """One document: a list of one answer, or the answer itself."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._done = False

    def decode(self, record: bytes) -> CompletionChunk | None:
        answer = _read(_ANSWER, record)
        if isinstance(answer, tuple):
            answer = answer[0]
        details = answer.details
        last = len(details.tokens) - 1
        tops = details.top_tokens or ((),) * len(details.tokens)
        if len(tops) != len(details.tokens):
            raise BackendError(_UNREADABLE, detail="token arrays of unequal length")
        kept = [
            (token, top)
            for number, (token, top) in enumerate(zip(details.tokens, tops, strict=True))
            if _is_kept(token, self._request, ends=number == last and details.finish_reason == "eos_token")
        ]
        text = answer.generated_text  # TGI leaves special tokens out of it
        if not self._request.skip_special_tokens and details.tokens:
            text = "".join(token.text for token, _ in kept)
        self._done = True
        usage = _usage(
            len(details.prefill or ()) or None, details.generated_tokens, estimated_prompt_tokens(self._request.prompts)
        )
        logprobs = _logprobs(kept, self._request, TokenOffsets())
        return CompletionChunk((ChoiceDelta(0, text, logprobs, details.reason),), usage)

    def finish(self) -> None:
        if not self._done:
            raise TruncatedStreamError


def _read(kind: TypeAdapter[Any], record: bytes) -> Any:
    """What ``record`` holds. Raises ``BackendError`` when it is of no such kind, and the error a failure stands for."""
    try:
        value = kind.validate_json(record)
    except ValidationError as error:
        raise BackendError(_UNREADABLE, detail=f"not a TGI record: {error.error_count()} faults") from None
    if isinstance(value, Failure):
        raise tgi_error(value.status, value.message)
    return value


def _is_kept(token: _WireToken, request: CompletionRequest, *, ends: bool) -> bool:
    """Whether a token's text is part of the answer: the one that ends it never is."""
    return not ends and not (token.special and request.skip_special_tokens)


def _usage(prompt_tokens: int | None, completion_tokens: int, estimate: int) -> Usage:
    if prompt_tokens is None:
        return Usage(estimate, completion_tokens, estimated=True)
    return Usage(prompt_tokens, completion_tokens)


def _logprobs(
    tokens: Iterable[tuple[_WireToken, Sequence[_WireToken]]], request: CompletionRequest, offsets: TokenOffsets
) -> Logprobs | None:
    """The arrays of ``tokens``, each with its alternatives; ``None`` unless the caller wants them."""
    pairs = list(tokens)
    if request.logprobs is None or not pairs:
        return None
    texts = tuple(token.text for token, _ in pairs)
    return Logprobs(
        tokens=texts,
        token_logprobs=tuple(token.score for token, _ in pairs),
        top_logprobs=tuple(_alternatives(token, tops, request.logprobs) for token, tops in pairs),
        text_offset=offsets.place(texts),
    )


def _alternatives(token: _WireToken, tops: Sequence[_WireToken], most: int) -> dict[str, float]:
    """The chosen token and the ``most`` likeliest; TGI names more of them where several are equally likely."""
    named = {token.text: token.score}
    for top in tops[:most]:
        named.setdefault(top.text, top.score)
    return named
