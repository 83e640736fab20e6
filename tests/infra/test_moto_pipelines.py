"""The pipelines of the deployment in moto: a message and a batch, each function under its own variables and role."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from completions.domain.catalog import ModelRoute
from completions.domain.limits import KeyLimits
from completions.domain.metering import Principal
from completions.metering.items import RECORD_SORT, partition
from completions.registry.dynamodb import put_key, put_model
from completions.web.auth import secret_digest
from completions_cli.local.tables import LOCAL_KEY
from deployed_functions import ACCOUNT, invoke, needed, permitted, statements, unpermitted
from ledger_reader import LedgerReader
from moto_deployment import ARN_OF_MACHINE, REGION, Deployment, follow_streams

KEY_ID: Final = "key-1"
QUEUES: Final = f"arn:aws:sqs:{REGION}:{ACCOUNT}:"


@pytest.fixture
def served(deployments: dict[str, Deployment]) -> Deployment:
    """A deployment with a key and a model. Nothing polls its queue."""
    deployment = deployments["buffered"]
    client = deployment.client("dynamodb")
    table = deployment.names["Tables.RegistryTable"]
    # limits, so that a request holds something of them
    limits = KeyLimits(tokens_per_day=1_000_000, parallel_requests=100)
    put_key(client, table, secret_digest(LOCAL_KEY), Principal(KEY_ID, "alice", limits=limits))
    put_model(client, table, ModelRoute("demo", "demo", "vllm", context_length=8192, created=1_700_000_000))
    return deployment


def bucket(deployment: Deployment) -> str:
    return deployment.names["Pipelines.PipelineBucket"]


def queue_arn(deployment: Deployment, name: str) -> str:
    return QUEUES + deployment.names[f"Pipelines.{name}"].rpartition("/")[2]


def line(number: int) -> dict[str, Any]:
    body = {"model": "demo", "prompt": "def main():\n", "max_tokens": 4, "temperature": 0}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


# What was made


def test_the_bucket_is_private_and_ends_objects(deployment: Deployment) -> None:
    s3, name = deployment.client("s3"), bucket(deployment)
    private = s3.get_public_access_block(Bucket=name)["PublicAccessBlockConfiguration"]
    assert private == dict.fromkeys(
        ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True
    )
    (encryption,) = s3.get_bucket_encryption(Bucket=name)["ServerSideEncryptionConfiguration"]["Rules"]
    assert encryption["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    rules = {rule["ID"]: rule for rule in s3.get_bucket_lifecycle_configuration(Bucket=name)["Rules"]}
    assert rules["Ends"]["Expiration"]["Days"] == 30
    assert rules["Unfinished"]["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] == 1
    policy = deployment.asked["PipelineBucketPolicy"]
    assert policy["Bucket"] == name
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert statement["Resource"] == [f"arn:aws:s3:::{name}", f"arn:aws:s3:::{name}/*"]


def test_the_nested_stack_got_what_the_root_gives_it(deployment: Deployment) -> None:
    given = deployment.asked["Pipelines"]["Parameters"]
    assert given == {"ServiceName": deployment.name, "RetentionDays": "30"}


def test_a_message_that_comes_too_often_goes_to_the_failures(deployment: Deployment) -> None:
    sqs = deployment.client("sqs")
    asked = {"QueueUrl": deployment.names["Pipelines.CompletionRequests"], "AttributeNames": ["All"]}
    attributes = sqs.get_queue_attributes(**asked)["Attributes"]
    redrive = json.loads(attributes["RedrivePolicy"])
    assert redrive["deadLetterTargetArn"] == queue_arn(deployment, "CompletionRequestFailures")
    assert int(redrive["maxReceiveCount"]) == 20
    assert attributes["VisibilityTimeout"] == "960"


@pytest.mark.parametrize(
    ("bus", "rule", "target", "failures"),
    [
        ("own", "Pipelines.CompletionRequested", "CompletionRequests", "CompletionRequestFailures"),
        ("default", "BatchStarterFunctionFileAppeared", "BatchStarterFunction", "BatchStartFailures"),
    ],
)
def test_a_rule_leads_to_its_target_and_what_that_refuses_to_a_queue_that_takes_it(
    deployment: Deployment, bus: str, rule: str, target: str, failures: str
) -> None:
    events, name = deployment.client("events"), deployment.name if bus == "own" else "default"
    made = events.describe_rule(Name=deployment.names[rule], EventBusName=name)
    (found,) = events.list_targets_by_rule(Rule=deployment.names[rule], EventBusName=name)["Targets"]
    if target == "BatchStarterFunction":
        assert found["Arn"] == f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{deployment.function(target)}:live"
        pattern = json.loads(made["EventPattern"])["detail"]
        assert pattern == {"bucket": {"name": [bucket(deployment)]}, "object": {"key": [{"prefix": "input/"}]}}
    else:
        assert found["Arn"] == queue_arn(deployment, target)
    assert found["DeadLetterConfig"]["Arn"] == queue_arn(deployment, failures)
    asked = {"QueueUrl": deployment.names[f"Pipelines.{failures}"], "AttributeNames": ["Policy"]}
    policy = json.loads(deployment.client("sqs").get_queue_attributes(**asked)["Attributes"]["Policy"])
    (statement,) = policy["Statement"]
    assert statement["Principal"] == {"Service": "events.amazonaws.com"}
    assert statement["Condition"] == {"ArnEquals": {"aws:SourceArn": made["Arn"]}}


def test_the_queue_feeds_its_function(deployments: dict[str, Deployment]) -> None:
    deployment = deployments["streamed"]
    follow_streams(deployment)
    arn = queue_arn(deployment, "CompletionRequests")
    (one,) = deployment.client("lambda").list_event_source_mappings(EventSourceArn=arn)["EventSourceMappings"]
    assert deployment.function("QueuedCompletionsFunction") in one["FunctionArn"]
    assert one["BatchSize"] == 10
    asked = deployment.asked["QueuedCompletionsFunctionRequests"]
    assert asked["FunctionResponseTypes"] == ["ReportBatchItemFailures"]


def test_the_state_machine_names_functions_that_there_are_and_has_its_role(deployment: Deployment) -> None:
    machine = deployment.client("stepfunctions").describe_state_machine(
        stateMachineArn=f"{ARN_OF_MACHINE}{deployment.name}-batches"
    )
    assert machine["type"] == "STANDARD"
    assert "${" not in machine["definition"]
    for name in ("BatchSplitterFunction", "BatchWorkerFunction", "BatchAssemblerFunction"):
        arn = f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{deployment.function(name)}:live"
        assert json.dumps(arn) in machine["definition"]
        assert permitted(deployment, "BatchStateMachineRole", "lambda:InvokeFunction", arn)
    role = deployment.client("iam").get_role(RoleName=deployment.names["BatchStateMachineRole"])["Role"]
    assert machine["roleArn"] == role["Arn"]
    (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": ["states.amazonaws.com"]}


def test_the_machine_may_call_no_other_function(deployment: Deployment) -> None:
    arn = f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{deployment.function('BatchesFunction')}:live"
    assert statements(deployment, "BatchStateMachineRole")
    assert not permitted(deployment, "BatchStateMachineRole", "lambda:InvokeFunction", arn)


# What it does


def test_a_message_is_answered_on_what_was_deployed_within_its_functions_role(served: Deployment) -> None:
    sqs, url = served.client("sqs"), served.names["Pipelines.CompletionRequests"]
    request = {"version": "1", "key_id": KEY_ID, "url": "/v1/completions", "body": line(1)["body"]}
    sqs.send_message(QueueUrl=url, MessageBody=json.dumps(request))
    (message,) = sqs.receive_message(QueueUrl=url, AttributeNames=["All"])["Messages"]
    record = {
        "messageId": message["MessageId"],
        "receiptHandle": message["ReceiptHandle"],
        "body": message["Body"],
        "attributes": message["Attributes"],
        "messageAttributes": {},
        "md5OfBody": message["MD5OfBody"],
        "eventSource": "aws:sqs",
        "eventSourceARN": queue_arn(served, "CompletionRequests"),
        "awsRegion": REGION,
    }

    said = invoke(served, "QueuedCompletionsFunction", {"Records": [record]})

    assert said.reply == {"batchItemFailures": []}, said.log
    (sent,) = said.arguments("events", "PutEvents")
    (entry,) = sent["Entries"]
    detail = json.loads(entry["Detail"])
    assert (entry["EventBusName"], entry["DetailType"]) == (served.name, "completion.succeeded")
    assert (detail["status"], detail["usage"]["completion_tokens"]) == (200, 4)
    ledger = LedgerReader(served.client("dynamodb"), served.names["Tables.UsageTable"])
    assert ledger.settled(detail["request_id"]).completion_tokens == 4
    assert unpermitted(served, "QueuedCompletionsFunction", said) == set()
    assert {service for service, _, _ in said.calls} >= {"dynamodb", "events", "s3", "sagemaker-runtime"}


def test_the_queues_function_may_put_a_message_off_and_send_to_no_queue(served: Deployment) -> None:
    role = "QueuedCompletionsFunctionRole"
    requests, failures = (queue_arn(served, name) for name in ("CompletionRequests", "CompletionRequestFailures"))
    assert permitted(served, role, "sqs:ChangeMessageVisibility", requests)
    assert permitted(served, role, "sqs:GetQueueUrl", requests)
    for queue in (requests, failures):
        assert not permitted(served, role, "sqs:SendMessage", queue)


def started(deployment: Deployment, root: Path, file: str, content: str) -> dict[str, Any]:
    """The input of the state machine that a file below ``input/`` leads to."""
    key = f"input/{KEY_ID}/{file}"
    put = deployment.client("s3").put_object(Bucket=bucket(deployment), Key=key, Body=content.encode())
    event = json.loads((root / "events" / "batch_starter.json").read_text())
    event["detail"]["bucket"]["name"] = bucket(deployment)
    event["detail"]["object"] |= {"key": key, "size": len(content), "etag": put["ETag"].strip('"')}
    said = invoke(deployment, "BatchStarterFunction", event)
    assert unpermitted(deployment, "BatchStarterFunction", said) == set()
    (start,) = said.arguments("stepfunctions", "StartExecution")
    given: dict[str, Any] = json.loads(start["input"])
    assert said.reply == {"batch_id": given["batch_id"]}
    return given


def parts_of(deployment: Deployment, given: dict[str, Any]) -> list[dict[str, Any]]:
    """What the state machine's map hands to the workers."""
    said = invoke(deployment, "BatchSplitterFunction", given)
    assert unpermitted(deployment, "BatchSplitterFunction", said) == set()
    split, name = said.reply, bucket(deployment)
    index = deployment.client("s3").get_object(Bucket=name, Key=split["index_key"])["Body"].read()
    parts = [{**given, "part": json.loads(text)} for text in index.splitlines()]
    assert (split["bucket"], split["parts"], split["workers"]) == (name, len(parts), 10)
    machine = "BatchStateMachineRole"
    assert permitted(deployment, machine, "s3:GetObject", f"arn:aws:s3:::{name}/{split['index_key']}")
    written = f"{split['map_prefix'].rstrip('/')}/run/manifest.json"
    assert permitted(deployment, machine, "s3:PutObject", f"arn:aws:s3:::{name}/{written}")
    return parts


