"""``completions doctor`` and ``make deploy`` against an account of moto's.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from samcli.cli.types import CfnParameterOverridesType
from typer.testing import CliRunner, Result

from completions.registry.dynamodb import put_model
from completions_cli.local.moto_server import moto_dynamodb
from completions_cli.local.template import load_template
from completions_cli.main import app
from fakes import route
from scripted_http import Received, Reply, scripted_server
from stubbed_aws import session

REGION = "ap-southeast-2"  # every moto server of a process has the same account, a part of it for each region
NUMBERS = itertools.count(1)
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class World:
    """An account, a project's ``samconfig.toml``, and perhaps a stack."""

    def __init__(self, root: Path, folder: Path, clients: Callable[[str], Any]) -> None:
        self.root = root
        self.config = folder / "samconfig.toml"
        self.stack = f"completions-{next(NUMBERS)}"
        self.client = clients
        self.exit_code = -1
        self.configure()

    def configure(self, *overrides: str, more: str = "") -> None:
        """Buffered, for moto has nobody else's layers."""
        given = json.dumps(["ResponseMode=buffered", "Architecture=x86_64", *overrides])
        self.config.write_text(
            f'[dev.deploy.parameters]\nstack_name = "{self.stack}"\nparameter_overrides = {given}\n{more}'
        )

    def doctor(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["doctor", *arguments, "--config-file", str(self.config)])

    def lines(self, *arguments: str) -> dict[str, tuple[str, str, str]]:
        """Verdict, what was found and the advice, by check and subject."""
        result = self.doctor(*arguments, "--json")
        self.exit_code = result.exit_code
        checks = json.loads(result.stdout)["checks"]
        return {
            f"{one['check']} {one['subject']}".strip(): (one["verdict"], one["found"], one["advice"]) for one in checks
        }

    def deploy(self, base_url: str = "http://127.0.0.1:1", **parameters: str) -> dict[str, str]:
        """A stack with the real tables and outputs; what they are called."""
        template = load_template(self.root / "infra" / "tables.yaml")
        for name, value in {"ModelEndpointPattern": "*", "AlarmTopicArn": "", **parameters}.items():
            template["Parameters"][name] = {"Type": "String", "Default": value}
        template["Outputs"]["BaseUrl"] = {"Value": base_url}
        bucket = f"{self.stack}-bucket"
        template["Outputs"]["PipelineBucketName"] = {"Value": bucket}
        cloudformation = self.client("cloudformation")
        cloudformation.create_stack(StackName=self.stack, TemplateBody=json.dumps(template))
        (stack,) = cloudformation.describe_stacks(StackName=self.stack)["Stacks"]
        outputs = {one["OutputKey"]: one["OutputValue"] for one in stack["Outputs"]}
        dynamodb = self.client("dynamodb")
        for table in (
            outputs["RegistryTableName"],
            outputs["UsageTableName"],
            outputs["PipelineTableName"],
        ):  # CloudFormation's part, which moto skips
            dynamodb.update_continuous_backups(
                TableName=table, PointInTimeRecoverySpecification={"PointInTimeRecoveryEnabled": True}
            )
        expiry = {"Enabled": True, "AttributeName": "expires_at"}
        for table in (outputs["UsageTableName"], outputs["PipelineTableName"]):
            dynamodb.update_time_to_live(TableName=table, TimeToLiveSpecification=expiry)
        s3 = self.client("s3")
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
        ends = {"ID": "Ends", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}
        s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [ends]})
        return outputs

    def endpoint(self, name: str) -> None:
        """A SageMaker endpoint in service."""
        sagemaker = self.client("sagemaker")
        role = "arn:aws:iam::123456789012:role/sagemaker"
        variant = {"VariantName": "AllTraffic", "ModelName": name, "InstanceType": "ml.m5.large"}
        sagemaker.create_model(ModelName=name, ExecutionRoleArn=role, PrimaryContainer={"Image": "image"})
        sagemaker.create_endpoint_config(
            EndpointConfigName=name, ProductionVariants=[{**variant, "InitialInstanceCount": 1}]
        )
        sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=name)


@pytest.fixture(scope="module")
def account() -> Iterator[str]:
    with moto_dynamodb() as url:
        yield url


