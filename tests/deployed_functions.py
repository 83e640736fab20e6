"""A function of a deployment in moto, run in a process of its own, and whether its role allows what it asked of AWS."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from moto.iam.access_control import IAMPolicyStatement, PermissionResult

from moto_deployment import REGION, Deployment

ROOT: Final = Path(__file__).parents[1]
ACCOUNT: Final = "123456789012"
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
reply = pkgutil.resolve_name(f"{module}:{name}")(json.load(sys.stdin), LambdaContext("function", int(sys.argv[2])))
print(json.dumps({"reply": reply, "calls": calls}, default=str))
"""
_S3: Final = {
    "HeadObject": "GetObject",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
}


@dataclass(frozen=True, slots=True)
class Said:
    """A handler's answer, what it logged, and the calls it made: service, operation, arguments."""

    reply: Any
    log: str
    calls: tuple[tuple[str, str, dict[str, Any]], ...]

    def arguments(self, service: str, operation: str) -> list[dict[str, Any]]:
        """Of each call of this kind."""
        return [arguments for one, other, arguments in self.calls if (one, other) == (service, operation)]


def invoke(deployment: Deployment, function: str, event: Any) -> Said:
    """What the version that the alias serves answers, under the variables that it has."""
    one = deployment.configuration(function)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    own = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("functions", "infra")),
    }
    done = subprocess.run(
        [sys.executable, "-c", INVOKE, one["Handler"], str(one["Timeout"])],
        env={**outer, **own, **one["Environment"]["Variables"]},
        input=json.dumps(event),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    log, _, last = done.stdout.rstrip("\n").rpartition("\n")
    said = json.loads(last)
    return Said(
        said["reply"],
        log + done.stderr,
        tuple((service, operation, given) for service, operation, given in said["calls"]),
    )


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


def permitted(deployment: Deployment, role: str, action: str, resource: str) -> bool:
    """Whether a role of the stack may do it."""
    answers = [IAMPolicyStatement(one).is_action_permitted(action, resource) for one in statements(deployment, role)]
    return PermissionResult.PERMITTED in answers and PermissionResult.DENIED not in answers


def needed(service: str, operation: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The actions and resources of a call, as IAM sees them."""
    match service:
        case "sagemaker-runtime":
            yield f"sagemaker:{operation}", _arn("sagemaker", f"endpoint/{arguments['EndpointName']}")
        case "dynamodb":
            yield from _of_dynamodb(operation, arguments)
        case "s3":
            yield from _of_s3(operation, arguments)
        case "sqs":
            name = arguments.get("QueueName") or arguments["QueueUrl"].rpartition("/")[2]
            yield f"sqs:{operation.removesuffix('Batch')}", _arn("sqs", name)
        case "events":
            for entry in arguments["Entries"]:
                bus = entry["EventBusName"]
                yield f"events:{operation}", bus if bus.startswith("arn:") else _arn("events", f"event-bus/{bus}")
        case "stepfunctions":
            yield f"states:{operation}", arguments["stateMachineArn"]
        case _:
            raise AssertionError(f"{service} {operation}: whose permission is not known here")


def unpermitted(deployment: Deployment, function: str, said: Said) -> set[tuple[str, str]]:
    """What the function asked for and its role does not allow."""
    asked = {pair for call in said.calls for pair in needed(*call)}
    assert asked, "it asked for nothing"
    return {pair for pair in asked if not permitted(deployment, f"{function}Role", *pair)}


def _of_dynamodb(operation: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if operation == "TransactWriteItems":
        for item in arguments["TransactItems"]:
            for verb, one in item.items():
                yield f"dynamodb:{verb.removesuffix('Item')}Item", _arn("dynamodb", f"table/{one['TableName']}")
    elif operation.startswith("Batch"):
        for name in arguments["RequestItems"]:
            yield f"dynamodb:{operation}", _arn("dynamodb", f"table/{name}")
    else:
        index = f"/index/{arguments['IndexName']}" if "IndexName" in arguments else ""
        yield f"dynamodb:{operation}", _arn("dynamodb", f"table/{arguments['TableName']}{index}")


def _of_s3(operation: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    bucket = f"arn:aws:s3:::{arguments['Bucket']}"
    if operation.startswith("List"):
        yield "s3:ListBucket", bucket
        return
    action = _S3.get(operation, operation)
    yield f"s3:{action}", f"{bucket}/{arguments['Key']}"
    if action == "GetObject":
        yield "s3:ListBucket", bucket  # without it S3 does not say that an object is not there


def _arn(service: str, resource: str) -> str:
    return f"arn:aws:{service}:{REGION}:{ACCOUNT}:{resource}"
