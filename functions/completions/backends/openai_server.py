"""Any other server of OpenAI's completions: SGLang behind a proxy, shims around NIM, llama.cpp.

By default a route is asked in OpenAI's documented fields alone, since such servers read an unknown key as nothing at
all. What this one reads beyond them, under vLLM's names, its registry entry declares as ``honoured``; what it lacks, as
``emulated`` or ``refused``. llama.cpp's server, for one: ``n``, ``prompt_batch`` and ``echo`` emulated;
``token_prompt``, ``ignore_eos``, ``top_k`` and ``min_p`` honoured, and the last two always, since its own defaults cut
the distribution. It reads no other of the optional ones.

An answer is complete at ``[DONE]``; without it, once all choices have their finish reasons and the usage was told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from completions.backends.codec import (
    Codec,
    EncodeOptions,
    Invocation,
    RouteFault,
    StreamDecoder,
    override_faults,
    route_abilities,
)
from completions.backends.completion_body import SMALLEST_TOP_P, body_bytes, prompt_value
from completions.backends.completion_records import CompletionRecordDecoder, WireError, error_in_body, failure_error
from completions.backends.estimated_usage import EstimatingDecoder
from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import ChoiceDelta, CompletionChunk, CompletionRequest, ConstraintKind
from completions.domain.errors import CompletionError, ContextLengthError, InvalidRequestError

OPTIONAL: Final = frozenset(
    {
        Parameter.TOP_K,
        Parameter.MIN_P,
        Parameter.REPETITION_PENALTY,
        Parameter.STOP_TOKEN_IDS,
        Parameter.MIN_TOKENS,
        Parameter.IGNORE_EOS,
        Parameter.SKIP_SPECIAL_TOKENS,
        Parameter.INCLUDE_STOP,
        Parameter.TOKEN_PROMPT,
        Parameter.JSON_OBJECT,
        Parameter.JSON_SCHEMA,
    }
)
"""What a route may declare as honoured beyond OpenAI's own fields."""

_HONOURED: Final = (
    Parameter.PROMPT_BATCH,
    Parameter.ECHO,
    Parameter.LOGPROBS,
    Parameter.N,
    Parameter.STOP,
    Parameter.TEMPERATURE,
    Parameter.TOP_P,
    Parameter.SEED,
    Parameter.PRESENCE_PENALTY,
    Parameter.FREQUENCY_PENALTY,
    Parameter.LOGIT_BIAS,
)
_EMULATED: Final = (Parameter.SUFFIX, Parameter.BEST_OF)
_ABILITIES: Final = Abilities(
    capabilities=MappingProxyType(
        dict.fromkeys(Parameter, Capability.REFUSED)
        | dict.fromkeys(_HONOURED, Capability.HONOURED)
        | dict.fromkeys(_EMULATED, Capability.EMULATED)
    ),
    max_stops=4,  # OpenAI's own limits
    max_logprobs=5,
)
_LOW_BITS: Final = 2**32 - 1
_LONGEST_RULE: Final = 300
"""Characters of a refusal that are passed on. A rule is short; a longer message quotes something."""


class OpenAIServerCodec(Codec):
    """See the module. OpenAI has no word for a prefix-cache salt, so tenants share the server's cache."""

    def abilities(self, route: ModelRoute) -> Abilities:
        abilities = route_abilities(_ABILITIES, route)
        if abilities.capabilities[Parameter.LOGPROBS] is not Capability.REFUSED:
            return abilities
        # candidates are ranked by their log-probabilities
        return replace(abilities, capabilities={**abilities.capabilities, Parameter.BEST_OF: Capability.REFUSED})

    def route_faults(self, route: ModelRoute) -> Sequence[RouteFault]:
        return override_faults(_ABILITIES.capabilities, route, OPTIONAL)

    def encode(self, request: CompletionRequest, route: ModelRoute, options: EncodeOptions) -> Invocation:
        body: dict[str, Any] = {"prompt": prompt_value(request.prompts, route)}  # first: SageMaker compares prefixes
        model = route.adapter or route.served_model
        if model is not None:
            body["model"] = model
        body |= {
            "max_tokens": request.max_tokens,
            **_sampling_values(request, self.abilities(route).capabilities),
            **_output_values(request),
        }
        if options.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Invocation(body_bytes(body), custom_attributes=route.custom_attributes)

    def decoder(self, request: CompletionRequest, *, whole: bool = False) -> StreamDecoder:
        records = CompletionRecordDecoder(request, whole=whole, failure=_failure)
        named = _AlternativesDecoder(records, request)
        return EstimatingDecoder(named, request, whole=whole, usage_ends=True)

    def decode_error(self, status: int, body: str) -> CompletionError:
        return _failure(status, error_in_body(body))


