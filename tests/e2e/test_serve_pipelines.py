"""What comes by events on this machine: a file in the bucket, an event on the bus, a message in the queue."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar

import boto3
import pytest
from botocore.config import Config

from served import Served, serving

LINES = 20
SECONDS = 60
Found = TypeVar("Found")


class Pipelines:
    """Clients of one served stack, as another shell would have them by ``.local/env.json``."""

    def __init__(self, environment: Mapping[str, str], cleanup: ExitStack) -> None:
        def client(service: Any, variable: str) -> Any:
            made: Any = boto3.client(
                service,
                endpoint_url=environment[f"AWS_ENDPOINT_URL_{variable}"],
                region_name=environment["AWS_DEFAULT_REGION"],
                config=Config(retries={"total_max_attempts": 1}),
            )
            return cleanup.enter_context(closing(made))

        self.s3, self.sqs, self.events = client("s3", "S3"), client("sqs", "SQS"), client("events", "EVENTBRIDGE")
        self.states = client("stepfunctions", "SFN")
        self.bucket, self.bus = environment["PIPELINE_BUCKET"], environment["PIPELINE_BUS"]
        self.requests = environment["COMPLETION_REQUESTS_QUEUE_URL"]

    def keys(self, prefix: str) -> list[str]:
        return [one["Key"] for one in self.s3.list_objects_v2(Bucket=self.bucket, Prefix=prefix).get("Contents", ())]

    def object(self, key: str) -> bytes:
        content: bytes = self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return content

    def queue_of_events(self, name: str, kind: str) -> str:
        """A queue that is told the bus's events of this kind."""
        url: str = self.sqs.create_queue(QueueName=name)["QueueUrl"]
        arn = f"arn:aws:sqs:us-east-1:123456789012:{name}"
        self.events.put_rule(Name=name, EventBusName=self.bus, EventPattern=json.dumps({"detail-type": [kind]}))
        self.events.put_targets(Rule=name, EventBusName=self.bus, Targets=[{"Id": "1", "Arn": arn}])
        return url

    def message(self, url: str) -> Any:
        """The next message's body."""
        return eventually(
            lambda: self.sqs.receive_message(QueueUrl=url, WaitTimeSeconds=5).get("Messages", [{}])[0].get("Body")
        )


def eventually(look: Callable[[], Found | None]) -> Found:
    deadline = time.monotonic() + SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, "it takes a moment, but not so long"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def pipelines(served_stack: Served) -> Iterator[Pipelines]:
    with ExitStack() as cleanup:
        yield Pipelines(served_stack.environment, cleanup)


