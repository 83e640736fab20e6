"""A stack's parameters: what CloudFormation checks of them before it makes anything, without an account.

Constraints of one parameter (``AllowedValues``, ``AllowedPattern`` and the like) come first, then the template's
``Rules``. What only an account can tell is not passed over: such a message ends in ``NOT_CHECKED``.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

NOT_CHECKED: Final = "not checked here"
_LISTS: Final = ("CommaDelimitedList", "List<Number>", "List<String>")
_NUMBERS: Final = ("Number", "List<Number>")
_TYPES: Final = frozenset({"String", "Number", *_LISTS})
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_PAIR: Final = re.compile(
    r"""
    (?: ParameterKey=(?P<key>[A-Za-z0-9]+),ParameterValue= | (?P<name>[A-Za-z0-9]+)= )
    (?P<value> "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | (?:\\.|[^\s"\\])+ )
    (?:\s+|$)
    """,
    re.VERBOSE,
)


def check_parameters(template: Mapping[str, Any], values: Mapping[str, str]) -> list[str]:
    """What is wrong with ``values`` as parameters of a loaded template, one message each; empty when nothing is."""
    declared: Mapping[str, Mapping[str, Any]] = template.get("Parameters", {})
    messages = [f"{name}: {_unknown(name, declared)}" for name in values if name not in declared]
    known: dict[str, str | list[str]] = {}
    for name, spec in declared.items():
        value = values.get(name, spec.get("Default"))
        if value is None:
            messages.append(f"{name}: it has no value, and the template no default for it")
            continue
        text = plain_text(value)
        known[name] = _items(text) if spec.get("Type") in _LISTS else text
        messages += [f"{name}: {reason}" for reason in _refusals(spec, text)]
    return messages + list(_broken_rules(template.get("Rules", {}), declared, known))


def plain_text(value: Any) -> str:
    """A value of a YAML template as CloudFormation takes it, for which all of them are text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(plain_text, value)) if isinstance(value, list) else str(value)


def _unknown(name: str, declared: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, declared, n=1)
    return "the template has no such parameter" + (f"; did you mean {close[0]}?" if close else "")


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")] if text else []


def _refusals(spec: Mapping[str, Any], text: str) -> Iterator[str]:
    """At most one reason why a parameter is refused, and what could not be checked."""
    kind = spec.get("Type", "String")
    if kind not in _TYPES:
        yield f"{kind} is compared with what the account has; {NOT_CHECKED}"
        return
    secret = plain_text(spec.get("NoEcho", False)) == "true"
    for item in _items(text) if kind in _LISTS else [text]:
        shown = "its value" if secret else json.dumps(item, ensure_ascii=False)
        try:
            reason = _not_a_number(kind, item) or _broken_constraint(spec, kind, item)
        except re.error:
            yield f"its AllowedPattern is written for another kind of regular expression; {NOT_CHECKED}"
            return
        if reason:
            said = spec.get("ConstraintDescription")
            yield f"{shown} does not meet its constraint: {said}" if said else f"{shown} {reason}"
            return


def _not_a_number(kind: str, text: str) -> str | None:
    return "is no number" if kind in _NUMBERS and not _NUMBER.fullmatch(text) else None


def _broken_constraint(spec: Mapping[str, Any], kind: str, text: str) -> str | None:
    """The first constraint that does not hold, in words."""
    allowed = [plain_text(value) for value in spec.get("AllowedValues", [])]
    if allowed and text not in allowed:
        return f"is none of {', '.join(json.dumps(value, ensure_ascii=False) for value in allowed)}"
    # as Java reads them: the whole value, and \w and \d of ASCII alone
    if "AllowedPattern" in spec and not re.fullmatch(spec["AllowedPattern"], text, re.ASCII):
        return f"does not match {spec['AllowedPattern']}"
    size, noun, least, most = (
        (float(text), "", "MinValue", "MaxValue")
        if kind in _NUMBERS
        else (len(text), " characters", "MinLength", "MaxLength")
    )
    if least in spec and size < float(spec[least]):
        return f"is less than {spec[least]}{noun}"
    if most in spec and size > float(spec[most]):
        return f"is more than {spec[most]}{noun}"
    return None


class _NotCheckedError(Exception):
    """A rule whose outcome is not known here, and why."""


class _MissingError(Exception):
    """A rule about a parameter without a value, which has its own message."""


def _broken_rules(
    rules: Mapping[str, Mapping[str, Any]], declared: Mapping[str, Any], known: Mapping[str, str | list[str]]
) -> Iterator[str]:
    expressions = _Expressions(declared, known)
    for name, rule in rules.items():
        for assertion in rule.get("Assertions", []):
            try:
                if not expressions.holds(rule.get("RuleCondition", True)) or expressions.holds(assertion["Assert"]):
                    continue
            except _MissingError:
                continue
            except _NotCheckedError as reason:
                yield f"rule {name}: {reason}; {NOT_CHECKED}"
                continue
            said = assertion.get("AssertDescription", "its assertion is false")
            yield f"rule {name}: {said}"


