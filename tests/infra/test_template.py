"""The template as CloudFormation would see it: what SAM transforms it into, in every form, not what it says.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudformation import deployed, of_type, transformed
from completions_cli.local.stack import LocalStack
from completions_cli.local.template import load_template, read_gateway
from completions_cli.parameters import check_parameters

FUNCTION = "AWS::Lambda::Function"
STREAMING = {
    "/v1/completions": "OpenAICompletionsFunction",
    "/completions": "OpenAICompletionsFunction",
    "/v2/completions": "ScaleCompletionsFunction",
    "/v1/llm/completions-sync": "ScaleV1CompletionsFunction",
    "/v1/llm/completions-stream": "ScaleV1CompletionsFunction",
    "/.api/completions/code": "SourcegraphCompletionsFunction",
    "/.api/completions/stream": "SourcegraphCompletionsFunction",
}
OPEN_ROUTES = {"/healthz", "/dashboard"}
WORKERS = {
    "UsageRollupFunction",
    "UsageSweeperFunction",
    "BatchStarterFunction",
    "BatchSplitterFunction",
    "BatchWorkerFunction",
    "BatchAssemblerFunction",
    "QueuedCompletionsFunction",
    "AsyncResultsFunction",
}
"""What nobody waits for at the other end of a connection."""
MANAGED = {"Compute": "managed-instances", "ManagedSubnetIds": "subnet-1,subnet-2", "ManagedSecurityGroupIds": "sg-1"}
FORMS: list[dict[str, str]] = [
    *(
        {"ResponseMode": mode, "Architecture": architecture}
        for mode, architecture in itertools.product(("streamed", "buffered"), ("arm64", "x86_64"))
    ),
    MANAGED,
    {"AuthMode": "iam"},
    {"CorsOrigins": "https://app.example.com"},
    {"UsagePlanRate": "10"},
    {"AuthMode": "iam", "UsagePlanRate": "10"},
    {"WafRequestsPerFiveMinutes": "2000"},
    {"AccessLogs": "on", "ApiGatewayLogRole": "create"},
    {"DomainName": "completions.example.com", "CertificateArn": "arn:aws:acm:x", "HostedZoneId": "Z1"},
    {"WorkerConcurrency": "2", "SnapStart": "PublishedVersions"},
    {"AsyncInputS3Uri": "s3://inputs/x", "AsyncBucketPattern": "inputs"},
    {"ReplyQueuePattern": "replies-*", "ReplyBucketPattern": "replies-*", "ReplyBusPattern": "replies-*"},
]


def form_id(form: dict[str, str]) -> str:
    return "-".join(form.values())[:60]


@pytest.fixture(scope="module")
def resources(project_root: Path) -> dict[str, Any]:
    return deployed(project_root)


@pytest.fixture(params=FORMS, ids=form_id)
def every_form(request: pytest.FixtureRequest, project_root: Path) -> dict[str, Any]:
    return deployed(project_root, **request.param)


def operation(resources: dict[str, Any], path: str, method: str) -> Any:
    (api,) = of_type(resources, "AWS::ApiGateway::RestApi").values()
    return api["Body"]["paths"][path][method]


def operations(resources: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Path, method and operation of every route."""
    (api,) = of_type(resources, "AWS::ApiGateway::RestApi").values()
    for path, methods in api["Body"]["paths"].items():
        for method, one in methods.items():
            yield path, method, one


def uri(operation: Any) -> str:
    return str(operation["x-amazon-apigateway-integration"]["uri"]["Fn::Sub"])


def test_the_api_is_regional(every_form: dict[str, Any]) -> None:
    # edge-optimised APIs cut a stream after 30 idle seconds
    (api,) = of_type(every_form, "AWS::ApiGateway::RestApi").values()
    assert api["EndpointConfiguration"]["Types"] == ["REGIONAL"]


