"""Whether an account and region can take a deployment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from completions_cli.doctor_aws import Aws, NotAnsweredError
from completions_cli.doctor_checks import Check, Finding, Findings, failed, not_answered, not_checked, ok, warning
from completions_cli.doctor_plan import Plan, PlannedStack

GATEWAY_MILLISECONDS: Final = 29_000
"""How long API Gateway waits for an answer that does not stream, unless the account has more."""
_UNRESERVED: Final = 100
"""What Lambda leaves to the functions for which nothing is reserved."""
_IMAGE: Final = re.compile(
    r"(?P<registry>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?"
    r"/(?P<repository>[^:@]+)(?::(?P<tag>.+)|@(?P<digest>.+))"
)
_TIMEOUT_QUOTA: Final = "Maximum integration timeout in milliseconds"


def concurrency(plan: Plan, aws: Aws) -> Findings:
    """How many functions may run at once, against what the parameters reserve."""
    limits = aws.ask("lambda", "get_account_settings")["AccountLimit"]
    limit, free = limits["ConcurrentExecutions"], limits["UnreservedConcurrentExecutions"]
    reserved = sum(
        int(float(one["Properties"].get("ReservedConcurrentExecutions", 0)))
        for one in _of_type(plan.api, "AWS::Serverless::Function")
    )
    raise_it = _raise("lambda", "L-B99A9384", 1000, aws.region)
    said = f"{limit} at once, of which {free} are not reserved"
    if not reserved:
        short = limit < _UNRESERVED
        found = f"{limit} at once, and a request takes one until its answer has ended"
        yield warning(found, raise_it) if short else ok(found)
    elif reserved <= free - _UNRESERVED:
        yield ok(f"{said}; WorkerConcurrency reserves {reserved}")
    elif reserved <= limit - _UNRESERVED:
        yield warning(
            f"{said}; WorkerConcurrency reserves {reserved}, and {_UNRESERVED} must stay free",
            f"nothing, where this stack holds them already; or {raise_it}",
        )
    else:
        yield failed(
            f"{said}; WorkerConcurrency reserves {reserved}, and {_UNRESERVED} must stay free",
            f"set WorkerConcurrency to 0, or {raise_it}",
        )


def instance_quota(plan: Plan, aws: Aws) -> Findings:
    """How many instances of each model's type an account may have for endpoints."""
    for model in plan.models:
        kind, most, least = model.value("InstanceType"), _whole(model, "MaxInstances"), _whole(model, "MinInstances")
        try:
            quota = _quota(aws, "sagemaker", f"{kind} for endpoint usage")
        except NotAnsweredError as error:
            yield not_answered(error, kind)
            continue
        if quota is None:
            yield failed(
                f"{aws.region} has no quota for it, so no such instance", "choose another InstanceType, or region", kind
            )
            continue
        found = f"{quota.value:g} for all endpoints of the account; {model.environment} may take {most}"
        if quota.value < most:
            yield failed(found, _raise("sagemaker", quota.code, most, aws.region), kind)
        elif quota.value < 2 * least:
            twice = _raise("sagemaker", quota.code, 2 * least, aws.region)
            yield warning(f"{found}, and an update twice its {least}", twice, kind)
        else:
            yield ok(found, kind)


def integration_timeout(plan: Plan, aws: Aws) -> Findings:
    """Whether API Gateway waits as long as the buffered routes ask for. Streams have no such quota."""
    if plan.api.value("ResponseMode") == "streamed":
        yield ok("answers stream for up to 10 minutes, for which no quota is needed")
        return
    wanted = max(_buffered_timeouts(plan.api), default=GATEWAY_MILLISECONDS)
    quota = _quota(aws, "apigateway", _TIMEOUT_QUOTA)
    if quota is None:
        yield not_checked(f'{aws.region} lists no quota "{_TIMEOUT_QUOTA}"')
    elif quota.value < wanted:
        yield failed(
            f"buffered answers may take {wanted / 1000:g} s, the account allows {quota.value / 1000:g} s",
            _raise("apigateway", quota.code, wanted, aws.region),
        )
    else:
        yield ok(
            f"buffered answers may take {wanted / 1000:g} s, the account allows {quota.value / 1000:g} s; "
            "ResponseMode=streamed has 10 minutes"
        )


def log_role(plan: Plan, aws: Aws) -> Findings:
    """Whether API Gateway has a role to write access logs with."""
    if plan.api.value("AccessLogs") != "on":
        yield ok("AccessLogs is off, and needs none")
        return
    role = aws.ask("apigateway", "get_account").get("cloudwatchRoleArn")
    creates = plan.api.value("ApiGatewayLogRole") == "create"
    if not role and not creates:
        yield failed(
            "AccessLogs is on, and API Gateway has no role here, so the stage cannot be made",
            "set ApiGatewayLogRole=create",
        )
    elif role and creates and f":role/{plan.api.name}-" not in role:
        yield warning(
            f"ApiGatewayLogRole=create would replace {role}, which all APIs of this account and region use",
            "set ApiGatewayLogRole=existing",
        )
    else:
        yield ok(role or "ApiGatewayLogRole=create makes one")


