"""What stands between the functions that events start, as the templates declare it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudformation import deployed, of_type
from completions.domain.batch_places import INPUT_PREFIX
from completions.settings import PipelineSettings, read_pipeline_settings
from completions_cli.local.template import load_template

FUNCTION = "AWS::Lambda::Function"
TWO_WEEKS = 14 * 24 * 3600
BATCH_TASKS = ("BatchSplitterFunction", "BatchWorkerFunction", "BatchAssemblerFunction")
BY_EVENTS = {"AsyncResultsFunction", "BatchStarterFunction", "QueuedCompletionsFunction", *BATCH_TASKS}
"""Those whose settings are ``PipelineSettings``, and who may use the pipelines' bucket, table and bus."""
ALSO_OVER_HTTP = {"BatchesFunction"}


@pytest.fixture(scope="module")
def resources(project_root: Path) -> dict[str, Any]:
    replies = {f"Reply{kind}Pattern": "replies-*" for kind in ("Queue", "Bucket", "Bus")}
    return deployed(project_root, PipelineKeyId="key-1", BatchTokensPerMinute="6000", **replies)


@pytest.fixture(scope="module")
def pipelines(project_root: Path) -> dict[str, Any]:
    """The resources of the nested stack, as they are written."""
    return dict(load_template(project_root / "infra" / "pipelines.yaml")["Resources"])


@pytest.fixture(scope="module")
def definition(project_root: Path) -> str:
    return (project_root / "infra" / "batch.asl.json").read_text()


def variables(resources: dict[str, Any], function: str) -> dict[str, Any]:
    return dict(resources[function]["Properties"]["Environment"]["Variables"])


def statements(resources: dict[str, Any], role: str) -> list[dict[str, Any]]:
    policies = resources[role]["Properties"].get("Policies", [])
    return [statement for policy in policies for statement in policy["PolicyDocument"]["Statement"]]


def actions(statement: dict[str, Any]) -> set[str]:
    return {statement["Action"]} if isinstance(statement["Action"], str) else set(statement["Action"])


def stack_output(name: str) -> dict[str, Any]:
    return {"Fn::GetAtt": ["Pipelines", f"Outputs.{name}"]}


# The queue


def test_a_message_is_hidden_for_longer_than_its_function_runs(
    pipelines: dict[str, Any], resources: dict[str, Any]
) -> None:
    hidden = pipelines["CompletionRequests"]["Properties"]["VisibilityTimeout"]
    assert hidden >= resources["QueuedCompletionsFunction"]["Properties"]["Timeout"] + 1  # the batching window
    assert variables(resources, "QueuedCompletionsFunction")["QUEUE_VISIBILITY_SECONDS"] == str(hidden)


def test_a_message_that_came_too_often_is_kept_for_two_weeks(pipelines: dict[str, Any]) -> None:
    redrive = pipelines["CompletionRequests"]["Properties"]["RedrivePolicy"]
    assert redrive["deadLetterTargetArn"] == {"Fn::GetAtt": ["CompletionRequestFailures", "Arn"]}
    assert redrive["maxReceiveCount"] == 20
    queues = of_type(pipelines, "AWS::SQS::Queue")
    assert set(queues) >= {"CompletionRequests", "CompletionRequestFailures", "BatchStartFailures"}
    for queue in queues.values():
        assert queue["MessageRetentionPeriod"] == TWO_WEEKS  # SQS's most
        assert queue["SqsManagedSseEnabled"] is True


@pytest.mark.parametrize("concurrency", ["2", "9"])
def test_the_queue_feeds_its_function_and_takes_back_what_it_could_not_do(project_root: Path, concurrency: str) -> None:
    mapping = deployed(project_root, QueueConcurrency=concurrency)["QueuedCompletionsFunctionRequests"]["Properties"]
    assert mapping["EventSourceArn"] == stack_output("CompletionRequestsQueueArn")
    assert mapping["FunctionName"] == {"Ref": "QueuedCompletionsFunctionAliaslive"}
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert (mapping["BatchSize"], mapping["MaximumBatchingWindowInSeconds"]) == (10, 1)
    assert mapping["ScalingConfig"] == {"MaximumConcurrency": concurrency}


