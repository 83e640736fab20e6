"""A small template's bucket, queues and rules over HTTP, and its functions behind them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Thread
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

import recorded_calls
from completions_cli.local.moto_server import moto_behind, moto_dynamodb
from completions_cli.local.pipeline_template import read_pipelines
from completions_cli.local.pipelines import LocalPipelines, PipelinePlan, pipeline_environment
from completions_cli.local.triggers import queue_triggers, rule_triggers

PIPELINES = """
Parameters:
  ServiceName: {Type: String}
Resources:
  SmallBucket:
    Type: AWS::S3::Bucket
    Properties: {NotificationConfiguration: {EventBridgeConfiguration: {EventBridgeEnabled: true}}}
  SmallWork:
    Type: AWS::SQS::Queue
    Properties:
      VisibilityTimeout: 2
      RedrivePolicy: {deadLetterTargetArn: !GetAtt SmallDead.Arn, maxReceiveCount: 2}
  SmallDead: {Type: AWS::SQS::Queue}
  SmallLost: {Type: AWS::SQS::Queue}
  SmallBus:
    Type: AWS::Events::EventBus
    Properties: {Name: !Ref ServiceName}
  Asked:
    Type: AWS::Events::Rule
    Properties:
      EventBusName: !Ref SmallBus
      EventPattern: {detail-type: [asked]}
      Targets: [{Id: queue, Arn: !GetAtt SmallWork.Arn, DeadLetterConfig: {Arn: !GetAtt SmallDead.Arn}}]
Outputs:
  PipelineBucketName: {Value: !Ref SmallBucket}
  CompletionsBusName: {Value: !Ref SmallBus}
  WorkArn: {Value: !GetAtt SmallWork.Arn}
  LostArn: {Value: !GetAtt SmallLost.Arn}
"""
TEMPLATE = """
Resources:
  Queued:
    Type: AWS::Serverless::Function
    Properties:
      Handler: recorded_calls.handler
      Events:
        Work:
          Type: SQS
          Properties:
            Queue: !GetAtt Pipelines.Outputs.WorkArn
            BatchSize: 10
            FunctionResponseTypes: [ReportBatchItemFailures]
  Told:
    Type: AWS::Serverless::Function
    Properties:
      Handler: recorded_calls.handler
      EventInvokeConfig:
        MaximumRetryAttempts: 1
        DestinationConfig: {OnFailure: {Type: SQS, Destination: !GetAtt Pipelines.Outputs.LostArn}}
      Events:
        Came:
          Type: EventBridgeRule
          Properties:
            Pattern:
              source: [aws.s3]
              detail-type: [Object Created]
              detail:
                bucket: {name: [!GetAtt Pipelines.Outputs.PipelineBucketName]}
                object: {key: [{prefix: input/}]}
