"""The deployment, made in moto and read back from its services; and the service, run on what was made."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from moto.iam.access_control import IAMPolicyStatement, PermissionResult

from completions.domain.catalog import ModelRoute
from completions.domain.metering import Principal
from completions.registry.dynamodb import put_key, put_model
from completions.web.auth import secret_digest
from completions_cli.local.moto_server import moto_dynamodb
from completions_cli.local.stack import LocalStack
from completions_cli.local.tables import LOCAL_KEY
from ledger_reader import LedgerReader
from moto_deployment import (
    ARN_OF_FUNCTION,
    ASKED_OF_SERVICES,
    LEFT_OUT,
    REGION,
    Deployment,
    deploy,
    follow_streams,
    not_known_to_moto,
)

COMPLETIONS: Final = {
    "OpenAICompletionsFunction": "openai_completions",
    "ScaleCompletionsFunction": "scale_completions",
    "ScaleV1CompletionsFunction": "scale_v1_completions",
    "SourcegraphCompletionsFunction": "sourcegraph_completions",
}
OTHERS: Final = {
    "OpenAIModelsFunction": "openai_models",
    "ScaleModelsFunction": "scale_models",
    "SourcegraphSiteFunction": "sourcegraph_site",
    "OrganizationUsageFunction": "organization_usage",
    "UsageRollupFunction": "usage_rollup",
    "DashboardFunction": "dashboard",
    "UsageSweeperFunction": "usage_sweeper",
    "HealthFunction": "health",
}
ROUTES: Final = {
    "POST /v1/completions": "OpenAICompletionsFunction",
    "POST /completions": "OpenAICompletionsFunction",
    "POST /v2/completions": "ScaleCompletionsFunction",
    "POST /v1/llm/completions-sync": "ScaleV1CompletionsFunction",
    "POST /v1/llm/completions-stream": "ScaleV1CompletionsFunction",
    "POST /.api/completions/code": "SourcegraphCompletionsFunction",
    "POST /.api/completions/stream": "SourcegraphCompletionsFunction",
    "GET /v1/models": "OpenAIModelsFunction",
    "GET /v1/models/{model+}": "OpenAIModelsFunction",
    "DELETE /v1/models/{model+}": "OpenAIModelsFunction",
    "GET /v1/llm/model-endpoints": "ScaleModelsFunction",
    "GET /v1/llm/model-endpoints/{name+}": "ScaleModelsFunction",
    "GET /.api/modelconfig/supported-models.json": "SourcegraphSiteFunction",
    "GET /.api/client-config": "SourcegraphSiteFunction",
    "POST /.api/graphql": "SourcegraphSiteFunction",
    "GET /v1/organization/usage/completions": "OrganizationUsageFunction",
    "GET /v1/organization/costs": "OrganizationUsageFunction",
    "GET /v1/organization/latency": "OrganizationUsageFunction",
    "GET /v1/organization/limits": "OrganizationUsageFunction",
    "GET /dashboard": "DashboardFunction",
    "GET /healthz": "HealthFunction",
}
# Says which calls of AWS it made, then the handler's answer.
INVOKE: Final = """
import json, pkgutil, sys
from botocore.client import BaseClient
from completions_cli.local.events import LambdaContext
calls, made = [], BaseClient._make_api_call
def call(client, operation, arguments):
    calls.append((client.meta.service_model.service_name, operation, arguments))
    return made(client, operation, arguments)
