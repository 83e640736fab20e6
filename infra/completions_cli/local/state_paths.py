"""The little of JSONPath, payload templates and choices that the batches' definition is written in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Final

_PATH: Final = re.compile(r"\$\$?(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_COMPARISONS: Final[Mapping[str, tuple[type | tuple[type, ...], Callable[[Any, Any], bool]]]] = {
    "BooleanEquals": (bool, lambda value, operand: value is operand),
    "NumericEquals": ((int, float), lambda value, operand: value == operand),
    "NumericGreaterThan": ((int, float), lambda value, operand: value > operand),
    "NumericGreaterThanEquals": ((int, float), lambda value, operand: value >= operand),
    "NumericLessThan": ((int, float), lambda value, operand: value < operand),
    "NumericLessThanEquals": ((int, float), lambda value, operand: value <= operand),
    "StringEquals": (str, lambda value, operand: value == operand),
}
COMPARISONS: Final = frozenset({*_COMPARISONS, "IsPresent"})


class PathError(Exception):
    """A path leads nowhere; the message is a state machine's own ``States.Runtime``."""


def is_path(text: str) -> bool:
    """Whether it is a path of the kind known here: names alone, no filters and no indices."""
    return _PATH.fullmatch(text) is not None


def at(path: str, data: Any, context: Any) -> Any:
    """The value at ``path``; ``$$`` is the context's. Raises ``PathError``."""
    value = context if path.startswith("$$") else data
    for name in path.lstrip("$").split(".")[1:]:
        if not isinstance(value, Mapping) or name not in value:
            raise PathError(f"The path '{path}' leads nowhere in the state's input.")
        value = value[name]
    return value


def filled(template: Any, data: Any, context: Any) -> Any:
    """A payload template: names that end in ``.$`` have a path for their value. Raises ``PathError``."""
    if isinstance(template, list):
        return [filled(one, data, context) for one in template]
    if not isinstance(template, Mapping):
        return template
    return {
        name.removesuffix(".$"): at(value, data, context) if name.endswith(".$") else filled(value, data, context)
        for name, value in template.items()
    }


def placed(path: str | None, data: Any, result: Any) -> Any:
    """A ``ResultPath``: the result in the input's place, at a name of it, or not at all."""
    if path is None:
        return data
    if path == "$":
        return result
    whole = deepcopy(data) if isinstance(data, dict) else {}
    inner = whole
    *parents, last = path.split(".")[1:]
    for name in parents:
        inner = inner.setdefault(name, {})
    inner[last] = result
    return whole


def chosen(rule: Mapping[str, Any], data: Any, context: Any) -> bool:
    """Whether one of a ``Choice``'s rules holds. Raises ``PathError``."""
    ((name, operand),) = ((key, value) for key, value in rule.items() if key in COMPARISONS)
    try:
        value = at(rule["Variable"], data, context)
    except PathError:
        if name != "IsPresent":
            raise
        return operand is False
    if name == "IsPresent":
        return operand is True
    kind, compare = _COMPARISONS[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return False
    return compare(value, operand)