@pytest.mark.parametrize("path", STREAMING)
def test_the_streamed_form_streams_end_to_end(project_root: Path, path: str) -> None:
    method = operation(deployed(project_root, ResponseMode="streamed"), path, "post")

    assert f"/2021-11-15/functions/${{{STREAMING[path]}.Arn}}:live/response-streaming-invocations" in uri(method)
    assert method["x-amazon-apigateway-integration"]["responseTransferMode"] == "STREAM"
    assert method["x-amazon-apigateway-integration"]["timeoutInMillis"] == 600_000


@pytest.mark.parametrize("path", STREAMING)
def test_the_buffered_form_streams_nowhere(project_root: Path, path: str) -> None:
    method = operation(deployed(project_root, ResponseMode="buffered"), path, "post")

    assert f"/2015-03-31/functions/${{{STREAMING[path]}.Arn}}:live/invocations" in uri(method)
    assert "STREAM" not in json.dumps(method)


@pytest.mark.parametrize("path", STREAMING)
def test_managed_instances_serve_all_completions_in_one_function(project_root: Path, path: str) -> None:
    resources = deployed(project_root, **MANAGED)
    function = resources["ManagedCompletionsFunction"]["Properties"]

    assert "functions/${ManagedCompletionsFunction.Arn}:live/response-streaming-invocations" in uri(
        operation(resources, path, "post")
    )
    assert STREAMING[path] not in resources
    capacity = function["CapacityProviderConfig"]["LambdaManagedInstancesCapacityProviderConfig"]
    assert int(capacity["PerExecutionEnvironmentMaxConcurrency"]) == 64
    assert function["MemorySize"] == 2048  # the least that managed instances take
    assert "ReservedConcurrentExecutions" not in function
    assert "SnapStart" not in function


def test_a_stream_may_take_as_long_as_its_function(every_form: dict[str, Any]) -> None:
    functions = of_type(every_form, FUNCTION)
    for path, _, one in operations(every_form):
        integration = one["x-amazon-apigateway-integration"]
        function = functions[uri(one).split("functions/${")[1].split(".Arn}")[0]]
        # API Gateway waits 29 s for what does not stream
        assert integration.get("timeoutInMillis", 29_000) >= function["Timeout"] * 1000, path


@pytest.mark.parametrize("name", sorted(set(STREAMING.values())))
@pytest.mark.parametrize("architecture", ["arm64", "x86_64"])
def test_function_and_method_change_form_together(project_root: Path, name: str, architecture: str) -> None:
    streamed, buffered = (
        deployed(project_root, ResponseMode=mode, Architecture=architecture)[name]["Properties"]
        for mode in ("streamed", "buffered")
    )

    assert (streamed["Handler"], streamed["Timeout"]) == ("run.sh", 600)
    assert streamed["Environment"]["Variables"]["AWS_LAMBDA_EXEC_WRAPPER"] == "/opt/bootstrap"
    layer = {"arm64": "LambdaAdapterLayerArm64", "x86_64": "LambdaAdapterLayerX86"}[architecture]
    assert [one["Fn::Sub"][1]["Layer"] for one in streamed["Layers"]] == [layer]
    assert streamed["Architectures"] == buffered["Architectures"] == [architecture]

    assert buffered["Handler"].startswith("completions.handlers.")
    assert buffered["Handler"] == buffered["Environment"]["Variables"]["APP_MODULE"].replace(":app", ".handler")
    assert buffered["Timeout"] == 29
    assert buffered.get("Layers", []) == []
    assert "AWS_LAMBDA_EXEC_WRAPPER" not in buffered["Environment"]["Variables"]


@pytest.mark.parametrize("mode", ["streamed", "buffered"])
def test_every_handler_and_app_can_be_imported(stack: LocalStack, project_root: Path, mode: str) -> None:
    for route in read_gateway(project_root / "template.yaml", {"ResponseMode": mode}).routes:
        assert callable(pkgutil.resolve_name(route.entry_point))