BaseClient._make_api_call = call
module, _, name = sys.argv[1].rpartition(".")
reply = pkgutil.resolve_name(f"{module}:{name}")(json.load(sys.stdin), LambdaContext("function", 29))
print(json.dumps({"reply": reply, "calls": calls}, default=str))
"""


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_dynamodb() as url:
        yield url


@pytest.fixture(scope="module")
def deployments(moto: str, stack: LocalStack, project_root: Path) -> dict[str, Deployment]:
    """Both forms, side by side in one account and region."""
    urls = {
        "DynamoDBEndpointUrl": moto,
        "SageMakerRuntimeEndpointUrl": stack.environment["AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME"],
    }
    return {
        mode: deploy(project_root, moto, f"completions-{mode}", ResponseMode=mode, **urls)
        for mode in ("streamed", "buffered")
    }


@pytest.fixture(params=["streamed", "buffered"])
def deployment(request: pytest.FixtureRequest, deployments: dict[str, Deployment]) -> Deployment:
    return deployments[request.param]


@pytest.fixture
def streamed(deployment: Deployment) -> bool:
    return deployment.name.endswith("streamed")


@cache
def statements(deployment: Deployment, role: str) -> list[dict[str, Any]]:
    """What a role of the stack may do."""
    iam, name = deployment.client("iam"), deployment.names[role]
    policies = (
        iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"]
        for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]
    )
    # moto says it as Python would
    return [statement for policy in policies for statement in ast.literal_eval(policy)["Statement"]]


def table(deployment: Deployment, name: str) -> dict[str, Any]:
    found = deployment.client("dynamodb").describe_table(TableName=deployment.names[f"Tables.{name}"])["Table"]
    return dict(found)


def function_arn(deployment: Deployment, function: str) -> str:
    return f"{ARN_OF_FUNCTION}{deployment.function(function)}:live"


def test_what_cloudformation_in_moto_cannot_make_is_exactly_this(project_root: Path) -> None:
    unknown = {kind for kind, reason in ASKED_OF_SERVICES.items() if reason == "not known to it"}
    assert not_known_to_moto(project_root) == unknown | LEFT_OUT


def test_the_tables_are_keyed_indexed_and_kept(deployment: Deployment) -> None:
    client = deployment.client("dynamodb")
    for name in ("RegistryTable", "UsageTable"):
        one = table(deployment, name)
        assert [(key["AttributeName"], key["KeyType"]) for key in one["KeySchema"]] == [("pk", "HASH"), ("sk", "RANGE")]
        assert one["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
        assert one["DeletionProtectionEnabled"] == "true"  # moto leaves a parameter the text that it is
        backups = client.describe_continuous_backups(TableName=one["TableName"])["ContinuousBackupsDescription"]
        assert backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"] == "ENABLED"

    usage = table(deployment, "UsageTable")
    (index,) = usage["GlobalSecondaryIndexes"]
    assert index["IndexName"] == "ByDay"
    keys = [(key["AttributeName"], key["KeyType"]) for key in index["KeySchema"]]
    assert keys == [("day_shard", "HASH"), ("created_at", "RANGE")]
    assert index["Projection"] == {"ProjectionType": "ALL"}
    assert usage["StreamSpecification"] == {"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"}
    expiry = client.describe_time_to_live(TableName=usage["TableName"])["TimeToLiveDescription"]
    assert expiry == {"TimeToLiveStatus": "ENABLED", "AttributeName": "expires_at"}


def test_the_queue_of_failures_keeps_them_for_two_weeks(deployment: Deployment) -> None:
    client = deployment.client("sqs")
    asked = {"QueueUrl": deployment.names["Pipelines.UsageRollupFailures"], "AttributeNames": ["All"]}
    attributes = client.get_queue_attributes(**asked)["Attributes"]
    assert attributes["MessageRetentionPeriod"] == str(14 * 24 * 3600)
    assert attributes["SqsManagedSseEnabled"] == "true"


@pytest.mark.parametrize("function", [*COMPLETIONS, *OTHERS])
def test_a_functions_role_is_its_own_and_names_what_it_may_do(deployment: Deployment, function: str) -> None:
    iam, name = deployment.client("iam"), deployment.names[f"{function}Role"]
    role = iam.get_role(RoleName=name)["Role"]
    assert deployment.configuration(function)["Role"] == role["Arn"]
    (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
    assert (trust["Principal"], trust["Action"]) == ({"Service": ["lambda.amazonaws.com"]}, ["sts:AssumeRole"])
    tables = {f"arn:aws:dynamodb:{REGION}:123456789012:table/{deployment.names[f'Tables.{one}']}"
              for one in ("RegistryTable", "UsageTable")}  # fmt: skip
    for statement in statements(deployment, f"{function}Role"):
        resources = [statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"]
        for resource in resources:
            if ":dynamodb:" in resource:
                assert resource.split("/index/")[0] in tables
            else:
                assert resource.startswith((f"arn:aws:sagemaker:{REGION}:123456789012:", "arn:aws:sqs:")), resource


@pytest.mark.parametrize("function", COMPLETIONS)
def test_a_completions_function_has_its_modes_handler_layer_and_time(
    deployment: Deployment, streamed: bool, function: str
) -> None:
    one = deployment.configuration(function)
    variables = one["Environment"]["Variables"]

    assert (one["Runtime"], one["Architectures"]) == ("python3.13", ["arm64"])
    assert one["TracingConfig"] == {"Mode": "Active"}
    assert variables["APP_MODULE"] == f"completions.handlers.{COMPLETIONS[function]}:app"
    assert variables["REGISTRY_TABLE"] == deployment.names["Tables.RegistryTable"]
    assert variables["USAGE_TABLE"] == deployment.names["Tables.UsageTable"]
    assert variables["POWERTOOLS_SERVICE_NAME"] == deployment.name
    if streamed:
        assert (one["Handler"], one["Timeout"], variables["UPSTREAM_READ_TIMEOUT"]) == ("run.sh", 600, "60")
        assert [layer["Arn"].rsplit(":layer:")[1] for layer in one["Layers"]] == ["LambdaAdapterLayerArm64:27"]
        assert variables["AWS_LAMBDA_EXEC_WRAPPER"] == "/opt/bootstrap"
    else:
        handler = f"completions.handlers.{COMPLETIONS[function]}.handler"
        assert (one["Handler"], one["Timeout"], variables["UPSTREAM_READ_TIMEOUT"]) == (handler, 29, "20")
        assert one["Layers"] == []
        assert "AWS_LAMBDA_EXEC_WRAPPER" not in variables


@pytest.mark.parametrize("function", OTHERS)
def test_every_other_function_is_the_same_in_both_modes(deployment: Deployment, function: str) -> None:
    one = deployment.configuration(function)
    assert one["Handler"] == f"completions.handlers.{OTHERS[function]}.handler"
    assert (one["Architectures"], one["Layers"]) == (["arm64"], [])
    assert one["Timeout"] <= 60


def test_the_alias_live_is_the_published_version(deployment: Deployment) -> None:
    client = deployment.client("lambda")
    for function in (*COMPLETIONS, *OTHERS):
        (alias,) = client.list_aliases(FunctionName=deployment.function(function))["Aliases"]
        assert (alias["Name"], alias["FunctionVersion"]) == ("live", "1")


def test_the_gateway_may_call_the_aliases_of_its_own_api(deployment: Deployment) -> None:
    for function in set(ROUTES.values()):
        asked = {"FunctionName": deployment.function(function), "Qualifier": "live"}
        (statement,) = json.loads(deployment.client("lambda").get_policy(**asked)["Policy"])["Statement"]
        assert (statement["Effect"], statement["Action"]) == ("Allow", "lambda:InvokeFunction")
        assert statement["Principal"] == {"Service": "apigateway.amazonaws.com"}
        api = f"arn:aws:execute-api:{REGION}:123456789012:{deployment.names['Api']}/*"
        assert statement["Condition"] == {"ArnLike": {"AWS:SourceArn": api}}


def test_every_route_leads_to_its_function_in_its_mode(deployment: Deployment, streamed: bool) -> None:
    gateway, api = deployment.client("apigateway"), deployment.names["Api"]
    found = {}
    for resource in gateway.get_resources(restApiId=api, limit=500)["items"]:
        for method in resource.get("resourceMethods", {}):
            one = gateway.get_integration(restApiId=api, resourceId=resource["id"], httpMethod=method)
            found[f"{method} {resource['path']}"] = (one["type"].upper(), one["httpMethod"], one["uri"])

    expected = {}
    for route, function in ROUTES.items():
        streams = streamed and function in COMPLETIONS
        version, verb = ("2021-11-15", "response-streaming-invocations") if streams else ("2015-03-31", "invocations")
        arn = function_arn(deployment, function)
        uri = f"arn:aws:apigateway:{REGION}:lambda:path/{version}/functions/{arn}/{verb}"
        expected[route] = ("AWS_PROXY", "POST", uri)
    assert found == expected


def test_the_stage_serves_a_deployment_throttled_traced_and_without_bodies_in_its_logs(deployment: Deployment) -> None:
    gateway, api = deployment.client("apigateway"), deployment.names["Api"]
    assert gateway.get_rest_api(restApiId=api)["name"] == deployment.name
    (stage,) = gateway.get_stages(restApiId=api)["item"]
    (made,) = gateway.get_deployments(restApiId=api)["items"]
    assert (stage["stageName"], stage["deploymentId"]) == ("prod", made["id"])
    assert stage["tracingEnabled"] is True
    settings = stage["methodSettings"]["*/*"]
    assert (settings["throttlingRateLimit"], settings["throttlingBurstLimit"]) == (100, 200)
    assert settings["dataTraceEnabled"] is False


def test_functions_log_into_one_group_that_forgets_after_thirty_days(deployment: Deployment) -> None:
    groups = {one["logGroupName"]: one for one in deployment.client("logs").describe_log_groups()["logGroups"]}
    assert groups[deployment.names["FunctionLogs"]]["retentionInDays"] == 30


def test_settled_records_reach_the_rollup(deployments: dict[str, Deployment]) -> None:
    deployment = deployments["streamed"]
    follow_streams(deployment)
    (one,) = deployment.client("lambda").list_event_source_mappings()["EventSourceMappings"]
    assert one["EventSourceArn"] == table(deployment, "UsageTable")["LatestStreamArn"]
    assert deployment.function("UsageRollupFunction") in one["FunctionArn"]
    assert (one["BatchSize"], one["State"]) == (100, "Enabled")
    asked = deployment.asked["UsageRollupFunctionSettled"]
    queue = deployment.names["Pipelines.UsageRollupFailures"].rsplit("/")[-1]
    assert asked["DestinationConfig"]["OnFailure"]["Destination"] == f"arn:aws:sqs:{REGION}:123456789012:{queue}"


def test_the_sweeper_runs_each_minute_and_is_not_tried_again(deployment: Deployment) -> None:
    scheduler = deployment.client("scheduler")
    schedules = [scheduler.get_schedule(Name=one["Name"]) for one in scheduler.list_schedules()["Schedules"]]
    arn = function_arn(deployment, "UsageSweeperFunction")
    (one,) = [schedule for schedule in schedules if schedule["Target"]["Arn"] == arn]
    assert one["ScheduleExpression"] == "rate(1 minute)"
    assert one["Target"]["RetryPolicy"]["MaximumRetryAttempts"] == 0
    (allowed,) = statements(deployment, "UsageSweeperFunctionEveryMinuteRole")
    assert (allowed["Action"], allowed["Resource"]) == ("lambda:InvokeFunction", arn)


def test_the_alarms_watch_the_functions_that_were_made(deployment: Deployment) -> None:
    alarms = deployment.client("cloudwatch").describe_alarms(AlarmNamePrefix=f"{deployment.name}-")["MetricAlarms"]
    watched = {
        dimension["Value"]
        for alarm in alarms
        for metric in ([alarm] if "MetricName" in alarm else [one.get("MetricStat", {}) for one in alarm["Metrics"]])
        for dimension in metric.get("Dimensions", metric.get("Metric", {}).get("Dimensions", []))
        if dimension["Name"] == "FunctionName"
    }
    expected = (*COMPLETIONS, "UsageRollupFunction", "UsageSweeperFunction")
    assert watched == {deployment.function(one) for one in expected}


def test_the_dashboard_names_alarms_that_there_are(deployment: Deployment) -> None:
    cloudwatch = deployment.client("cloudwatch")
    board = cloudwatch.get_dashboard(DashboardName=f"{deployment.name}-{REGION}")
    (widget,) = [one for one in json.loads(board["DashboardBody"])["widgets"] if one["type"] == "alarm"]
    alarms = cloudwatch.describe_alarms(AlarmNamePrefix=f"{deployment.name}-")["MetricAlarms"]
    assert set(widget["properties"]["alarms"]) == {one["AlarmArn"] for one in alarms}


def test_a_deployment_goes_back_on_alarms_that_there_are(deployment: Deployment) -> None:
    codedeploy, there = deployment.client("codedeploy"), deployment.client("cloudwatch")
    names = {one["AlarmName"] for one in there.describe_alarms(AlarmNamePrefix=deployment.name)["MetricAlarms"]}
    groups = codedeploy.list_deployment_groups(applicationName=deployment.name)["deploymentGroups"]
    assert {one.removesuffix("DeploymentGroup") for one in groups} == {*COMPLETIONS, *OTHERS}
    for group in groups:
        # moto takes a group's alarms and does not say them
        watched = {one["Name"] for one in deployment.asked[group]["AlarmConfiguration"]["Alarms"]}
        assert watched, group
        assert watched <= names


def permitted(deployment: Deployment, role: str, action: str, resource: str) -> bool:
    answers = [IAMPolicyStatement(one).is_action_permitted(action, resource) for one in statements(deployment, role)]
    return PermissionResult.PERMITTED in answers and PermissionResult.DENIED not in answers


def needed(service: str, operation: str, arguments: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The actions and resources of a call, as IAM sees them."""
    prefix = f"arn:aws:{service}:{REGION}:123456789012:"
    if service == "sagemaker-runtime":
        yield (
            f"sagemaker:{operation}",
            f"arn:aws:sagemaker:{REGION}:123456789012:endpoint/{arguments['EndpointName']}",
        )
    elif operation == "TransactWriteItems":
        for item in arguments["TransactItems"]:
            for verb, one in item.items():
                yield f"dynamodb:{verb.removesuffix('Item')}Item", f"{prefix}table/{one['TableName']}"
    elif operation.startswith("Batch"):
        for name in arguments["RequestItems"]:
            yield f"dynamodb:{operation}", f"{prefix}table/{name}"
    else:
        index = f"/index/{arguments['IndexName']}" if "IndexName" in arguments else ""
        yield f"dynamodb:{operation}", f"{prefix}table/{arguments['TableName']}{index}"


