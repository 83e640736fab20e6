"""What a catalogue's entries must agree on: with themselves, with their codec, and with each other.

Names are looked at in the raw data, so that an entry that is wrong elsewhere still counts as a model that exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final

from completions.backends.codec import EncodeOptions
from completions.backends.families import CODECS
from completions.backends.sagemaker_async import LONGEST_WAIT_SECONDS
from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionRequest
from completions.domain.errors import CompletionError
from completions_cli.catalogue_file import ModelEntry
from completions_cli.catalogue_yaml import Place

_EMULATED_HERE: Final = frozenset(
    {
        Parameter.PROMPT_BATCH,
        Parameter.SUFFIX,
        Parameter.ECHO,
        Parameter.N,
        Parameter.BEST_OF,
        Parameter.STOP,
        Parameter.INCLUDE_STOP,
    }
)
"""What the service can do in a container's place."""
_MAX_ATTRIBUTES: Final = 1024
_FILE_NAMES: Final = {"model_id": "id", "endpoint_name": "endpoint"}


@dataclass(frozen=True, slots=True)
class EntryFault:
    """``place`` is within the entry; ``concerns`` are all the keys that make it a fault."""

    place: Place
    message: str
    concerns: frozenset[str]


@dataclass(frozen=True, slots=True)
class NameFault:
    """``{line}`` in the message is the line of ``other``."""

    place: Place
    message: str
    other: Place = ()


def entry_faults(entry: ModelEntry) -> Iterator[EntryFault]:
    """What contradicts itself in one entry."""
    if entry.inference_component is not None and entry.target_variant is not None:
        yield _fault("target_variant", "cannot be combined with inference_component", "inference_component")
    if entry.asynchronous and entry.wait_for_start:
        yield _fault("wait_for_start", "means nothing on an asynchronous endpoint, which queues", "asynchronous")
    for field in ("inference_component", "target_variant"):
        if entry.asynchronous and getattr(entry, field) is not None:
            yield _fault(field, "means nothing to an asynchronous endpoint", "asynchronous")
    if entry.asynchronous and (entry.timeout_seconds or 0) > LONGEST_WAIT_SECONDS:
        message = f"is more than the {LONGEST_WAIT_SECONDS:.0f} s an asynchronous answer is waited for"
        yield _fault("timeout_seconds", message, "asynchronous")
    most = entry.limits.output_tokens
    if most is not None and most > entry.context_length:
        message = f"is more than the context_length of {entry.context_length}"
        yield EntryFault(("limits", "output_tokens"), message, frozenset({"limits", "context_length"}))
    yield from _codec_faults(entry.to_route())


def name_faults(models: Sequence[object]) -> Iterator[NameFault]:
    """Ids and aliases that mean two models, and fallbacks that lead nowhere or back."""
    entries = {index: entry for index, entry in enumerate(models) if isinstance(entry, dict)}
    ids: dict[str, Place] = {}
    for index, entry in entries.items():
        name = entry.get("id")
        place: Place = ("models", index, "id")
        if isinstance(name, str) and ids.setdefault(name, place) != place:
            yield NameFault(place, f"'{_short(name)}' is already the id of the model on line {{line}}", ids[name])
    aliases: dict[str, Place] = {}
    for index, entry in entries.items():
        for position, name in _texts(entry, "aliases"):
            place = ("models", index, "aliases", position)
            if name in ids:
                own = ids[name][1] == index
                whose = "of this model" if own else "of the model on line {line}"
                yield NameFault(place, f"'{_short(name)}' is the id {whose}", ids[name])
            elif aliases.setdefault(name, place) != place:
                yield NameFault(place, f"'{_short(name)}' is already an alias on line {{line}}", aliases[name])
    yield from _fallback_faults(entries, ids, aliases)


def _fallback_faults(
    entries: Mapping[int, Mapping[str, Any]], ids: Mapping[str, Place], aliases: Mapping[str, Place]
) -> Iterator[NameFault]:
    for index, entry in entries.items():
        known: set[str] = set()
        for position, name in _texts(entry, "fallbacks"):
            place = ("models", index, "fallbacks", position)
            if name in known:
                yield NameFault(place, f"'{_short(name)}' stands twice")
            elif name in ids:
                if name == entry.get("id"):
                    yield NameFault(place, "the model falls back to itself")
            elif name in aliases:
                meant = entries[int(aliases[name][1])].get("id")
                yield NameFault(place, f"'{_short(name)}' is an alias; name the model by its id, '{meant}'")
            else:
                nearest = get_close_matches(name, ids, n=1)
                hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
                yield NameFault(place, f"there is no model '{_short(name)}' in this file{hint}")
            known.add(name)
    yield from _circles(entries)


