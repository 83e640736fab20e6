"""Whether a SageMaker endpoint can serve the models that the registry sends there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from completions.domain.catalog import ModelRoute
from completions_cli.doctor_aws import Aws, NotAnsweredError
from completions_cli.doctor_checks import Finding, Findings, failed, not_answered, ok, warning
from completions_cli.doctor_plan import PlannedStack, covers

_CHANGING: Final = ("Updating", "SystemUpdating", "RollingBack")
"""States of an endpoint that serves meanwhile."""


def endpoint_findings(
    aws: Aws,
    endpoint: str,
    routes: Sequence[ModelRoute],
    parameters: Mapping[str, str],
    planned: PlannedStack | None,
) -> Findings:
    """What is to be said of an endpoint, of the models on it, and of what the functions may do with it.

    ``parameters`` are the service's in force, and ``planned`` is the stack that makes the endpoint.
    """
    pattern = parameters.get("ModelEndpointPattern", "*")
    if routes and not covers(pattern, endpoint):
        yield failed(
            f"ModelEndpointPattern {pattern} does not cover it, so every call is refused",
            "change ModelEndpointPattern in samconfig.toml, and deploy",
            endpoint,
        )
    if any(route.asynchronous for route in routes) and not parameters.get("AsyncBucketPattern"):
        yield failed(
            "it is asynchronous, and AsyncBucketPattern is empty, so no answer can be read",
            "set AsyncBucketPattern in samconfig.toml, and deploy",
            endpoint,
        )
    try:
        described = aws.ask("sagemaker", "describe_endpoint", EndpointName=endpoint)
    except NotAnsweredError as error:
        yield _absent(endpoint, routes, planned) if _is_absent(error) else not_answered(error, endpoint)
        return
    yield _state(endpoint, described)
    yield from _variants(endpoint, described, routes)
    for component in sorted({route.inference_component for route in routes if route.inference_component}):
        try:
            yield _component(aws, endpoint, component)
        except NotAnsweredError as error:
            yield not_answered(error, component)


def _is_absent(error: NotAnsweredError) -> bool:
    return error.code in ("ValidationException", "ValidationError") and "Could not find" in error.message


def _absent(endpoint: str, routes: Sequence[ModelRoute], planned: PlannedStack | None) -> Finding:
    asked = f"; {_names(routes)} ask it" if routes else ""
    if planned is not None:
        command = f"sam deploy --config-env {planned.environment}"
        return failed(f"there is no such endpoint yet{asked}", command, endpoint)
    return failed(
        f"there is no such endpoint{asked}",
        "deploy infra/model-endpoint.yaml for it, or name another in infra/models.yaml",
        endpoint,
    )


def _state(endpoint: str, described: Mapping[str, Any]) -> Finding:
    status, reason = described["EndpointStatus"], described.get("FailureReason")
    said = f"{status}: {reason}" if reason else status
    if status == "InService":
        counts = [one["CurrentInstanceCount"] for one in described.get("ProductionVariants", []) if _counted(one)]
        if not counts:
            return ok(status, endpoint)
        if sum(counts):
            return ok(f"{status}, instances: {sum(counts)}", endpoint)
        return ok(f"{status}, scaled to zero: the first request starts an instance, which takes minutes", endpoint)
    if status in _CHANGING:
        return warning(f"{said}; it serves meanwhile", "wait, then run this again", endpoint)
    if status == "Creating":
        wait = f"aws sagemaker wait endpoint-in-service --endpoint-name {endpoint}"
        return warning(f"{said}; it serves in some minutes", wait, endpoint)
    return failed(said, f"aws logs tail /aws/sagemaker/Endpoints/{endpoint} --since 1h", endpoint)


def _counted(variant: Mapping[str, Any]) -> bool:
    return "CurrentInstanceCount" in variant


def _variants(endpoint: str, described: Mapping[str, Any], routes: Sequence[ModelRoute]) -> Findings:
    there = [one["VariantName"] for one in described.get("ProductionVariants", [])]
    for route in routes:
        if route.target_variant is not None and route.target_variant not in there:
            yield failed(
                f"it has no variant {route.target_variant}, which {route.model_id} asks for; it has {', '.join(there)}",
                "mend target_variant in infra/models.yaml, and apply it",
                endpoint,
            )


def _component(aws: Aws, endpoint: str, name: str) -> Finding:
    try:
        described = aws.ask("sagemaker", "describe_inference_component", InferenceComponentName=name)
    except NotAnsweredError as error:
        if not _is_absent(error):
            raise
        return failed("there is no such inference component", "mend inference_component in infra/models.yaml", name)
    status, reason = described["InferenceComponentStatus"], described.get("FailureReason")
    said = f"{status}: {reason}" if reason else status
    if described["EndpointName"] != endpoint:
        return failed(
            f"it is on {described['EndpointName']}, not on {endpoint}", "mend endpoint in infra/models.yaml", name
        )
    if status in ("Creating", "Updating"):
        return warning(said, "wait, then run this again", name)
    if status != "InService":
        return failed(said, f"aws logs tail /aws/sagemaker/InferenceComponents/{name} --since 1h", name)
    copies = described.get("RuntimeConfig", {}).get("CurrentCopyCount")
    if copies == 0:
        return ok(f"{status}, scaled to zero: the first request starts a copy, which takes minutes", name)
    return ok(status if copies is None else f"{status}, copies: {copies}", name)


def _names(routes: Sequence[ModelRoute]) -> str:
    return ", ".join(sorted(route.model_id for route in routes))