def test_the_function_answers_on_what_was_deployed_and_needs_no_more_than_its_role(
    deployments: dict[str, Deployment], project_root: Path
) -> None:
    deployment = deployments["buffered"]
    client = deployment.client("dynamodb")
    one = deployment.configuration("OpenAICompletionsFunction")
    variables = one["Environment"]["Variables"]
    put_key(client, variables["REGISTRY_TABLE"], secret_digest(LOCAL_KEY), Principal("key-1", "alice"))
    route = ModelRoute("demo", "demo", "vllm", context_length=8192, created=1_700_000_000)
    put_model(client, variables["REGISTRY_TABLE"], route)
    event = (project_root / "events/openai_completions.json").read_text()

    outer = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    own = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": REGION}
    paths = os.pathsep.join(str(project_root / one) for one in ("functions", "infra"))
    done = subprocess.run(
        [sys.executable, "-c", INVOKE, one["Handler"]],
        env={**outer, **own, "AWS_DEFAULT_REGION": REGION, "PYTHONPATH": paths, **variables},
        input=event,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])

    assert said["reply"]["statusCode"] == 200, said
    usage = json.loads(said["reply"]["body"])["usage"]
    assert usage["completion_tokens"] == 24
    record = LedgerReader(client, variables["USAGE_TABLE"]).settled(json.loads(event)["requestContext"]["requestId"])
    assert (record.model, record.owner, record.completion_tokens) == ("demo", "alice", 24)
    wanted = {pair for call in said["calls"] for pair in needed(*call)}
    assert {action.split(":")[0] for action, _ in wanted} == {"dynamodb", "sagemaker"}
    for action, resource in wanted:
        assert permitted(deployment, "OpenAICompletionsFunctionRole", action, resource), (action, resource)
        assert not permitted(deployment, "HealthFunctionRole", action, resource)
