"""Whether a deployed stack works: its state, tables, models' endpoints, API and alarms."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from completions.domain.catalog import ModelRoute
from completions.registry.dynamodb import read_models
from completions_cli.doctor_aws import Aws, NotAnsweredError, asking
from completions_cli.doctor_checks import Check, Finding, Findings, failed, not_answered, not_checked, ok, warning
from completions_cli.doctor_endpoints import endpoint_findings
from completions_cli.doctor_plan import RELEASE, Plan

_SECONDS_FOR_HEALTH: Final = 10
_WAYS_OUT: Final[Mapping[str, tuple[str, str]]] = {
    "ROLLBACK_COMPLETE": (
        "its first deployment failed, and such a stack takes no update",
        "aws cloudformation delete-stack --stack-name {stack}, then deploy anew",
    ),
    "ROLLBACK_FAILED": (
        "its first deployment failed, and could not be undone",
        "aws cloudformation delete-stack --stack-name {stack}, then deploy anew",
    ),
    "CREATE_FAILED": (
        "its first deployment failed",
        "aws cloudformation delete-stack --stack-name {stack}, then deploy anew",
    ),
    "UPDATE_ROLLBACK_FAILED": (
        "an update failed, and could not be undone",
        "mend what the events name, then aws cloudformation continue-update-rollback --stack-name {stack}",
    ),
    "UPDATE_FAILED": (
        "an update failed, and stands half done",
        "aws cloudformation rollback-stack --stack-name {stack}",
    ),
    "DELETE_FAILED": (
        "it could not be deleted",
        "mend what the events name, then aws cloudformation delete-stack --stack-name {stack}",
    ),
}
_SERVES: Final = ("CREATE_COMPLETE", "IMPORT_", "UPDATE_")
"""How the states begin in which there is a service to look at."""


@dataclass(frozen=True, slots=True)
class DeployedStack:
    """What CloudFormation says of the stack."""

    name: str
    status: str
    reason: str
    parameters: Mapping[str, str]
    outputs: Mapping[str, str]

    @property
    def serves(self) -> bool:
        """Whether there is a service to look at."""
        return self.status.startswith(_SERVES)


def deployed_stack(aws: Aws, name: str) -> DeployedStack | None:
    """The stack, if there is one. Raises ``NotAnsweredError``."""
    try:
        (stack,) = aws.ask("cloudformation", "describe_stacks", StackName=name)["Stacks"]
    except NotAnsweredError as error:
        if error.code == "ValidationError" and "does not exist" in error.message:
            return None
        raise
    return DeployedStack(
        name,
        stack["StackStatus"],
        stack.get("StackStatusReason", ""),
        {one["ParameterKey"]: one["ParameterValue"] for one in stack.get("Parameters", [])},
        {one["OutputKey"]: one["OutputValue"] for one in stack.get("Outputs", [])},
    )


def stack_finding(plan: Plan, aws: Aws, stack: DeployedStack | None) -> Finding:
    """The stack's state, and the way out of it."""
    if stack is None:
        return not_checked(
            f"there is no stack {plan.api.name} in {aws.region} yet", f"make deploy ENV={plan.api.environment}"
        )
    said = f"{stack.name}: {stack.status}"
    if stack.status in _WAYS_OUT:
        what, advice = _WAYS_OUT[stack.status]
        because = f" ({stack.reason})" if stack.reason else ""
        return failed(f"{said}: {what}{because}", f"{_events(stack.name)} says why; {advice.format(stack=stack.name)}")
    if stack.status == "UPDATE_ROLLBACK_COMPLETE":
        return warning(f"{said}: the last update failed, and the one before it serves", _events(stack.name))
    if stack.status.endswith("_IN_PROGRESS"):
        return warning(f"{said}: something is being done to it", "wait, then run this again")
    return ok(said)


def in_force(plan: Plan, _: Aws, stack: DeployedStack) -> Findings:
    """Whether the stack has the parameters that its configuration gives."""
    differing = [
        f"{name} is {stack.parameters[name] or 'empty'}, not {value or 'empty'}"
        for name, value in plan.api.values.items()
        if name in stack.parameters and name != RELEASE and stack.parameters[name] != value
    ]
    if differing:
        yield warning("; ".join(differing), f"make deploy ENV={plan.api.environment}")
    else:
        yield ok(f"those of {plan.api.environment}")