def test_there_is_no_source_but_the_stream_and_the_queue(resources: dict[str, Any]) -> None:
    sources = {
        one["FunctionName"]["Ref"].removesuffix("Aliaslive"): one["EventSourceArn"]["Fn::GetAtt"]
        for one in of_type(resources, "AWS::Lambda::EventSourceMapping").values()
    }
    assert sources == {
        "UsageRollupFunction": ["Tables", "Outputs.UsageTableStreamArn"],
        "QueuedCompletionsFunction": ["Pipelines", "Outputs.CompletionRequestsQueueArn"],
    }


# The bus


def test_what_is_requested_on_the_bus_gets_into_the_queue(pipelines: dict[str, Any]) -> None:
    rule = pipelines["CompletionRequested"]["Properties"]
    assert rule["EventBusName"] == {"Ref": "CompletionsBus"}
    assert rule["EventPattern"] == {"detail-type": ["completion.requested"]}
    (target,) = rule["Targets"]
    assert target["Arn"] == {"Fn::GetAtt": ["CompletionRequests", "Arn"]}
    assert target["DeadLetterConfig"] == {"Arn": {"Fn::GetAtt": ["CompletionRequestFailures", "Arn"]}}


def test_eventbridge_may_send_into_those_queues_for_that_rule_alone(pipelines: dict[str, Any]) -> None:
    policy = pipelines["CompletionRequestedPolicy"]["Properties"]
    assert policy["Queues"] == [{"Ref": "CompletionRequests"}, {"Ref": "CompletionRequestFailures"}]
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert statement == {
        "Effect": "Allow",
        "Principal": {"Service": "events.amazonaws.com"},
        "Action": "sqs:SendMessage",
        "Resource": [{"Fn::GetAtt": [name, "Arn"]} for name in ("CompletionRequests", "CompletionRequestFailures")],
        "Condition": {"ArnEquals": {"aws:SourceArn": {"Fn::GetAtt": ["CompletionRequested", "Arn"]}}},
    }


# The bucket


def test_the_bucket_is_private_encrypted_and_speaks_tls_alone(pipelines: dict[str, Any]) -> None:
    bucket = pipelines["PipelineBucket"]["Properties"]
    assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
    assert len(bucket["PublicAccessBlockConfiguration"]) == 4
    assert bucket["OwnershipControls"] == {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]}
    assert bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    policy = pipelines["PipelineBucketPolicy"]["Properties"]
    assert policy["Bucket"] == {"Ref": "PipelineBucket"}
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert (statement["Effect"], statement["Principal"], statement["Action"]) == ("Deny", "*", "s3:*")
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert len(statement["Resource"]) == 2  # itself, and what is in it


def test_the_bucket_forgets_and_tells_eventbridge_and_is_kept(pipelines: dict[str, Any]) -> None:
    bucket = pipelines["PipelineBucket"]
    rules = {rule["Id"]: rule for rule in bucket["Properties"]["LifecycleConfiguration"]["Rules"]}
    assert {rule["Status"] for rule in rules.values()} == {"Enabled"}
    assert rules["Ends"]["ExpirationInDays"] == {"Ref": "RetentionDays"}
    assert rules["Unfinished"]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert not any("Prefix" in rule for rule in rules.values())
    tells = bucket["Properties"]["NotificationConfiguration"]["EventBridgeConfiguration"]
    assert tells == {"EventBridgeEnabled": True}
    assert bucket["DeletionPolicy"] == bucket["UpdateReplacePolicy"] == "Retain"


def test_the_table_ends_what_is_over_as_the_bucket_does(project_root: Path, resources: dict[str, Any]) -> None:
    table = load_template(project_root / "infra" / "tables.yaml")["Resources"]["PipelineTable"]["Properties"]
    assert table["TimeToLiveSpecification"] == {"AttributeName": "expires_at", "Enabled": True}
    kept = deployed(project_root, PipelineRetentionDays="45")
    assert kept["Pipelines"]["Properties"]["Parameters"]["RetentionDays"] == "45"
    for name in BY_EVENTS | ALSO_OVER_HTTP:
        assert variables(kept, name)["PIPELINE_RETENTION_DAYS"] == "45"