@pytest.fixture
def world(account: str, project_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", account)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # moto answers 500 to what it does not know
    clients: dict[str, Any] = {}

    def client(service: str) -> Any:
        if service not in clients:
            clients[service] = session(REGION).client(service)  # type: ignore[call-overload]
        return clients[service]

    yield World(project_root, tmp_path, client)
    for one in clients.values():
        one.close()


def healthy(_: Received) -> Reply:
    return Reply(200, b"0.6.0")


def test_a_service_that_works_is_all_right(world: World) -> None:
    with scripted_server(healthy) as api:
        outputs = world.deploy(base_url=f"{api.url}/prod", AlarmTopicArn="arn:aws:sns:eu-west-1:123456789012:a")
        registry, usage = outputs["RegistryTableName"], outputs["UsageTableName"]
        put_model(world.client("dynamodb"), registry, route(model_id="coder", endpoint_name=f"{world.stack}-coder"))
        world.endpoint(f"{world.stack}-coder")
        result = world.doctor()
        lines = world.lines()

    assert (result.exit_code, result.stderr) == (0, "")
    assert (
        {name: line[:2] for name, line in lines.items()}
        == {
            "parameters": ("ok", "template.yaml takes what dev gives"),
            "models": ("not checked", "whether the account has instances and images for them"),
            "account": ("ok", f"arn:aws:sts::123456789012:user/moto, in {REGION}"),
            "Lambda concurrency": lines["Lambda concurrency"][:2],  # moto knows nothing of it
            "integration timeout": lines["integration timeout"][:2],  # nor of this
            "API Gateway log role": ("ok", "AccessLogs is off, and needs none"),
            "adapter layer": ("ok", "the buffered form needs none"),
            "stack": ("ok", f"{world.stack}: CREATE_COMPLETE"),
            "parameters in force": ("ok", "those of dev"),
            f"table {registry}": ("ok", "ACTIVE, 1 items some hours ago, deletion protection"),
            f"table {usage}": ("ok", "ACTIVE, 0 items some hours ago, deletion protection"),
            f"table {outputs['PipelineTableName']}": ("ok", "ACTIVE, 0 items some hours ago, deletion protection"),
            f"bucket {outputs['PipelineBucketName']}": ("ok", "what is in it ends after 30 days"),
            f"model {world.stack}-coder": ("ok", "InService, instances: 1"),
            "API": ("ok", f"{api.url}/prod/healthz: version 0.6.0"),
            "alarm": ("ok", "none rings"),
        }
    )
    assert lines["Lambda concurrency"][0] == lines["integration timeout"][0] == "not checked"
    printed = result.stdout.splitlines()
    assert f"ok          model {world.stack}-coder: InService, instances: 1" in printed
    assert printed[-1] == "13 ok, 0 warning, 0 failed, 3 not checked"


def test_what_moto_does_not_know_is_not_checked_with_the_action_it_needs(world: World) -> None:
    lines = world.lines("--before")
    assert lines["Lambda concurrency"][1].startswith("lambda:GetAccountSettings: 404")
    assert lines["integration timeout"][1].startswith("servicequotas:ListServiceQuotas: ")


def test_before_a_deployment_there_is_no_stack_and_nothing_has_failed(world: World) -> None:
    assert world.lines("--before")["stack"] == (
        "not checked",
        f"there is no stack {world.stack} in {REGION} yet",
        "make deploy ENV=dev",
    )
    assert world.exit_code == 0


def test_a_stack_may_be_named(world: World) -> None:
    world.deploy()
    world.config.write_text('[dev.deploy.parameters]\nstack_name = "another"\n')
    assert world.lines("--stack", world.stack)["stack"][0] == "ok"
    assert world.lines()["stack"][0] == "not checked"


def test_a_stack_of_another_region_is_asked_for_there(world: World) -> None:
    world.deploy()
    assert world.lines("--region", "ap-southeast-1")["stack"][1] == (
        f"there is no stack {world.stack} in ap-southeast-1 yet"
    )


def test_another_value_than_the_configurations_is_a_warning(world: World) -> None:
    world.deploy()
    world.configure("ModelEndpointPattern=completions-*", "DeletionProtection=true")
    assert world.lines()["parameters in force"] == (
        "warning",
        "ModelEndpointPattern is *, not completions-*",
        "make deploy ENV=dev",
    )


def test_a_table_that_is_gone_is_a_failure(world: World) -> None:
    usage = world.deploy(DeletionProtection="false")["UsageTableName"]
    dynamodb = world.client("dynamodb")
    dynamodb.update_table(TableName=usage, DeletionProtectionEnabled=False)
    dynamodb.delete_table(TableName=usage)

    verdict, said, advice = world.lines()[f"table {usage}"]
    assert (world.exit_code, verdict, said) == (1, "failed", "it is gone")
    assert f"aws dynamodb list-backups --backup-type ALL --table-name {usage}" in advice


def test_a_table_without_its_guards_is_a_warning(world: World) -> None:
    usage = world.deploy()["UsageTableName"]
    dynamodb = world.client("dynamodb")
    dynamodb.update_continuous_backups(
        TableName=usage, PointInTimeRecoverySpecification={"PointInTimeRecoveryEnabled": False}
    )
    expiry = {"Enabled": False, "AttributeName": "expires_at"}
    dynamodb.update_time_to_live(TableName=usage, TimeToLiveSpecification=expiry)
    assert world.lines()[f"table {usage}"][:2] == (
        "warning",
        "ACTIVE; no point-in-time recovery; no expiry, so records stay for ever",
    )


def test_a_bucket_that_is_gone_is_a_failure(world: World) -> None:
    bucket = world.deploy()["PipelineBucketName"]
    world.client("s3").delete_bucket(Bucket=bucket)

    verdict, said, advice = world.lines()[f"bucket {bucket}"]
    assert (world.exit_code, verdict, said) == (1, "failed", "it is gone")
    assert advice.startswith(f"aws s3 mb s3://{bucket} makes it again")


def test_a_bucket_that_forgets_nothing_is_a_warning(world: World) -> None:
    bucket = world.deploy()["PipelineBucketName"]
    s3 = world.client("s3")
    nothing_ends = ("warning", "nothing in it ends, and that is prompts and completions")
    aborts = {"ID": "Unfinished", "Status": "Enabled", "Filter": {"Prefix": ""}}
    aborts |= {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [aborts]})
    assert world.lines()[f"bucket {bucket}"][:2] == nothing_ends
    s3.delete_bucket_lifecycle(Bucket=bucket)
    assert world.lines()[f"bucket {bucket}"][:2] == nothing_ends