def _circles(entries: Mapping[int, Mapping[str, Any]]) -> Iterator[NameFault]:
    """Each circle at the fallback that closes it."""
    open_ended: dict[str, list[str]] = {}
    for index, entry in entries.items():
        model = entry.get("id")
        if not isinstance(model, str):
            continue
        for position, name in _texts(entry, "fallbacks"):
            back = _way(open_ended, name, model) if name != model else None
            if back is None:
                open_ended.setdefault(model, []).append(name)
            else:
                circle = " → ".join((model, *back))
                yield NameFault(("models", index, "fallbacks", position), f"fallbacks run in a circle: {circle}")


def _way(edges: Mapping[str, Sequence[str]], start: str, end: str) -> list[str] | None:
    """The models from ``start`` to ``end``, both included."""
    came_from: dict[str, str | None] = {start: None}
    waiting = [start]
    while waiting:
        model = waiting.pop()
        if model == end:
            way = [model]
            while (before := came_from[way[-1]]) is not None:
                way.append(before)
            return way[::-1]
        fresh = [name for name in edges.get(model, ()) if name not in came_from]
        came_from |= dict.fromkeys(fresh, model)
        waiting += fresh
    return None


def _codec_faults(route: ModelRoute) -> Iterator[EntryFault]:
    """What the family's codec cannot carry out, override by override so that each has its own line."""
    codec = CODECS[route.family]
    plain = replace(route, capabilities={})
    family = codec.abilities(plain).capabilities
    told: set[str] = set()
    for fault in codec.route_faults(plain):
        yield _fault(_FILE_NAMES.get(fault.field, fault.field), fault.message, "family")
    for parameter, capability in route.capabilities.items():
        place = ("capabilities", str(parameter))
        concerns = frozenset({"capabilities", "family"})
        known = [fault.message for fault in codec.route_faults(plain)]
        faults = codec.route_faults(replace(route, capabilities={parameter: capability}))
        messages = [fault.message for fault in faults if fault.message not in known]
        emulated = parameter in _EMULATED_HERE or family[parameter] is Capability.EMULATED
        if capability is Capability.EMULATED and not emulated:
            messages = ["cannot be emulated: the service has no way to do it in the container's place"]
        if capability is Capability.HONOURED and family[parameter] is Capability.EMULATED:
            messages = [f"cannot be honoured: family '{route.family}' never sends it to the container"]
        told |= set(messages)
        yield from (EntryFault(place, message, concerns) for message in messages)
    together = {fault.message for fault in codec.route_faults(route) if fault.field == "capabilities"}
    alone = {
        fault.message
        for parameter, capability in route.capabilities.items()
        for fault in codec.route_faults(replace(route, capabilities={parameter: capability}))
    }
    for message in sorted(together - alone - told):  # what only several of them do together
        yield _fault("capabilities", message, "family")
    yield from _attribute_faults(plain)


def _attribute_faults(route: ModelRoute) -> Iterator[EntryFault]:
    """The family may add to the operator's attributes, and the header is limited."""
    if route.custom_attributes is None:
        return
    if "route=" in route.custom_attributes:
        yield _fault("custom_attributes", "cannot choose the container's route: the family does", "family")
    try:
        request = CompletionRequest(route.model_id, ("x",), max_tokens=1)
        sent = CODECS[route.family].encode(request, route, EncodeOptions()).custom_attributes or ""
    except CompletionError:
        return
    if len(sent) > _MAX_ATTRIBUTES:
        message = f"is {len(sent)} characters with what the family adds; SageMaker's header holds {_MAX_ATTRIBUTES}"
        yield _fault("custom_attributes", message, "family")


def _fault(field: str, message: str, *others: str) -> EntryFault:
    return EntryFault((field,), message, frozenset({field, *others}))


def _texts(entry: Mapping[str, Any], field: str) -> list[tuple[int, str]]:
    """The texts of a list and where they stand; what else may be there is a problem told elsewhere."""
    values = entry.get(field)
    return (
        [(at, value) for at, value in enumerate(values) if isinstance(value, str)] if isinstance(values, list) else []
    )


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."