def test_every_handler_of_every_form_exists(stack: LocalStack, every_form: dict[str, Any]) -> None:
    for function in of_type(every_form, FUNCTION).values():
        variables = function["Environment"]["Variables"]
        if function["Handler"] == "run.sh":
            assert callable(pkgutil.resolve_name(variables["APP_MODULE"]))
        else:
            assert callable(pkgutil.resolve_name(":".join(function["Handler"].rsplit(".", 1))))


def test_the_gateway_may_call_each_function_it_names_and_by_the_alias_that_it_names(every_form: dict[str, Any]) -> None:
    named = {uri(one).split("functions/${")[1].split(".Arn}")[0] for _, _, one in operations(every_form)}
    permissions = of_type(every_form, "AWS::Lambda::Permission").values()
    assert {one["Action"] for one in permissions} == {"lambda:InvokeFunction"}
    allowed: dict[str, set[str]] = {}
    for one in permissions:
        allowed.setdefault(one["Principal"], set()).add(one["FunctionName"]["Ref"].removesuffix("Aliaslive"))
    assert allowed == {
        "apigateway.amazonaws.com": named,
        "events.amazonaws.com": {"AsyncResultsFunction", "BatchStarterFunction"},
        "sns.amazonaws.com": {"AsyncResultsFunction"},
    }
    aliases = of_type(every_form, "AWS::Lambda::Alias")
    assert {f"{name}Aliaslive" for name in named} <= set(aliases)
    assert {one["Name"] for one in aliases.values()} == {"live"}


def test_another_release_is_another_version_of_every_function(project_root: Path) -> None:
    # SAM's own hash does not see that a parameter has another value: the alias would go on with the old setting
    one, other = (deployed(project_root, ReleaseId=release) for release in ("0123456789", "abcdef0123"))
    for name in of_type(one, FUNCTION):
        versions = [{key for key in resources if key.startswith(f"{name}Version")} for resources in (one, other)]
        assert versions == [{f"{name}Version0123456789"}, {f"{name}Versionabcdef0123"}]
        # Lambda refuses to publish a function that is as it was
        assert one[name]["Properties"] != other[name]["Properties"]


@pytest.mark.parametrize("form", [{}, MANAGED], ids=["classic", "managed"])
def test_new_code_goes_back_when_an_alarm_rings(project_root: Path, form: dict[str, str]) -> None:
    resources = deployed(project_root, DeploymentStrategy="Canary10Percent15Minutes", **form)
    groups = of_type(resources, "AWS::CodeDeploy::DeploymentGroup")
    assert {name.removesuffix("DeploymentGroup") for name in groups} == set(of_type(resources, FUNCTION))
    for name, group in groups.items():
        assert group["DeploymentConfigName"]["Fn::Sub"][1] == {"ConfigName": "Canary10Percent15Minutes"}
        assert "DEPLOYMENT_STOP_ON_ALARM" in group["AutoRollbackConfiguration"]["Events"]
        alarms = [one["Name"]["Fn::GetAtt"][1] for one in group["AlarmConfiguration"]["Alarms"]]
        assert "Outputs.ApiErrorsAlarm" in alarms
        if name.replace("DeploymentGroup", "") in STREAMING.values():
            assert f"Outputs.{name.replace('FunctionDeploymentGroup', '')}ErrorsAlarm" in alarms
        if name == "ManagedCompletionsFunctionDeploymentGroup":
            assert "Outputs.OpenAICompletionsErrorsAlarm" in alarms
        if name in ("QueuedCompletionsFunctionDeploymentGroup", "BatchWorkerFunctionDeploymentGroup"):
            assert f"Outputs.{name.replace('FunctionDeploymentGroup', '')}ErrorsAlarm" in alarms


