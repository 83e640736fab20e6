"""The queue's function against SQS, S3, EventBridge and DynamoDB (moto's) and the SageMaker stand-in.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from openapi_schema_validator import OAS31Validator

from completions.domain.catalog import ModelPrice, ModelRoute
from completions.domain.limits import KeyLimits
from completions.domain.metering import Principal
from completions.registry.dynamodb import put_key, put_model
from completions.web.auth import secret_digest
from completions_cli.local.events import LambdaContext
from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import LocalStack
from dynamodb_local import new_table
from metered import AMPLE, LONG_AGO, Books

ENDPOINT = "queued"
KEY = Principal("queue-key", "ada", limits=KeyLimits(**AMPLE))
CROWD = Principal("crowds-key", "ada", limits=KeyLimits(**AMPLE))
BUCKET, REPLIED, BUS = "queued-pipeline", "queued-replies", "queued-bus"
BODY = {"model": "queued", "prompt": "import os\n", "max_tokens": 8, "temperature": 0}
ACCOUNT = "123456789012"
PRICE = ModelPrice("2026-11", 100, 10, 200)
THROTTLED = Fault(refusal=Refusal(kind="throttled"))
Handler = Callable[[Mapping[str, Any], LambdaContext], dict[str, list[dict[str, str]]]]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Queues by their names, and what was written where."""

    stack: LocalStack
    handler: Handler
    environment: Mapping[str, str]
    books: Books
    sqs: Any
    s3: Any
    events: Any
    urls: Mapping[str, str]
    schemas: Mapping[bool, OAS31Validator]

    def invoke(self, records: Sequence[Any]) -> list[str]:
        """The ids of the messages that failed."""
        reply = self.handler({"Records": list(records)}, LambdaContext("QueuedCompletionsFunction", 60))
        return [failure["itemIdentifier"] for failure in reply["batchItemFailures"]]

    def send(self, body: Any, **attributes: str) -> None:
        texts = {name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()}
        text = body if isinstance(body, str) else json.dumps(body)
        self.sqs.send_message(QueueUrl=self.urls["requests"], MessageBody=text, MessageAttributes=texts)

    def receive(self, queue: str = "requests") -> list[dict[str, Any]]:
        """Up to ten messages, as Lambda hands them over."""
        found = self.sqs.receive_message(
            QueueUrl=self.urls[queue],
            MaxNumberOfMessages=10,
            AttributeNames=["All"],
            MessageAttributeNames=["All"],
        )
        return [
            {
                "messageId": message["MessageId"],
                "receiptHandle": message["ReceiptHandle"],
                "body": message["Body"],
                "attributes": message["Attributes"],
                "messageAttributes": {
                    name: {"stringValue": value["StringValue"], "dataType": value["DataType"]}
                    for name, value in message.get("MessageAttributes", {}).items()
                },
                "eventSource": "aws:sqs",
                "eventSourceARN": f"arn:aws:sqs:us-east-1:{ACCOUNT}:{self.urls[queue].rpartition('/')[2]}",
                "awsRegion": "us-east-1",
            }
            for message in found.get("Messages", ())
        ]

    def delete(self, record: Mapping[str, Any], queue: str = "requests") -> None:
        self.sqs.delete_message(QueueUrl=self.urls[queue], ReceiptHandle=record["receiptHandle"])

    def poll(self, patience: float = 20) -> int:
        """What an event source mapping does until the queue is empty; the number of invocations."""
        invocations, end = 0, time.monotonic() + patience
        while self.left("requests"):
            assert time.monotonic() < end, "messages are left"
            if not (records := self.receive()):
                time.sleep(0.1)
                continue
            invocations += 1
            failed = self.invoke(records)
            for record in records:
                if record["messageId"] not in failed:
                    self.delete(record)
        return invocations

    def left(self, queue: str) -> int:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.urls[queue], AttributeNames=names)["Attributes"]
        return sum(int(found[name]) for name in names)

    def drained(self, queue: str) -> list[dict[str, Any]]:
        """Every message of a queue, taken from it."""
        found = []
        while records := self.receive(queue):
            found += records
            for record in records:
                self.delete(record, queue)
        return found

    def replies(self) -> list[dict[str, Any]]:
        """All that came to the queue, the bus and the bucket since the last time, each true to its schema."""
        details = [json.loads(record["body"]) for record in self.drained("replies")]
        for record in self.drained("told"):
            event = json.loads(record["body"])
            succeeded = event["detail"]["status"] < 400
            assert event["detail-type"] == f"completion.{'succeeded' if succeeded else 'failed'}"
            assert event["source"] == "completions"
            details.append(event["detail"])
        for page in self.s3.get_paginator("list_objects_v2").paginate(Bucket=REPLIED):
            for entry in page.get("Contents", ()):
                details.append(json.loads(self.s3.get_object(Bucket=REPLIED, Key=entry["Key"])["Body"].read()))
                self.s3.delete_object(Bucket=REPLIED, Key=entry["Key"])
        for detail in details:
            self.schemas[detail["status"] < 400].validate(detail)
        return details

    def calls(self) -> int:
        return self.stack.sagemaker.call_count[ENDPOINT]

    def script(self, *faults: Fault) -> None:
        self.stack.sagemaker.faults.replace(ENDPOINT, list(faults))