def result(deployment: Deployment, given: dict[str, Any], file: str) -> str:
    key = f"output/{KEY_ID}/{given['batch_id']}/{file}"
    content: bytes = deployment.client("s3").get_object(Bucket=bucket(deployment), Key=key)["Body"].read()
    return content.decode()


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(one) for one in text.splitlines()]


def test_a_file_becomes_a_batch_and_its_output_each_function_within_its_role(
    served: Deployment, project_root: Path
) -> None:
    content = "".join(f"{json.dumps(line(number))}\n" for number in range(3)) + "no JSON\n"
    given = started(served, project_root, "prompts.jsonl", content)

    for part in parts_of(served, given):
        worked = invoke(served, "BatchWorkerFunction", part)
        assert unpermitted(served, "BatchWorkerFunction", worked) == set()
        assert worked.arguments("sagemaker-runtime", "InvokeEndpointWithResponseStream")
    joined = invoke(served, "BatchAssemblerFunction", given)

    assert unpermitted(served, "BatchAssemblerFunction", joined) == set()
    output = lines_of(result(served, given, "output.jsonl"))
    assert [one["custom_id"] for one in output] == ["line-0", "line-1", "line-2"]
    assert {one["response"]["status_code"] for one in output} == {200}
    (fault,) = lines_of(result(served, given, "errors.jsonl"))
    assert fault["error"]["code"] == "invalid_json_line"
    assert json.loads(result(served, given, "manifest.json"))["status"] == "completed"


