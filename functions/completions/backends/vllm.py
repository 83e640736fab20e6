"""vLLM, as the AWS and Hugging Face vLLM images serve it on SageMaker.

The attributes header ``route=/v1/completions`` reaches the real route, whose error messages and ``model`` field
survive; images without that middleware ignore it and answer on ``/invocations``, where a ``model`` means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from completions.backends.codec import (
    Codec,
    EncodeOptions,
    Invocation,
    RouteFault,
    StreamDecoder,
    override_faults,
    route_abilities,
)
from completions.backends.completion_body import body_bytes, version_numbers, vllm_body
from completions.backends.completion_records import CompletionRecordDecoder, error_in_body, failure_error
from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionRequest
from completions.domain.errors import CompletionError

ROUTE_ATTRIBUTE: Final = "route=/v1/completions"

_EMULATED: Final = (Parameter.SUFFIX, Parameter.BEST_OF)
# vLLM reads an unknown key as nothing at all, so what it has no field for must be refused here.
_REFUSED: Final = (Parameter.BEAM,)
_ABILITIES: Final = Abilities(
    capabilities=MappingProxyType(
        dict.fromkeys(Parameter, Capability.HONOURED)
        | dict.fromkeys(_EMULATED, Capability.EMULATED)
        | dict.fromkeys(_REFUSED, Capability.REFUSED)
    ),
    max_stops=4,  # from 0.33 on; earlier versions take any number
)
_STRUCTURED_OUTPUTS_SINCE: Final = (0, 12)


class VllmCodec(Codec):
    """See the module. Without ``routed`` the attributes header is left out: the plain ``/invocations``."""

    def __init__(self, *, routed: bool = True) -> None:
        self._routed = routed

    def abilities(self, route: ModelRoute) -> Abilities:
        return route_abilities(_ABILITIES, route)

    def route_faults(self, route: ModelRoute) -> Sequence[RouteFault]:
        faults = override_faults(_ABILITIES.capabilities, route)
        if not self._routed:
            faults += [
                RouteFault(field, "/invocations reads no model name; use the adapter's own inference component")
                for field in ("adapter", "served_model")
                if getattr(route, field) is not None
            ]
        return faults

    def encode(self, request: CompletionRequest, route: ModelRoute, options: EncodeOptions) -> Invocation:
        version = route.family_version
        body = vllm_body(
            request,
            route,
            model=route.adapter or route.served_model,
            # an undeclared version is taken for a new one
            structured_outputs=version is None or version_numbers(version) >= _STRUCTURED_OUTPUTS_SINCE,
        )
        if options.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if options.cache_salt is not None:
            body["cache_salt"] = options.cache_salt
        return Invocation(body_bytes(body), custom_attributes=self._attributes(route))

    def decoder(self, request: CompletionRequest, *, whole: bool = False) -> StreamDecoder:
        return CompletionRecordDecoder(request, whole=whole)

    def decode_error(self, status: int, body: str) -> CompletionError:
        return failure_error(status, error_in_body(body))

    def _attributes(self, route: ModelRoute) -> str | None:
        own = (route.custom_attributes,) if route.custom_attributes is not None else ()
        if not self._routed or any("route=" in attributes for attributes in own):
            return ",".join(own) or None
        return ",".join((*own, ROUTE_ATTRIBUTE))
