"""The stand-in of Step Functions as boto3 meets it, with functions of this process and objects of moto's S3."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event
from typing import Any

import boto3
import pytest
from botocore.config import Config

import recorded_calls
from completions_cli.local.state_machine import StateMachines, machine_arn, read_state_machines, serving_state_machines
from completions_cli.local.template import TemplateError
from moto_services import moto_services

TEMPLATE = """
Resources:
  Worker:
    Type: AWS::Serverless::Function
    Properties: {Handler: recorded_calls.handler}
  Small:
    Type: AWS::Serverless::StateMachine
    Properties:
      DefinitionUri: small.asl.json
      DefinitionSubstitutions: {Partition: !Ref AWS::Partition, WorkerArn: !Ref Worker.Alias}
"""
PARTS = {
    "Type": "Map",
    "ItemReader": {
        "Resource": "arn:${Partition}:states:::s3:getObject",
        "ReaderConfig": {"InputType": "JSONL"},
        "Parameters": {"Bucket": "small-machine", "Key.$": "$.key"},
    },
    "ItemSelector": {"part.$": "$$.Map.Item.Value", "index.$": "$$.Map.Item.Index"},
    "ToleratedFailurePercentage": 50,
    "ItemProcessor": {
        "ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
        "StartAt": "Work",
        "States": {"Work": {"Type": "Task", "Resource": "${WorkerArn}", "End": True}},
    },
    "ResultWriter": {
        "Resource": "arn:${Partition}:states:::s3:putObject",
        "Parameters": {"Bucket": "small-machine", "Prefix": "results"},
    },
    "End": True,
}
DEFINITION = {
    "StartAt": "Which",
    "States": {
        "Which": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.key", "IsPresent": True, "Next": "Parts"}],
            "Default": "Once",
        },
        "Once": {"Type": "Task", "Resource": "${WorkerArn}", "End": True},
        "Parts": PARTS,
    },
}
ARN = machine_arn("Small")


def written(folder: Path, definition: object = DEFINITION, template: str = TEMPLATE) -> Path:
    path = folder / "template.yaml"
    path.write_text(template)
    (folder / "small.asl.json").write_text(json.dumps(definition))
    return path


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with moto_services("eu-south-2") as client:
        found = client("s3")
        place = {"LocationConstraint": "eu-south-2"}
        found.create_bucket(Bucket="small-machine", CreateBucketConfiguration=place)
        yield found


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory, s3: Any) -> Iterator[Any]:
    machines = read_state_machines(written(tmp_path_factory.mktemp("small")))
    service = StateMachines(machines, lambda: s3, retry_factor=0)
    with ExitStack() as cleanup:
        url = cleanup.enter_context(serving_state_machines(service))
        settings = Config(retries={"total_max_attempts": 1})
        yield cleanup.enter_context(
            closing(boto3.client("stepfunctions", endpoint_url=url, region_name="us-east-1", config=settings))
        )


def ended(states: Any, arn: str) -> Any:
    deadline = time.monotonic() + 10
    while (told := states.describe_execution(executionArn=arn))["status"] == "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return told


def test_an_execution_is_started_and_described_to_its_end(states: Any) -> None:
    recorded_calls.begin(lambda event: {"got": event})
    arn = states.start_execution(stateMachineArn=ARN, name="first", input='{"a": 1}')["executionArn"]
    assert arn == "arn:aws:states:us-east-1:123456789012:execution:Small:first"
    told = ended(states, arn)
    assert (told["status"], told["name"], told["stateMachineArn"]) == ("SUCCEEDED", "first", ARN)
    assert json.loads(told["output"]) == {"got": {"a": 1}}
    assert json.loads(told["input"]) == {"a": 1}
    assert told["stopDate"] >= told["startDate"]


def test_a_name_is_one_execution(states: Any) -> None:
    release = Event()
    recorded_calls.begin(lambda _: release.wait(10))
    request = {"stateMachineArn": ARN, "name": "twice"}
    first = states.start_execution(**request, input="{}")
    assert states.start_execution(**request, input="{}") | {"ResponseMetadata": 0} == first | {"ResponseMetadata": 0}
    with pytest.raises(states.exceptions.ExecutionAlreadyExists):
        states.start_execution(**request, input='{"other": 1}')
    release.set()
    ended(states, first["executionArn"])
    with pytest.raises(states.exceptions.ExecutionAlreadyExists):
        states.start_execution(**request, input="{}")
    assert len(recorded_calls.calls) == 1


def test_a_function_that_raises_fails_it_by_the_exceptions_name(states: Any) -> None:
    def fail(_: Any) -> None:
        raise KeyError("gone")

    recorded_calls.begin(fail)
    told = ended(states, states.start_execution(stateMachineArn=ARN, input="{}")["executionArn"])
    assert (told["status"], told["error"]) == ("FAILED", "KeyError")
    assert json.loads(told["cause"]) == {"errorMessage": "'gone'", "errorType": "KeyError"}


def test_a_map_reads_its_lines_from_s3_and_leaves_its_results_there(states: Any, s3: Any) -> None:
    def fail_two(event: Any) -> Any:
        if event["part"]["n"] == 2:
            raise RuntimeError("two")
        return {"done": event["part"]["n"]}

    recorded_calls.begin(fail_two)
    s3.put_object(Bucket="small-machine", Key="lines", Body=b'{"n": 1}\n{"n": 2}\n\n{"n": 3}\n')
    told = ended(states, states.start_execution(stateMachineArn=ARN, input='{"key": "lines"}')["executionArn"])
    assert told["status"] == "SUCCEEDED"
    assert sorted((event["index"], event["part"]["n"]) for event in recorded_calls.calls) == [(0, 1), (1, 2), (2, 3)]

    place = json.loads(told["output"])["ResultWriterDetails"]
    assert place["Bucket"] == "small-machine"
    assert place["Key"].startswith("results/")
    manifest = json.loads(s3.get_object(Bucket="small-machine", Key=place["Key"])["Body"].read())
    files = {status: [one["Key"] for one in found] for status, found in manifest["ResultFiles"].items()}
    (succeeded,), (failed,) = files["SUCCEEDED"], files["FAILED"]
    records = json.loads(s3.get_object(Bucket="small-machine", Key=succeeded)["Body"].read())
    assert sorted(json.loads(record["Output"])["done"] for record in records) == [1, 3]
    (record,) = json.loads(s3.get_object(Bucket="small-machine", Key=failed)["Body"].read())
    assert (record["Status"], record["Error"]) == ("FAILED", "RuntimeError")


@pytest.mark.parametrize(("key", "content"), [("absent", None), ("broken", b"{\n")])
def test_a_file_that_cannot_be_read_fails_the_map(states: Any, s3: Any, key: str, content: bytes | None) -> None:
    if content is not None:
        s3.put_object(Bucket="small-machine", Key=key, Body=content)
    arn = states.start_execution(stateMachineArn=ARN, input=json.dumps({"key": key}))["executionArn"]
    assert ended(states, arn)["error"] == "States.ItemReaderFailed"


def test_a_stopped_execution_is_aborted_at_once(states: Any) -> None:
    release = Event()
    recorded_calls.begin(lambda _: release.wait(10))
    arn = states.start_execution(stateMachineArn=ARN, input="{}")["executionArn"]
    recorded_calls.until(1)
    states.stop_execution(executionArn=arn, error="Cancelled", cause="by hand")
    told = states.describe_execution(executionArn=arn)
    assert (told["status"], told["error"], told["cause"]) == ("ABORTED", "Cancelled", "by hand")
    release.set()


def test_what_is_not_there_and_what_is_no_json_is_refused(states: Any) -> None:
    with pytest.raises(states.exceptions.StateMachineDoesNotExist):
        states.start_execution(stateMachineArn=machine_arn("Other"), input="{}")
    with pytest.raises(states.exceptions.ExecutionDoesNotExist):
        states.describe_execution(executionArn=f"{ARN}:none".replace("stateMachine", "execution"))
    with pytest.raises(states.exceptions.InvalidExecutionInput):
        states.start_execution(stateMachineArn=ARN, input="{")


def test_another_operation_is_refused_with_those_that_are_known(states: Any) -> None:
    with pytest.raises(states.exceptions.ClientError, match="does not know ListStateMachines, but StartExecution"):
        states.list_state_machines()


def test_what_is_deployed_is_understood(project_root: Path) -> None:
    machines = read_state_machines(project_root / "template.yaml")
    assert [machine.name for machine in machines] == ["BatchStateMachine"]
    names = {target.handler for target in machines[0].functions.values()}
    assert names == {f"completions.handlers.batch_{name}.handler" for name in ("splitter", "worker", "assembler")}
    StateMachines(machines, Event, retry_factor=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("definition", "change", "error"),
    [
        (DEFINITION, ("WorkerArn: !Ref Worker.Alias", "Other: !Ref Worker.Alias"), "no substitution WorkerArn"),
        (DEFINITION, ("!Ref Worker.Alias", "!Ref Nobody.Alias"), "no function of this template"),
        (DEFINITION, ("small.asl.json", "none.asl.json"), "none.asl.json"),
    ],
)
def test_a_machine_that_cannot_be_read_is_an_error(
    tmp_path: Path, definition: object, change: tuple[str, str], error: str
) -> None:
    with pytest.raises(TemplateError, match=error):
        read_state_machines(written(tmp_path, definition, TEMPLATE.replace(*change)))