def test_a_registry_without_models_says_how_they_are_applied(world: World) -> None:
    registry = world.deploy()["RegistryTableName"]
    assert world.lines()["model"] == (
        "warning",
        f"{registry} has no model, so every completion is a 404",
        "completions models apply infra/models.yaml",
    )


def test_missing_endpoints_and_those_out_of_reach_are_failures(world: World) -> None:
    registry = world.deploy(ModelEndpointPattern="acme-*")["RegistryTableName"]
    for name in ("acme-missing", f"{world.stack}-out-of-reach"):
        put_model(world.client("dynamodb"), registry, route(model_id=name, endpoint_name=name))
    world.endpoint(f"{world.stack}-out-of-reach")

    result = world.doctor()
    assert result.exit_code == 1
    assert "failed      model acme-missing: there is no such endpoint; acme-missing ask it" in result.stdout
    refused = "ModelEndpointPattern acme-* does not cover it, so every call is refused"
    assert f"failed      model {world.stack}-out-of-reach: {refused}" in result.stdout
    assert f"ok          model {world.stack}-out-of-reach: InService, instances: 1" in result.stdout


MODEL = """
[{environment}.deploy.parameters]
template_file = "infra/model-endpoint.yaml"
stack_name = "{environment}"
parameter_overrides = ["EndpointName={environment}", "ContainerFamily=openai", "Image={image}"]
"""


def test_a_models_own_stack_is_looked_at_with_its_image(world: World) -> None:
    ecr = world.client("ecr")
    ecr.create_repository(repositoryName="llama")
    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": DOCKER_MANIFEST, "config": {"digest": "sha256:0"}, "layers": []}
    )
    ecr.put_image(repositoryName="llama", imageManifest=manifest, imageTag="1")
    host = f"123456789012.dkr.ecr.{REGION}.amazonaws.com"
    stacks = {"model": f"{host}/llama:1", "second": f"{host}/llama:2", "third": f"{host}/vllm:1"}
    world.configure(more="".join(MODEL.format(environment=name, image=image) for name, image in stacks.items()))

    usual = world.lines()
    assert usual["model parameters model"][0] == usual["image model"][0] == "ok"
    assert "image model" not in world.lines("--before")  # the service does not wait for its models
    named = world.lines("--model-config-env", "second", "--model-config-env", "third", "--before")
    assert named["image second"][1] == f"{host}/llama:2: Requested image not found"
    assert named["image third"][1] == f"{host}/vllm:1: there is no such repository"
    assert "model parameters model" not in named


