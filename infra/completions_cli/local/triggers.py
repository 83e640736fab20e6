"""What the template lets call a function besides HTTP: a table's stream, and the clock."""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from completions_cli.local.events import LambdaContext
from completions_cli.local.template import LAMBDA_DEFAULT_SECONDS, TemplateError, load_template

Handler = Callable[[Mapping[str, Any], LambdaContext], Any]
_RATE: Final = re.compile(r"rate\((\d+) (minute|hour|day)s?\)")
_SECONDS: Final = {"minute": 60, "hour": 3600, "day": 86_400}


@dataclass(frozen=True, slots=True)
class Target:
    """A function that events are sent to."""

    name: str
    handler: str
    timeout: int

    def load(self) -> Callable[[Mapping[str, Any]], Any]:
        """What calls it. Its module is imported here, under the environment of the moment."""
        handler: Handler = pkgutil.resolve_name(":".join(self.handler.rsplit(".", 1)))
        return lambda event: handler(event, LambdaContext(self.name, self.timeout))


@dataclass(frozen=True, slots=True)
class StreamTrigger:
    """An event source mapping of a table's stream; the names are those of its properties."""

    target: Target
    table: str
    batch_size: int
    retry_attempts: int
    bisect: bool
    patterns: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ScheduleTrigger:
    """A schedule, every so many seconds."""

    target: Target
    name: str
    seconds: int


def stream_triggers(template: Path) -> list[StreamTrigger]:
    """The template's, of tables by their logical id. Raises ``TemplateError``."""
    return [
        StreamTrigger(
            target=target,
            table=_table(properties["Stream"]),
            batch_size=properties.get("BatchSize", 100),
            retry_attempts=properties.get("MaximumRetryAttempts", -1),
            bisect=properties.get("BisectBatchOnFunctionError", False),
            patterns=[json.loads(one["Pattern"]) for one in properties.get("FilterCriteria", {}).get("Filters", ())],
        )
        for target, _, properties in _events(template, "DynamoDB")
    ]


def schedule_triggers(template: Path) -> list[ScheduleTrigger]:
    """The template's. Raises ``TemplateError``."""
    return [
        ScheduleTrigger(target, name, _period(properties["ScheduleExpression"]))
        for target, name, properties in _events(template, "ScheduleV2")
    ]


def matches(pattern: Any, value: Any) -> bool:
    """Whether an event, or a part of it, passes a filter's pattern: texts, ``exists`` and ``anything-but``."""
    if isinstance(pattern, Mapping):
        known = value if isinstance(value, Mapping) else {}
        return all(matches(part, known.get(name)) for name, part in pattern.items())
    return any(_allows(rule, value) for rule in pattern)


def _allows(rule: Any, value: Any) -> bool:
    if not isinstance(rule, Mapping):
        return bool(rule == value)
    ((kind, operand),) = rule.items()
    if kind == "exists":
        return (value is not None) is operand
    if kind == "anything-but":
        return value is not None and value not in operand
    raise TemplateError(f"a filter's '{kind}' is not understood here")


def _events(template: Path, kind: str) -> Iterator[tuple[Target, str, Mapping[str, Any]]]:
    tree = load_template(template)
    shared = tree.get("Globals", {}).get("Function", {})
    for name, resource in tree["Resources"].items():
        if resource["Type"] != "AWS::Serverless::Function":
            continue
        properties = {**shared, **resource["Properties"]}
        for event_name, event in properties.get("Events", {}).items():
            if event["Type"] == kind:
                target = Target(name, properties["Handler"], properties.get("Timeout", LAMBDA_DEFAULT_SECONDS))
                yield target, f"{name}{event_name}", event["Properties"]


def _table(stream: Any) -> str:
    """The table of ``!GetAtt Tables.Outputs.<table>StreamArn``."""
    names = stream.get("Fn::GetAtt", ()) if isinstance(stream, Mapping) else ()
    match = re.fullmatch(r"Tables\.Outputs\.(\w+)StreamArn", ".".join(names))
    if match is None:
        raise TemplateError(f"not the stream of one of the tables: {stream}")
    return match[1]


def _period(expression: str) -> int:
    match = _RATE.fullmatch(expression)
    if match is None:
        raise TemplateError(f"not a rate: {expression}")
    return int(match[1]) * _SECONDS[match[2]]