class _Expressions:
    """Evaluates the functions of a template's rules."""

    def __init__(self, declared: Mapping[str, Any], known: Mapping[str, str | list[str]]) -> None:
        self._declared = declared
        self._known = known
        self._functions: Mapping[str, Callable[[Any], bool]] = {
            "Fn::And": lambda each: all(map(self.holds, each)),
            "Fn::Or": lambda each: any(map(self.holds, each)),
            "Fn::Not": lambda one: not self.holds(*one),
            "Fn::Equals": lambda two: _equal(*map(self._value, two)),
            "Fn::Contains": lambda two: _contains(*map(self._value, two)),
            "Fn::EachMemberIn": lambda two: _each_in(*map(self._value, two)),
            "Fn::EachMemberEquals": lambda two: _each_equals(*map(self._value, two)),
        }

    def holds(self, node: Any) -> bool:
        """Whether a condition is true."""
        if isinstance(node, Mapping) and len(node) == 1:
            ((name, operands),) = node.items()
            if name not in self._functions:
                raise _NotCheckedError(_why_not(name))
            try:
                return self._functions[name](operands)
            except (TypeError, ValueError):
                raise _NotCheckedError(f"{name} has operands it does not take") from None
        if plain_text(node) in ("true", "false"):
            return plain_text(node) == "true"
        raise _NotCheckedError(f"{json.dumps(node, default=str)} is no condition")

    def _value(self, node: Any) -> str | list[str]:
        if isinstance(node, list):
            return [plain_text(self._value(item)) for item in node]
        if not isinstance(node, Mapping):
            return plain_text(node)
        name = node.get("Ref")
        if not isinstance(name, str):
            raise _NotCheckedError(_why_not(*node))
        if name in self._known:
            return self._known[name]
        if name in self._declared:
            raise _MissingError
        raise _NotCheckedError(f"{name} is known when the stack is made")


def _why_not(name: str, *_: str) -> str:
    asks = name in ("Fn::RefAll", "Fn::ValueOf", "Fn::ValueOfAll")
    return f"{name} asks the account" if asks else f"{name} is no function of rules"


def _listed(value: str | list[str]) -> list[str]:
    if isinstance(value, str):
        raise TypeError(value)
    return value


def _equal(left: str | list[str], right: str | list[str]) -> bool:
    return left == right


def _contains(among: str | list[str], one: str | list[str]) -> bool:
    return one in _listed(among)


def _each_in(each: str | list[str], among: str | list[str]) -> bool:
    return set(_listed(each)) <= set(_listed(among))


def _each_equals(each: str | list[str], one: str | list[str]) -> bool:
    return all(item == one for item in _listed(each))


class SamConfigError(Exception):
    """A ``samconfig.toml`` that cannot be read, and where."""


def read_samconfig(path: Path, environment: str) -> dict[str, str]:
    """What ``sam deploy --config-env ENVIRONMENT`` would give as parameters, read as SAM reads it.

    That is ``parameter_overrides`` of ``[ENVIRONMENT.deploy.parameters]``. Raises ``SamConfigError``.
    """
    environments = _read(path)
    if environment not in environments:
        there = ", ".join(name for name, value in environments.items() if isinstance(value, dict)) or "none"
        raise SamConfigError(f"{path}: there is no environment {environment}; there are: {there}")
    # what stands for every command holds for this one unless it has its own
    for command in ("deploy", "global"):
        place = f"{path}: [{environment}.{command}.parameters]"
        settings = _table(_table(environments[environment], place).get(command, {}), place).get("parameters", {})
        if "parameter_overrides" in _table(settings, place):
            return _collected(settings["parameter_overrides"], f"{place} parameter_overrides")
    return {}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise SamConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SamConfigError(f"{path}: not TOML: {error}") from None


def _table(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SamConfigError(f"{place}: not a table")
    return value


def _collected(overrides: Any, place: str) -> dict[str, str]:
    collected: dict[str, str] = {}
    for name, value in _pairs(overrides, place):
        if name in collected:
            raise SamConfigError(f"{place}: {name} is given twice; keep one of them")
        collected[name] = _unquoted(value)
    return collected


def _pairs(overrides: Any, place: str) -> Iterator[tuple[str, str]]:
    """The names and values of a string, a table, or a list of such; the values still in their quotes."""
    if isinstance(overrides, str):
        yield from _pairs_of_text(overrides, place)
    elif isinstance(overrides, list):
        for item in overrides:
            yield from _pairs(item, place)
    elif isinstance(overrides, dict):
        for name, value in overrides.items():
            yield name, _text(value, f"{place}: {name}")
    else:
        raise SamConfigError(f"{place}: a string, a table or a list of these is expected, not {overrides!r}")


def _pairs_of_text(text: str, place: str) -> Iterator[tuple[str, str]]:
    rest = text.strip()
    while rest:
        pair = _PAIR.match(rest)
        if pair is None:
            begin = rest.split()[0].partition("=")[0]  # what follows may be a secret
            advice = "; files are not read, so write the parameters here" if rest.startswith("file://") else ""
            raise SamConfigError(f'{place}: from {begin} on, it is not Name=value or Name="a value"{advice}')
        yield pair["key"] or pair["name"], pair["value"]
        rest = rest[pair.end() :]


def _text(value: Any, place: str) -> str:
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ",".join(str(item).strip() for item in value)
    if not isinstance(value, str | int | float):
        raise SamConfigError(f"{place}: a string, a number or a list of these is expected")
    return str(value)


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1]
    return re.sub(r"""\\([ "'])""", r"\1", value)
