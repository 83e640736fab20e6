"""LMI (djl-serving) with its asynchronous vLLM handler, asked with the OpenAI body.

A body with ``prompt`` goes to vLLM's completion request whole, so everything is as on vLLM itself, but for the stream:
JSON lines in place of server-sent events, with nothing where ``[DONE]`` was. The last word of a stream is therefore the
usage record without choices, which is always asked for.
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
from completions.backends.completion_body import body_bytes, vllm_body
from completions.backends.completion_records import CompletionRecordDecoder
from completions.backends.lmi_container import (
    container_failure,
    failure_in_record,
    structured_outputs,
    version_faults,
)
from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionChunk, CompletionRequest
from completions.domain.errors import CompletionError, TruncatedStreamError

_EMULATED: Final = (Parameter.SUFFIX, Parameter.BEST_OF)
# vLLM reads an unknown key as nothing at all, so what it has no field for must be refused here.
_REFUSED: Final = (Parameter.BEAM,)
_ABILITIES: Final = Abilities(
    capabilities=MappingProxyType(
        dict.fromkeys(Parameter, Capability.HONOURED)
        | dict.fromkeys(_EMULATED, Capability.EMULATED)
        | dict.fromkeys(_REFUSED, Capability.REFUSED)
    ),
    max_stops=4,  # vLLM's, from 0.33 on; earlier versions take any number
)


class LmiCodec(Codec):
    """See the module. ``family_version`` is LMI's own: ``"18.0"``, not djl-serving's ``"0.36.0"``."""

    def abilities(self, route: ModelRoute) -> Abilities:
        return route_abilities(_ABILITIES, route)

    def route_faults(self, route: ModelRoute) -> Sequence[RouteFault]:
        return [*override_faults(_ABILITIES.capabilities, route), *version_faults(route)]

    def encode(self, request: CompletionRequest, route: ModelRoute, options: EncodeOptions) -> Invocation:
        body = vllm_body(request, route, model=route.served_model, structured_outputs=structured_outputs(route))
        if options.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if route.adapter is not None:
            body["adapters"] = route.adapter
        if options.cache_salt is not None:
            body["cache_salt"] = options.cache_salt
        return Invocation(
            body_bytes(body),
            # the handler answers so by the body's ``stream`` alone; this only says what is expected
            accept="application/jsonlines" if options.streamed else "application/json",
            custom_attributes=route.custom_attributes,
        )

    def decoder(self, request: CompletionRequest, *, whole: bool = False) -> StreamDecoder:
        return _LmiRecordDecoder(request, whole=whole)

    def decode_error(self, status: int, body: str) -> CompletionError:
        return container_failure(status, body)


class _LmiRecordDecoder(StreamDecoder):
    """vLLM's records, but for the end of a stream and for LMI's own words about a failure."""

    def __init__(self, request: CompletionRequest, *, whole: bool) -> None:
        self._records = CompletionRecordDecoder(request, whole=whole)
        self._whole = whole
        self._ended = False

    def decode(self, record: bytes) -> CompletionChunk | None:
        try:
            chunk = self._records.decode(record)
        except CompletionError as error:
            raise failure_in_record(record) or error from None
        if chunk is not None and (self._whole or (chunk.usage is not None and not chunk.choices)):
            self._ended = True
        return chunk

    def finish(self) -> None:
        if not self._ended:
            raise TruncatedStreamError