"""


class Small:
    """The running pipelines, and clients of them."""

    def __init__(self, url: str, environment: dict[str, str]) -> None:
        settings = Config(retries={"total_max_attempts": 1})

        def client(service: Any) -> Any:
            return boto3.client(service, endpoint_url=url, region_name="us-east-1", config=settings)

        self.s3, self.sqs, self.events = client("s3"), client("sqs"), client("events")
        self.bucket, self.bus = environment["PIPELINE_BUCKET"], environment["PIPELINE_BUS"]

    def url(self, queue: str) -> str:
        url: str = self.sqs.get_queue_url(QueueName=queue)["QueueUrl"]
        return url

    def received(self, queue: str, seconds: int = 10) -> Any:
        """The next message of a queue, taken out of it."""
        reply = self.sqs.receive_message(QueueUrl=self.url(queue), WaitTimeSeconds=seconds)
        (message,) = reply["Messages"]
        self.sqs.delete_message(QueueUrl=self.url(queue), ReceiptHandle=message["ReceiptHandle"])
        return message

    def close(self) -> None:
        for client in (self.s3, self.sqs, self.events):
            client.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    folder = tmp_path_factory.mktemp("small")
    template = folder / "template.yaml"
    template.write_text(TEMPLATE)
    (folder / "pipelines.yaml").write_text(PIPELINES)
    declared = read_pipelines(folder / "pipelines.yaml")
    plan = PipelinePlan(
        declared, queue_triggers(template, declared), rule_triggers(template, declared), retry_factor=0.001
    )
    with ExitStack() as cleanup:
        pipelines = LocalPipelines(plan, cleanup.enter_context(moto_dynamodb()))
        cleanup.callback(pipelines.stop)
        url = cleanup.enter_context(moto_behind(pipelines.start))
        running = Small(url, pipeline_environment(declared, [], services_url=url, states_url="http://127.0.0.1:9"))
        cleanup.callback(running.close)
        yield running


def test_messages_come_in_a_batch_as_lambda_sends_them(small: Small) -> None:
    recorded_calls.begin()
    entries = [{"Id": str(number), "MessageBody": f"body {number}"} for number in range(3)]
    entries[0]["MessageAttributes"] = {  # type: ignore[assignment]
        "key_id": {"DataType": "String", "StringValue": "acme"},
        "raw": {"DataType": "Binary", "BinaryValue": b"\x00\x01"},
    }
    small.sqs.send_message_batch(QueueUrl=small.url("SmallWork"), Entries=entries)

    records = [record for event in recorded_calls.until(1) for record in event["Records"]]
    assert sorted(record["body"] for record in records) == ["body 0", "body 1", "body 2"]
    (first,) = [record for record in records if record["body"] == "body 0"]
    assert first["eventSource"] == "aws:sqs"
    assert first["eventSourceARN"] == "arn:aws:sqs:us-east-1:123456789012:SmallWork"
    assert first["awsRegion"] == "us-east-1"
    assert first["attributes"]["ApproximateReceiveCount"] == "1"
    assert first["messageAttributes"] == {
        "key_id": {"stringValue": "acme", "stringListValues": [], "binaryListValues": [], "dataType": "String"},
        "raw": {"binaryValue": "AAE=", "stringListValues": [], "binaryListValues": [], "dataType": "Binary"},
    }


def test_what_failed_comes_again_alone_and_then_goes_to_the_dead_letters(small: Small) -> None:
    def fail_poison(event: Any) -> Any:
        poison = [one["messageId"] for one in event["Records"] if one["body"] == "poison"]
        return {"batchItemFailures": [{"itemIdentifier": name} for name in poison]}

    recorded_calls.begin(fail_poison)
    entries = [{"Id": body, "MessageBody": body} for body in ("good", "poison")]
    small.sqs.send_message_batch(QueueUrl=small.url("SmallWork"), Entries=entries)

    assert small.received("SmallDead")["Body"] == "poison"
    delivered = [record["body"] for event in recorded_calls.calls for record in event["Records"]]
    assert sorted(delivered) == ["good", "poison", "poison"]


def test_an_event_of_the_bus_reaches_the_function_through_its_queue(small: Small) -> None:
    recorded_calls.begin()
    entry = {"Source": "test", "DetailType": "asked", "Detail": json.dumps({"n": 1}), "EventBusName": small.bus}
    other = entry | {"DetailType": "another"}
    reply = small.events.put_events(Entries=[other, entry])
    assert reply["FailedEntryCount"] == 0

    (event,) = recorded_calls.until(1)
    (record,) = event["Records"]
    envelope = json.loads(record["body"])
    assert (envelope["detail-type"], envelope["detail"], envelope["source"]) == ("asked", {"n": 1}, "test")
    assert envelope["id"] == reply["Entries"][1]["EventId"]


def test_an_object_under_the_prefix_is_told_to_its_function_and_no_other_is(small: Small) -> None:
    recorded_calls.begin()
    small.s3.put_object(Bucket=small.bucket, Key="output/x.jsonl", Body=b"1")
    small.s3.put_object(Bucket=small.bucket, Key="input/local/x.jsonl", Body=b"12")
    small.s3.put_object(Bucket=small.bucket, Key="input/local/x.jsonl", Body=b"12")

    first, second = recorded_calls.until(2)
    assert (first["source"], first["detail-type"]) == ("aws.s3", "Object Created")
    assert first["detail"]["bucket"] == {"name": "small-bucket"}
    assert first["detail"]["reason"] == "PutObject"
    told = first["detail"]["object"]
    assert (told["key"], told["size"]) == ("input/local/x.jsonl", 2)
    assert told["etag"] == hashlib.md5(b"12").hexdigest()  # noqa: S324 - S3's own
    assert told.keys() == {"key", "size", "etag", "sequencer"}
    assert first["id"] != second["id"]
    assert told["sequencer"] != second["detail"]["object"]["sequencer"]


def test_a_multipart_upload_is_told_once_when_it_is_complete(small: Small) -> None:
    recorded_calls.begin()
    place: dict[str, Any] = {"Bucket": small.bucket, "Key": "input/local/parts.jsonl"}
    upload = small.s3.create_multipart_upload(**place)["UploadId"]
    part = small.s3.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"abc")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    assert recorded_calls.calls == []
    small.s3.complete_multipart_upload(**place, UploadId=upload, MultipartUpload=parts)

    recorded_calls.until(1)
    time.sleep(0.5)  # for a second one
    (event,) = recorded_calls.calls
    assert event["detail"]["reason"] == "CompleteMultipartUpload"
    assert event["detail"]["object"]["size"] == 3


def test_an_event_whose_function_fails_is_tried_again_and_then_kept(small: Small) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("broken")

    recorded_calls.begin(fail)
    small.s3.put_object(Bucket=small.bucket, Key="input/local/broken.jsonl", Body=b"1")

    kept = json.loads(small.received("SmallLost")["Body"])
    assert len(recorded_calls.calls) == 2
    assert kept["requestPayload"] == recorded_calls.calls[0] == recorded_calls.calls[1]
    assert kept["requestContext"]["condition"] == "RetriesExhausted"
    assert kept["requestContext"]["approximateInvokeCount"] == 2
    assert kept["requestContext"]["functionArn"] == "arn:aws:lambda:us-east-1:123456789012:function:Told"
    assert kept["responsePayload"] == {"errorMessage": "broken", "errorType": "RuntimeError"}


def test_who_waits_for_a_message_lets_the_others_by(small: Small) -> None:
    url = small.url("SmallLost")
    began = time.monotonic()
    assert "Messages" not in small.sqs.receive_message(QueueUrl=url, WaitTimeSeconds=1)
    assert time.monotonic() - began >= 1

    waiting = Thread(target=small.sqs.receive_message, kwargs={"QueueUrl": url, "WaitTimeSeconds": 3})
    waiting.start()
    time.sleep(0.2)
    began = time.monotonic()
    small.s3.list_buckets()
    assert time.monotonic() - began < 1
    small.sqs.send_message(QueueUrl=url, MessageBody="here")
    waiting.join(2)
    assert not waiting.is_alive()


def test_the_first_who_asks_waits_until_all_is_made_and_one_who_fails_leaves_it_to_the_next() -> None:
    prepared: list[str] = []

    def prepare() -> None:
        prepared.append("try")
        if len(prepared) == 1:
            raise RuntimeError("not yet")

    with ExitStack() as cleanup:
        cleanup.enter_context(moto_dynamodb())
        url = cleanup.enter_context(moto_behind(prepare))
        settings = Config(retries={"total_max_attempts": 1})
        s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=settings)
        cleanup.callback(s3.close)
        assert prepared == []
        with pytest.raises(ClientError) as caught:
            s3.list_buckets()
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500
        s3.list_buckets()
        s3.list_buckets()
    assert prepared == ["try", "try"]
