"""What the template lets call a function besides HTTP: a table's stream, the clock, a queue, and a bus's events."""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from completions_cli.local.events import LambdaContext
from completions_cli.local.pipeline_template import Pipelines, Queue, named, output_of
from completions_cli.local.template import LAMBDA_DEFAULT_SECONDS, Resolver, TemplateError, load_template

Handler = Callable[[Mapping[str, Any], LambdaContext], Any]
_RATE: Final = re.compile(r"rate\((\d+) (minute|hour|day)s?\)")
_SECONDS: Final = {"minute": 60, "hour": 3600, "day": 86_400}
_RULE_PROPERTIES: Final = {"DeadLetterConfig", "EventBusName", "Pattern", "RetryPolicy", "State"}
_FUNCTION_REFERENCE: Final = re.compile(r"(\w+?)(?:\.(?:Alias|Arn))?")


@dataclass(frozen=True, slots=True)
class Target:
    """A function that events are sent to."""

    name: str
    handler: str
    timeout: int

    @property
    def arn(self) -> str:
        """As its context says it."""
        return LambdaContext(self.name, self.timeout).invoked_function_arn

    def load(self) -> Callable[[Mapping[str, Any]], Any]:
        """What calls it. Its module is imported here, under the environment of the moment."""
        handler: Handler = pkgutil.resolve_name(":".join(self.handler.rsplit(".", 1)))
        return lambda event: handler(event, LambdaContext(self.name, self.timeout))

    def when_called(self) -> Callable[[Mapping[str, Any]], Any]:
        """The same, its module imported at the first call: what nobody asks for costs nothing at start."""
        load = cache(self.load)

        def called(event: Mapping[str, Any]) -> Any:
            return load()(event)

        return called


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


@dataclass(frozen=True, slots=True)
class QueueTrigger:
    """An event source mapping of a queue. ``partial`` is whether the function says which messages failed;
    ``most_at_once`` how many batches it is given side by side."""

    target: Target
    queue: Queue
    batch_size: int
    window_seconds: float
    partial: bool
    most_at_once: int


@dataclass(frozen=True, slots=True)
class RuleTrigger:
    """A bus's rule whose target is a function, called without anybody waiting for its answer. ``attempts`` is how often
    in all; ``failures`` is the queue that is then told."""

    target: Target
    name: str
    bus: str
    pattern: Mapping[str, Any]
    attempts: int
    failures: Queue | None


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
        for target, _, properties, _ in _events(template, "DynamoDB")
    ]


def schedule_triggers(template: Path) -> list[ScheduleTrigger]:
    """The template's. Raises ``TemplateError``."""
    return [
        ScheduleTrigger(target, name, _period(properties["ScheduleExpression"]))
        for target, name, properties, _ in _events(template, "ScheduleV2")
    ]


def queue_triggers(template: Path, pipelines: Pipelines) -> list[QueueTrigger]:
    """The template's. Raises ``TemplateError``."""
    found = []
    for target, name, properties, _ in _events(template, "SQS"):
        queue = named(properties["Queue"], output_of(pipelines))
        if not isinstance(queue, str):
            raise TemplateError(f"{name}: not a queue of infra/pipelines.yaml: {queue}")
        if "FilterCriteria" in properties:
            raise TemplateError(f"{name}: a queue's FilterCriteria is not understood here")
        found.append(
            QueueTrigger(
                target=target,
                queue=pipelines.queue(queue),
                batch_size=properties.get("BatchSize", 10),
                window_seconds=properties.get("MaximumBatchingWindowInSeconds", 0),
                partial="ReportBatchItemFailures" in properties.get("FunctionResponseTypes", ()),
                most_at_once=int(properties.get("ScalingConfig", {}).get("MaximumConcurrency", 4)),
            )
        )
    return found


def rule_triggers(template: Path, pipelines: Pipelines) -> list[RuleTrigger]:
    """The template's. Raises ``TemplateError``."""
    found = []
    for target, name, given, function in _events(template, "EventBridgeRule"):
        properties = named(given, output_of(pipelines))
        invoked = named(function.get("EventInvokeConfig", {}), output_of(pipelines))
        failures = invoked.get("DestinationConfig", {}).get("OnFailure", {}).get("Destination")
        if properties.get("State") == "DISABLED":
            continue
        if unknown := sorted(properties.keys() - _RULE_PROPERTIES):
            raise TemplateError(f"{name}: {', '.join(unknown)} of a rule is not understood here")
        found.append(
            RuleTrigger(
                target=target,
                name=name,
                bus=properties.get("EventBusName", "default"),
                pattern=properties["Pattern"],
                attempts=1 + invoked.get("MaximumRetryAttempts", 2),
                failures=None if failures is None else pipelines.queue(failures),
            )
        )
    return found


def functions(template: Path) -> dict[str, Target]:
    """Every function of the template by its logical id. Raises ``TemplateError``."""
    return {target.name: target for target, _ in _functions(template)}


def function_name(reference: Any) -> str:
    """The function that ``!Ref X.Alias`` or ``!GetAtt X.Arn`` means. Raises ``TemplateError``."""
    match reference:
        case {"Ref": str(name)} | {"Fn::GetAtt": [str(name), "Arn"]} if found := _FUNCTION_REFERENCE.fullmatch(name):
            return found[1]
    raise TemplateError(f"not a function of this template: {reference}")


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


def _events(template: Path, kind: str) -> Iterator[tuple[Target, str, Mapping[str, Any], Mapping[str, Any]]]:
    """What is called, the event's name and properties, and the function's."""
    for target, properties in _functions(template):
        for event_name, event in properties.get("Events", {}).items():
            if event["Type"] == kind:
                yield target, f"{target.name}{event_name}", event["Properties"], properties


def _functions(template: Path) -> Iterator[tuple[Target, Mapping[str, Any]]]:
    tree = load_template(template)
    resolver = Resolver(tree, {})
    shared = resolver.resolve(tree.get("Globals", {}).get("Function", {}))
    for name, resource in resolver.resources().items():
        if resource["Type"] == "AWS::Serverless::Function":
            properties = {**shared, **resource["Properties"]}
            yield Target(name, properties["Handler"], properties.get("Timeout", LAMBDA_DEFAULT_SECONDS)), properties


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