def test_what_a_worker_answered_before_it_died_is_settled_within_the_assemblers_role(
    served: Deployment, project_root: Path
) -> None:
    given = started(served, project_root, "died.jsonl", f"{json.dumps(line(9))}\n")
    (part,) = parts_of(served, given)
    invoke(served, "BatchWorkerFunction", part)
    # it had kept the reply, and not yet settled what it cost nor written what its part came to
    client, table = served.client("dynamodb"), served.names["Tables.UsageTable"]
    name = f"{given['batch_id']}-1"
    client.update_item(
        TableName=table,
        Key={"pk": {"S": partition(name)}, "sk": {"S": RECORD_SORT}},
        UpdateExpression="SET #state = :open REMOVE outcome",
        ExpressionAttributeNames={"#state": "state"},
        ExpressionAttributeValues={":open": {"S": "RESERVED"}},
    )
    s3 = served.client("s3")
    for entry in s3.list_objects_v2(Bucket=bucket(served), Prefix=f"batches/{given['batch_id']}/parts/")["Contents"]:
        s3.delete_object(Bucket=bucket(served), Key=entry["Key"])

    joined = invoke(served, "BatchAssemblerFunction", {**given, "failure": {"Error": "States.Timeout"}})

    assert unpermitted(served, "BatchAssemblerFunction", joined) == set()
    assert [one["custom_id"] for one in lines_of(result(served, given, "output.jsonl"))] == ["line-9"]
    assert LedgerReader(client, table).settled(name).completion_tokens == 4