def test_a_planned_endpoint_that_no_model_uses_is_told(world: World) -> None:
    registry = world.deploy()["RegistryTableName"]
    put_model(world.client("dynamodb"), registry, route(model_id="m", endpoint_name=f"{world.stack}-used"))
    world.endpoint(f"{world.stack}-used")
    world.endpoint(f"{world.stack}-idle")
    image = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/x:1"
    more = MODEL.format(environment="model", image=image).replace(
        "EndpointName=model", f"EndpointName={world.stack}-idle"
    )
    world.configure(more=more)
    assert world.lines()[f"model {world.stack}-idle"][:2] == (
        "warning",
        "no model of the registry is on it, and it costs by the hour",
    )


@pytest.mark.parametrize(
    ("reply", "said"), [(Reply(403), "403"), (Reply(500), "500"), (None, "[Errno 111] Connection refused")]
)
def test_an_api_that_does_not_answer_is_a_failure(world: World, reply: Reply | None, said: str) -> None:
    if reply is None:
        world.deploy()
        verdict, found, _ = world.lines()["API"]
    else:
        with scripted_server(lambda _: reply) as api:
            world.deploy(base_url=api.url)
            verdict, found, _ = world.lines()["API"]
    assert verdict == "failed"
    assert found.endswith(f"/healthz: {said}")


def test_an_alarm_that_rings_is_a_failure_and_others_are_none_of_ours(world: World) -> None:
    world.deploy()
    cloudwatch = world.client("cloudwatch")
    alarm = {
        "MetricName": "m",
        "Namespace": "n",
        "Period": 60,
        "EvaluationPeriods": 1,
        "Threshold": 1,
        "Statistic": "Sum",
    }
    for name in (f"{world.stack}-Observability-1X-RollupErrorsAlarm-2Y", f"{world.stack}0-Observability-1X-Other-2Y"):
        cloudwatch.put_metric_alarm(
            AlarmName=name, AlarmDescription="Read its log.", ComparisonOperator="GreaterThanThreshold", **alarm
        )
        cloudwatch.set_alarm_state(AlarmName=name, StateValue="ALARM", StateReason="2 errors")
    lines = {name: line for name, line in world.lines().items() if name.startswith("alarm")}
    assert lines == {"alarm 1X-RollupErrorsAlarm-2Y": ("failed", "2 errors", "Read its log.")}


def test_access_logs_without_a_role_fail_before_the_deployment(world: World) -> None:
    world.configure("AccessLogs=on")
    assert world.lines("--before")["API Gateway log role"][2] == "set ApiGatewayLogRole=create"
    assert world.exit_code == 1
    operation = {"op": "replace", "path": "/cloudwatchRoleArn", "value": "arn:aws:iam::123456789012:role/logs"}
    gateway = world.client("apigateway")
    gateway.update_account(patchOperations=[operation])
    assert world.lines("--before")["API Gateway log role"][0] == "ok"
    gateway.update_account(patchOperations=[{**operation, "value": ""}])


def test_a_layer_that_the_region_lacks_fails_before_the_deployment(world: World) -> None:
    world.config.write_text(f'[dev.deploy.parameters]\nstack_name = "{world.stack}"\n')
    layer = f"arn:aws:lambda:{REGION}:753240598075:layer:LambdaAdapterLayerArm64:27"
    assert world.lines("--before")["adapter layer"][:2] == ("failed", f"{layer} is not there, or not for this account")
    assert world.exit_code == 1