def adapter_layer(plan: Plan, aws: Aws) -> Findings:
    """Whether Lambda Web Adapter's layer is there, in this region, for this account."""
    layers = sorted(set(_layers(plan.api, aws)))
    if not layers:
        yield ok("the buffered form needs none")
    for arn in layers:
        name, _, version = arn.rpartition(":")
        absent = failed(
            f"{arn} is not there, or not for this account",
            "choose a region that has it, or set ResponseMode=buffered",
        )
        try:
            aws.ask("lambda", "get_layer_version", LayerName=name, VersionNumber=int(version))
        except NotAnsweredError as error:
            # the owner of the layer decides by a policy on the layer; one that does not exist has none
            if error.code == "ResourceNotFoundException" or "resource-based policy" in error.message:
                yield absent
            else:
                yield not_answered(error)
        else:
            yield ok(arn)


def image(plan: Plan, aws: Aws) -> Findings:
    """Whether each model's image can be pulled, as SageMaker will."""
    for model in plan.models:
        given = model.value("Image")
        parts = _IMAGE.fullmatch(given)
        if parts is None:
            continue  # the parameters' own check has said so
        if parts["region"] != aws.region:
            yield failed(
                f"{given} is in {parts['region']}, and SageMaker pulls from its own region, {aws.region}",
                "name the same repository of this region",
                model.environment,
            )
            continue
        yield _pulled(aws, given, parts, model.environment)


ACCOUNT: Final = (
    Check("Lambda concurrency", concurrency),
    Check("instance quota", instance_quota),
    Check("integration timeout", integration_timeout),
    Check("API Gateway log role", log_role),
    Check("adapter layer", adapter_layer),
    Check("image", image),
)


@dataclass(frozen=True, slots=True)
class _Quota:
    code: str
    value: float


def _quota(aws: Aws, service: str, name: str) -> _Quota | None:
    """What an account has, or what every account has where it has nothing of its own."""
    for operation in ("list_service_quotas", "list_aws_default_service_quotas"):
        for quota in aws.each("service-quotas", operation, "Quotas", ServiceCode=service):
            if quota["QuotaName"] == name:
                return _Quota(quota["QuotaCode"], quota["Value"])
    return None


def _raise(service: str, code: str, value: int, region: str) -> str:
    return (
        f"aws service-quotas request-service-quota-increase --service-code {service} --quota-code {code} "
        f"--desired-value {value} --region {region}"
    )


def _whole(stack: PlannedStack, parameter: str) -> int:
    return int(float(stack.value(parameter)))


def _of_type(stack: PlannedStack, kind: str) -> Iterator[Mapping[str, Any]]:
    return (resource for resource in stack.resources().values() if resource["Type"] == kind)


def _buffered_timeouts(stack: PlannedStack) -> Iterator[int]:
    for api in _of_type(stack, "AWS::Serverless::Api"):
        for methods in api["Properties"]["DefinitionBody"]["paths"].values():
            for operation in methods.values():
                integration = operation["x-amazon-apigateway-integration"]
                if integration.get("responseTransferMode") != "STREAM":
                    yield integration.get("timeoutInMillis", GATEWAY_MILLISECONDS)


def _layers(stack: PlannedStack, aws: Aws) -> Iterator[str]:
    """The ARNs of the functions' layers."""
    for function in _of_type(stack, "AWS::Serverless::Function"):
        for layer in function["Properties"].get("Layers") or []:
            arn, names = layer["Fn::Sub"]
            known = {"AWS::Partition": aws.partition, "AWS::Region": aws.region, **names}
            for name, value in known.items():
                arn = arn.replace(f"${{{name}}}", value)
            yield arn


def _pulled(aws: Aws, given: str, parts: re.Match[str], subject: str) -> Finding:
    wanted = {"imageTag": parts["tag"]} if parts["tag"] else {"imageDigest": parts["digest"]}
    advice = "name an image that the repository has, or push it"
    try:
        answer = aws.ask(
            "ecr",
            "batch_get_image",
            registryId=parts["registry"],
            repositoryName=parts["repository"],
            imageIds=[wanted],
        )
    except NotAnsweredError as error:
        if error.code == "RepositoryNotFoundException":
            return failed(f"{given}: there is no such repository", advice, subject)
        return not_answered(error, subject)
    if answer["images"]:
        return ok(given, subject)
    reason = "; ".join(one.get("failureReason", one["failureCode"]) for one in answer.get("failures", []))
    return failed(f"{given}: {reason or 'not found'}", advice, subject)
