"""TGI with the OpenAI completions body: usage from the container, no token details.

Transcribes TGI 3.3's ``completions`` (``router/src/server.rs``). It reads few of OpenAI's fields, refuses ``suffix``,
and takes any model name but its own for an adapter's. Stop texts stay in the answer, so they are cut here; the last
chunk of an answer carries its usage. Special tokens come as text and without a mark; those that may stand inside an
answer belong into the route's ``stop_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from completions.backends.completion_body import body_bytes, prompt_value
from completions.backends.completion_records import CompletionRecordDecoder, WireError
from completions.backends.estimated_usage import EstimatingDecoder
from completions.backends.tgi_rules import MAX_STOPS, failure_in_body, nucleus_values, seed_values, tgi_error
from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionRequest
from completions.domain.errors import CompletionError

_BASE_MODEL: Final = "tgi"
_HONOURED: Final = (
    Parameter.TEMPERATURE,
    Parameter.TOP_P,
    Parameter.SEED,
    Parameter.FREQUENCY_PENALTY,
    Parameter.REPETITION_PENALTY,
)
_EMULATED: Final = (
    Parameter.N,
    Parameter.PROMPT_BATCH,  # TGI takes four prompts at most
    Parameter.ECHO,
    Parameter.SUFFIX,
    Parameter.STOP,
    Parameter.INCLUDE_STOP,
)
# TGI reads an unknown key as nothing at all, so everything else must be refused here; that includes best_of, whose
# candidates are ranked by log-probabilities
_ABILITIES: Final = Abilities(
    capabilities=MappingProxyType(
        dict.fromkeys(Parameter, Capability.REFUSED)
        | dict.fromkeys(_HONOURED, Capability.HONOURED)
        | dict.fromkeys(_EMULATED, Capability.EMULATED)
    ),
    max_stops=MAX_STOPS,
)


class TgiOpenAICodec(Codec):
    """See the module. TGI has no word for a prefix-cache salt, so tenants share its prefix cache."""

    def abilities(self, route: ModelRoute) -> Abilities:
        return route_abilities(_ABILITIES, route)

    def route_faults(self, route: ModelRoute) -> Sequence[RouteFault]:
        faults = override_faults(_ABILITIES.capabilities, route)
        if route.served_model not in (None, _BASE_MODEL):
            faults.append(
                RouteFault("served_model", f"TGI takes any name but {_BASE_MODEL!r} for an adapter; use 'adapter'")
            )
        return faults

    def encode(self, request: CompletionRequest, route: ModelRoute, options: EncodeOptions) -> Invocation:
        body: dict[str, Any] = {
            "prompt": prompt_value(request.prompts, route),  # first: SageMaker compares prefixes
            "model": route.adapter or _BASE_MODEL,
            "max_tokens": request.max_tokens,
            **_sampling_values(request),
        }
        if request.stop:
            body["stop"] = request.stop[:MAX_STOPS]  # the rest is cut here, as all of them are
        if options.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Invocation(body_bytes(body), custom_attributes=route.custom_attributes)

    def decoder(self, request: CompletionRequest, *, whole: bool = False) -> StreamDecoder:
        records = CompletionRecordDecoder(request, whole=whole, failure=_failure)
        return EstimatingDecoder(records, request, whole=whole)

    def decode_error(self, status: int, body: str) -> CompletionError:
        return failure_in_body(status, body)


def _sampling_values(request: CompletionRequest) -> dict[str, Any]:
    """Temperature 0 is greedy here, unless ``top_p`` has TGI sample after all."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        **(nucleus_values(sampling) if sampling.temperature > 0 else {}),
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **seed_values(sampling),
    }


def _failure(status: int, failure: WireError) -> CompletionError:
    return tgi_error(status, failure.message)