@pytest.fixture(scope="module")
def module(stack: LocalStack, project_root: Path) -> Iterator[Pipeline]:
    """Tables, queues, buckets and a bus of its own; the model is the stack's, behind an endpoint of its own."""
    url = stack.environment["AWS_ENDPOINT_URL_DYNAMODB"]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as cleanup:
        clients: dict[str, Any] = {}
        for service in ("dynamodb", "s3", "sqs", "events"):
            clients[service] = boto3.client(service, endpoint_url=url)
            cleanup.callback(clients[service].close)
        dynamodb = clients["dynamodb"]
        environment = {
            "AWS_ENDPOINT_URL_S3": url,
            "AWS_ENDPOINT_URL_SQS": url,
            "AWS_ENDPOINT_URL_EVENTBRIDGE": url,
            "REGISTRY_TABLE": new_table(dynamodb, "RegistryTable"),
            "USAGE_TABLE": new_table(dynamodb),
            "PIPELINE_TABLE": new_table(dynamodb, "PipelineTable"),
            "PIPELINE_BUCKET": BUCKET,
            "PIPELINE_BUS": BUS,
            "UPSTREAM_ATTEMPTS": "1",
        }
        for name, value in environment.items():
            patch.setenv(name, value)
        _register(dynamodb, environment["REGISTRY_TABLE"], "demo-vllm", ENDPOINT)
        stack.sagemaker.containers[ENDPOINT] = stack.sagemaker.containers["demo-vllm"]
        for bucket in (BUCKET, REPLIED):
            clients["s3"].create_bucket(Bucket=bucket)
        sys.modules.pop("completions.handlers.queued_completions", None)
        handler = importlib.import_module("completions.handlers.queued_completions").handler
        sys.modules.pop("completions.handlers.queued_completions")  # its environment ends with this module
        urls = _queues(clients["sqs"], clients["events"])
        books = Books(dynamodb, environment["USAGE_TABLE"])
        yield Pipeline(
            stack,
            handler,
            environment,
            books,
            clients["sqs"],
            clients["s3"],
            clients["events"],
            urls,
            _schemas(project_root),
        )
        del stack.sagemaker.containers[ENDPOINT]


def _register(dynamodb: Any, table: str, *endpoints: str) -> None:
    put_key(dynamodb, table, secret_digest("sk-queue"), KEY)
    put_key(dynamodb, table, secret_digest("sk-crowd"), CROWD)
    put_key(dynamodb, table, secret_digest("sk-local"), Principal("local", "local"))
    for endpoint in endpoints:
        model = "demo" if endpoint == "demo-vllm" else endpoint
        put_model(dynamodb, table, ModelRoute(model, endpoint, "vllm", 8192, 1_764_547_200, price=PRICE))


def _queues(sqs: Any, events: Any) -> dict[str, str]:
    """A bus whose requests go to the queue, and all the rest to another, for the test to read."""
    made = {name: sqs.create_queue(QueueName=f"queued-{name}")["QueueUrl"] for name in ("replies", "told", "failures")}
    redrive = {"deadLetterTargetArn": f"arn:aws:sqs:us-east-1:{ACCOUNT}:queued-failures", "maxReceiveCount": 2}
    attributes = {"VisibilityTimeout": "960", "RedrivePolicy": json.dumps(redrive)}
    made["requests"] = sqs.create_queue(QueueName="queued-requests", Attributes=attributes)["QueueUrl"]
    events.create_event_bus(Name=BUS)
    for rule, kinds, queue in (
        ("in", ["completion.requested"], "requests"),
        ("out", ["completion.succeeded", "completion.failed"], "told"),
    ):
        events.put_rule(Name=rule, EventBusName=BUS, EventPattern=json.dumps({"detail-type": kinds}))
        target = {"Id": "queue", "Arn": f"arn:aws:sqs:us-east-1:{ACCOUNT}:queued-{queue}"}
        events.put_targets(Rule=rule, EventBusName=BUS, Targets=[target])
    return made


