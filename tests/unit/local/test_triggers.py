"""What the template says of streams and schedules, and Lambda's filter rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from completions_cli.local.pipeline_template import Pipelines, read_pipelines
from completions_cli.local.template import TemplateError
from completions_cli.local.triggers import (
    Target,
    function_name,
    matches,
    queue_triggers,
    rule_triggers,
    schedule_triggers,
    stream_triggers,
)

TEMPLATE = """
Globals:
  Function: {{Timeout: 7}}
Resources:
  Worker:
    Type: AWS::Serverless::Function
    Properties:
      Handler: package.module.handler
      Events:
        One: {event}
  Table: {{Type: AWS::DynamoDB::Table}}
"""
STREAM = "{Type: DynamoDB, Properties: {Stream: !GetAtt Tables.Outputs.UsageTableStreamArn, %s}}"
RATE = "{Type: ScheduleV2, Properties: {ScheduleExpression: '%s'}}"


def template(folder: Path, event: str) -> Path:
    path = folder / "template.yaml"
    path.write_text(TEMPLATE.format(event=event))
    return path


def test_a_mapping_is_read_with_its_filters(tmp_path: Path) -> None:
    pattern = json.dumps({"eventName": ["INSERT"]})
    rest = (
        "BatchSize: 9, MaximumRetryAttempts: 3, BisectBatchOnFunctionError: true, "
        f"FilterCriteria: {{Filters: [{{Pattern: '{pattern}'}}]}}"
    )
    (trigger,) = stream_triggers(template(tmp_path, STREAM % rest))
    assert (trigger.target.name, trigger.target.handler, trigger.target.timeout) == (
        "Worker",
        "package.module.handler",
        7,
    )
    assert (trigger.table, trigger.batch_size, trigger.retry_attempts, trigger.bisect) == ("UsageTable", 9, 3, True)
    assert trigger.patterns == [{"eventName": ["INSERT"]}]


@pytest.mark.parametrize(
    ("expression", "seconds"), [("rate(1 minute)", 60), ("rate(5 minutes)", 300), ("rate(2 hours)", 7200)]
)
def test_a_rate_is_read(tmp_path: Path, expression: str, seconds: int) -> None:
    (trigger,) = schedule_triggers(template(tmp_path, RATE % expression))
    assert trigger.seconds == seconds


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (RATE % "cron(0 12 * * ? *)", "not a rate"),
        ("{Type: DynamoDB, Properties: {Stream: 'arn:aws:dynamodb:x'}}", "not the stream"),
    ],
)
def test_what_is_not_understood_is_an_error(tmp_path: Path, event: str, error: str) -> None:
    path = template(tmp_path, event)
    with pytest.raises(TemplateError, match=error):
        _ = [*stream_triggers(path), *schedule_triggers(path)]


EVENT: Any = {"eventName": "MODIFY", "dynamodb": {"NewImage": {"state": {"S": "SETTLED"}, "outcome": {"S": "lost"}}}}


@pytest.mark.parametrize(
    ("pattern", "passes"),
    [
        ({}, True),
        ({"eventName": ["MODIFY"]}, True),
        ({"eventName": ["INSERT", "MODIFY"]}, True),
        ({"eventName": ["INSERT"]}, False),
        ({"dynamodb": {"NewImage": {"state": {"S": ["SETTLED"]}}}}, True),
        ({"dynamodb": {"OldImage": {"state": {"S": ["SETTLED"]}}}}, False),
        ({"eventName": ["MODIFY"], "dynamodb": {"NewImage": {"state": {"S": ["RESERVED"]}}}}, False),
        ({"dynamodb": {"NewImage": {"outcome": {"S": [{"anything-but": ["lost"]}]}}}}, False),
        ({"dynamodb": {"NewImage": {"outcome": {"S": [{"anything-but": ["failed"]}]}}}}, True),
        ({"dynamodb": {"NewImage": {"absent": {"S": [{"anything-but": ["failed"]}]}}}}, False),
        ({"dynamodb": {"NewImage": {"absent": {"S": [{"exists": False}]}}}}, True),
        ({"dynamodb": {"NewImage": {"state": {"S": [{"exists": False}]}}}}, False),
        ({"dynamodb": {"NewImage": {"state": {"S": [{"exists": True}]}}}}, True),
    ],
)
def test_a_filter_passes_what_lambda_would(pattern: Any, passes: bool) -> None:
    assert matches(pattern, EVENT) is passes


def test_a_rule_nobody_wrote_here_is_an_error() -> None:
    with pytest.raises(TemplateError, match="prefix"):
        matches({"eventName": [{"prefix": "MOD"}]}, EVENT)


PIPELINES = """
Resources:
  Work: {Type: AWS::SQS::Queue}
  Lost: {Type: AWS::SQS::Queue}
  Bus: {Type: AWS::Events::EventBus}
