"""What the doctor makes of what is deployed, where no stand-in can be brought into such a state."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from completions.domain.catalog import ModelRoute
from completions_cli.doctor_aws import NotAnsweredError
from completions_cli.doctor_checks import Finding
from completions_cli.doctor_endpoints import endpoint_findings
from completions_cli.doctor_plan import Plan, PlannedStack
from completions_cli.doctor_stack import DeployedStack, alarms, deployed_stack, form, stack_finding, tables
from fakes import route
from stubbed_aws import StubbedAws, template

NOW = datetime(2026, 11, 30, tzinfo=UTC)
CODER = route(model_id="coder", endpoint_name="completions-coder")
DELETE = "aws cloudformation delete-stack --stack-name completions-dev, then deploy anew"


@pytest.fixture
def aws() -> Iterator[StubbedAws]:
    account = StubbedAws()
    yield account
    account.all_asked()


@pytest.fixture
def plan(project_root: Path) -> Plan:
    return Plan(PlannedStack("dev", "completions-dev", "template.yaml", template(project_root / "template.yaml"), {}))


def deployed(status: str = "CREATE_COMPLETE", reason: str = "", **outputs: str) -> DeployedStack:
    return DeployedStack("completions-dev", status, reason, {}, outputs)


@pytest.mark.parametrize(
    ("status", "verdict", "advice", "serves"),
    [
        ("CREATE_COMPLETE", "ok", "", True),
        ("UPDATE_COMPLETE", "ok", "", True),
        ("IMPORT_COMPLETE", "ok", "", True),
        ("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS", "warning", "wait, then run this again", True),
        ("CREATE_IN_PROGRESS", "warning", "wait, then run this again", False),
        ("REVIEW_IN_PROGRESS", "warning", "wait, then run this again", False),
        ("ROLLBACK_COMPLETE", "failed", DELETE, False),
        ("ROLLBACK_FAILED", "failed", DELETE, False),
        ("CREATE_FAILED", "failed", DELETE, False),
        ("UPDATE_ROLLBACK_COMPLETE", "warning", "", True),
        (
            "UPDATE_ROLLBACK_FAILED",
            "failed",
            "aws cloudformation continue-update-rollback --stack-name completions-dev",
            True,
        ),
        ("UPDATE_FAILED", "failed", "aws cloudformation rollback-stack --stack-name completions-dev", True),
        ("DELETE_FAILED", "failed", "aws cloudformation delete-stack --stack-name completions-dev", False),
        ("DELETE_IN_PROGRESS", "warning", "wait, then run this again", False),
    ],
)
def test_each_state_of_a_stack_has_its_way_out(
    plan: Plan, aws: StubbedAws, status: str, verdict: str, advice: str, serves: bool
) -> None:
    one = stack_finding(plan, aws, deployed(status, "because"))
    assert one.verdict == verdict
    assert one.advice.endswith(advice)
    assert deployed(status).serves is serves
    if verdict == "failed":
        assert "(because)" in one.found
        assert one.advice.startswith("aws cloudformation describe-stack-events --stack-name completions-dev says why")


def test_a_stack_that_is_not_there_yet_is_made_by_a_deployment(plan: Plan, aws: StubbedAws) -> None:
    message = "Stack with id completions-dev does not exist"
    aws.refuses("cloudformation", "describe_stacks", "ValidationError", message)
    one = stack_finding(plan, aws, deployed_stack(aws, "completions-dev"))
    assert (one.verdict, one.advice) == ("not checked", "make deploy ENV=dev")


def test_a_stack_that_may_not_be_seen_is_not_taken_for_absent(aws: StubbedAws) -> None:
    aws.denies("cloudformation", "describe_stacks", "cloudformation:DescribeStacks")
    with pytest.raises(NotAnsweredError, match=r"^needs cloudformation:DescribeStacks$"):
        deployed_stack(aws, "completions-dev")


def endpoint(status: str, **more: Any) -> dict[str, Any]:
    arn = "arn:aws:sagemaker:eu-west-1:123456789012:endpoint/completions-coder"
    variants = [{"VariantName": "AllTraffic", "CurrentInstanceCount": 1}]
    return {
        "EndpointName": "completions-coder",
        "EndpointArn": arn,
        "EndpointConfigName": "c",
        "EndpointStatus": status,
        "CreationTime": NOW,
        "LastModifiedTime": NOW,
        "ProductionVariants": variants,
        **more,
    }


def looked_at(aws: StubbedAws, *routes: ModelRoute, planned: PlannedStack | None = None, **parameters: str) -> Any:
    name = routes[0].endpoint_name if routes else "completions-coder"
    return list(endpoint_findings(aws, name, routes, parameters, planned))


@pytest.mark.parametrize(
    ("status", "more", "verdict", "said"),
    [
        ("InService", {}, "ok", "InService, instances: 1"),
        (
            "InService",
            {"ProductionVariants": [{"VariantName": "AllTraffic", "CurrentInstanceCount": 0}]},
            "ok",
            "InService, scaled to zero: the first request starts an instance, which takes minutes",
        ),
        ("InService", {"ProductionVariants": [{"VariantName": "AllTraffic"}]}, "ok", "InService"),
        ("Creating", {}, "warning", "Creating; it serves in some minutes"),
        ("Updating", {}, "warning", "Updating; it serves meanwhile"),
        ("RollingBack", {}, "warning", "RollingBack; it serves meanwhile"),
        (
            "Failed",
            {"FailureReason": "no capacity for ml.g6e.xlarge"},
            "failed",
            "Failed: no capacity for ml.g6e.xlarge",
        ),
        ("OutOfService", {}, "failed", "OutOfService"),
        ("Deleting", {}, "failed", "Deleting"),
        ("UpdateRollbackFailed", {}, "failed", "UpdateRollbackFailed"),
    ],
)
def test_each_state_of_an_endpoint_is_told_with_its_reason(
    aws: StubbedAws, status: str, more: dict[str, Any], verdict: str, said: str
) -> None:
    aws.answers("sagemaker", "describe_endpoint", endpoint(status, **more), {"EndpointName": "completions-coder"})
    (one,) = looked_at(aws, CODER)
    assert (one.subject, one.verdict, one.found) == ("completions-coder", verdict, said)


NOT_FOUND = 'Could not find endpoint "arn:aws:sagemaker:eu-west-1:123456789012:endpoint/completions-coder".'


def test_a_missing_endpoint_names_who_asks_it_and_the_stack_that_makes_it(project_root: Path, aws: StubbedAws) -> None:
    model = PlannedStack("model", "coder", "m", template(project_root / "infra/model-endpoint.yaml"), {})
    aws.refuses("sagemaker", "describe_endpoint", "ValidationException", NOT_FOUND)
    aws.refuses("sagemaker", "describe_endpoint", "ValidationException", NOT_FOUND)
    (known,) = looked_at(aws, CODER, planned=model)
    (unknown,) = looked_at(aws, CODER)
    assert (known.verdict, known.found) == ("failed", "there is no such endpoint yet; coder ask it")
    assert known.advice == "sam deploy --config-env model"
    assert (unknown.verdict, unknown.found) == ("failed", "there is no such endpoint; coder ask it")


def test_an_endpoint_that_may_not_be_seen_is_not_checked(aws: StubbedAws) -> None:
    aws.denies("sagemaker", "describe_endpoint", "sagemaker:DescribeEndpoint")
    (one,) = looked_at(aws, CODER)
    assert (one.verdict, one.found) == ("not checked", "needs sagemaker:DescribeEndpoint")


def test_an_endpoint_that_the_functions_may_not_call_is_a_failure(aws: StubbedAws) -> None:
    aws.answers("sagemaker", "describe_endpoint", endpoint("InService"))
    first, second = looked_at(aws, CODER, ModelEndpointPattern="acme-*")
    assert (first.verdict, second.verdict) == ("failed", "ok")
    assert first.found == "ModelEndpointPattern acme-* does not cover it, so every call is refused"


def test_an_asynchronous_endpoint_needs_its_buckets(aws: StubbedAws) -> None:
    batch = route(model_id="batch", endpoint_name="completions-coder", asynchronous=True)
    aws.answers("sagemaker", "describe_endpoint", endpoint("InService"))
    aws.answers("sagemaker", "describe_endpoint", endpoint("InService"))
    without = looked_at(aws, batch)
    with_buckets = looked_at(aws, batch, AsyncBucketPattern="completions-async-*")
    assert [one.verdict for one in without] == ["failed", "ok"]
    assert [one.verdict for one in with_buckets] == ["ok"]


def test_a_variant_that_the_catalogue_names_must_be_there(aws: StubbedAws) -> None:
    aws.answers("sagemaker", "describe_endpoint", endpoint("InService"))
    _, one = looked_at(aws, route(model_id="b", endpoint_name="completions-coder", target_variant="Blue"))
    assert (one.verdict, one.found) == ("failed", "it has no variant Blue, which b asks for; it has AllTraffic")


def component(status: str, copies: int, on: str = "completions-coder", **more: Any) -> dict[str, Any]:
    return {
        "InferenceComponentName": "small",
        "InferenceComponentArn": "arn:aws:sagemaker:eu-west-1:123456789012:inference-component/small",
        "EndpointName": on,
        "EndpointArn": f"arn:aws:sagemaker:eu-west-1:123456789012:endpoint/{on}",
        "InferenceComponentStatus": status,
        "RuntimeConfig": {"DesiredCopyCount": copies, "CurrentCopyCount": copies},
        "CreationTime": NOW,
        "LastModifiedTime": NOW,
        **more,
    }


@pytest.mark.parametrize(
    ("described", "verdict", "said"),
    [
        (component("InService", 2), "ok", "InService, copies: 2"),
        (
            component("InService", 0),
            "ok",
            "InService, scaled to zero: the first request starts a copy, which takes minutes",
        ),
        (component("Creating", 0), "warning", "Creating"),
        (component("Failed", 0, FailureReason="out of memory"), "failed", "Failed: out of memory"),
        (component("InService", 1, on="other"), "failed", "it is on other, not on completions-coder"),
    ],
)
def test_an_inference_component_is_looked_at_beside_its_endpoint(
    aws: StubbedAws, described: dict[str, Any], verdict: str, said: str
) -> None:
    aws.answers("sagemaker", "describe_endpoint", endpoint("InService"))
    asked = {"InferenceComponentName": "small"}
    aws.answers("sagemaker", "describe_inference_component", described, asked)
    _, one = looked_at(aws, route(model_id="s", endpoint_name="completions-coder", inference_component="small"))
    assert (one.subject, one.verdict, one.found) == ("small", verdict, said)


def test_a_missing_inference_component_is_a_failure(aws: StubbedAws) -> None:
    aws.answers("sagemaker", "describe_endpoint", endpoint("InService"))
    aws.refuses(
        "sagemaker", "describe_inference_component", "ValidationException", "Could not find inference component"
    )
    _, one = looked_at(aws, route(model_id="s", endpoint_name="completions-coder", inference_component="small"))
    assert (one.verdict, one.found) == ("failed", "there is no such inference component")


def usage_table(**table: Any) -> dict[str, Any]:
    stream = {"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"}
    return {
        "Table": {"TableName": "usage", "TableStatus": "ACTIVE", "StreamSpecification": stream, "ItemCount": 3, **table}
    }


def usage_finding(plan: Plan, aws: StubbedAws) -> Finding:
    _, usage, _ = tables(plan, aws, deployed(UsageTableName="usage"))
    return usage


def test_a_usage_table_without_its_stream_is_a_failure(plan: Plan, aws: StubbedAws) -> None:
    aws.answers("dynamodb", "describe_table", usage_table(StreamSpecification={"StreamEnabled": False}))
    one = usage_finding(plan, aws)
    assert (one.verdict, one.found) == ("failed", "it has no stream, so nothing is added to the roll-ups")


def test_a_table_whose_key_is_lost_is_a_failure(plan: Plan, aws: StubbedAws) -> None:
    aws.answers("dynamodb", "describe_table", usage_table(TableStatus="INACCESSIBLE_ENCRYPTION_CREDENTIALS"))
    one = usage_finding(plan, aws)
    assert (one.verdict, one.found) == ("failed", "INACCESSIBLE_ENCRYPTION_CREDENTIALS")


def test_a_table_that_may_not_be_described_is_not_checked(plan: Plan, aws: StubbedAws) -> None:
    aws.denies("dynamodb", "describe_table", "dynamodb:DescribeTable")
    one = usage_finding(plan, aws)
    assert (one.verdict, one.subject, one.found) == ("not checked", "usage", "needs dynamodb:DescribeTable")


def test_a_stack_of_another_template_has_no_tables(plan: Plan, aws: StubbedAws) -> None:
    assert [(one.verdict, one.found) for one in tables(plan, aws, deployed())] == [
        ("failed", "the stack has no output RegistryTableName"),
        ("failed", "the stack has no output UsageTableName"),
        ("failed", "the stack has no output PipelineTableName"),
    ]


def test_an_alarm_that_rings_says_what_to_do_first(plan: Plan, aws: StubbedAws) -> None:
    alarm = {
        "AlarmName": "completions-dev-Observability-1X-SweeperMissingAlarm-2Y",
        "AlarmDescription": "The sweeper has not run.\nRead its log.",
        "StateReason": "no datapoints",
    }
    asked = {"AlarmNamePrefix": "completions-dev-Observability-", "StateValue": "ALARM"}
    aws.answers("cloudwatch", "describe_alarms", {"MetricAlarms": [alarm]}, asked)
    (one,) = alarms(plan, aws, deployed())
    assert (one.verdict, one.subject, one.found) == ("failed", "1X-SweeperMissingAlarm-2Y", "no datapoints")
    assert one.advice == "The sweeper has not run. Read its log."


@pytest.mark.parametrize(
    ("running", "given", "verdict", "words"),
    [
        ({}, {}, "ok", "stay as they are"),
        ({"ResponseMode": "streamed", "AuthMode": "keys", "Compute": "classic"}, {}, "ok", "stay as they are"),
        ({"ResponseMode": "buffered"}, {}, "warning", "ResponseMode from buffered to streamed"),
        ({"AuthMode": "keys"}, {"AuthMode": "iam"}, "warning", "AuthMode from keys to iam"),
        (
            {"ResponseMode": "streamed"},
            {"ResponseMode": "buffered", "DeploymentStrategy": "Canary10Percent15Minutes"},
            "failed",
            "under Canary10Percent15Minutes most calls would fail",
        ),
    ],
)
def test_methods_change_at_once_and_functions_later(
    project_root: Path, aws: StubbedAws, running: dict[str, str], given: dict[str, str], verdict: str, words: str
) -> None:
    # a method of one form in front of a function of the other is a 502
    api = PlannedStack("dev", "completions-dev", "template.yaml", template(project_root / "template.yaml"), given)
    (one,) = form(Plan(api), aws, DeployedStack("completions-dev", "CREATE_COMPLETE", "", running, {}))
    assert one.verdict == verdict
    assert words in one.found
    assert (verdict == "ok") is (one.advice == "")
