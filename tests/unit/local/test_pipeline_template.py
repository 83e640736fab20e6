"""What is read of a template of pipelines, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from completions_cli.local.pipeline_template import Bucket, Pipelines, local_bucket, read_pipelines
from completions_cli.local.template import TemplateError


def read(folder: Path, resources: str, outputs: str = "{}") -> Pipelines:
    path = folder / "pipelines.yaml"
    path.write_text(f"Resources: {resources}\nOutputs: {outputs}\n")
    return read_pipelines(path)


def test_what_is_deployed_is_read(project_root: Path) -> None:
    declared = read_pipelines(project_root / "infra" / "pipelines.yaml")
    assert declared.buckets == [Bucket("pipeline-bucket", tells=True)]
    assert "CompletionsBus" in declared.buses
    requests = declared.queue("arn:aws:sqs:us-east-1:123456789012:CompletionRequests")
    assert requests.most_receives is not None
    dead = json.loads(requests.attributes["RedrivePolicy"])["deadLetterTargetArn"]
    assert declared.queue(dead).name == "CompletionRequestFailures"
    (rule,) = [rule for rule in declared.rules if requests.arn in rule.targets]
    assert (rule.bus, rule.pattern) == ("CompletionsBus", {"detail-type": ["completion.requested"]})
    assert declared.outputs["PipelineBucketName"] == "pipeline-bucket"
    assert declared.outputs["CompletionsBusName"] == "CompletionsBus"
    assert declared.outputs["CompletionRequestsQueueArn"] == requests.arn


def test_a_template_that_is_not_there_declares_nothing(tmp_path: Path) -> None:
    assert read_pipelines(tmp_path / "none.yaml") == Pipelines()


@pytest.mark.parametrize(("name", "local"), [("PipelineBucket", "pipeline-bucket"), ("Answers", "answers")])
def test_a_bucket_is_called_by_its_logical_id_without_capitals(name: str, local: str) -> None:
    assert local_bucket(name) == local


def test_a_fifo_queue_is_called_so(tmp_path: Path) -> None:
    declared = read(tmp_path, "{Q: {Type: AWS::SQS::Queue, Properties: {FifoQueue: true}}}")
    (queue,) = declared.queues
    assert (queue.name, queue.attributes) == ("Q.fifo", {"FifoQueue": "true"})


RULE = "{Q: {Type: AWS::SQS::Queue}, R: {Type: AWS::Events::Rule, Properties: {%s}}}"


@pytest.mark.parametrize(
    ("properties", "error"),
    [
        ("EventPattern: {source: [a]}, Targets: [{Id: q, Arn: !GetAtt Elsewhere.Arn}]", "only its own queues"),
        ("EventPattern: {source: [a]}, EventBusName: !Ref Elsewhere", "only its own queues and buses"),
        ("ScheduleExpression: rate(1 day), Targets: [{Id: q, Arn: !GetAtt Q.Arn}]", "EventPattern"),
        ("EventPattern: {source: [a]}, Targets: [{Id: q, Arn: !GetAtt Q.Arn, InputPath: $.detail}]", "InputPath"),
    ],
)
def test_a_rule_that_cannot_be_followed_here_is_an_error(tmp_path: Path, properties: str, error: str) -> None:
    with pytest.raises(TemplateError, match=error):
        read(tmp_path, RULE % properties)