def batch_file(name: str) -> bytes:
    lines = [
        {
            "custom_id": f"{name}-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "demo", "prompt": f"def f{number}(", "max_tokens": 4, "temperature": 0},
        }
        for number in range(LINES)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def test_a_file_that_appears_in_the_bucket_is_answered_line_by_line(pipelines: Pipelines) -> None:
    before = set(pipelines.keys("output/local/"))
    pipelines.s3.put_object(Bucket=pipelines.bucket, Key="input/local/x.jsonl", Body=batch_file("x"))

    def manifest_key() -> str | None:
        new = set(pipelines.keys("output/local/")) - before
        for key in sorted(new):
            if key.endswith("/manifest.json") and b'"x-0"' in pipelines.object(
                key.replace("manifest.json", "output.jsonl")
            ).replace(b": ", b":"):
                return key
        return None

    folder = eventually(manifest_key).removesuffix("manifest.json")
    answers = [json.loads(line) for line in pipelines.object(f"{folder}output.jsonl").splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"x-{number}" for number in range(LINES))
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    assert {answer["error"] for answer in answers} == {None}
    assert {answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers} == {4}


def test_the_batchs_execution_is_found_where_step_functions_would_have_it(
    served_stack: Served, pipelines: Pipelines
) -> None:
    pipelines.s3.put_object(Bucket=pipelines.bucket, Key="input/local/y.jsonl", Body=batch_file("y"))
    machine = served_stack.environment["BATCH_STATE_MACHINE"]

    def ended() -> list[Any]:
        names = {key.split("/")[1] for key in pipelines.keys("batches/")}
        arns = [machine.replace("stateMachine", "execution") + f":{name}" for name in names]
        told = [pipelines.states.describe_execution(executionArn=arn) for arn in arns]
        return [one for one in told if one["status"] != "RUNNING"]

    for one in eventually(ended):
        assert one["status"] == "SUCCEEDED"
        assert json.loads(one["input"]).keys() >= {"tenant", "batch_id"}


def request(custom_id: str) -> dict[str, Any]:
    body = {"model": "demo", "prompt": "def main(", "max_tokens": 5, "temperature": 0}
    return {"version": "1", "custom_id": custom_id, "url": "/v1/completions", "body": body}


def test_an_event_on_the_bus_is_answered_by_an_event(pipelines: Pipelines) -> None:
    told = pipelines.queue_of_events("told-succeeded", "completion.succeeded")
    entry = {"Source": "test", "DetailType": "completion.requested", "EventBusName": pipelines.bus}
    reply = pipelines.events.put_events(Entries=[{**entry, "Detail": json.dumps(request("e1"))}])
    assert reply["FailedEntryCount"] == 0

    event = json.loads(pipelines.message(told))
    assert event["detail-type"] == "completion.succeeded"
    assert (event["detail"]["custom_id"], event["detail"]["status"]) == ("e1", 200)
    assert event["detail"]["body"]["usage"]["completion_tokens"] == 5
    assert event["detail"]["key_id"] == "local"


def test_a_message_in_the_queue_is_answered_where_it_says(pipelines: Pipelines) -> None:
    replies = pipelines.sqs.create_queue(QueueName="told-replies")["QueueUrl"]
    place = {"DataType": "String", "StringValue": replies}
    pipelines.sqs.send_message(
        QueueUrl=pipelines.requests,
        MessageBody=json.dumps(request("m1")),
        MessageAttributes={"reply_queue_url": place},
    )
    reply = json.loads(pipelines.message(replies))
    assert (reply["custom_id"], reply["status"]) == ("m1", 200)
    assert reply["body"]["usage"]["completion_tokens"] == 5


def test_a_message_may_be_answered_in_the_bucket(pipelines: Pipelines) -> None:
    place = {"DataType": "String", "StringValue": f"s3://{pipelines.bucket}/replied/here/"}
    pipelines.sqs.send_message(
        QueueUrl=pipelines.requests, MessageBody=json.dumps(request("m2")), MessageAttributes={"reply_s3_uri": place}
    )
    (key,) = eventually(lambda: pipelines.keys("replied/here/"))
    assert json.loads(pipelines.object(key))["custom_id"] == "m2"


def test_a_message_that_is_no_request_is_answered_by_a_failure(pipelines: Pipelines) -> None:
    told = pipelines.queue_of_events("told-failed", "completion.failed")
    pipelines.sqs.send_message(QueueUrl=pipelines.requests, MessageBody="no JSON")
    event = json.loads(pipelines.message(told))
    assert event["detail"]["status"] == 400


def test_a_signal_ends_it_while_a_batch_is_at_work(project_root: Path, tmp_path: Path) -> None:
    with (
        ExitStack() as cleanup,
        serving(tmp_path, project_root / "template.yaml", "--tokens-per-second", "0.05") as (process, printed),
    ):
        assert "s3://pipeline-bucket/input/local/*.jsonl" in printed
        environment = json.loads((tmp_path / ".local" / "env.json").read_text())["environment"]
        pipelines = Pipelines(environment, cleanup)
        pipelines.s3.put_object(Bucket=pipelines.bucket, Key="input/local/slow.jsonl", Body=batch_file("slow"))
        eventually(lambda: pipelines.keys("batches/"))
        time.sleep(1)  # the first lines are with the model by now, which takes twenty seconds for a token
        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=20) == 0
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()
        assert not list((tmp_path / ".local").iterdir())