def test_a_file_that_appears_below_the_inputs_starts_its_batch(resources: dict[str, Any]) -> None:
    rule = resources["BatchStarterFunctionFileAppeared"]["Properties"]
    assert "EventBusName" not in rule  # S3 tells the default bus
    assert rule["EventPattern"] == {
        "source": ["aws.s3"],
        "detail-type": ["Object Created"],
        "detail": {
            "bucket": {"name": [stack_output("PipelineBucketName")]},
            "object": {"key": [{"prefix": INPUT_PREFIX}]},
        },
    }
    (target,) = rule["Targets"]
    assert target["Arn"] == {"Ref": "BatchStarterFunctionAliaslive"}


def test_a_file_for_which_no_batch_was_started_is_remembered(resources: dict[str, Any]) -> None:
    queue = stack_output("BatchStartFailuresQueueArn")
    (target,) = resources["BatchStarterFunctionFileAppeared"]["Properties"]["Targets"]
    assert target["DeadLetterConfig"] == {"Arn": queue}  # where Lambda did not take the event
    failed = resources["BatchStarterFunctionEventInvokeConfig"]["Properties"]
    assert failed["DestinationConfig"]["OnFailure"]["Destination"] == queue  # where the function failed three times
    (statement,) = resources["BatchStartFailuresPolicy"]["Properties"]["PolicyDocument"]["Statement"]
    assert (statement["Principal"], statement["Action"]) == ({"Service": "events.amazonaws.com"}, "sqs:SendMessage")
    rule = {"Fn::GetAtt": ["BatchStarterFunctionFileAppeared", "Arn"]}
    assert statement["Condition"] == {"ArnEquals": {"aws:SourceArn": rule}}


# The state machine


def test_the_definition_uses_each_substitution_and_no_other(resources: dict[str, Any], definition: str) -> None:
    given = resources["BatchStateMachine"]["Properties"]["DefinitionSubstitutions"]
    assert set(re.findall(r"\$\{(\w+)\}", definition)) == set(given)
    for name in BATCH_TASKS:
        assert given[f"{name}Arn"] == {"Ref": f"{name}Aliaslive"}


def tasks(states: dict[str, Any]) -> Iterator[str]:
    for state in states.values():
        if state["Type"] == "Task":
            yield state["Resource"]
        elif state["Type"] == "Map":
            yield from tasks(state["ItemProcessor"]["States"])


def test_the_machine_may_invoke_exactly_the_functions_that_its_definition_names(
    resources: dict[str, Any], definition: str
) -> None:
    named = {resource.removeprefix("${").removesuffix("Arn}") for resource in tasks(json.loads(definition)["States"])}
    invoking = [
        one for one in statements(resources, "BatchStateMachineRole") if "lambda:InvokeFunction" in actions(one)
    ]
    assert named == set(BATCH_TASKS)
    (statement,) = invoking
    assert [one["Ref"] for one in statement["Resource"]] == [f"{name}Aliaslive" for name in BATCH_TASKS]


def test_the_machine_may_run_its_own_parts_and_read_and_write_below_its_batches(resources: dict[str, Any]) -> None:
    machine = resources["BatchStateMachine"]["Properties"]["StateMachineName"]
    assert machine == {"Fn::Sub": "${AWS::StackName}-batches"}
    found = {
        action: statement["Resource"]
        for statement in statements(resources, "BatchStateMachineRole")
        for action in actions(statement)
    }
    states = "arn:${AWS::Partition}:states:${AWS::Region}:${AWS::AccountId}"
    assert found["states:StartExecution"] == {"Fn::Sub": f"{states}:stateMachine:${{AWS::StackName}}-batches"}
    for action in ("states:DescribeExecution", "states:StopExecution"):
        # the machine's own, and those of a map's run
        assert found[action] == [
            {"Fn::Sub": f"{states}:execution:${{AWS::StackName}}-batches{sign}*"} for sign in (":", "/")
        ]
    # what a map reads, and what its result writer does
    for action in ("GetObject", "PutObject", "ListMultipartUploadParts", "AbortMultipartUpload"):
        assert found[f"s3:{action}"] == {"Fn::Sub": "${Pipelines.Outputs.PipelineBucketArn}/batches/*"}