def test_wrong_parameters_are_told_without_an_account(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.configure("StageNam=dev")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for arguments in ((), ("--offline",)):
        result = world.doctor(*arguments)
        assert result.exit_code == 1
        assert "failed      parameters: StageNam: the template has no such parameter" in result.stdout
    assert world.lines()["account"][:2] == ("not checked", "not looked at with wrong parameters")


def test_a_configuration_that_cannot_be_read_is_a_failure(world: World) -> None:
    result = world.doctor("--config-env", "test")
    assert result.exit_code == 1
    assert "there is no environment test; there are: dev" in result.stdout


@pytest.fixture
def nobody(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    return world


def test_without_credentials_the_offline_checks_are_made_and_the_end_is_2(nobody: World) -> None:
    result = nobody.doctor()
    assert result.exit_code == 2
    assert "ok          parameters: template.yaml takes what dev gives" in result.stdout
    assert "completions doctor: the account cannot be asked: Unable to locate credentials; aws sts" in result.stderr
    assert "cannot be asked" in json.loads(nobody.doctor("--json").stdout)["cannot"]
    assert nobody.doctor("--offline").exit_code == 0
    assert nobody.doctor("environment").exit_code == 2


def test_a_profile_that_is_not_there_is_named(nobody: World) -> None:
    nobody.configure(more='[dev.global.parameters]\nprofile = "acme"\n')
    result = nobody.doctor()
    assert (result.exit_code, "The config profile (acme) could not be found" in result.stderr) == (2, True)


def test_without_a_region_nothing_is_asked(nobody: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    result = nobody.doctor()
    assert (result.exit_code, "completions doctor: no region; set AWS_DEFAULT_REGION" in result.stderr) == (2, True)


def test_nothing_secret_is_printed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.deploy()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "rather-secret")
    for arguments in ((), ("--json",)):
        assert "secret" not in world.doctor(*arguments).output


def test_the_environment_of_the_other_commands_is_for_the_shells_eval(world: World) -> None:
    outputs = world.deploy(base_url="https://x/it's; prod")
    result = world.doctor("environment")
    names = (
        "AWS_DEFAULT_REGION",
        "REGISTRY_TABLE",
        "USAGE_TABLE",
        "BASE_URL",
        "COMPLETIONS_BASE_URL",
        "PIPELINE_BUCKET",
    )
    quoted = " ".join(f'"${name}"' for name in names)
    command = f'{result.stdout}\nprintf "%s\\n" {quoted}'
    read = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()
    tables = [outputs["RegistryTableName"], outputs["UsageTableName"]]
    assert read == [REGION, *tables, *["https://x/it's; prod"] * 2, outputs["PipelineBucketName"]]


def test_there_is_no_environment_of_a_stack_that_is_not_there(world: World) -> None:
    result = world.doctor("environment")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"completions doctor: there is no stack {world.stack} in {REGION}; make deploy ENV=dev\n"


def make_deploy(world: World, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``make deploy`` in a checkout of its own, with ``make`` and ``sam`` that only say what they are called with."""
    for name in ("template.yaml", "infra"):
        link = world.config.parent / name
        if not link.exists():
            link.symlink_to(world.root / name)
    command = ["make", "--no-print-directory", "-C", str(world.config.parent), "-f", str(world.root / "Makefile")]
    stand_ins = ["RUN=", "SAM=echo sam", "MAKE=echo make"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [*command, "-o", "setup", "deploy", *stand_ins, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )


def test_a_deployment_is_looked_at_built_for_its_processor_and_made_with_all_its_parameters(world: World) -> None:
    world.configure("OpenAIExtraFields=top_k,min_p", 'SourcegraphDefaultModel="my coder"')
    done = make_deploy(world, "ENV=dev")
    assert (done.returncode, done.stderr) == (0, "")
    steps = [line for line in done.stdout.splitlines() if line.startswith(("make", "sam"))]
    file = ".aws-sam/parameters-dev.yaml"
    assert steps == [
        "make --no-print-directory build ARCH=x86_64",
        f"sam deploy --config-env dev --parameter-overrides file://{file}",
    ]
    given = CfnParameterOverridesType().convert((f"file://{world.config.parent / file}",), None, None)
    assert re.fullmatch("[0-9a-f]{10}", given.pop("ReleaseId"))
    assert given == {
        "ResponseMode": "buffered",
        "Architecture": "x86_64",
        "OpenAIExtraFields": "top_k,min_p",
        "SourcegraphDefaultModel": "my coder",
    }
    assert 'eval "$(.venv/bin/completions doctor environment --config-env dev)"' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ENV=dev"], "set ApiGatewayLogRole=create"),
        (["ENV=test"], "there is no environment test"),
        (["ENV="], "deploy: which environment of samconfig.toml? make deploy ENV=dev"),
    ],
)
def test_what_would_fail_is_not_deployed(world: World, arguments: list[str], said: str) -> None:
    world.configure("AccessLogs=on")
    done = make_deploy(world, *arguments)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert "sam deploy" not in done.stdout
