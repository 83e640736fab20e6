"""What is sent for a request: one call, or the several that stand in for what the container has no word for.

A container that returns one choice at a time is asked once a candidate; one that takes a single prompt is asked once a
prompt. The choices of all calls are numbered as the caller would see them from one: prompt * candidates + candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionChunk, CompletionRequest
from completions.domain.errors import InvalidRequestError, ModelNotFoundError
from completions.domain.metering import Principal
from completions.domain.ports import Registry
from completions.service.answer import known_choices
from completions.service.echo import with_echo
from completions.service.infill import infill_stops, with_infill
from completions.service.parameters import check_parameters
from completions.service.stops import cut_at_stops

MOST_CALLS = 128
"""Calls one request may become; a container that is asked this often for one answer has better things to do."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call. ``choices`` gives the caller's number of each choice the container returns, ``prompts`` the number of
    each prompt it is sent."""

    request: CompletionRequest
    choices: tuple[int, ...]
    prompts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How ``route`` is asked. ``request`` is what all calls together ask for, ``cut`` the stop texts we look for
    ourselves, ``echoed`` whether the prompt is put in front here, ``ranked`` whether candidates are chosen here."""

    route: ModelRoute
    request: CompletionRequest
    calls: tuple[PlannedCall, ...]
    cut: tuple[str, ...]
    echoed: bool = False
    ranked: bool = False

    def pipeline(self, chunks: Iterable[CompletionChunk]) -> Iterator[CompletionChunk]:
        """The container's chunks as the caller gets them."""
        known = known_choices(chunks, self.request.choice_count)
        cut = cut_at_stops(known, self.cut, self.request) if self.cut else known
        return with_echo(cut, self.request) if self.echoed else cut


def chosen_route(registry: Registry, request: CompletionRequest, principal: Principal) -> ModelRoute:
    """The first reading of the request's model that there is and that the key may use.

    Raises ``ModelNotFoundError``.
    """
    for name in (request.model, *request.other_models):
        route = registry.route(name)
        if route is not None and principal.may_use(route.model_id):
            return route
    raise ModelNotFoundError(
        f"The model '{request.model[:200]}' does not exist or this key has no access to it.",
        param=request.param_names.get("model", "model"),
        code="model_not_found",
    )


def planned(request: CompletionRequest, route: ModelRoute, abilities: Abilities) -> Plan:
    """The plan for ``route``. Raises ``InvalidRequestError`` for what it can neither honour nor emulate."""
    check_parameters(request, route, abilities)
    capabilities = abilities.capabilities
    ranking = Capability.EMULATED in (capabilities[Parameter.BEST_OF], capabilities[Parameter.N])
    ranked = request.best_of > request.n and ranking
    echoed = request.echo and capabilities[Parameter.ECHO] is Capability.EMULATED
    unheard = request.stop if capabilities[Parameter.STOP] is Capability.EMULATED else ()
    told = abilities.max_stops
    untold = () if told is None else request.stop[told:]
    cut = dict.fromkeys((*unheard, *untold, *infill_stops(request, route), *route.stop_tokens))
    sent = with_infill(request, route)
    if untold:
        sent = replace(sent, stop=request.stop[:told])
    if ranked:
        sent = replace(sent, n=request.best_of, logprobs=request.logprobs or 0)
    if echoed:
        sent = replace(sent, echo=False)
    return Plan(route, sent, _calls(sent, abilities), tuple(cut), echoed, ranked)


def _calls(request: CompletionRequest, abilities: Abilities) -> tuple[PlannedCall, ...]:
    count = len(request.prompts)
    batches = [tuple(range(count))]
    if count > 1 and abilities.capabilities[Parameter.PROMPT_BATCH] is Capability.EMULATED:
        batches = [(number,) for number in range(count)]
    one_by_one = request.n > 1 and abilities.capabilities[Parameter.N] is Capability.EMULATED
    calls = len(batches) * (request.n if one_by_one else 1)
    if calls > MOST_CALLS:
        names = request.param_names
        raise InvalidRequestError(
            f"This model is asked once for each choice, and {calls} times is too often; at most {MOST_CALLS}.",
            param=names.get("n", "n") if one_by_one else names.get("prompts", "prompt"),
        )
    if not one_by_one:
        return tuple(_call(request, batch, range(request.n)) for batch in batches)
    return tuple(_call(request, batch, range(number, number + 1)) for batch in batches for number in range(request.n))


def _call(request: CompletionRequest, batch: tuple[int, ...], candidates: range) -> PlannedCall:
    if len(batch) == len(request.prompts) and len(candidates) == request.n:  # the whole of it
        return PlannedCall(request, tuple(range(request.choice_count)), batch)
    sampling = request.sampling
    if sampling.seed is not None and candidates.start > 0:
        sampling = replace(sampling, seed=_int64(sampling.seed + candidates.start))
    return PlannedCall(
        request=replace(
            request,
            prompts=tuple(request.prompts[number] for number in batch),
            n=len(candidates),
            best_of=request.best_of if len(candidates) == request.n else len(candidates),
            sampling=sampling,
        ),
        choices=tuple(number * request.n + candidate for number in batch for candidate in candidates),
        prompts=batch,
    )


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
