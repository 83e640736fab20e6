"""What the doctor makes of an account's answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from completions_cli.doctor_account import (
    adapter_layer,
    concurrency,
    image,
    instance_quota,
    integration_timeout,
    log_role,
)
from completions_cli.doctor_plan import Plan, PlannedStack
from stubbed_aws import REGION, StubbedAws, quotas, template

MODEL = {
    "EndpointName": "completions-coder",
    "ContainerFamily": "lmi",
    "Image": f"763104351884.dkr.ecr.{REGION}.amazonaws.com/djl-inference:0.36.0-lmi28.0.0-cu130",
    "ModelId": "Qwen/Qwen2.5-Coder-7B",
    "InstanceType": "ml.g6e.xlarge",
    "MaxInstances": "2",
}
QUOTA = "ml.g6e.xlarge for endpoint usage"
LAYER = f"arn:aws:lambda:{REGION}:753240598075:layer:LambdaAdapterLayer"


@pytest.fixture
def aws() -> Iterator[StubbedAws]:
    account = StubbedAws()
    yield account
    account.all_asked()


def planned(root: Path, model: dict[str, str] | None = None, **values: str) -> Plan:
    models = [PlannedStack("model", "coder", "m", template(root / "infra/model-endpoint.yaml"), model)] if model else []
    return Plan(
        PlannedStack("dev", "completions-dev", "template.yaml", template(root / "template.yaml"), values), tuple(models)
    )


def limits(limit: int, unreserved: int) -> dict[str, object]:
    return {"AccountLimit": {"ConcurrentExecutions": limit, "UnreservedConcurrentExecutions": unreserved}}


@pytest.mark.parametrize(
    ("each", "limit", "unreserved", "verdict"),
    [
        ("0", 1000, 1000, "ok"),
        ("0", 10, 10, "warning"),  # a new account
        ("5", 1000, 1000, "ok"),
        # six workers of five, four for the queue, ten for a batch, and the hundred that must stay
        ("5", 144, 144, "ok"),
        ("5", 143, 143, "failed"),
        ("5", 10, 10, "failed"),
        ("5", 1000, 105, "warning"),  # reserved by this stack already, or by others
    ],
)
def test_workers_reserve_what_the_account_can_spare(
    project_root: Path, aws: StubbedAws, each: str, limit: int, unreserved: int, verdict: str
) -> None:
    aws.answers("lambda", "get_account_settings", limits(limit, unreserved), {})
    (one,) = concurrency(planned(project_root, WorkerConcurrency=each), aws)
    assert one.verdict == verdict
    asked = "--service-code lambda --quota-code L-B99A9384 --desired-value 1000 --region eu-west-1"
    assert (asked in one.advice) is (verdict != "ok")


@pytest.mark.parametrize(
    ("quota", "least", "verdict", "wanted"),
    [(4, "1", "ok", None), (2, "1", "ok", None), (1, "1", "failed", 2), (0, "1", "failed", 2), (3, "2", "warning", 4)],
)
def test_a_model_has_as_many_instances_as_it_may_scale_to(
    project_root: Path, aws: StubbedAws, quota: float, least: str, verdict: str, wanted: int | None
) -> None:
    # an update runs the new instances beside the old ones
    there = quotas("sagemaker", {"ml.g6e.xlarge for training job usage": ("L-1", 9), QUOTA: ("L-B0729CB4", quota)})
    aws.answers("service-quotas", "list_service_quotas", there, {"ServiceCode": "sagemaker"})
    (one,) = instance_quota(planned(project_root, {**MODEL, "MinInstances": least}), aws)
    assert (one.subject, one.verdict) == ("ml.g6e.xlarge", verdict)
    if wanted is None:
        assert one.advice == ""
    else:
        assert f"--quota-code L-B0729CB4 --desired-value {wanted} --region eu-west-1" in one.advice


def test_a_quota_the_account_has_nothing_of_its_own_for_is_everybodys(project_root: Path, aws: StubbedAws) -> None:
    aws.answers("service-quotas", "list_service_quotas", quotas("sagemaker", {}))
    aws.answers("service-quotas", "list_aws_default_service_quotas", quotas("sagemaker", {QUOTA: ("L-B0729CB4", 0)}))
    (one,) = instance_quota(planned(project_root, MODEL), aws)
    assert (one.verdict, one.found) == ("failed", "0 for all endpoints of the account; model may take 2")


def test_a_region_without_such_instances_has_no_quota_for_them(project_root: Path, aws: StubbedAws) -> None:
    aws.answers("service-quotas", "list_service_quotas", quotas("sagemaker", {}))
    aws.answers("service-quotas", "list_aws_default_service_quotas", quotas("sagemaker", {}))
    (one,) = instance_quota(planned(project_root, MODEL), aws)
    assert (one.verdict, one.found) == ("failed", "eu-west-1 has no quota for it, so no such instance")


def test_quotas_that_may_not_be_read_are_not_checked(project_root: Path, aws: StubbedAws) -> None:
    aws.denies("service-quotas", "list_service_quotas", "servicequotas:ListServiceQuotas")
    (one,) = instance_quota(planned(project_root, MODEL), aws)
    assert (one.verdict, one.found) == ("not checked", "needs servicequotas:ListServiceQuotas")


def test_streams_need_no_quota_for_their_time(project_root: Path, aws: StubbedAws) -> None:
    (one,) = integration_timeout(planned(project_root), aws)
    assert one.verdict == "ok"


@pytest.mark.parametrize(("milliseconds", "verdict"), [(29_000, "ok"), (60_000, "ok"), (20_000, "failed")])
def test_buffered_answers_have_the_gateways_29_seconds(
    project_root: Path, aws: StubbedAws, milliseconds: float, verdict: str
) -> None:
    there = quotas("apigateway", {"Maximum integration timeout in milliseconds": ("L-E5AE38E3", milliseconds)})
    aws.answers("service-quotas", "list_service_quotas", there, {"ServiceCode": "apigateway"})
    (one,) = integration_timeout(planned(project_root, ResponseMode="buffered"), aws)
    assert one.verdict == verdict
    assert one.found.startswith(f"buffered answers may take 29 s, the account allows {milliseconds // 1000} s")


ROLE = "arn:aws:iam::123456789012:role/apigateway-logs"
OWN_ROLE = "arn:aws:iam::123456789012:role/completions-dev-ApiGatewayCloudWatchRole-1AB"


@pytest.mark.parametrize(
    ("makes", "role", "verdict", "advice"),
    [
        ("existing", ROLE, "ok", ""),
        ("existing", None, "failed", "set ApiGatewayLogRole=create"),
        ("create", None, "ok", ""),
        ("create", OWN_ROLE, "ok", ""),
        ("create", ROLE, "warning", "set ApiGatewayLogRole=existing"),
    ],
)
def test_access_logs_need_a_role_that_other_apis_use_too(
    project_root: Path, aws: StubbedAws, makes: str, role: str | None, verdict: str, advice: str
) -> None:
    aws.answers("apigateway", "get_account", {"cloudwatchRoleArn": role} if role else {})
    (one,) = log_role(planned(project_root, AccessLogs="on", ApiGatewayLogRole=makes), aws)
    assert (one.verdict, one.advice) == (verdict, advice)


def test_without_access_logs_no_role_is_asked_for(project_root: Path, aws: StubbedAws) -> None:
    (one,) = log_role(planned(project_root), aws)
    assert one.verdict == "ok"


MANAGED = {"Compute": "managed-instances", "ManagedSubnetIds": "subnet-1", "ManagedSecurityGroupIds": "sg-1"}


@pytest.mark.parametrize(
    ("values", "layer"),
    [({}, "Arm64"), ({"Architecture": "x86_64"}, "X86"), (MANAGED, "Arm64")],
    ids=["arm64", "x86_64", "managed-instances"],
)
def test_the_layer_is_the_one_of_the_template(
    project_root: Path, aws: StubbedAws, values: dict[str, str], layer: str
) -> None:
    aws.answers("lambda", "get_layer_version", {}, {"LayerName": f"{LAYER}{layer}", "VersionNumber": 27})
    (one,) = adapter_layer(planned(project_root, None, **values), aws)
    assert (one.verdict, one.found) == ("ok", f"{LAYER}{layer}:27")


@pytest.mark.parametrize(
    ("code", "message", "verdict"),
    [
        ("ResourceNotFoundException", "Layer version does not exist.", "failed"),
        (
            "AccessDeniedException",
            "User: arn:aws:iam::1:user/a is not authorized to perform: lambda:GetLayerVersion on resource: "
            f"{LAYER}Arm64:27 because no resource-based policy allows the lambda:GetLayerVersion action",
            "failed",
        ),
        (
            "AccessDeniedException",
            "User: arn:aws:iam::1:user/a is not authorized to perform: lambda:GetLayerVersion on resource: "
            f"{LAYER}Arm64:27 because no identity-based policy allows the lambda:GetLayerVersion action",
            "not checked",
        ),
    ],
)
def test_a_layer_that_is_not_there_is_told_from_one_that_may_not_be_read(
    project_root: Path, aws: StubbedAws, code: str, message: str, verdict: str
) -> None:
    aws.refuses("lambda", "get_layer_version", code, message)
    (one,) = adapter_layer(planned(project_root), aws)
    assert one.verdict == verdict


def test_the_buffered_form_has_no_layer(project_root: Path, aws: StubbedAws) -> None:
    (one,) = adapter_layer(planned(project_root, ResponseMode="buffered"), aws)
    assert one.verdict == "ok"


DIGEST = f"sha256:{'0' * 64}"
REPOSITORY = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/team/vllm"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(f"{REPOSITORY}:0.27-cu130", {"imageTag": "0.27-cu130"}), (f"{REPOSITORY}@{DIGEST}", {"imageDigest": DIGEST})],
)
def test_an_image_is_pulled_by_tag_or_digest(
    project_root: Path, aws: StubbedAws, given: str, wanted: dict[str, str]
) -> None:
    asked = {"registryId": "123456789012", "repositoryName": "team/vllm", "imageIds": [wanted]}
    aws.answers("ecr", "batch_get_image", {"images": [{"imageId": wanted}]}, asked)
    (one,) = image(planned(project_root, {**MODEL, "Image": given}), aws)
    assert (one.subject, one.verdict, one.found) == ("model", "ok", given)


def test_a_tag_that_is_not_there_is_a_failure(project_root: Path, aws: StubbedAws) -> None:
    failure = {"failureCode": "ImageNotFound", "failureReason": "Requested image not found"}
    aws.answers("ecr", "batch_get_image", {"images": [], "failures": [failure]})
    (one,) = image(planned(project_root, MODEL), aws)
    assert (one.verdict, one.found) == ("failed", f"{MODEL['Image']}: Requested image not found")


def test_a_repository_that_is_not_there_is_a_failure(project_root: Path, aws: StubbedAws) -> None:
    aws.refuses("ecr", "batch_get_image", "RepositoryNotFoundException", "no")
    (one,) = image(planned(project_root, MODEL), aws)
    assert (one.verdict, one.found) == ("failed", f"{MODEL['Image']}: there is no such repository")


def test_an_image_that_may_not_be_read_is_not_checked(project_root: Path, aws: StubbedAws) -> None:
    aws.denies("ecr", "batch_get_image", "ecr:BatchGetImage")
    (one,) = image(planned(project_root, MODEL), aws)
    assert (one.verdict, one.found) == ("not checked", "needs ecr:BatchGetImage")


def test_an_image_of_another_region_is_a_failure(project_root: Path, aws: StubbedAws) -> None:
    given = MODEL["Image"].replace(REGION, "us-east-1")
    (one,) = image(planned(project_root, {**MODEL, "Image": given}), aws)
    assert (one.verdict, one.advice) == ("failed", "name the same repository of this region")