@pytest.mark.parametrize(
    ("form", "security"),
    [
        ({}, []),
        ({"AuthMode": "iam"}, [{"sigv4": []}]),
        ({"UsagePlanRate": "5"}, [{"gateway_key": []}]),
        ({"AuthMode": "iam", "UsagePlanRate": "5"}, [{"sigv4": [], "gateway_key": []}]),
    ],
    ids=["keys", "iam", "plan", "iam-and-plan"],
)
def test_every_route_but_the_open_ones_asks_for_what_the_form_asks(
    project_root: Path, form: dict[str, str], security: list[Any]
) -> None:
    resources = deployed(project_root, **form, CorsOrigins="*")
    for path, method, one in operations(resources):
        expected = None if path in OPEN_ROUTES or method == "options" else security
        assert one.get("security") == expected, (method, path)
    (api,) = of_type(resources, "AWS::ApiGateway::RestApi").values()
    schemes = api["Body"]["components"]["securitySchemes"]
    assert schemes["sigv4"]["x-amazon-apigateway-authtype"] == "awsSigv4"
    assert (schemes["gateway_key"]["in"], schemes["gateway_key"]["name"]) == ("header", "x-api-key")


def test_preflights_have_a_route_where_browsers_may_call_and_only_there(project_root: Path) -> None:
    def preflights(**form: str) -> set[str]:
        return {path for path, method, _ in operations(deployed(project_root, **form)) if method == "options"}

    assert preflights() == set()
    assert preflights(CorsOrigins="*") == {path for path, _, _ in operations(deployed(project_root))} - OPEN_ROUTES


