"""The README's table of canonical parameters and dialects. Names, ranges and defaults are the dialects' own; what
happens to a value is found out by decoding one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from completions.dialects.dialect import Dialect, ErrorHead, WireRequest
from completions.dialects.documentation import Documentation, Operation
from completions.domain.completion import CompletionRequest, SamplingParams
from completions.domain.errors import CompletionError
from completions_cli.openapi import documentations

_NOWHERE: Final = "—"
_INTERNAL: Final = frozenset({"sampling", "other_models", "param_names"})
_LARGEST: Final = 2**31
_PROBES: Final[Mapping[str, Mapping[str, Any] | None]] = {
    "an unknown field": {"no_such_field": 1},
    "a field twice": None,
    "null": {"stop": None, "stop_sequences": None, "stopSequences": None},
    "a number as text": {"max_tokens": "5", "max_new_tokens": "5", "maxTokensToSample": "5"},
    "a list for a number": {"max_tokens": [], "max_new_tokens": [], "maxTokensToSample": []},
}


def dialect_table() -> str:
    """Rows are canonical parameters, then kinds of bad input; a column is a dialect."""
    columns = [_Column(documentation) for documentation in documentations()]
    rows = [["parameter", *(column.title for column in columns)], ["---"] * (1 + len(columns))]
    rows += [[f"`{name}`", *(column.cell(name) for column in columns)] for name in _canonical_parameters()]
    rows += [[label, *(column.probed(probe) for column in columns)] for label, probe in _PROBES.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def named_fields(documentation: Documentation) -> frozenset[str]:
    """The body fields that the dialect's column names."""
    column = _Column(documentation)
    names = {name for parameter in _canonical_parameters() for name in column.names(parameter)}
    return frozenset(names & set(column.properties))


def body_fields(documentation: Documentation) -> frozenset[str]:
    """All fields of the dialect's body."""
    return frozenset(_Column(documentation).properties)


def _canonical_parameters() -> Iterator[str]:
    """In the order of the classes, those of the sampling in its place."""
    for one in fields(CompletionRequest):
        if one.name == "sampling":
            yield from (sampled.name for sampled in fields(SamplingParams))
        if one.name not in _INTERNAL:
            yield one.name


@dataclass(frozen=True, slots=True)
class _Route:
    path: str
    dialect: Dialect
    example: Mapping[str, Any]
    query: Mapping[str, str]

    def decode(self, body: Mapping[str, Any] | bytes) -> CompletionRequest:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.dialect.decode(WireRequest("POST", self.path, self.query, {}, raw))

    def status(self, body: Mapping[str, Any] | bytes) -> int | None:
        """Of the refusal of ``body``; ``None`` when it is accepted."""
        try:
            self.decode(body)
        except CompletionError as error:
            return self.dialect.encode_error(error, ErrorHead("request-id", 0.0)).status
        return None