def test_files_and_batches_are_served_over_http_within_the_functions_role(
    served: Deployment, project_root: Path
) -> None:
    upload = json.loads((project_root / "events" / "batches_upload.json").read_text())

    def call(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        event = json.loads((project_root / "events" / "batches_files.json").read_text())
        event |= {"httpMethod": method, "path": path, "body": None if body is None else json.dumps(body)}
        event |= {"queryStringParameters": None, "multiValueQueryStringParameters": None}
        return said_within_role(event)

    def said_within_role(event: dict[str, Any]) -> Any:
        said = invoke(served, "BatchesFunction", event)
        assert said.reply["statusCode"] == 200, said.reply
        assert unpermitted(served, "BatchesFunction", said) == set()
        return json.loads(said.reply["body"]) if "content" not in event["path"] else said.reply["body"]

    file_id = said_within_role(upload)["id"]
    assert file_id in [one["id"] for one in call("GET", "/v1/files")["data"]]
    assert call("GET", f"/v1/files/{file_id}")["purpose"] == "batch"
    assert "request-1" in call("GET", f"/v1/files/{file_id}/content")
    order = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = call("POST", "/v1/batches", order)["id"]
    assert batch_id in [one["id"] for one in call("GET", "/v1/batches")["data"]]
    assert call("GET", f"/v1/batches/{batch_id}")["status"] == "validating"
    assert call("POST", f"/v1/batches/{batch_id}/cancel")["status"] == "cancelling"


@pytest.mark.parametrize(
    "event", ["async_results.json", "schedule"], ids=["an answer that nobody waits for", "what is overdue"]
)
def test_the_ends_of_submitted_completions_are_looked_up_within_the_functions_role(
    served: Deployment, project_root: Path, event: str
) -> None:
    told = (project_root / "events" / "async_results.json").read_text()
    schedule = {"source": "aws.scheduler", "detail-type": "Scheduled Event"}
    said = invoke(served, "AsyncResultsFunction", schedule if event == "schedule" else json.loads(told))
    assert said.reply == {"replies": 0}
    assert unpermitted(served, "AsyncResultsFunction", said) == set()


def test_each_kind_of_call_is_one_of_iams_actions() -> None:
    queue = f"https://sqs.{REGION}.amazonaws.com/{ACCOUNT}/requests"
    bus = {"Entries": [{"EventBusName": "bus"}, {"EventBusName": f"arn:aws:events:{REGION}:{ACCOUNT}:event-bus/other"}]}
    assert set(needed("sqs", "ChangeMessageVisibilityBatch", {"QueueUrl": queue})) == {
        ("sqs:ChangeMessageVisibility", f"{QUEUES}requests")
    }
    assert set(needed("events", "PutEvents", bus)) == {
        ("events:PutEvents", f"arn:aws:events:{REGION}:{ACCOUNT}:event-bus/bus"),
        ("events:PutEvents", f"arn:aws:events:{REGION}:{ACCOUNT}:event-bus/other"),
    }
    assert set(needed("s3", "UploadPart", {"Bucket": "b", "Key": "k"})) == {("s3:PutObject", "arn:aws:s3:::b/k")}
    assert set(needed("s3", "ListObjectsV2", {"Bucket": "b"})) == {("s3:ListBucket", "arn:aws:s3:::b")}
    assert set(needed("s3", "HeadObject", {"Bucket": "b", "Key": "k"})) == {
        ("s3:GetObject", "arn:aws:s3:::b/k"),
        ("s3:ListBucket", "arn:aws:s3:::b"),
    }
