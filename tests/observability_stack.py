"""``infra/observability.yaml`` as CloudFormation would see it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

TOPIC = "arn:aws:sns:eu-west-1:123456789012:alarms"
ENDPOINT = "coder-7b"
GIVEN = {
    "ServiceName": "gateway",
    "ApiName": "gateway-api",
    "StageName": "prod",
    "OpenAICompletionsFunctionName": "openai-fn",
    "ScaleCompletionsFunctionName": "scale-fn",
    "ScaleV1CompletionsFunctionName": "scale-v1-fn",
    "SourcegraphCompletionsFunctionName": "sourcegraph-fn",
    "UsageRollupFunctionName": "rollup-fn",
    "UsageSweeperFunctionName": "sweeper-fn",
    "UsageRollupFailuresQueueName": "failures-queue",
    "QueuedCompletionsFunctionName": "queue-fn",
    "BatchWorkerFunctionName": "worker-fn",
    "CompletionRequestsQueueName": "requests-queue",
    "CompletionRequestFailuresQueueName": "given-up-queue",
    "BatchStartFailuresQueueName": "unstarted-queue",
    "BatchStateMachineArn": "arn:aws:states:eu-west-1:123456789012:stateMachine:gateway-batches",
    "UsageTableName": "usage-table",
    "RegistryTableName": "registry-table",
}
ALL_GIVEN = {**GIVEN, "AlarmTopicArn": TOPIC, "DailySpendAlarmDollars": "12.5", "ModelEndpointName": ENDPOINT}
ABSENT = object()


class Resolved:
    """A template's resources and outputs under parameters; alarms and the like are their own names."""

    def __init__(self, template: Mapping[str, Any], parameters: Mapping[str, str]) -> None:
        self._template = template
        declared = template["Parameters"]
        assert set(parameters) <= set(declared)
        defaults = {name: str(one["Default"]) for name, one in declared.items() if "Default" in one}
        self._values = {**defaults, **parameters, "AWS::Region": "eu-west-1", "AWS::NoValue": ABSENT}
        for name, one in declared.items():
            assert re.fullmatch(one.get("AllowedPattern", ".*"), str(self._values[name])), name
        self.resources = {
            name: self.of(resource["Properties"])
            for name, resource in template["Resources"].items()
            if "Condition" not in resource or self._holds(resource["Condition"])
        }
        self.outputs = {name: self.of(output["Value"]) for name, output in template["Outputs"].items()}
        self.alarms = {name: one for name, one in self.resources.items() if "AlarmDescription" in one}
        self.dashboard = json.loads(self.resources["Dashboard"]["DashboardBody"])

    def of(self, value: Any) -> Any:
        if isinstance(value, list):
            return [one for one in map(self.of, value) if one is not ABSENT]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((name, argument),) = value.items()
            if name == "Ref" or name.startswith("Fn::"):
                return self._intrinsic(name, argument)
        entries = ((key, self.of(one)) for key, one in value.items())
        return {key: one for key, one in entries if one is not ABSENT}

    def _intrinsic(self, name: str, argument: Any) -> Any:
        match name:
            case "Ref":
                return self._values[argument] if argument in self._values else self._named(argument)
            case "Fn::GetAtt":
                resource, attribute = argument
                assert attribute == "Arn"
                return f"arn:aws:cloudwatch:eu-west-1:123456789012:alarm:{self._named(resource)}"
            case "Fn::If":
                return self.of(argument[1 if self._holds(argument[0]) else 2])
            case "Fn::Join":
                return argument[0].join(self.of(argument[1]))
            case "Fn::Sub":
                text, own = (argument, {}) if isinstance(argument, str) else argument
                values = {**self._values, **{key: self.of(one) for key, one in own.items()}}
                return re.sub(
                    r"\$\{(!?)([^}]+)\}", lambda m: f"${{{m[2]}}}" if m[1] else values[m[2]], text.rstrip("\n")
                )
        raise AssertionError(f"{name} is not expected in this template")

    def _named(self, resource: str) -> str:
        assert resource in self._template["Resources"], resource
        condition = self._template["Resources"][resource].get("Condition")
        assert condition is None or self._holds(condition), f"{resource} is not there"
        return resource

    def _holds(self, condition: str) -> bool:
        ((_, (equals,)),) = self._template["Conditions"][condition].items()  # every one is a negated comparison
        one, other = equals["Fn::Equals"]
        return str(self.of(one)) != str(self.of(other))
