"""What a container family must be able to say: request to bytes, record to chunk, failure to error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionChunk, CompletionRequest
from completions.domain.errors import CompletionError

EMULATABLE: Final = frozenset(
    {
        Parameter.SUFFIX,
        Parameter.ECHO,
        Parameter.N,
        Parameter.BEST_OF,
        Parameter.PROMPT_BATCH,
        Parameter.STOP,
        Parameter.INCLUDE_STOP,
    }
)
"""What the service can do in a container's place, whatever the family."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """What goes to ``/invocations``: the body, its media types, and the attributes header if the family uses one."""

    body: bytes
    content_type: str = "application/json"
    accept: str = "application/json"
    custom_attributes: str | None = None


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """What a request does not say. ``cache_salt`` keeps this tenant's prompts apart in the container's prefix cache;
    an answer that is not ``streamed`` comes as one document, as asynchronous endpoints give it."""

    cache_salt: str | None = None
    streamed: bool = True


@dataclass(frozen=True, slots=True)
class RouteFault:
    """Why a family cannot serve a route as its registry entry has it; ``field`` is ``ModelRoute``'s."""

    field: str
    message: str


class StreamDecoder(Protocol):
    """Stateful for one answer: records in, canonical chunks out."""

    def decode(self, record: bytes) -> CompletionChunk | None:
        """The chunk a record holds, ``None`` for one without content. Raises the error a failure record stands for."""
        ...

    def finish(self) -> None:
        """Called at the end of the bytes. Raises ``TruncatedStreamError`` unless the terminal record was seen."""
        ...


class Codec(Protocol):
    """One container family's wire format. Pure: no clients, no clocks."""

    def abilities(self, route: ModelRoute) -> Abilities:
        """What the family can do on this route, the route's own overrides and limits included."""
        ...

    def route_faults(self, route: ModelRoute) -> Sequence[RouteFault]:
        """What of ``route`` this family cannot carry out; empty when it can be served."""
        ...

    def encode(self, request: CompletionRequest, route: ModelRoute, options: EncodeOptions) -> Invocation:
        """The call that asks for ``request``, usage included. ``request`` uses nothing the abilities do not honour.

        Raises ``InvalidRequestError`` for a value the container's wire format has no room for.
        """
        ...

    def decoder(self, request: CompletionRequest, *, whole: bool = False) -> StreamDecoder:
        """A fresh decoder for one answer. A ``whole`` answer is one record, the container's unstreamed document."""
        ...

    def decode_error(self, status: int, body: str) -> CompletionError:
        """What the container meant by an HTTP failure. ``body`` may be cut off (SageMaker keeps 2048 characters)."""
        ...


def route_abilities(family: Abilities, route: ModelRoute) -> Abilities:
    """The family's abilities with the route's overrides, and the smaller of their limits."""
    return Abilities(
        capabilities={**family.capabilities, **route.capabilities},
        max_stops=_smaller(family.max_stops, route.limits.stops),
        max_logprobs=_smaller(family.max_logprobs, route.limits.logprobs),
    )


def override_faults(
    family: Mapping[Parameter, Capability], route: ModelRoute, optional: frozenset[Parameter] = frozenset()
) -> list[RouteFault]:
    """Overrides that would lose a parameter: honoured where the family never sends it, unless it is ``optional``, or
    emulated where nobody emulates it."""
    faults = []
    for parameter, capability in route.capabilities.items():
        own = family[parameter]
        if capability is Capability.HONOURED and own is not Capability.HONOURED and parameter not in optional:
            faults.append(RouteFault("capabilities", f"{parameter} cannot be honoured: the family has it {own}"))
        if capability is Capability.EMULATED and own is not Capability.EMULATED and parameter not in EMULATABLE:
            faults.append(RouteFault("capabilities", f"{parameter} cannot be emulated: it has to be {own} or refused"))
    capabilities = {**family, **route.capabilities}
    promised = route.capabilities.get(Parameter.BEST_OF, Capability.REFUSED) is not Capability.REFUSED
    if promised and capabilities[Parameter.LOGPROBS] is Capability.REFUSED:
        faults.append(RouteFault("capabilities", "best_of ranks by logprobs, which are refused"))
    return faults


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)
