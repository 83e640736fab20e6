"""YAML with the line of everything in it: plain values, and where each of them stands.

Numbers with a fraction come as ``Decimal``, so that a price is what was written. Unlike PyYAML's own loader, a key
that stands twice is a problem and not the later of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeAlias

import yaml

Place: TypeAlias = tuple[str | int, ...]
"""Keys and indexes from the top of the document."""

_TAG: Final = "tag:yaml.org,2002:"
_SCALARS: Final = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float", "str", "timestamp", "value"))


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What is wrong on a line, counted from 1. ``place`` is said in the file's own words."""

    line: int
    place: str
    message: str


@dataclass(frozen=True, slots=True)
class LocatedData:
    """A document. ``problems`` are those of the YAML itself; what they concern is left out of ``value``."""

    value: Any
    lines: Mapping[Place, int]
    problems: tuple[Problem, ...] = ()

    def line(self, place: Place) -> int:
        """The line of the value at ``place``, or of the nearest thing around it."""
        for end in range(len(place), 0, -1):
            if place[:end] in self.lines:
                return self.lines[place[:end]]
        return self.lines.get((), 1)


def load_located(text: str) -> LocatedData:
    """The only document of ``text``. Never raises: what cannot be read is in ``problems``."""
    loader = yaml.SafeLoader("")
    try:
        loader = yaml.SafeLoader(text)
        reader = _Reader(loader)
        node = loader.get_single_node()
        value = None if node is None else reader.read(node, ())
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return LocatedData(None, {}, (Problem(line, "", f"not YAML: {error.reason}"),))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        return LocatedData(None, {}, (Problem(line, "", f"not YAML: {error.problem or error.context}"),))
    finally:
        loader.dispose()
    return LocatedData(value, reader.lines, tuple(reader.problems))


@dataclass(slots=True)
class _Reader:
    loader: yaml.SafeLoader
    lines: dict[Place, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    open: list[yaml.Node] = field(default_factory=list)

    def read(self, node: yaml.Node, place: Place) -> Any:
        self.lines.setdefault(place, _line(node))
        if any(node is outer for outer in self.open):
            return self._problem(node, place, "an anchor stands inside itself")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            return self._problem(node, place, f"unknown tag {node.tag}")
        self.open.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*place, index)) for index, item in enumerate(node.value)]
            return self._mapping(node, place)
        finally:
            self.open.pop()

    def _mapping(self, node: yaml.Node, place: Place) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._scalar(key_node, place) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                self._problem(key_node, place, "a key must be text; put it in quotes")
            elif key in values:
                self._problem(key_node, (*place, key), f"stands twice, first on line {self.lines[*place, key]}")
            else:
                self.lines[*place, key] = _line(key_node)
                values[key] = self.read(value_node, (*place, key))
        return values

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        if node.tag == _TAG + "merge":
            return str(node.value)
        if node.tag not in _SCALARS:
            return self._problem(node, place, f"unknown tag {node.tag}")
        if node.tag == _TAG + "float":
            try:
                return Decimal(node.value.replace("_", ""))
            except InvalidOperation:  # infinity and the sexagesimal form
                pass
        try:
            return self.loader.construct_object(node)
        except ValueError:  # a date that the calendar does not have
            return str(node.value)

    def _problem(self, node: yaml.Node, place: Place, message: str) -> Any:
        """Note it; ``None`` stands for the value."""
        self.problems.append(Problem(_line(node), spelled(place), message))


def spelled(place: Place) -> str:
    """A place as ``models[0].price``."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1