def form(plan: Plan, _: Aws, stack: DeployedStack) -> Findings:
    """Whether a deployment would change what the API's methods are: they change at once, the functions later."""
    changed = [
        f"{name} from {stack.parameters[name]} to {wanted}"
        for name in ("ResponseMode", "Compute", "AuthMode")
        if name in stack.parameters and stack.parameters[name] != (wanted := plan.api.value(name))
    ]
    strategy = plan.api.value("DeploymentStrategy")
    if not changed:
        yield ok("the API's methods stay as they are")
    elif strategy == "AllAtOnce":
        yield warning(
            f"{', '.join(changed)}: until the functions follow, about a minute, calls fail",
            "do it when few call, or make a second stack and move the domain",
        )
    else:
        yield failed(
            f"{', '.join(changed)}: under {strategy} most calls would fail until an alarm takes it back",
            f"set DeploymentStrategy=AllAtOnce in [{plan.api.environment}.deploy.parameters] for this deployment, "
            "or make a second stack and move the domain",
        )


def tables(_: Plan, aws: Aws, stack: DeployedStack) -> Findings:
    """Whether the tables are there, with what guards their items and what moves them on."""
    for output, streams, expires in (
        ("RegistryTableName", False, False),
        ("UsageTableName", True, True),
        ("PipelineTableName", False, True),
    ):
        name = stack.outputs.get(output)
        if name is None:
            yield _no_output(output)
            continue
        try:
            yield _table(aws, name, streams=streams, expires=expires)
        except NotAnsweredError as error:
            yield not_answered(error, name)


def bucket(_: Plan, aws: Aws, stack: DeployedStack) -> Findings:
    """Whether the pipelines' bucket is there, and forgets what is in it."""
    name = stack.outputs.get("PipelineBucketName")
    if name is None:
        yield _no_output("PipelineBucketName")
        return
    try:
        rules = aws.ask("s3", "get_bucket_lifecycle_configuration", Bucket=name)["Rules"]
    except NotAnsweredError as error:
        if error.code == "NoSuchBucket":
            yield failed("it is gone", f"aws s3 mb s3://{name} makes it again; {_drift(stack)} what it lacks", name)
        elif error.code == "NoSuchLifecycleConfiguration":
            yield warning("nothing in it ends, and that is prompts and completions", f"{_drift(stack)} it", name)
        else:
            yield not_answered(error, name)
        return
    days = [rule["Expiration"]["Days"] for rule in rules if "Days" in rule.get("Expiration", {})]
    if days:
        yield ok(f"what is in it ends after {min(days)} days", name)
    else:
        yield warning("nothing in it ends, and that is prompts and completions", f"{_drift(stack)} it", name)


def models(plan: Plan, aws: Aws, stack: DeployedStack) -> Findings:
    """Whether each model of the registry, and of a stack of its own, has an endpoint that answers."""
    table = stack.outputs.get("RegistryTableName", "")
    planned = {model.value("EndpointName"): model for model in plan.models}
    apply = "completions models apply infra/models.yaml"
    try:
        routes, unreadable = _routes(aws, table)
    except NotAnsweredError as error:
        yield not_answered(error)
        return
    if unreadable:
        yield failed(f"{table} has entries that cannot be read: {', '.join(unreadable)}", apply)
    if not routes:
        yield warning(f"{table} has no model, so every completion is a 404", apply)
    by_endpoint: dict[str, list[ModelRoute]] = defaultdict(list)
    for route in routes:
        by_endpoint[route.endpoint_name].append(route)
    for endpoint in sorted({*by_endpoint, *planned}):
        served = by_endpoint[endpoint]
        yield from endpoint_findings(aws, endpoint, served, stack.parameters, planned.get(endpoint))
        if routes and not served:
            yield warning("no model of the registry is on it, and it costs by the hour", apply, endpoint)