Outputs:
  WorkArn: {Value: !GetAtt Work.Arn}
  BusName: {Value: !Ref Bus}
"""
QUEUE = "{Type: SQS, Properties: {Queue: !GetAtt Pipelines.Outputs.%s, %s}}"
RULE = "{Type: EventBridgeRule, Properties: {Pattern: {source: [a, !GetAtt Pipelines.Outputs.BusName]}, %s}}"


def pipelines(folder: Path) -> Pipelines:
    path = folder / "pipelines.yaml"
    path.write_text(PIPELINES)
    return read_pipelines(path)


def test_a_queues_mapping_is_read(tmp_path: Path) -> None:
    event = QUEUE % (
        "WorkArn",
        "BatchSize: 7, MaximumBatchingWindowInSeconds: 2, FunctionResponseTypes: [ReportBatchItemFailures], "
        "ScalingConfig: {MaximumConcurrency: 3}",
    )
    (trigger,) = queue_triggers(template(tmp_path, event), pipelines(tmp_path))
    assert (trigger.target.name, trigger.queue.name) == ("Worker", "Work")
    assert (trigger.batch_size, trigger.window_seconds, trigger.partial, trigger.most_at_once) == (7, 2, True, 3)


def test_a_queues_mapping_has_lambdas_defaults(tmp_path: Path) -> None:
    (trigger,) = queue_triggers(template(tmp_path, QUEUE % ("WorkArn", "Enabled: true")), pipelines(tmp_path))
    assert (trigger.batch_size, trigger.window_seconds, trigger.partial) == (10, 0, False)


def test_a_rule_is_read_with_what_it_refers_to(tmp_path: Path) -> None:
    event = RULE % "EventBusName: !GetAtt Pipelines.Outputs.BusName"
    (trigger,) = rule_triggers(template(tmp_path, event), pipelines(tmp_path))
    assert (trigger.name, trigger.bus, trigger.pattern) == ("WorkerOne", "Bus", {"source": ["a", "Bus"]})
    assert (trigger.attempts, trigger.failures) == (3, None)


def test_a_rule_that_is_off_calls_nobody(tmp_path: Path) -> None:
    assert rule_triggers(template(tmp_path, RULE % "State: DISABLED"), pipelines(tmp_path)) == []


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (QUEUE % ("None", "BatchSize: 1"), "no output None"),
        (QUEUE % ("BusName", "BatchSize: 1"), "declares no queue Bus"),
        (QUEUE % ("WorkArn", "FilterCriteria: {Filters: []}"), "FilterCriteria"),
        (RULE % "Input: x", "Input of a rule"),
    ],
)
def test_a_trigger_that_cannot_be_followed_here_is_an_error(tmp_path: Path, event: str, error: str) -> None:
    path, declared = template(tmp_path, event), pipelines(tmp_path)
    with pytest.raises(TemplateError, match=error):
        _ = [*queue_triggers(path, declared), *rule_triggers(path, declared)]


@pytest.mark.parametrize("reference", [{"Ref": "X"}, {"Ref": "X.Alias"}, {"Fn::GetAtt": ["X", "Arn"]}])
def test_a_function_is_known_by_its_references(reference: Any) -> None:
    assert function_name(reference) == "X"


@pytest.mark.parametrize("reference", ["X", {"Ref": "X.Version"}, {"Fn::GetAtt": ["X", "Name"]}])
def test_what_is_no_reference_to_a_function_is_an_error(reference: Any) -> None:
    with pytest.raises(TemplateError, match="not a function"):
        function_name(reference)


def test_a_function_is_imported_when_it_is_called_and_not_before() -> None:
    call = Target("Worker", "no_such_module.handler", 3).when_called()
    with pytest.raises(ModuleNotFoundError):
        call({})