@pytest.mark.parametrize(
    "kind",
    [
        "DEFAULT_4XX",
        "DEFAULT_5XX",
        "REQUEST_TOO_LARGE",
        "THROTTLED",
        "QUOTA_EXCEEDED",
        "INTEGRATION_TIMEOUT",
        "MISSING_AUTHENTICATION_TOKEN",
    ],
)
@pytest.mark.parametrize("auth", ["keys", "iam"])
def test_the_gateways_own_answers_carry_one_body_that_every_dialects_client_reads(
    project_root: Path, kind: str, auth: str
) -> None:
    (api,) = of_type(deployed(project_root, AuthMode=auth), "AWS::ApiGateway::RestApi").values()
    answer = api["Body"]["x-amazon-apigateway-gateway-responses"][kind]

    text = answer["responseTemplates"]["application/json"].replace("$context.error.messageString", '"words"')
    body = json.loads(text)
    assert set(body) == {"error", "detail", "request_id"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["request_id"] == "$context.requestId"
    assert answer["responseParameters"]["gatewayresponse.header.x-request-id"] == "context.requestId"


@pytest.mark.parametrize(("auth", "status"), [("keys", 404), ("iam", 403)])
def test_an_unknown_route_is_404_unless_it_may_be_a_signature_that_is_missing(
    project_root: Path, auth: str, status: int
) -> None:
    (api,) = of_type(deployed(project_root, AuthMode=auth), "AWS::ApiGateway::RestApi").values()
    answers = api["Body"]["x-amazon-apigateway-gateway-responses"]
    assert answers["MISSING_AUTHENTICATION_TOKEN"]["statusCode"] == status


def test_prompts_are_never_logged_by_the_gateway_and_its_log_is_json(project_root: Path) -> None:
    (stage,) = of_type(deployed(project_root, AccessLogs="on"), "AWS::ApiGateway::Stage").values()
    assert [one["DataTraceEnabled"] for one in stage["MethodSettings"]] == [False]
    line = json.loads(stage["AccessLogSetting"]["Format"])
    assert line["requestId"] == "$context.requestId"
    assert not any("body" in value.lower() or "authorization" in value.lower() for value in line.values())
    (silent,) = of_type(deployed(project_root), "AWS::ApiGateway::Stage").values()
    assert "AccessLogSetting" not in silent


def test_every_log_ends_and_every_function_writes_to_one_that_does(every_form: dict[str, Any]) -> None:
    groups = of_type(every_form, "AWS::Logs::LogGroup")
    assert {one["RetentionInDays"] for one in groups.values()} == {30}
    for function in of_type(every_form, FUNCTION).values():
        assert function["LoggingConfig"] == {"LogFormat": "JSON", "LogGroup": {"Ref": "FunctionLogs"}}
        assert function["TracingConfig"] == {"Mode": "Active"}


def test_what_is_optional_is_there_when_asked_for_and_not_before(project_root: Path) -> None:
    optional = {
        "UsagePlan": {"UsagePlanRate": "10"},
        "GatewayKey": {"UsagePlanRate": "10"},
        "Firewall": {"WafRequestsPerFiveMinutes": "2000"},
        "FirewallOfApi": {"WafRequestsPerFiveMinutes": "2000"},
        "Domain": {"DomainName": "a.example.com", "CertificateArn": "arn:aws:acm:x"},
        "DomainMapping": {"DomainName": "a.example.com", "CertificateArn": "arn:aws:acm:x"},
        "DomainRecord": {"DomainName": "a.example.com", "CertificateArn": "arn:aws:acm:x", "HostedZoneId": "Z"},
        "AccessLogGroup": {"AccessLogs": "on"},
        "ApiGatewayAccount": {"ApiGatewayLogRole": "create"},
        "ManagedInstances": MANAGED,
    }
    plain = deployed(project_root)
    for name, form in optional.items():
        assert name not in plain
        assert name in deployed(project_root, **form)


@pytest.mark.parametrize("given", ["0", "3"])
def test_workers_keep_concurrency_when_told_and_functions_that_serve_never_do(project_root: Path, given: str) -> None:
    resources = deployed(project_root, WorkerConcurrency=given, QueueConcurrency="5", BatchWorkers="7")
    # as much as they are sent at once: what is turned away unread spends its tries
    kept = dict.fromkeys(WORKERS, "3") | {"QueuedCompletionsFunction": "5", "BatchWorkerFunction": "7"}
    for name, function in of_type(resources, FUNCTION).items():
        reserved = kept.get(name) if given != "0" else None
        assert function.get("ReservedConcurrentExecutions") == reserved, name


def test_snapshots_are_for_functions_that_somebody_waits_for(project_root: Path) -> None:
    resources = deployed(project_root, SnapStart="PublishedVersions")
    waited_for = {name for name, one in of_type(resources, FUNCTION).items() if one.get("SnapStart")}
    assert waited_for == set(of_type(resources, FUNCTION)) - WORKERS


def test_nested_stacks_get_parameters_that_they_have(project_root: Path) -> None:
    nested = of_type(deployed(project_root, **MANAGED), "AWS::CloudFormation::Stack")
    assert set(nested) == {"Tables", "Pipelines", "Observability", "ManagedInstances"}
    for stack in nested.values():
        declared = load_template(project_root / "infra" / Path(stack["TemplateURL"]).name).get("Parameters", {})
        given = set(stack.get("Parameters", {}))
        assert given <= set(declared)
        assert {name for name, one in declared.items() if "Default" not in one} <= given


def test_whatever_a_resource_waits_for_is_there(every_form: dict[str, Any]) -> None:
    for name, resource in every_form.items():
        waited_for = resource.get("DependsOn", [])
        assert set([waited_for] if isinstance(waited_for, str) else waited_for) <= set(every_form), name


def test_the_api_waits_for_the_role_that_writes_its_logs(project_root: Path) -> None:
    # a stage with access logs is refused while the account has no such role
    with_role = deployed(project_root, AccessLogs="on", ApiGatewayLogRole="create")
    assert with_role["Api"]["Metadata"]["LogRole"] == {"Ref": "ApiGatewayAccount"}
    assert deployed(project_root)["Api"]["Metadata"]["LogRole"] == ""


def test_the_transformed_template_has_no_fault_that_cfn_lint_knows(project_root: Path, tmp_path: Path) -> None:
    # on the template as written it passes over names that begin as a SAM resource's
    path = tmp_path / "transformed.json"
    path.write_text(json.dumps(transformed(project_root)))
    done = subprocess.run(
        [Path(sys.executable).with_name("cfn-lint"), "--format", "parseable", path],
        capture_output=True,
        text=True,
        check=False,
    )
    faults = [line for line in done.stdout.splitlines() if re.search(r":E\d{4}:", line)]
    assert not faults, faults


def test_a_schedule_has_no_name_for_another_stack_may_have_one(every_form: dict[str, Any]) -> None:
    schedules = of_type(every_form, "AWS::Scheduler::Schedule")
    assert schedules
    assert not any("Name" in one for one in schedules.values())


def test_managed_policies_let_functions_write_logs_and_traces_and_read_their_source(every_form: dict[str, Any]) -> None:
    always = {"service-role/AWSLambdaBasicExecutionRole", "AWSXrayWriteOnlyAccess"}
    # SAM gives them to whoever reads a stream or a queue: GetRecords or ReceiveMessage, which the inline policy cannot
    # take back
    more = {
        "UsageRollupFunctionRole": {"service-role/AWSLambdaDynamoDBExecutionRole"},
        "QueuedCompletionsFunctionRole": {"service-role/AWSLambdaSQSQueueExecutionRole"},
    }
    functions = {f"{name}Role" for name in of_type(every_form, FUNCTION)}
    for name, role in of_type(every_form, "AWS::IAM::Role").items():
        if name in functions:
            managed = {arn.split(":policy/")[1] for arn in role["ManagedPolicyArns"]}
            assert managed == always | more.get(name, set()), name


def test_completions_may_be_asked_for_in_each_way_that_the_backend_asks(resources: dict[str, Any]) -> None:
    for name in set(STREAMING.values()):
        statements = resources[f"{name}Role"]["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]
        allowed = {action for one in statements for action in one["Action"]}
        assert {
            "sagemaker:InvokeEndpoint",
            "sagemaker:InvokeEndpointAsync",
            "sagemaker:InvokeEndpointWithResponseStream",
        } <= allowed


def test_no_deployment_waits_for_what_waits_for_it(project_root: Path) -> None:
    """Names of other resources, followed, never come round."""
    template = transformed(project_root)["Resources"]
    graph = {name: {found for found in mentions(one) if found in template} for name, one in template.items()}

    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, path
        if name not in settled:
            for other in graph[name]:
                follow(other, (*path, name))
            settled.add(name)

    settled: set[str] = set()
    for name in graph:
        follow(name, ())


def mentions(node: Any) -> Iterator[str]:
    """Logical ids that a resource names, by Ref, GetAtt, Sub or DependsOn."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("Ref", "DependsOn") and isinstance(value, str):
                yield value
            elif key == "Fn::GetAtt":
                yield value[0]
            elif key == "Fn::Sub":
                text = value if isinstance(value, str) else value[0]
                yield from (part.split("}")[0].split(".")[0] for part in text.split("${")[1:])
            yield from mentions(value)
    elif isinstance(node, list):
        for one in node:
            yield from mentions(one)


def test_the_start_script_can_be_executed(project_root: Path) -> None:
    assert os.access(project_root / "functions" / "run.sh", os.X_OK)


# Step Functions asks CloudWatch to deliver its log with the machine's role, by actions that know no resource.
LOG_DELIVERY = {
    "logs:CreateLogDelivery",
    "logs:DeleteLogDelivery",
    "logs:DescribeLogGroups",
    "logs:DescribeResourcePolicies",
    "logs:GetLogDelivery",
    "logs:ListLogDeliveries",
    "logs:PutResourcePolicy",
    "logs:UpdateLogDelivery",
}


def test_no_policy_allows_every_action_or_every_resource(every_form: dict[str, Any]) -> None:
    statements = [
        statement
        for role in of_type(every_form, "AWS::IAM::Role").values()
        for policy in role.get("Policies", [])
        for statement in policy["PolicyDocument"]["Statement"]
    ]
    assert statements
    for statement in statements:
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert all("*" not in action for action in actions)
        assert statement["Resource"] != "*" or set(actions) == LOG_DELIVERY


def test_the_same_routes_are_served_in_both_modes(project_root: Path) -> None:
    served = {
        mode: {
            (route.method, route.path)
            for route in read_gateway(project_root / "template.yaml", {"ResponseMode": mode}).routes
        }
        for mode in ("streamed", "buffered")
    }
    assert served["streamed"] == served["buffered"]
    assert ("POST", "/v1/completions") in served["streamed"]


def test_every_route_has_an_event(project_root: Path) -> None:
    events = [json.loads(path.read_text()) for path in (project_root / "events").glob("*.json")]
    covered = {(event["httpMethod"], event["resource"]) for event in events if "httpMethod" in event}
    routes = read_gateway(project_root / "template.yaml", {}).routes
    unversioned = {("POST", "/completions")}  # the same function and body as /v1/completions
    assert {(route.method, route.path) for route in routes} - unversioned <= covered


def test_the_roll_up_gets_settled_records_and_nothing_is_dropped_unseen(resources: dict[str, Any]) -> None:
    mapping = resources["UsageRollupFunctionSettled"]["Properties"]
    assert mapping["EventSourceArn"] == {"Fn::GetAtt": ["Tables", "Outputs.UsageTableStreamArn"]}
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert mapping["BisectBatchOnFunctionError"] is True
    assert mapping["MaximumRetryAttempts"] == 10
    assert mapping["StartingPosition"] == "TRIM_HORIZON"
    assert mapping["DestinationConfig"]["OnFailure"]["Destination"] == {
        "Fn::GetAtt": ["Pipelines", "Outputs.UsageRollupFailuresQueueArn"]
    }
    for filter_ in mapping["FilterCriteria"]["Filters"]:
        image = json.loads(filter_["Pattern"])["dynamodb"]["NewImage"]
        assert (image["sk"], image["state"]) == ({"S": ["RECORD"]}, {"S": ["SETTLED"]})


def test_every_function_that_is_no_route_has_an_event(project_root: Path, resources: dict[str, Any]) -> None:
    functions = [one["Handler"] for one in of_type(resources, FUNCTION).values()]
    served = {route.function.handler for route in read_gateway(project_root / "template.yaml", {}).routes}
    for handler in functions:
        if handler not in served:
            assert (project_root / "events" / f"{handler.split('.')[-2]}.json").is_file()


def test_the_tables_are_kept_and_protected(project_root: Path) -> None:
    tables = load_template(project_root / "infra" / "tables.yaml")["Resources"]
    for table in tables.values():
        assert table["DeletionPolicy"] == table["UpdateReplacePolicy"] == "Retain"
        assert table["Properties"]["DeletionProtectionEnabled"] == {"Ref": "DeletionProtection"}
        assert table["Properties"]["PointInTimeRecoverySpecification"]["PointInTimeRecoveryEnabled"] is True
        assert table["Properties"]["SSESpecification"]["SSEEnabled"] is True
    usage = tables["UsageTable"]["Properties"]
    assert usage["TimeToLiveSpecification"] == {"AttributeName": "expires_at", "Enabled": True}


def test_the_functions_install_what_the_lock_says(project_root: Path) -> None:
    requirements = (project_root / "functions" / "requirements.txt").read_text()
    for package in ("fastapi", "mangum", "uvicorn", "boto3", "pydantic", "aws-lambda-powertools"):
        assert f"\n{package}==" in f"\n{requirements}"
    for absent in ("moto", "pytest", "typer", "openai"):
        assert f"\n{absent}==" not in f"\n{requirements}"


RELEASE = {"ReleaseId": "0123456789"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ReleaseId": "0000000000"}, "ReleaseId must be new at each deployment"),
        ({"ReleaseId": "v1.2"}, "ten hexadecimal digits"),
        ({"Compute": "managed-instances"}, "needs ManagedSubnetIds"),
        ({**MANAGED, "ResponseMode": "buffered"}, "set ResponseMode to streamed"),
        ({**MANAGED, "SnapStart": "PublishedVersions"}, "Managed instances have no SnapStart"),
        ({"AsyncInputS3Uri": "s3://inputs/x"}, "needs AsyncBucketPattern"),
        ({"DomainName": "a.example.com"}, "DomainName needs CertificateArn"),
        ({"HostedZoneId": "Z1"}, "HostedZoneId is the zone of DomainName, which is empty"),
        ({"CorsOrigins": "https://App.example.com/"}, "CorsOrigins"),
        ({"AuthMode": "none"}, "AuthMode"),
        ({"LogRetentionDays": "31"}, "LogRetentionDays"),
        ({"ResponseMood": "streamed"}, "ResponseMood"),
        ({"WafRequestsPerFiveMinutes": "5"}, "WafRequestsPerFiveMinutes"),
        ({"UsagePlanRate": "0.5"}, "UsagePlanRate"),
        ({"WorkerConcurrency": "0.0"}, "WorkerConcurrency"),
        ({"ManagedVCpus": "2.5"}, "ManagedVCpus"),
        ({"WatchedEndpointName": "-a"}, "WatchedEndpointName"),
        ({"AsyncBucketPattern": "*"}, "AsyncBucketPattern"),
        ({"PipelineKeyId": "my key"}, "PipelineKeyId"),
        ({"PipelineRetentionDays": "0"}, "PipelineRetentionDays"),
        ({"QueueConcurrency": "1"}, "QueueConcurrency"),  # Lambda takes no less than 2
        ({"QueueConcurrency": "1001"}, "QueueConcurrency"),
        ({"BatchWorkers": "0"}, "BatchWorkers"),
        ({"BatchTokensPerMinute": "-1"}, "BatchTokensPerMinute"),
        ({"BatchTokensPerMinute": "0"}, "BatchTokensPerMinute"),
        ({"BatchToleratedFailurePercentage": "101"}, "BatchToleratedFailurePercentage"),
        ({"ReplyQueuePattern": "*"}, "ReplyQueuePattern"),
        ({"ReplyQueuePattern": "https://sqs.us-east-1.amazonaws.com/1/replies"}, "ReplyQueuePattern"),
        ({"ReplyBucketPattern": "s3://replies"}, "ReplyBucketPattern"),
        ({"ReplyBucketPattern": "*"}, "ReplyBucketPattern"),
        ({"ReplyBusPattern": "*"}, "ReplyBusPattern"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_parameters_are_refused_with_a_message_before_anything_is_made(
    project_root: Path, wrong: dict[str, str], message: str
) -> None:
    found = check_parameters(load_template(project_root / "template.yaml"), {**RELEASE, **wrong})
    assert any(message in one for one in found), found


@pytest.mark.parametrize(
    "right",
    [
        {"PipelineKeyId": "key-1.b_C"},
        {"QueueConcurrency": "2"},
        {"BatchWorkers": "1000"},
        {"BatchToleratedFailurePercentage": "0"},
        {"ReplyQueuePattern": "replies-*.fifo"},
        {"ReplyQueuePattern": "replies.fifo"},
        {"ReplyBusPattern": "default"},
        {"ReplyBusPattern": "aws.partner/example.com/replies"},
    ],
    ids=lambda value: "-".join(f"{name}-{one}" for name, one in value.items()),
)
def test_right_parameters_are_taken(project_root: Path, right: dict[str, str]) -> None:
    assert check_parameters(load_template(project_root / "template.yaml"), {**RELEASE, **right}) == []


@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_every_form_has_right_parameters(project_root: Path, form: dict[str, str]) -> None:
    certificate = {"CertificateArn": "arn:aws:acm:us-east-1:123456789012:certificate/x"} if "DomainName" in form else {}
    assert check_parameters(load_template(project_root / "template.yaml"), {**RELEASE, **form, **certificate}) == []