def health(_: Plan, __: Aws, stack: DeployedStack) -> Findings:
    """Whether the API answers."""
    base_url = stack.outputs.get("BaseUrl", "")
    url = f"{base_url}/healthz"
    if not base_url.startswith(("https://", "http://")):
        yield _no_output("BaseUrl")
        return
    try:
        # the scheme is looked at above
        with urllib.request.urlopen(url, timeout=_SECONDS_FOR_HEALTH) as answer:  # noqa: S310
            yield ok(f"{url}: version {answer.read(100).decode(errors='replace')}")
    except urllib.error.HTTPError as error:
        error.close()
        yield failed(
            f"{url}: {error.code}", f"sam logs --stack-name {stack.name}; or a firewall has a rule against you"
        )
    except OSError as error:
        advice = (
            "a domain needs its DNS record: HostedZoneId, or one of your own"
            if stack.parameters.get("DomainName")
            else "is there a way from here to the internet?"
        )
        yield failed(f"{url}: {getattr(error, 'reason', error)}", advice)


def alarms(_: Plan, aws: Aws, stack: DeployedStack) -> Findings:
    """The stack's alarms that ring. What to do first is each one's own description."""
    prefix = f"{stack.name}-Observability-"
    ringing = list(
        aws.each("cloudwatch", "describe_alarms", "MetricAlarms", AlarmNamePrefix=prefix, StateValue="ALARM")
    )
    for alarm in ringing:
        name = alarm["AlarmName"].removeprefix(prefix)
        yield failed(alarm.get("StateReason", "in ALARM"), " ".join(alarm.get("AlarmDescription", "").split()), name)
    if not ringing:
        heard = "" if stack.parameters.get("AlarmTopicArn") else "; AlarmTopicArn is empty, so nobody would hear one"
        yield ok(f"none rings{heard}")


TO_BE_DEPLOYED: Final = (Check("form", form),)

DEPLOYED: Final = (
    Check("parameters in force", in_force),
    Check("table", tables),
    Check("bucket", bucket),
    Check("model", models),
    Check("API", health),
    Check("alarm", alarms),
)


def _no_output(name: str) -> Finding:
    return failed(f"the stack has no output {name}", "is it a stack of this template?")


def _drift(stack: DeployedStack) -> str:
    return f"aws cloudformation detect-stack-drift on the stack Pipelines within {stack.name} then names"


def _events(stack: str) -> str:
    return f"aws cloudformation describe-stack-events --stack-name {stack}"


def _table(aws: Aws, name: str, *, streams: bool, expires: bool) -> Finding:
    try:
        table = aws.ask("dynamodb", "describe_table", TableName=name)["Table"]
    except NotAnsweredError as error:
        if error.code != "ResourceNotFoundException":
            raise
        return failed(
            "it is gone",
            "restore it; DynamoDB keeps a last backup for 35 days: "
            f"aws dynamodb list-backups --backup-type ALL --table-name {name}",
            name,
        )
    if table["TableStatus"] not in ("ACTIVE", "UPDATING"):
        return failed(table["TableStatus"], "wait, or see DynamoDB's console", name)
    if streams and not table.get("StreamSpecification", {}).get("StreamEnabled"):
        return failed("it has no stream, so nothing is added to the roll-ups", "deploy anew", name)
    lacking = list(_lacking(aws, name, expires))
    guard = "deletion protection" if table.get("DeletionProtectionEnabled") else "no deletion protection"
    if lacking:
        return warning(
            f"{table['TableStatus']}; {'; '.join(lacking)}", "deploy anew; somebody has switched it off", name
        )
    return ok(f"{table['TableStatus']}, {table.get('ItemCount', 0):,} items some hours ago, {guard}", name)


def _lacking(aws: Aws, name: str, expires: bool) -> Iterator[str]:
    backups = aws.ask("dynamodb", "describe_continuous_backups", TableName=name)["ContinuousBackupsDescription"]
    recovery = backups.get("PointInTimeRecoveryDescription", {}).get("PointInTimeRecoveryStatus")
    if recovery != "ENABLED":
        yield "no point-in-time recovery"
    if expires:
        expiry = aws.ask("dynamodb", "describe_time_to_live", TableName=name)["TimeToLiveDescription"]
        if expiry.get("TimeToLiveStatus") not in ("ENABLED", "ENABLING"):
            yield "no expiry, so records stay for ever"


def _routes(aws: Aws, table: str) -> tuple[Sequence[ModelRoute], Sequence[str]]:
    """The models of the registry, and the names of those that cannot be read."""
    with asking("dynamodb", "query"):
        found = read_models(aws.client("dynamodb"), table)
    by_id = {route.model_id: route for route in found.values() if route}
    return list(by_id.values()), sorted(name for name, route in found.items() if route is None)