def _sampling_values(request: CompletionRequest, capabilities: Mapping[Parameter, Capability]) -> dict[str, Any]:
    """OpenAI's fields always, since a server's defaults may differ from OpenAI's; for the same reason those of the
    optional ones that a route declares."""
    sampling = request.sampling
    values: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or SMALLEST_TOP_P,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    declared = {
        Parameter.TOP_K: ("top_k", -1 if sampling.top_k is None else sampling.top_k),
        Parameter.MIN_P: ("min_p", sampling.min_p),
        Parameter.REPETITION_PENALTY: ("repetition_penalty", sampling.repetition_penalty),
    }
    for parameter, (name, value) in declared.items():
        if capabilities[parameter] is Capability.HONOURED:
            values[name] = value
    used: dict[str, Any] = {
        "seed": None if sampling.seed is None else _seed(sampling.seed),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "min_tokens": sampling.min_tokens or None,
        "ignore_eos": sampling.ignore_eos or None,
        "stop_token_ids": sampling.stop_token_ids or None,
    }
    return values | {name: value for name, value in used.items() if value is not None}


def _seed(seed: int) -> int:
    """llama.cpp keeps 32 bits of a seed and takes all ones, as of -1, for none; the seed beside it repeats itself."""
    return seed ^ 1 if seed & _LOW_BITS == _LOW_BITS else seed


def _output_values(request: CompletionRequest) -> dict[str, Any]:
    """What is sent only when it is used."""
    values: dict[str, Any] = {
        "n": request.n if request.n > 1 else None,
        "echo": request.echo or None,
        # to llama.cpp 0 means none at all, so the chosen token comes with one alternative, which is left out again
        "logprobs": None if request.logprobs is None else max(request.logprobs, 1),
        "stop": request.stop or None,
        "include_stop_str_in_output": request.include_stop or None,
        "skip_special_tokens": None if request.skip_special_tokens else False,
        "response_format": _response_format(request),
    }
    return {name: value for name, value in values.items() if value is not None}


def _response_format(request: CompletionRequest) -> dict[str, Any] | None:
    constraint = request.constraint
    if constraint is None:
        return None
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"type": "json_object"}
    schema = json.loads(constraint.value or "{}")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


class _AlternativesDecoder(StreamDecoder):
    """``decoder``'s chunks; each token's alternatives name the chosen one, and nothing else when none was asked for."""

    def __init__(self, decoder: StreamDecoder, request: CompletionRequest) -> None:
        self._decoder = decoder
        self._most = request.logprobs

    def decode(self, record: bytes) -> CompletionChunk | None:
        chunk = self._decoder.decode(record)
        if chunk is None:
            return None
        return replace(chunk, choices=tuple(self._named(delta) for delta in chunk.choices))

    def finish(self) -> None:
        self._decoder.finish()

    def _named(self, delta: ChoiceDelta) -> ChoiceDelta:
        logprobs = delta.logprobs
        if logprobs is None or self._most is None:  # some servers send them unasked
            return replace(delta, logprobs=None)
        rows = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
        return replace(delta, logprobs=replace(logprobs, top_logprobs=tuple(self._row(*row) for row in rows)))

    def _row(self, token: str, value: float | None, top: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if value is None:  # the first token of an echoed prompt
            return None
        return {token: value, **((top or {}) if self._most else {})}


def _failure(status: int, failure: WireError) -> CompletionError:
    if failure.type == "exceed_context_size_error":  # llama.cpp's
        return ContextLengthError("The prompt is longer than this model's maximum context length.", param="prompt")
    error = failure_error(status, failure)
    if type(error) is InvalidRequestError and "context length" in error.message:
        return ContextLengthError(error.message, param="prompt")
    if type(error) is InvalidRequestError and len(error.message) > _LONGEST_RULE:
        return failure_error(status, WireError())
    return error
