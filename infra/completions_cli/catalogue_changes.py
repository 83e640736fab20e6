"""What applying a catalogue would change in the registry table: a diff to read, and the items to write and delete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from completions.domain.catalog import ModelRoute
from completions_cli.catalogue_file import entry_values


class ChangeKind(StrEnum):
    """What happens to a model."""

    ADDED = "+"
    CHANGED = "~"
    REMOVED = "-"


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One key of an entry, in JSON's types; ``None`` is unset."""

    name: str
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class ModelChange:
    """One model's difference. ``note`` says what ``fields`` cannot."""

    kind: ChangeKind
    model_id: str
    fields: tuple[FieldChange, ...] = ()
    note: str | None = None


@dataclass(frozen=True, slots=True)
class CatalogueChanges:
    """``puts`` and ``deletes`` are by item name, an id or an alias; no name is in both. ``kept`` are the models that
    only the table has. ``conflicts`` are reasons not to apply at all."""

    changes: tuple[ModelChange, ...] = ()
    puts: Mapping[str, ModelRoute] = field(default_factory=dict)
    deletes: frozenset[str] = frozenset()
    kept: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()


def catalogue_changes(
    wanted: Sequence[ModelRoute], table: Mapping[str, ModelRoute | None], *, prune: bool
) -> CatalogueChanges:
    """From ``table``, its items by name (``None`` for one that cannot be read), to the models that are ``wanted``.

    A model that is not wanted stays unless ``prune``, but gives up the aliases that a wanted model has.
    """
    names = {name: route for route in wanted for name in (route.model_id, *route.aliases)}
    wanted_ids = {route.model_id for route in wanted}
    others = _owned({name: route for name, route in table.items() if _owner(name, route) not in wanted_ids})
    puts = {name: route for name, route in names.items() if table.get(name) != route}
    deletes = {name for name, route in table.items() if _owner(name, route) in wanted_ids and name not in names}
    changes = [change for route in wanted if (change := _wanted_change(route, table, puts, deletes)) is not None]
    kept: list[str] = []
    conflicts: list[str] = []
    for model_id, items in sorted(others.items()):
        free = [name for name in items if name not in names]
        if prune:
            changes.append(ModelChange(ChangeKind.REMOVED, model_id))
            deletes |= set(free)
        elif model_id in names:
            if items.get(model_id) is not None:
                conflicts.append(
                    f"'{model_id}' is an alias of '{names[model_id].model_id}' in the file and a model's id in the "
                    "table; --prune would remove that model"
                )
        else:
            kept.append(model_id)
            for name, lessened in _lessened(items, names):
                puts[name] = lessened
                if name == model_id:
                    old, new = items[name], lessened
                    changes.append(ModelChange(ChangeKind.CHANGED, model_id, _field_changes(old, new)))
    return CatalogueChanges(tuple(changes), puts, frozenset(deletes), tuple(kept), tuple(conflicts))


def _wanted_change(
    route: ModelRoute, table: Mapping[str, ModelRoute | None], puts: Mapping[str, ModelRoute], deletes: set[str]
) -> ModelChange | None:
    model_id = route.model_id
    if model_id not in table:
        return ModelChange(ChangeKind.ADDED, model_id)
    old = table[model_id]
    if old is None:
        return ModelChange(ChangeKind.CHANGED, model_id, note="the table's entry cannot be read and is replaced")
    if old.model_id != model_id:
        return ModelChange(ChangeKind.ADDED, model_id, note=f"was an alias of '{old.model_id}'")
    fields = _field_changes(old, route)
    mended = sorted(name for name, put in puts.items() if put is route)
    mended += sorted(name for name in deletes if (item := table[name]) is not None and item.model_id == model_id)
    if fields:
        return ModelChange(ChangeKind.CHANGED, model_id, fields)
    if mended:
        return ModelChange(ChangeKind.CHANGED, model_id, note=f"items out of step: {', '.join(mended)}")
    return None


def _field_changes(old: ModelRoute | None, new: ModelRoute) -> tuple[FieldChange, ...]:
    if old is None:
        return ()
    before, after = _flat(entry_values(old)), _flat(entry_values(new))
    return tuple(
        FieldChange(name, before.get(name), after.get(name))
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """``{"price": {"version": ..}}`` as ``{"price.version": ..}``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": content for inner, content in value.items()}
        else:
            flat[name] = value
    return flat


def _owned(items: Mapping[str, ModelRoute | None]) -> dict[str, dict[str, ModelRoute | None]]:
    """Items by the model they belong to."""
    owned: dict[str, dict[str, ModelRoute | None]] = {}
    for name, route in items.items():
        owned.setdefault(_owner(name, route), {})[name] = route
    return owned


def _owner(name: str, route: ModelRoute | None) -> str:
    return name if route is None else route.model_id


def _lessened(
    items: Mapping[str, ModelRoute | None], taken: Mapping[str, ModelRoute]
) -> Iterator[tuple[str, ModelRoute]]:
    """The items of a model that stays, without the aliases that went to another."""
    for name, route in items.items():
        if route is None or name in taken:
            continue
        aliases = tuple(alias for alias in route.aliases if alias not in taken)
        if aliases != route.aliases:
            yield name, replace(route, aliases=aliases)