def _schemas(root: Path) -> dict[bool, OAS31Validator]:
    return {
        succeeded: OAS31Validator(json.loads((root / "infra" / "schemas" / f"completion-{name}.v1.json").read_text()))
        for succeeded, name in ((True, "succeeded"), (False, "failed"))
    }


@pytest.fixture
def pipeline(module: Pipeline) -> Iterator[Pipeline]:
    """Nothing on its way, no call counted, no fault scripted."""
    module.stack.sagemaker.call_count[ENDPOINT] = 0
    yield module
    module.script()
    for queue in module.urls:
        module.drained(queue)
    module.replies()


def detail(custom_id: str, **fields: Any) -> dict[str, Any]:
    return {
        "version": "1",
        "custom_id": custom_id,
        "key_id": KEY.key_id,
        "url": "/v1/completions",
        "body": {**BODY},
        **fields,
    }


# The whole of it


def send_200(pipeline: Pipeline) -> None:
    """A quarter of them over the bus; replies go to a queue, a bucket and the bus."""
    places = [{"queue_url": pipeline.urls["replies"]}, {"s3_uri": f"s3://{REPLIED}/all/"}, None]
    for number in range(200):
        asked = detail(
            f"n{number}",
            key_id=CROWD.key_id,
            reply=places[number % 3],
            body={**BODY, "max_tokens": 1 + number % 8},
        )
        if number % 4:
            pipeline.send(asked)
        else:
            entry = {"Source": "test", "DetailType": "completion.requested", "Detail": json.dumps(asked)}
            pipeline.events.put_events(Entries=[{**entry, "EventBusName": BUS}])


def deliver_twice(pipeline: Pipeline) -> None:
    """Every batch, one after the other and at once in turn, until no message is left that failed both times."""
    pending: list[list[Any]] = []
    while records := pipeline.receive():
        pending.append(records)
    for number in range(200):
        batch = pending.pop(0) if pending else []
        with ThreadPoolExecutor(1 + number % 2) as pool:
            failed = list(pool.map(pipeline.invoke, [batch, batch]))
        again = set(failed[0]) & set(failed[1])
        for record in batch:
            if record["messageId"] not in again:
                pipeline.delete(record)
        pending += [[record for record in batch if record["messageId"] in again]] if again else []
    assert pending == []


def test_of_200_messages_delivered_twice_each_is_answered_once_and_paid_once(pipeline: Pipeline) -> None:
    pipeline.script(*[Fault(calls=9), THROTTLED] * 20)
    send_200(pipeline)
    deliver_twice(pipeline)
    assert pipeline.left("requests") == 0

    replies = pipeline.replies()
    assert Counter(reply["custom_id"] for reply in replies) == Counter(f"n{number}" for number in range(200))
    assert {reply["status"] for reply in replies} == {200}
    records = pipeline.books.records(CROWD)
    outcomes = Counter(record["outcome"] for record in records)
    assert outcomes["succeeded"] == 200
    assert outcomes["refused"] == 20
    assert outcomes.total() == pipeline.calls() == 200 + outcomes["refused"]
    for field in ("prompt_tokens", "completion_tokens"):
        assert sum(reply["usage"][field] for reply in replies) == sum(record[field] for record in records)
    assert sum(reply["cost_nanos"] for reply in replies) == sum(record["nanos"] for record in records) > 0
    pipeline.books.require_balance(CROWD)


