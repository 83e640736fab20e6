"""The deployment, made in moto and read back from its services; and the service, run on what was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from completions.domain.catalog import ModelRoute
from completions.domain.metering import Principal
from completions.registry.dynamodb import put_key, put_model
from completions.web.auth import secret_digest
from completions_cli.local.tables import LOCAL_KEY
from deployed_functions import invoke, needed, permitted, statements
from ledger_reader import LedgerReader
from moto_deployment import (
    ARN_OF_FUNCTION,
    ASKED_OF_SERVICES,
    LEFT_OUT,
    REGION,
    Deployment,
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
    "BatchesFunction": "batches",
}
BY_EVENTS: Final = {
    "BatchStarterFunction": "batch_starter",
    "BatchSplitterFunction": "batch_splitter",
    "BatchWorkerFunction": "batch_worker",
    "BatchAssemblerFunction": "batch_assembler",
    "QueuedCompletionsFunction": "queued_completions",
    "AsyncResultsFunction": "async_results",
}
FUNCTIONS: Final = COMPLETIONS | OTHERS | BY_EVENTS
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
    "POST /v1/files": "BatchesFunction",
    "GET /v1/files": "BatchesFunction",
    "GET /v1/files/{file_id}": "BatchesFunction",
    "DELETE /v1/files/{file_id}": "BatchesFunction",
    "GET /v1/files/{file_id}/content": "BatchesFunction",
    "POST /v1/batches": "BatchesFunction",
    "GET /v1/batches": "BatchesFunction",
    "GET /v1/batches/{batch_id}": "BatchesFunction",
    "POST /v1/batches/{batch_id}/cancel": "BatchesFunction",
    "GET /dashboard": "DashboardFunction",
    "GET /healthz": "HealthFunction",
}


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
    for name in ("RegistryTable", "UsageTable", "PipelineTable"):
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
    for name in ("UsageTable", "PipelineTable"):
        expiry = client.describe_time_to_live(TableName=table(deployment, name)["TableName"])["TimeToLiveDescription"]
        assert expiry == {"TimeToLiveStatus": "ENABLED", "AttributeName": "expires_at"}


def test_the_queue_of_failures_keeps_them_for_two_weeks(deployment: Deployment) -> None:
    client = deployment.client("sqs")
    asked = {"QueueUrl": deployment.names["Pipelines.UsageRollupFailures"], "AttributeNames": ["All"]}
    attributes = client.get_queue_attributes(**asked)["Attributes"]
    assert attributes["MessageRetentionPeriod"] == str(14 * 24 * 3600)
    assert attributes["SqsManagedSseEnabled"] == "true"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_functions_role_is_its_own_and_names_what_it_may_do(deployment: Deployment, function: str) -> None:
    iam, name = deployment.client("iam"), deployment.names[f"{function}Role"]
    role = iam.get_role(RoleName=name)["Role"]
    assert deployment.configuration(function)["Role"] == role["Arn"]
    (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
    assert (trust["Principal"], trust["Action"]) == ({"Service": ["lambda.amazonaws.com"]}, ["sts:AssumeRole"])
    tables = {f"arn:aws:dynamodb:{REGION}:123456789012:table/{deployment.names[f'Tables.{one}']}"
              for one in ("RegistryTable", "UsageTable", "PipelineTable")}  # fmt: skip
    bucket = f"arn:aws:s3:::{deployment.names['Pipelines.PipelineBucket']}"
    own = f"{REGION}:123456789012:"
    others = (
        f"arn:aws:sagemaker:{own}",
        f"arn:aws:sqs:{own}{deployment.name}-Pipelines-",
        f"arn:aws:events:{own}event-bus/{deployment.name}",
        f"arn:aws:states:{own}stateMachine:{deployment.name}-batches",
    )
    for statement in statements(deployment, f"{function}Role"):
        resources = [statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"]
        for resource in resources:
            if ":dynamodb:" in resource:
                assert resource.split("/index/")[0] in tables
            elif ":s3:" in resource:
                assert resource.removesuffix("/*") == bucket
            else:
                assert resource.startswith(others), resource


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


@pytest.mark.parametrize("function", OTHERS | BY_EVENTS)
def test_every_other_function_is_the_same_in_both_modes(deployment: Deployment, function: str) -> None:
    one = deployment.configuration(function)
    assert one["Handler"] == f"completions.handlers.{(OTHERS | BY_EVENTS)[function]}.handler"
    assert (one["Architectures"], one["Layers"]) == (["arm64"], [])
    takes_long = function.startswith(("BatchSplitter", "BatchWorker", "BatchAssembler", "Queued"))
    assert one["Timeout"] <= (900 if takes_long else 60)


def test_the_alias_live_is_the_published_version(deployment: Deployment) -> None:
    client = deployment.client("lambda")
    for function in FUNCTIONS:
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
    mappings = deployment.client("lambda").list_event_source_mappings()["EventSourceMappings"]
    stream = table(deployment, "UsageTable")["LatestStreamArn"]
    (one,) = [mapping for mapping in mappings if mapping["EventSourceArn"] == stream]
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
    workers = ("UsageRollupFunction", "UsageSweeperFunction", "QueuedCompletionsFunction", "BatchWorkerFunction")
    expected = (*COMPLETIONS, *workers)
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
    assert {one.removesuffix("DeploymentGroup") for one in groups} == set(FUNCTIONS)
    for group in groups:
        # moto takes a group's alarms and does not say them
        watched = {one["Name"] for one in deployment.asked[group]["AlarmConfiguration"]["Alarms"]}
        assert watched, group
        assert watched <= names


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
    event = json.loads((project_root / "events/openai_completions.json").read_text())

    said = invoke(deployment, "OpenAICompletionsFunction", event)

    assert said.reply["statusCode"] == 200, said
    usage = json.loads(said.reply["body"])["usage"]
    assert usage["completion_tokens"] == 24
    record = LedgerReader(client, variables["USAGE_TABLE"]).settled(event["requestContext"]["requestId"])
    assert (record.model, record.owner, record.completion_tokens) == ("demo", "alice", 24)
    wanted = {pair for call in said.calls for pair in needed(*call)}
    assert {action.split(":")[0] for action, _ in wanted} == {"dynamodb", "sagemaker"}
    for action, resource in wanted:
        assert permitted(deployment, "OpenAICompletionsFunctionRole", action, resource), (action, resource)
        assert not permitted(deployment, "HealthFunctionRole", action, resource)