class _Column:
    def __init__(self, documentation: Documentation) -> None:
        self.title = documentation.title
        self._fields = documentation.fields
        operations = {path: documentation.operations["POST", path] for path in documentation.endpoints}
        first = next(iter(operations.values()))
        self._schema = documentation.schemas[first.request or ""]
        self.properties: Mapping[str, Any] = self._schema["properties"]
        self._on_request = documentation.on_request
        self._parameters = {one["name"]: one for one in first.parameters}
        self._routes = [
            _Route(path, dialect, _required(operations[path], self._schema), _query(operations[path]))
            for path, dialect in documentation.endpoints.items()
        ]
        self._requests = [route.decode(route.example) for route in self._routes]

    def names(self, canonical: str) -> tuple[str, ...]:
        """The dialect's spellings of a parameter."""
        spelled = self._fields.get(canonical) or (self._requests[0].param_names.get(canonical, canonical),)
        known = (self.properties, self._parameters, self._on_request)
        return tuple(name for name in spelled if any(name in one for one in known))

    def cell(self, canonical: str) -> str:
        names = self.names(canonical)
        defaults = list(dict.fromkeys(_value(request, canonical) for request in self._requests))
        if not names:
            return "by route" if len(defaults) > 1 else _NOWHERE
        notes = [", ".join(self._spelled(name) for name in names)]
        only = names[0] if len(names) == 1 else ""
        if only in self._on_request:
            return notes[0] + _range(self._on_request[only]) + ", where let through, else 400"
        if only in self.properties:
            notes[0] += _range(self.properties[only])
        if any(self._is_required(name) for name in names):
            notes.append("required")
        elif default := self._default(canonical, defaults):
            notes.append(f"default {default}")
        if only in self.properties:
            notes += self._beyond(only, canonical)
        return ", ".join(notes)

    def probed(self, probe: Mapping[str, Any] | None) -> str:
        """What becomes of the example with the probe's fields, as far as the dialect has them."""
        route = self._routes[0]
        if probe is None:
            return _outcome(route.status(_twice(route.example)), "the last counts")
        known = {name: value for name, value in probe.items() if name in self.properties}
        return _outcome(route.status({**route.example, **(known or probe)}), "accepted" if known else "ignored")

    def _spelled(self, name: str) -> str:
        return f"{self._parameters[name]['in']} `{name}`" if name in self._parameters else f"`{name}`"

    def _is_required(self, name: str) -> bool:
        if name in self.properties:
            return name in self._schema["required"]
        return bool(self._parameters[name]["required"])

    def _default(self, canonical: str, defaults: Sequence[Any]) -> str:
        """What is meant when nothing is said; another field's value, or a different one on each route."""
        route = self._routes[0]
        if canonical == "best_of" and route.decode({**route.example, "n": 3}).best_of == 3:
            return "`n`"
        if any(isinstance(value, tuple) for value in defaults):
            return ""
        shown = [text for value in defaults if (text := _shown(value))]
        if len(shown) < len(defaults) > 1:
            return "by route"
        return " or ".join(shown) + (" by route" if len(shown) > 1 else "")

    def _beyond(self, name: str, canonical: str) -> list[str]:
        """What happens to a value outside the range."""
        route = self._routes[0]
        outcomes: dict[str, str] = {}
        for end, value in _outside(self.properties[name]):
            body = {**route.example, name: value}
            status = route.status(body)
            if status is not None:
                outcomes[end] = str(status)
            elif _value(route.decode(body), canonical) != value:
                outcomes[end] = "brought into it"
        if len(set(outcomes.values())) == 1:
            return [f"else {next(iter(outcomes.values()))}"]
        return [f"{end} {outcome}" for end, outcome in outcomes.items()]


def _required(operation: Operation, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The example without what it need not say."""
    return {name: value for name, value in (operation.example or {}).items() if name in schema["required"]}


def _query(operation: Operation) -> dict[str, str]:
    return {one["name"]: "demo" for one in operation.parameters if one["in"] == "query" and one["required"]}


def _twice(body: Mapping[str, Any]) -> bytes:
    name, value = next(iter(body.items()))
    return b"{" + json.dumps({name: value}).encode()[1:-1] + b"," + json.dumps(body).encode()[1:]


def _outcome(status: int | None, accepted: str) -> str:
    return accepted if status is None else str(status)


def _value(request: CompletionRequest, canonical: str) -> Any:
    value = getattr(request, canonical) if hasattr(request, canonical) else getattr(request.sampling, canonical)
    return tuple(value) if isinstance(value, Mapping) else value


def _shown(value: object) -> str:
    """A default worth telling; nothing and off go without saying."""
    if value is None or value is False or value in ((), ""):
        return ""
    return "true" if value is True else f"{value:g}" if isinstance(value, int | float) else ""


def _branches(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [branch for branch in schema.get("anyOf", [schema]) if branch.get("type") != "null"]


def _range(schema: Mapping[str, Any]) -> str:
    low, high = _bounds(schema)
    if low is None or high is None:
        return f" {low}" if low else f" ≤ {high}" if high else ""
    return f" {low.removeprefix('≥ ')}..{high}" if low.startswith("≥") else f" {low}, ≤ {high}"


def _bounds(schema: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The lowest and highest value as text; bounds that only mean 64 bits are none."""
    low = high = None
    for branch in _branches(schema):
        if "exclusiveMinimum" in branch:
            low = f"> {branch['exclusiveMinimum']:g}"
        elif abs(branch.get("minimum", _LARGEST)) < _LARGEST:
            low = f"≥ {branch['minimum']:g}"
        if abs(branch.get("maximum", _LARGEST)) < _LARGEST:
            high = f"{branch['maximum']:g}"
        elif "maxItems" in branch:
            high = f"{branch['maxItems']} texts"
            low = f"≥ {branch['minItems']}"
    return low, high


def _outside(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A value below and one above the range, where it has such an end."""
    for branch in _branches(schema):
        if "exclusiveMinimum" in branch:
            yield "below", branch["exclusiveMinimum"]
        elif abs(branch.get("minimum", _LARGEST)) < _LARGEST:
            yield "below", branch["minimum"] - 1
        if abs(branch.get("maximum", _LARGEST)) < _LARGEST:
            yield "above", branch["maximum"] + 1
        elif "maxItems" in branch:
            yield "above", ["x"] * (branch["maxItems"] + 1)