@pytest.mark.parametrize("moment", ["after", "before"])
def test_a_killed_function_leaves_a_message_that_is_answered_once_and_paid_once(
    pipeline: Pipeline, project_root: Path, moment: str
) -> None:
    pipeline.send(detail(moment))
    records = pipeline.receive()
    run = subprocess.run(
        [sys.executable, str(project_root / "tests" / "killed_queue_worker.py"), moment],
        input=json.dumps({"Records": records}),
        env=os.environ
        | pipeline.environment
        | {"PYTHONPATH": os.pathsep.join(str(project_root / folder) for folder in ("functions", "infra", "tests"))},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert pipeline.calls() == 1
    if moment == "before":
        assert pipeline.invoke(records) == [records[0]["messageId"]]  # somebody may still be at it
        pipeline.books.sweeper(KEY, now=datetime.now(UTC) + LONG_AGO).sweep()

    assert pipeline.invoke(records) == []
    assert pipeline.invoke(records) == []
    pipeline.delete(records[0])

    (reply,) = pipeline.replies()
    assert (reply["custom_id"], reply["status"], reply["usage"]["completion_tokens"]) == (moment, 200, 8)
    name = f"REQ#{reply['request_id']}"
    mine = [record for record in pipeline.books.records(KEY) if record["pk"].startswith(name)]
    outcomes = {record["pk"]: record["outcome"] for record in mine}
    if moment == "after":
        assert (outcomes, pipeline.calls()) == ({name: "succeeded"}, 1)
    else:
        assert (outcomes, pipeline.calls()) == ({name: "lost", f"{name}-2": "succeeded"}, 2)
    pipeline.books.require_balance(KEY)


# Messages


def test_the_event_of_the_repository_is_answered(pipeline: Pipeline, project_root: Path) -> None:
    pipeline.s3.create_bucket(Bucket="pipeline-bucket")
    event = json.loads((project_root / "events" / "queued_completions.json").read_text())
    assert pipeline.invoke(event["Records"]) == []
    told = {reply["custom_id"]: reply for reply in pipeline.replies()}
    assert {name: reply["status"] for name, reply in told.items()} == {"plain": 200, "from the bus": 200}
    listed = pipeline.s3.list_objects_v2(Bucket="pipeline-bucket", Prefix="replied/")["Contents"]
    kept = [
        json.loads(pipeline.s3.get_object(Bucket="pipeline-bucket", Key=one["Key"])["Body"].read()) for one in listed
    ]
    assert [(reply["custom_id"], reply["status"]) for reply in kept] == [("with attributes", 200)]
    assert listed[0]["Key"] == f"replied/{kept[0]['request_id']}.json"
    assert kept[0]["body"]["completion"]
    pipeline.s3.delete_object(Bucket="pipeline-bucket", Key=listed[0]["Key"])


def test_a_message_that_is_no_request_is_told_on_the_bus_and_done(pipeline: Pipeline) -> None:
    pipeline.send("hello")
    pipeline.send(detail("wrong", url=None))
    assert pipeline.poll() == 1
    replies = {reply.get("custom_id"): reply for reply in pipeline.replies()}
    assert {name: reply["status"] for name, reply in replies.items()} == {None: 400, "wrong": 400}
    assert "'url'" in replies["wrong"]["error"]["message"]
    assert pipeline.calls() == 0


def test_a_throttled_message_comes_back_soon_not_after_the_queues_own_time(pipeline: Pipeline) -> None:
    pipeline.script(THROTTLED)
    pipeline.send(detail("throttled"))
    assert pipeline.poll() == 2
    (reply,) = pipeline.replies()
    assert (reply["status"], pipeline.calls()) == (200, 2)


def test_a_model_that_failed_three_times_is_a_failed_reply(pipeline: Pipeline) -> None:
    pipeline.script(Fault(refusal=Refusal(kind="internal"), calls=3))
    pipeline.send(detail("failed"))
    assert pipeline.poll() == 1
    (reply,) = pipeline.replies()
    assert (reply["status"], reply["error"]["type"], pipeline.calls()) == (500, "BackendError", 3)
    assert reply["body"]["error"]["type"]


def test_a_model_that_is_not_there_is_waited_for_however_often(pipeline: Pipeline) -> None:
    pipeline.script(Fault(refusal=Refusal(kind="unavailable"), calls=5))
    pipeline.send(detail("absent"))
    (record,) = pipeline.receive()
    for _ in range(5):
        assert pipeline.invoke([record]) == [record["messageId"]]
    assert pipeline.invoke([record]) == []
    pipeline.delete(record)
    (reply,) = pipeline.replies()
    assert reply["status"] == 200


def test_poison_ends_in_the_dead_letter_queue_and_holds_up_nobody(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = detail("poison", idempotency_key="poison")
    pipeline.send(named)
    assert pipeline.poll() == 1
    (reply,) = pipeline.replies()
    kept = f"replies/{reply['request_id'][:44]}.json"
    pipeline.s3.put_object(Bucket=BUCKET, Key=kept, Body=b"no longer what it was")
    pipeline.send({**named, "reply": {"queue_url": pipeline.urls["replies"]}})
    pipeline.send(detail("good"))
    pipeline.poll()
    assert [answered["custom_id"] for answered in pipeline.replies()] == ["good"]
    (dead,) = pipeline.drained("failures")
    assert json.loads(dead["body"])["custom_id"] == "poison"


# Replies


def test_a_request_named_again_is_replied_to_once_at_each_place_and_paid_once(pipeline: Pipeline) -> None:
    named = detail("named", idempotency_key="named")
    elsewhere = {**named, "reply": {"queue_url": pipeline.urls["replies"]}}
    for asked in (named, named, elsewhere, elsewhere):
        pipeline.send(asked)
        pipeline.poll()
    replies = pipeline.replies()
    assert [reply["status"] for reply in replies] == [200, 200]
    assert replies[0]["body"] == replies[1]["body"]
    assert pipeline.calls() == 1


def test_another_request_under_a_used_name_is_refused_and_changes_nothing(pipeline: Pipeline) -> None:
    named = detail("first", idempotency_key="conflict", reply={"s3_uri": f"s3://{REPLIED}/conflict/"})
    pipeline.send(named)
    pipeline.poll()
    pipeline.send({**named, "custom_id": "other", "body": {**BODY, "prompt": "another"}})
    pipeline.poll()
    pipeline.send({**named, "custom_id": "again", "reply": None})
    pipeline.poll()
    found = {reply["custom_id"]: reply for reply in pipeline.replies()}
    assert {name: reply["status"] for name, reply in found.items()} == {"first": 200, "other": 400, "again": 200}
    assert found["first"]["body"] == found["again"]["body"]
    assert pipeline.calls() == 1


def test_a_fifo_queue_gets_its_replies_by_key_and_name(pipeline: Pipeline) -> None:
    url = pipeline.sqs.create_queue(QueueName="queued-ordered.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    pipeline.send(detail("ordered"), reply_queue_url=url)
    pipeline.poll()
    (found,) = pipeline.sqs.receive_message(
        QueueUrl=url, AttributeNames=["All"], MessageAttributeNames=["All"], MaxNumberOfMessages=10
    )["Messages"]
    reply = json.loads(found["Body"])
    assert found["Attributes"]["MessageGroupId"] == KEY.key_id
    assert found["Attributes"]["MessageDeduplicationId"] == reply["request_id"]
    assert found["MessageAttributes"]["status"] == {"StringValue": "200", "DataType": "Number"}


def test_an_object_may_have_a_name_of_its_own(pipeline: Pipeline) -> None:
    pipeline.send(detail("object"), reply_s3_uri=f"s3://{REPLIED}/mine.json")
    pipeline.poll()
    assert [one["Key"] for one in pipeline.s3.list_objects_v2(Bucket=REPLIED)["Contents"]] == ["mine.json"]
    assert [reply["custom_id"] for reply in pipeline.replies()] == ["object"]


def test_a_long_text_is_in_the_bucket_and_the_event_points_to_it(pipeline: Pipeline) -> None:
    body = {**BODY, "prompt": "import os\n" * 1_500, "echo": True, "logprobs": 5}
    pipeline.send(detail("long", body=body))
    pipeline.poll()
    (reply,) = pipeline.replies()
    assert (reply["status"], reply["body"]) == (200, None)
    bucket, _, key = reply["body_s3_uri"].removeprefix("s3://").partition("/")
    assert (bucket, key) == (BUCKET, f"replies-large/{reply['request_id']}.json")
    content = pipeline.s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    assert len(content) > 200_000
    assert json.loads(content)["choices"][0]["text"].startswith("import os\n")


def test_a_reply_that_cannot_be_sent_is_sent_later_without_asking_again(pipeline: Pipeline) -> None:
    missing = pipeline.urls["replies"].replace("queued-replies", "queued-missing")
    pipeline.send(detail("later"), reply_queue_url=missing)
    (record,) = pipeline.receive()
    assert pipeline.invoke([record]) == [record["messageId"]]
    assert pipeline.sqs.create_queue(QueueName="queued-missing")["QueueUrl"] == missing
    assert pipeline.invoke([record]) == []
    pipeline.delete(record)
    (message,) = pipeline.sqs.receive_message(QueueUrl=missing)["Messages"]
    assert json.loads(message["Body"])["custom_id"] == "later"
    assert pipeline.calls() == 1


def test_a_bus_that_is_not_there_is_no_success(pipeline: Pipeline) -> None:
    pipeline.send(detail("nowhere", reply={"event_bus": "nowhere"}))
    (record,) = pipeline.receive()
    assert pipeline.invoke([record]) == [record["messageId"]]
    pipeline.delete(record)


def test_a_function_of_the_queue_imports_no_web_framework(pipeline: Pipeline, project_root: Path) -> None:
    program = (
        "import sys, completions.handlers.queued_completions;"
        "print(sorted({'fastapi', 'starlette', 'mangum', 'uvicorn', 'anyio'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | pipeline.environment | {"PYTHONPATH": str(project_root / "functions")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
