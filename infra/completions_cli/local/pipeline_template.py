"""What the local stack reads of ``infra/pipelines.yaml``: buckets, queues, buses and rules, named by their logical ids.

Of their properties, those are read that change what happens here; encryption, policies and lifecycles do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from completions_cli.local.template import Resolver, TemplateError, load_template

ACCOUNT: Final = "123456789012"
REGION: Final = "us-east-1"
NESTED_STACK: Final = "Pipelines"
_QUEUE_ATTRIBUTES: Final = (
    "VisibilityTimeout",
    "MessageRetentionPeriod",
    "DelaySeconds",
    "ReceiveMessageWaitTimeSeconds",
    "FifoQueue",
    "ContentBasedDeduplication",
)
_TARGET_KEYS: Final = {"Arn", "DeadLetterConfig", "Id", "RetryPolicy"}


@dataclass(frozen=True, slots=True)
class Queue:
    """One of SQS. ``attributes`` are as its API takes them."""

    name: str
    attributes: Mapping[str, str]

    @property
    def arn(self) -> str:
        return queue_arn(self.name)

    @property
    def most_receives(self) -> int | None:
        """How often a message is given out before it goes to the dead letters."""
        policy = self.attributes.get("RedrivePolicy")
        return None if policy is None else int(json.loads(policy)["maxReceiveCount"])


@dataclass(frozen=True, slots=True)
class Bucket:
    """One of S3. ``tells`` is whether EventBridge hears what happens in it."""

    name: str
    tells: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """One of EventBridge; ``targets`` are ARNs of queues."""

    name: str
    bus: str
    pattern: Mapping[str, Any]
    targets: Sequence[str]


@dataclass(frozen=True, slots=True)
class Pipelines:
    """The nested stack. ``outputs`` are its own, with local values."""

    buckets: Sequence[Bucket] = ()
    queues: Sequence[Queue] = ()
    buses: Sequence[str] = ()
    rules: Sequence[Rule] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)

    def queue(self, arn: str) -> Queue:
        """The queue of this ARN. Raises ``TemplateError``."""
        for queue in self.queues:
            if queue.arn == arn:
                return queue
        raise TemplateError(f"infra/pipelines.yaml declares no queue {arn}")


def queue_arn(name: str) -> str:
    """A queue's ARN."""
    return f"arn:aws:sqs:{REGION}:{ACCOUNT}:{name}"


def read_pipelines(path: Path) -> Pipelines:
    """What ``path`` declares; nothing where it is not there. Raises ``TemplateError``."""
    if not path.exists():
        return Pipelines()
    tree = load_template(path)
    resolver = Resolver(tree, {})
    resources = resolver.resources()
    kinds = {name: resource["Type"] for name, resource in resources.items()}

    def refer(name: str, attribute: str | None) -> str | None:
        return _local_value(kinds.get(name, ""), name, attribute, resources)

    def of(kind: str) -> Iterator[tuple[str, Any]]:
        for name, resource in resources.items():
            if resource["Type"] == kind:
                yield name, named(resource.get("Properties", {}), refer)

    outputs = {name: named(resolver.resolve(output["Value"]), refer) for name, output in tree["Outputs"].items()}
    return Pipelines(
        buckets=[_bucket(name, properties) for name, properties in of("AWS::S3::Bucket")],
        queues=[_queue(name, properties) for name, properties in of("AWS::SQS::Queue")],
        buses=[name for name, _ in of("AWS::Events::EventBus")],
        rules=[_rule(name, properties) for name, properties in of("AWS::Events::Rule")],
        outputs={name: value for name, value in outputs.items() if isinstance(value, str)},
    )


def named(node: Any, refer: Callable[[str, str | None], str | None]) -> Any:
    """``node`` with the references that ``refer`` knows, by logical id and attribute, in their place."""
    if isinstance(node, list):
        return [named(one, refer) for one in node]
    if not isinstance(node, dict):
        return node
    match node:
        case {"Ref": str(name)}:
            found = refer(name, None)
        case {"Fn::GetAtt": [str(name), str(attribute)]}:
            found = refer(name, attribute)
        case _:
            return {key: named(value, refer) for key, value in node.items()}
    return node if found is None else found


def output_of(pipelines: Pipelines) -> Callable[[str, str | None], str | None]:
    """What the main template's references to the nested stack are here."""

    def refer(name: str, attribute: str | None) -> str | None:
        if name != NESTED_STACK or attribute is None:
            return None
        output = attribute.removeprefix("Outputs.")
        if output not in pipelines.outputs:
            raise TemplateError(f"infra/pipelines.yaml has no output {output}")
        return pipelines.outputs[output]

    return refer


def local_bucket(name: str) -> str:
    """A bucket's name by its logical id; S3 takes no capitals."""
    return re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower()


def _local_value(kind: str, name: str, attribute: str | None, resources: Mapping[str, Any]) -> str | None:
    known: dict[str | None, str] = {}
    if kind == "AWS::S3::Bucket":
        bucket = local_bucket(name)
        known = {None: bucket, "Arn": f"arn:aws:s3:::{bucket}"}
    elif kind == "AWS::SQS::Queue":
        queue = _queue_name(name, resources[name].get("Properties", {}))
        known = {"QueueName": queue, "Arn": queue_arn(queue)}
    elif kind == "AWS::Events::EventBus":
        known = {None: name, "Name": name, "Arn": f"arn:aws:events:{REGION}:{ACCOUNT}:event-bus/{name}"}
    return known.get(attribute)


def _queue_name(name: str, properties: Mapping[str, Any]) -> str:
    return f"{name}.fifo" if properties.get("FifoQueue") else name


def _bucket(name: str, properties: Mapping[str, Any]) -> Bucket:
    told = properties.get("NotificationConfiguration", {}).get("EventBridgeConfiguration", {})
    return Bucket(local_bucket(name), bool(told.get("EventBridgeEnabled", False)))


def _queue(name: str, properties: Mapping[str, Any]) -> Queue:
    attributes = {
        key: str(properties[key]).lower() if isinstance(properties[key], bool) else str(properties[key])
        for key in _QUEUE_ATTRIBUTES
        if key in properties
    }
    if "RedrivePolicy" in properties:
        attributes["RedrivePolicy"] = json.dumps(properties["RedrivePolicy"])
    return Queue(_queue_name(name, properties), attributes)


def _rule(name: str, properties: Mapping[str, Any]) -> Rule:
    if unknown := sorted({key for one in properties.get("Targets", ()) for key in one} - _TARGET_KEYS):
        raise TemplateError(f"infra/pipelines.yaml: {name}: a target's {', '.join(unknown)} is not known here")
    bus = properties.get("EventBusName", "default")
    targets = [target["Arn"] for target in properties.get("Targets", ())]
    for value in (bus, *targets):
        if not isinstance(value, str):
            raise TemplateError(f"infra/pipelines.yaml: {name}: only its own queues and buses are known here: {value}")
    if "EventPattern" not in properties:
        raise TemplateError(f"infra/pipelines.yaml: {name}: only rules with an EventPattern are known here")
    return Rule(name, bus, properties["EventPattern"], targets)
