"""The template as CloudFormation would see it: what SAM transforms it into, in every mode, not what it says."""

from __future__ import annotations

import json
import os
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from samtranslator.parser.parser import Parser
from samtranslator.translator.translator import Translator
from samtranslator.yaml_helper import yaml_parse

from completions_cli.local.stack import LocalStack
from completions_cli.local.template import load_template, read_gateway

FUNCTION = "AWS::Lambda::Function"


def transformed(root: Path) -> dict[str, Any]:
    """CloudFormation's resources; conditions are still to be decided."""
    template = yaml_parse((root / "template.yaml").read_text())
    template["Resources"]["Tables"]["Properties"]["Location"] = "https://s3.amazonaws.com/bucket/tables.yaml"
    for resource in template["Resources"].values():
        if resource["Type"] == "AWS::Serverless::Function":
            resource["Properties"]["CodeUri"] = "s3://bucket/code.zip"
    template["Globals"]["Function"]["CodeUri"] = "s3://bucket/code.zip"
    translator = Translator({}, Parser())
    result: dict[str, Any] = translator.translate(template, parameter_values={})
    resources: dict[str, Any] = result["Resources"]
    return resources


@pytest.fixture(scope="module")
def resources(project_root: Path) -> dict[str, Any]:
    return transformed(project_root)


def integration(resources: Mapping[str, Any], path: str, streamed: bool) -> Any:
    """The integration of a completions route in one of its two forms."""
    operation = resources["Api"]["Properties"]["Body"]["paths"][path]["post"]
    condition, when_streamed, when_buffered = operation["x-amazon-apigateway-integration"]["Fn::If"]
    assert condition == "Streamed"
    return when_streamed if streamed else when_buffered


def test_the_api_is_regional(resources: dict[str, Any]) -> None:
    assert resources["Api"]["Properties"]["EndpointConfiguration"]["Types"] == ["REGIONAL"]


STREAMING = {
    "/v1/completions": "OpenAICompletionsFunction",
    "/completions": "OpenAICompletionsFunction",
    "/v2/completions": "ScaleCompletionsFunction",
    "/v1/llm/completions-sync": "ScaleV1CompletionsFunction",
    "/v1/llm/completions-stream": "ScaleV1CompletionsFunction",
    "/.api/completions/code": "SourcegraphCompletionsFunction",
    "/.api/completions/stream": "SourcegraphCompletionsFunction",
}


@pytest.mark.parametrize("path", STREAMING)
def test_the_streamed_form_streams_end_to_end(project_root: Path, path: str) -> None:
    method = json.dumps(integration(transformed(project_root), path, True))

    assert f"{STREAMING[path]}.Arn" in method
    assert '"responseTransferMode": "STREAM"' in method
    assert "response-streaming-invocations" in method
    assert '"timeoutInMillis": 600000' in method


@pytest.mark.parametrize("path", STREAMING)
def test_the_buffered_form_streams_nowhere(project_root: Path, path: str) -> None:
    method = json.dumps(integration(transformed(project_root), path, False))

    assert "STREAM" not in method
    assert "/2015-03-31/" in method


@pytest.mark.parametrize("name", sorted(set(STREAMING.values())))
def test_function_and_method_change_form_together(resources: dict[str, Any], name: str) -> None:
    function = resources[name]["Properties"]

    streamed, buffered = function["Handler"]["Fn::If"][1:]
    assert streamed == "run.sh"
    assert buffered.startswith("completions.handlers.")
    assert function["Environment"]["Variables"]["APP_MODULE"] == buffered.removesuffix(".handler") + ":app"
    assert function["Timeout"] == {"Fn::If": ["Streamed", 600, 29]}
    assert function["Layers"][0]["Fn::If"][0] == "Streamed"
    wrapper = function["Environment"]["Variables"]["AWS_LAMBDA_EXEC_WRAPPER"]
    assert wrapper == {"Fn::If": ["Streamed", "/opt/bootstrap", {"Ref": "AWS::NoValue"}]}


@pytest.mark.parametrize("mode", ["streamed", "buffered"])
def test_every_handler_and_app_can_be_imported(stack: LocalStack, project_root: Path, mode: str) -> None:
    for route in read_gateway(project_root / "template.yaml", {"ResponseMode": mode}).routes:
        assert callable(pkgutil.resolve_name(route.entry_point))


@pytest.mark.parametrize("name", sorted(set(STREAMING.values())))
def test_the_gateway_may_call_each_function_it_names(resources: dict[str, Any], name: str) -> None:
    permission = resources[name.replace("Function", "Permission")]["Properties"]
    assert permission["FunctionName"] == {"Ref": name}
    assert permission["Principal"] == "apigateway.amazonaws.com"


def test_the_start_script_can_be_executed(project_root: Path) -> None:
    assert os.access(project_root / "functions" / "run.sh", os.X_OK)


def test_no_policy_allows_every_action_or_every_resource(resources: dict[str, Any]) -> None:
    roles = [resource for resource in resources.values() if resource["Type"] == "AWS::IAM::Role"]
    statements = [
        statement
        for role in roles
        for policy in role["Properties"].get("Policies", [])
        for entry in policy["PolicyDocument"]["Statement"]
        for statement in _alternatives(entry)
    ]
    assert statements
    for statement in statements:
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert all("*" not in action for action in actions)
        assert statement["Resource"] != "*"


def _alternatives(statement: dict[str, Any]) -> list[dict[str, Any]]:
    """A statement, or what a condition may make of it."""
    if "Fn::If" not in statement:
        return [statement]
    return [branch for branch in statement["Fn::If"][1:] if branch != {"Ref": "AWS::NoValue"}]


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
    (mapping,) = [one["Properties"] for one in resources.values() if one["Type"] == "AWS::Lambda::EventSourceMapping"]
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert mapping["BisectBatchOnFunctionError"] is True
    assert mapping["MaximumRetryAttempts"] == 10
    assert mapping["StartingPosition"] == "TRIM_HORIZON"
    assert mapping["DestinationConfig"]["OnFailure"]["Destination"] == {"Fn::GetAtt": ["UsageRollupFailures", "Arn"]}
    for filter_ in mapping["FilterCriteria"]["Filters"]:
        image = json.loads(filter_["Pattern"])["dynamodb"]["NewImage"]
        assert (image["sk"], image["state"]) == ({"S": ["RECORD"]}, {"S": ["SETTLED"]})


def test_every_function_that_is_no_route_has_an_event(project_root: Path, resources: dict[str, Any]) -> None:
    functions = [one["Properties"]["Handler"] for one in resources.values() if one["Type"] == FUNCTION]
    served = {route.function.handler for route in read_gateway(project_root / "template.yaml", {}).routes}
    for handler in functions:
        if isinstance(handler, str) and handler not in served:
            assert (project_root / "events" / f"{handler.split('.')[-2]}.json").is_file()


def test_the_tables_are_kept_and_protected(project_root: Path) -> None:
    tables = load_template(project_root / "infra" / "tables.yaml")["Resources"]
    for table in tables.values():
        assert table["DeletionPolicy"] == table["UpdateReplacePolicy"] == "Retain"
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