def test_the_machine_logs_failures_into_a_log_that_ends_and_never_what_it_handles(resources: dict[str, Any]) -> None:
    logging = resources["BatchStateMachine"]["Properties"]["LoggingConfiguration"]
    assert (logging["Level"], logging["IncludeExecutionData"]) == ("ERROR", False)
    (destination,) = logging["Destinations"]
    assert destination["CloudWatchLogsLogGroup"]["LogGroupArn"] == {"Fn::GetAtt": ["StateMachineLogs", "Arn"]}
    name = resources["StateMachineLogs"]["Properties"]["LogGroupName"]
    assert name == {"Fn::Sub": "/aws/vendedlogs/states/${AWS::StackName}-batches"}


def test_the_alarms_watch_the_machine_by_the_name_that_it_has(resources: dict[str, Any]) -> None:
    given = resources["Observability"]["Properties"]["Parameters"]["BatchStateMachineArn"]["Fn::Sub"]
    name = resources["BatchStateMachine"]["Properties"]["StateMachineName"]["Fn::Sub"]
    assert given == f"arn:${{AWS::Partition}}:states:${{AWS::Region}}:${{AWS::AccountId}}:stateMachine:{name}"


# The functions


@pytest.mark.parametrize("name", sorted(BY_EVENTS | ALSO_OVER_HTTP))
def test_a_function_has_the_settings_that_its_module_reads(resources: dict[str, Any], name: str) -> None:
    found = variables(resources, name)
    own = {key for key in found if key.startswith(("PIPELINE_", "BATCH_", "QUEUE_"))}
    assert own <= {field.upper() for field in PipelineSettings.model_fields}
    plain = {key: value if isinstance(value, str) else "what CloudFormation says" for key, value in found.items()}
    settings = read_pipeline_settings(plain)
    assert settings.pipeline_bus != PipelineSettings.model_fields["pipeline_bus"].default
    starts = name in {"BatchStarterFunction", "BatchesFunction"}
    assert (settings.batch_state_machine is not None) == starts


def test_parameters_reach_the_functions_that_they_are_for(resources: dict[str, Any]) -> None:
    assert variables(resources, "QueuedCompletionsFunction")["PIPELINE_KEY_ID"] == "key-1"
    assert variables(resources, "BatchWorkerFunction")["BATCH_TOKENS_PER_MINUTE"] == "6000"
    # each worker's share of the pace, and how many the map runs
    for name in ("BatchWorkerFunction", "BatchSplitterFunction"):
        assert variables(resources, name)["BATCH_WORKERS"] == "10"
    assert variables(resources, "BatchSplitterFunction")["BATCH_TOLERATED_FAILURE_PERCENTAGE"] == "100"


def test_nobody_else_may_use_what_is_the_pipelines(resources: dict[str, Any]) -> None:
    for name in of_type(resources, FUNCTION):
        granted = json.dumps([one["Resource"] for one in statements(resources, f"{name}Role")])
        uses = "PipelineBucket" in granted or "PipelineTable" in granted or "CompletionsBus" in granted
        assert uses == (name in BY_EVENTS | ALSO_OVER_HTTP), name
        if name not in BY_EVENTS | ALSO_OVER_HTTP:
            assert "PIPELINE_BUCKET" not in variables(resources, name)


@pytest.mark.parametrize("role", ["QueuedCompletionsFunctionRole", "AsyncResultsFunctionRole"])
def test_replies_may_go_where_the_patterns_say_and_nowhere_without_one(
    project_root: Path, resources: dict[str, Any], role: str
) -> None:
    def beyond(found: dict[str, Any]) -> set[str]:
        return {
            action
            for one in statements(found, role)
            if "${Reply" in json.dumps(one["Resource"])
            for action in actions(one)
        }

    assert beyond(resources) == {"sqs:SendMessage", "s3:PutObject", "events:PutEvents"}
    assert beyond(deployed(project_root)) == set()
