"""A model's endpoint as CloudFormation would make it of ``infra/model-endpoint.yaml``, in each of its forms."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from completions_cli.local.template import Resolver, load_template
from completions_cli.parameters import check_parameters, plain_text
from moto_services import moto_services

ACCOUNT = "111122223333"
PSEUDO = {"AWS::Partition": "aws", "AWS::Region": "eu-west-1", "AWS::AccountId": ACCOUNT}
NAME = "completions-coder"
IMAGE = "763104351884.dkr.ecr.eu-west-1.amazonaws.com/vllm:0.27-gpu-py312-cu130-ubuntu22.04-sagemaker"
TOKEN_SECRET = f"arn:aws:secretsmanager:eu-west-1:{ACCOUNT}:secret:hub-token-AbCdEf"
KEY = f"arn:aws:kms:eu-west-1:{ACCOUNT}:key/1234abcd-12ab-34cd-56ef-1234567890ab"
SIZES = {"GpuCount": "4", "ContextLength": "32768", "MaxSequences": "48"}

FAMILIES = ("vllm", "lmi", "tgi", "openai")
SOURCES = {"hub": {"ModelId": "Qwen/Qwen2.5-Coder-7B"}, "s3": {"ModelS3Uri": "s3://models/coder/7b/"}}
FORMS = {
    "fixed": {"MinInstances": "2", "MaxInstances": "2"},
    "autoscaled": {"MinInstances": "1", "MaxInstances": "4"},
    "scale-to-zero": {"MinInstances": "0", "MaxInstances": "3", "ScaleToZero": "yes"},
}
NETWORKS = {
    "public": {},
    "vpc": {"SubnetIds": "subnet-0a1b2c3d,subnet-1a2b3c4d", "SecurityGroupIds": "sg-0a1b2c3d"},
}

ALWAYS = {"Logs", "ExecutionRole", "Model", "EndpointConfig", "Endpoint"}
OF_FORM = {
    "fixed": {"ServerErrors"},
    "autoscaled": {"ServerErrors", "InstanceTarget", "InstanceScaling"},
    "scale-to-zero": {"Component", "ComponentTarget", "ComponentScaling", "ComponentStart", "ComponentWanted"},
}


@pytest.fixture(scope="module")
def template(project_root: Path) -> dict[str, Any]:
    return load_template(project_root / "infra" / "model-endpoint.yaml")


def given(
    family: str = "vllm", source: str = "hub", form: str = "fixed", network: str = "public", **more: str
) -> dict[str, str]:
    """The parameters of one form of the stack."""
    named = {"EndpointName": NAME, "ContainerFamily": family, "Image": IMAGE}
    return {**named, **SIZES, **SOURCES[source], **FORMS[form], **NETWORKS[network], **more}


def made(template: Mapping[str, Any], parameters: Mapping[str, str]) -> dict[str, Any]:
    """The properties of every resource that there is, by logical id. A ``Ref`` or attribute of one is its own name."""
    assert check_parameters(template, parameters) == []
    values = {name: plain_text(one["Default"]) for name, one in template["Parameters"].items() if "Default" in one}
    values |= parameters
    resources = Resolver(template, values).resources()
    return {name: computed(one["Properties"], {**values, **PSEUDO}) for name, one in resources.items()}


def computed(node: Any, values: Mapping[str, str]) -> Any:
    """What the shared resolver leaves, which joins and takes apart texts."""
    if isinstance(node, list):
        return [computed(item, values) for item in node]
    if not isinstance(node, dict):
        return node
    inner = {name: computed(value, values) for name, value in node.items()}
    ((name, argument), *more) = inner.items()
    return inner if more or name not in FUNCTIONS else FUNCTIONS[name](argument, values)


FUNCTIONS: Mapping[str, Callable[[Any, Mapping[str, str]], Any]] = {
    "Ref": lambda name, values: values.get(name, name),
    "Fn::GetAtt": lambda path, _: path if isinstance(path, str) else ".".join(path),
    "Fn::Sub": lambda argument, values: (
        substituted(argument, values)
        if isinstance(argument, str)
        else substituted(argument[0], {**values, **argument[1]})
    ),
    "Fn::Join": lambda argument, _: argument[0].join(argument[1]),
    "Fn::Split": lambda argument, _: argument[1].split(argument[0]),
    "Fn::Select": lambda argument, _: argument[1][int(argument[0])],
}


def substituted(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{([^}]+)\}", lambda match: values.get(match[1], match[1]), text)


def variant(resources: Mapping[str, Any]) -> dict[str, Any]:
    (only,) = resources["EndpointConfig"]["ProductionVariants"]
    assert isinstance(only, dict)
    return only


def statements(resources: Mapping[str, Any]) -> list[dict[str, Any]]:
    (policy,) = resources["ExecutionRole"]["Policies"]
    found: list[dict[str, Any]] = policy["PolicyDocument"]["Statement"]
    return found


def actions(statement: Mapping[str, Any]) -> list[str]:
    return [statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"]


def allowed(resources: Mapping[str, Any], action: str) -> Any:
    """On what an action is allowed."""
    (one,) = [statement for statement in statements(resources) if action in actions(statement)]
    return one["Resource"]


def test_the_linter_finds_nothing_with_all_its_rules(project_root: Path) -> None:
    path = project_root / "infra" / "model-endpoint.yaml"
    linter = Path(sys.executable).with_name("cfn-lint")
    options = ["--include-checks", "I", "--non-zero-exit-code", "informational", "--template", str(path)]
    result = subprocess.run([linter, *options], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert "cfn-lint" not in path.read_text()  # nothing is ignored in the file either


def test_it_needs_no_packaging(project_root: Path) -> None:
    text = (project_root / "infra" / "model-endpoint.yaml").read_text()
    assert "\nTransform:" not in text
    assert not re.search(r"[:-] [&*]\w", text)  # CloudFormation itself refuses YAML's aliases


EVERY_FORM = list(product(FAMILIES, SOURCES, FORMS, NETWORKS))


@pytest.mark.parametrize(("family", "source", "form", "network"), EVERY_FORM)
def test_each_form_makes_what_it_needs_and_nothing_else(
    template: dict[str, Any], family: str, source: str, form: str, network: str
) -> None:
    resources = made(template, given(family, source, form, network))

    assert set(resources) == ALWAYS | OF_FORM[form]
    text = json.dumps(resources)
    assert not re.search(r'"(Fn::\w+|Ref|Condition|AWS::NoValue)": "', text)
    assert "${" not in text


@pytest.mark.parametrize(("family", "source", "form", "network"), EVERY_FORM)
def test_no_form_stores_what_is_asked_or_answered(
    template: dict[str, Any], family: str, source: str, form: str, network: str
) -> None:
    assert "DataCaptureConfig" not in made(template, given(family, source, form, network))["EndpointConfig"]


ENVIRONMENTS: dict[tuple[str, str], dict[str, str]] = {
    ("vllm", "hub"): {"SM_VLLM_MODEL": "Qwen/Qwen2.5-Coder-7B"},
    ("vllm", "s3"): {"SM_VLLM_MODEL": "/opt/ml/model"},
    ("lmi", "hub"): {"HF_MODEL_ID": "Qwen/Qwen2.5-Coder-7B"},
    ("lmi", "s3"): {},
    ("tgi", "hub"): {"HF_MODEL_ID": "Qwen/Qwen2.5-Coder-7B"},
    ("tgi", "s3"): {"HF_MODEL_ID": "/opt/ml/model"},
    ("openai", "hub"): {"HF_MODEL_ID": "Qwen/Qwen2.5-Coder-7B"},
    ("openai", "s3"): {"HF_MODEL_ID": "/opt/ml/model"},
}
SETTINGS: dict[str, dict[str, str]] = {
    "vllm": {"SM_VLLM_TENSOR_PARALLEL_SIZE": "4", "SM_VLLM_MAX_MODEL_LEN": "32768", "SM_VLLM_MAX_NUM_SEQS": "48"},
    "lmi": {
        "OPTION_ASYNC_MODE": "true",
        "OPTION_ROLLING_BATCH": "disable",
        "OPTION_ENTRYPOINT": "djl_python.lmi_vllm.vllm_async_service",
        "TENSOR_PARALLEL_DEGREE": "4",
        "OPTION_MAX_MODEL_LEN": "32768",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "48",
    },
    "tgi": {"SM_NUM_GPUS": "4", "MAX_TOTAL_TOKENS": "32768", "MAX_CONCURRENT_REQUESTS": "48"},
    "openai": {"GPU_COUNT": "4", "CONTEXT_LENGTH": "32768", "MAX_SEQUENCES": "48"},
}


@pytest.mark.parametrize(("family", "source", "form"), list(product(FAMILIES, SOURCES, FORMS)))
def test_the_container_is_told_in_its_familys_own_words(
    template: dict[str, Any], family: str, source: str, form: str
) -> None:
    container = made(template, given(family, source, form))["Model"]["PrimaryContainer"]

    assert container["Image"] == IMAGE
    assert container["Environment"] == {**SETTINGS[family], **ENVIRONMENTS[family, source]}


def test_an_image_of_the_openai_family_may_carry_its_model(template: dict[str, Any]) -> None:
    container = made(template, given("openai", ModelId=""))["Model"]["PrimaryContainer"]
    assert container == {"Image": IMAGE, "Environment": SETTINGS["openai"]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("secret", [TOKEN_SECRET, f"{TOKEN_SECRET}:SecretString:token"])
def test_the_hubs_token_is_a_reference_that_only_cloudformation_resolves(
    template: dict[str, Any], family: str, secret: str
) -> None:
    resources = made(template, given(family, ModelTokenSecretArn=secret))

    environment = resources["Model"]["PrimaryContainer"]["Environment"]
    assert environment["HF_TOKEN"] == f"{{{{resolve:secretsmanager:{secret}}}}}"
    assert json.dumps(resources).count(secret) == 1  # the instances need no right to the secret
    assert "HF_TOKEN" not in made(template, given(family))["Model"]["PrimaryContainer"]["Environment"]


def test_a_model_in_s3_is_a_prefix_of_plain_files(template: dict[str, Any]) -> None:
    source = made(template, given(source="s3"))["Model"]["PrimaryContainer"]["ModelDataSource"]
    assert source == {
        "S3DataSource": {"S3Uri": "s3://models/coder/7b/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    }
    assert "ModelDataSource" not in made(template, given(source="hub"))["Model"]["PrimaryContainer"]


def test_a_fixed_number_of_instances_is_one_variant_with_the_model(template: dict[str, Any]) -> None:
    resources = made(template, given(form="fixed"))
    assert resources["EndpointConfig"] == {
        "ProductionVariants": [
            {
                "VariantName": "AllTraffic",
                "ModelName": "Model.ModelName",
                "InstanceType": "ml.g6e.xlarge",
                "InitialInstanceCount": "2",
                "InferenceAmiVersion": "al2-ami-sagemaker-inference-gpu-3-1",
                "ModelDataDownloadTimeoutInSeconds": "1800",
                "ContainerStartupHealthCheckTimeoutInSeconds": "1800",
                "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
            }
        ]
    }
    assert resources["Endpoint"]["EndpointName"] == NAME
    assert resources["Endpoint"]["EndpointConfigName"] == "EndpointConfig.EndpointConfigName"


def test_an_endpoint_that_scales_to_zero_has_a_variant_without_the_model(template: dict[str, Any]) -> None:
    resources = made(template, given(form="scale-to-zero"))

    assert resources["EndpointConfig"]["ExecutionRoleArn"] == "ExecutionRole.Arn"
    only = variant(resources)
    assert "ModelName" not in only
    assert only["InitialInstanceCount"] == 1
    assert only["ManagedInstanceScaling"] == {"Status": "ENABLED", "MinInstanceCount": 0, "MaxInstanceCount": "3"}
    assert resources["Component"] == {
        "InferenceComponentName": NAME,
        "EndpointName": "Endpoint.EndpointName",
        "VariantName": "AllTraffic",
        "Specification": {
            "ModelName": "Model.ModelName",
            "ComputeResourceRequirements": {"NumberOfAcceleratorDevicesRequired": "4", "MinMemoryRequiredInMb": 1024},
            "StartupParameters": {
                "ModelDataDownloadTimeoutInSeconds": "1800",
                "ContainerStartupHealthCheckTimeoutInSeconds": "1800",
            },
        },
        "RuntimeConfig": {"CopyCount": 1},  # SageMaker makes none with 0
    }


@pytest.mark.parametrize("form", ["fixed", "autoscaled"])
def test_sagemaker_is_not_asked_to_manage_instances_without_components(template: dict[str, Any], form: str) -> None:
    resources = made(template, given(form=form))
    assert "ManagedInstanceScaling" not in variant(resources)
    assert "ExecutionRoleArn" not in resources["EndpointConfig"]


@pytest.mark.parametrize("form", FORMS)
def test_the_hosts_limits_are_the_parameters(template: dict[str, Any], form: str) -> None:
    asked = {
        "InstanceType": "ml.c7i.4xlarge",
        "InferenceAmiVersion": "",
        "VolumeSize": "200",
        "KmsKeyId": KEY,
        "DownloadTimeoutSeconds": "3600",
        "StartupTimeoutSeconds": "60",
    }
    resources = made(template, given(form=form, **asked))

    only = variant(resources)
    assert only["InstanceType"] == "ml.c7i.4xlarge"
    assert "InferenceAmiVersion" not in only
    assert only["VolumeSizeInGB"] == "200"
    assert only["ModelDataDownloadTimeoutInSeconds"] == "3600"
    assert only["ContainerStartupHealthCheckTimeoutInSeconds"] == "60"
    assert resources["EndpointConfig"]["KmsKeyId"] == KEY
    assert allowed(resources, "kms:Decrypt") == KEY


def test_prompts_that_begin_alike_can_go_to_one_instance(template: dict[str, Any]) -> None:
    assert variant(made(template, given(RoutingStrategy="PREFIX_AWARE")))["RoutingConfig"] == {
        "RoutingStrategy": "PREFIX_AWARE",
        "PrefixAwareRoutingConfig": {"PrefixLength": 4096, "ConcurrencyThreshold": "48"},
    }


@pytest.mark.parametrize("form", FORMS)
def test_containers_live_in_the_vpc_where_one_is_given(template: dict[str, Any], form: str) -> None:
    inside, outside = (made(template, given(form=form, network=network)) for network in ("vpc", "public"))

    network = {"Subnets": ["subnet-0a1b2c3d", "subnet-1a2b3c4d"], "SecurityGroupIds": ["sg-0a1b2c3d"]}
    assert inside["Model"]["VpcConfig"] == network
    # of an endpoint with components, SageMaker takes the network from its configuration
    assert inside["EndpointConfig"].get("VpcConfig") == (network if form == "scale-to-zero" else None)
    assert "VpcConfig" not in outside["Model"]
    assert "VpcConfig" not in outside["EndpointConfig"]


def test_instances_are_scaled_by_the_requests_in_progress(template: dict[str, Any]) -> None:
    resources = made(template, given(form="autoscaled", TargetConcurrency="30"))

    assert resources["InstanceTarget"] == {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{NAME}/variant/AllTraffic",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
        "MinCapacity": "1",
        "MaxCapacity": "4",
    }
    assert variant(resources)["InitialInstanceCount"] == "1"
    assert resources["InstanceScaling"]["ScalingTargetId"] == "InstanceTarget"
    assert resources["InstanceScaling"]["PolicyType"] == "TargetTrackingScaling"
    tracking = resources["InstanceScaling"]["TargetTrackingScalingPolicyConfiguration"]
    assert tracking["PredefinedMetricSpecification"] == {
        "PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"
    }
    assert tracking["TargetValue"] == "30"
    assert tracking["ScaleOutCooldown"] < tracking["ScaleInCooldown"]


def test_copies_are_scaled_by_the_requests_in_progress_down_to_none(template: dict[str, Any]) -> None:
    resources = made(template, given(form="scale-to-zero", TargetConcurrency="30"))

    assert resources["ComponentTarget"] == {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"inference-component/{NAME}",
        "ScalableDimension": "sagemaker:inference-component:DesiredCopyCount",
        "MinCapacity": 0,
        "MaxCapacity": "3",
    }
    assert resources["ComponentScaling"]["ScalingTargetId"] == "ComponentTarget"
    tracking = resources["ComponentScaling"]["TargetTrackingScalingPolicyConfiguration"]
    assert tracking["PredefinedMetricSpecification"] == {
        "PredefinedMetricType": "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"
    }
    assert tracking["TargetValue"] == "30"


def test_the_first_request_refused_starts_a_copy(template: dict[str, Any]) -> None:
    resources = made(template, given(form="scale-to-zero"))

    start = resources["ComponentStart"]
    assert (start["PolicyType"], start["ScalingTargetId"]) == ("StepScaling", "ComponentTarget")
    assert start["StepScalingPolicyConfiguration"]["AdjustmentType"] == "ChangeInCapacity"
    assert start["StepScalingPolicyConfiguration"]["StepAdjustments"] == [
        {"MetricIntervalLowerBound": 0, "ScalingAdjustment": 1}
    ]
    alarm = resources["ComponentWanted"]
    assert alarm["AlarmActions"] == ["ComponentStart"]
    assert (alarm["Namespace"], alarm["MetricName"]) == ("AWS/SageMaker", "NoCapacityInvocationFailures")
    assert alarm["Dimensions"] == [{"Name": "InferenceComponentName", "Value": NAME}]
    assert (alarm["ComparisonOperator"], alarm["Threshold"]) == ("GreaterThanOrEqualToThreshold", 1)
    assert (alarm["Statistic"], alarm["EvaluationPeriods"]) == ("Sum", 1)
    assert alarm["TreatMissingData"] == "notBreaching"


@pytest.mark.parametrize(("form", "kept"), [("fixed", None), ("autoscaled", True), ("scale-to-zero", None)])
def test_a_deployment_undoes_no_autoscaling_but_sets_a_fixed_number(
    template: dict[str, Any], form: str, kept: bool | None
) -> None:
    assert made(template, given(form=form))["Endpoint"].get("RetainAllVariantProperties") is kept


@pytest.mark.parametrize("form", ["fixed", "autoscaled"])
def test_an_update_goes_back_when_the_endpoint_fails(template: dict[str, Any], form: str) -> None:
    resources = made(template, given(form=form))

    deployment = resources["Endpoint"]["DeploymentConfig"]
    assert deployment["AutoRollbackConfiguration"] == {"Alarms": [{"AlarmName": "ServerErrors"}]}
    policy = deployment["BlueGreenUpdatePolicy"]
    assert policy["TrafficRoutingConfiguration"]["Type"] == "ALL_AT_ONCE"  # the others need two instances
    # both timeouts of a start, and the waiting, fit in
    assert 2 * 3600 + policy["TerminationWaitInSeconds"] < policy["MaximumExecutionTimeoutInSeconds"] <= 28800
    alarm = resources["ServerErrors"]
    assert (alarm["Namespace"], alarm["MetricName"]) == ("AWS/SageMaker", "Invocation5XXErrors")
    assert alarm["Dimensions"] == [
        {"Name": "EndpointName", "Value": NAME},
        {"Name": "VariantName", "Value": "AllTraffic"},
    ]
    assert alarm["TreatMissingData"] == "notBreaching"
    assert allowed(resources, "cloudwatch:DescribeAlarms") == "ServerErrors.Arn"
    # the alarm must have its say while the old instances are still there
    assert alarm["Period"] * alarm["DatapointsToAlarm"] < policy["TerminationWaitInSeconds"]


def test_a_repair_can_be_let_through(template: dict[str, Any]) -> None:
    resources = made(template, given(AutoRollback="no"))
    assert "ServerErrors" not in resources
    assert "DeploymentConfig" not in resources["Endpoint"]


@pytest.mark.parametrize(
    ("form", "group"),
    [
        ("fixed", f"/aws/sagemaker/Endpoints/{NAME}"),
        ("autoscaled", f"/aws/sagemaker/Endpoints/{NAME}"),
        ("scale-to-zero", f"/aws/sagemaker/InferenceComponents/{NAME}"),
    ],
)
def test_the_containers_logs_end(template: dict[str, Any], form: str, group: str) -> None:
    assert made(template, given(form=form, LogRetentionDays="7"))["Logs"] == {
        "LogGroupName": group,
        "RetentionInDays": "7",
    }


def test_nothing_that_costs_outlives_the_stack(template: dict[str, Any]) -> None:
    policies = {resource.get("DeletionPolicy", "Delete") for resource in template["Resources"].values()}
    assert policies == {"Delete"}


@pytest.mark.parametrize(
    ("image", "repository"),
    [
        (IMAGE, "arn:aws:ecr:eu-west-1:763104351884:repository/vllm"),
        (
            "111122223333.dkr.ecr.us-east-1.amazonaws.com/team/models/vllm.custom:1.0",
            "arn:aws:ecr:us-east-1:111122223333:repository/team/models/vllm.custom",
        ),
        (
            f"111122223333.dkr.ecr.us-east-1.amazonaws.com/vllm@sha256:{'0a' * 32}",
            "arn:aws:ecr:us-east-1:111122223333:repository/vllm",
        ),
        (
            "111122223333.dkr.ecr.cn-north-1.amazonaws.com.cn/team/vllm:1",
            "arn:aws:ecr:cn-north-1:111122223333:repository/team/vllm",
        ),
    ],
)
def test_only_the_images_own_repository_is_read(template: dict[str, Any], image: str, repository: str) -> None:
    assert allowed(made(template, given(Image=image)), "ecr:BatchGetImage") == repository


def test_only_the_models_own_prefix_is_read(template: dict[str, Any]) -> None:
    resources = made(template, given(source="s3"))
    assert allowed(resources, "s3:GetObject") == "arn:aws:s3:::models/coder/7b/*"
    assert allowed(resources, "s3:ListBucket") == "arn:aws:s3:::models"


ANYWHERE = {  # IAM knows no resource for these
    "ecr:GetAuthorizationToken",
    "cloudwatch:PutMetricData",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
}


@pytest.mark.parametrize(("source", "form", "network"), list(product(SOURCES, FORMS, NETWORKS)))
def test_the_role_may_do_no_more_than_its_form_needs(
    template: dict[str, Any], source: str, form: str, network: str
) -> None:
    resources = made(template, given(source=source, form=form, network=network))

    assert resources["ExecutionRole"]["AssumeRolePolicyDocument"]["Statement"] == [
        {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "sagemaker.amazonaws.com"}}
    ]
    by_service: dict[str, set[str]] = {}
    for statement in statements(resources):
        assert statement["Effect"] == "Allow"
        for action in actions(statement):
            assert "*" not in action
            by_service.setdefault(action.partition(":")[0], set()).add(action)
        if statement["Resource"] == "*":
            assert set(actions(statement)) <= ANYWHERE
    services = {"ecr", "cloudwatch", "logs"} | ({"s3"} if source == "s3" else set())
    assert set(by_service) == services | ({"ec2"} if network == "vpc" else set())
    (metrics,) = [one for one in statements(resources) if one["Action"] == "cloudwatch:PutMetricData"]
    assert metrics["Condition"] == {"StringLike": {"cloudwatch:namespace": ["AWS/SageMaker", "/aws/sagemaker/*"]}}
    assert allowed(resources, "logs:PutLogEvents") == [
        f"arn:aws:logs:eu-west-1:{ACCOUNT}:log-group:Logs",
        f"arn:aws:logs:eu-west-1:{ACCOUNT}:log-group:Logs:*",
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"EndpointName": "completions_coder"}, "EndpointName: .* letters, digits and .* hyphens"),
        ({"EndpointName": "c" * 64}, "EndpointName: .* 1 to 63"),
        ({"ContainerFamily": "sglang"}, "ContainerFamily: .* one of vllm, lmi, tgi and openai"),
        ({"Image": "vllm/vllm-openai:latest"}, "Image: .* private ECR repository"),
        ({"Image": IMAGE.partition(":")[0]}, "Image: .* with its tag or digest"),
        ({"Image": "public.ecr.aws/deep-learning-containers/vllm:1"}, "Image: .* private ECR repository"),
        ({"ModelId": "https://huggingface.co/a/b"}, "ModelId: .* as Qwen/Qwen2.5-Coder-7B"),
        ({"ModelId": "", "ModelS3Uri": "s3://models/coder"}, "ModelS3Uri: .* ends with a slash"),
        ({"ModelId": "", "ModelS3Uri": "https://models/"}, "ModelS3Uri: .* as s3://"),
        ({"ModelTokenSecretArn": "hf_abcdef"}, "ModelTokenSecretArn: .* ARN of a secret"),
        ({"InstanceType": "g6e.xlarge"}, "InstanceType: .* as ml.g6e.xlarge"),
        ({"GpuCount": "3"}, "GpuCount: .* 1, 2, 4 or 8"),
        ({"ContextLength": "32k"}, "ContextLength: .* number of tokens"),
        ({"MaxSequences": "0"}, "MaxSequences: .* from 1 to 1024"),
        ({"InferenceAmiVersion": "gpu-3"}, "InferenceAmiVersion: .* or empty"),
        ({"VolumeSize": "513"}, "VolumeSize: .* from 1 to 512"),
        ({"DownloadTimeoutSeconds": "59"}, "DownloadTimeoutSeconds: .* from 60 to 3600"),
        ({"StartupTimeoutSeconds": "3601"}, "StartupTimeoutSeconds: .* from 60 to 3600"),
        ({"MinInstances": "11"}, "MinInstances: .* 0 to 10, 12"),
        ({"MaxInstances": "0"}, "MaxInstances: .* 1 to 10, 12"),
        ({"TargetConcurrency": "0"}, "TargetConcurrency: .* from 1 to 1024"),
        ({"ScaleToZero": "true"}, "ScaleToZero: .* yes or no"),
        ({"RoutingStrategy": "KV_AWARE"}, "RoutingStrategy: .* PREFIX_AWARE or RANDOM"),
        ({"SubnetIds": "subnet-1 subnet-2", "SecurityGroupIds": "sg-1"}, "SubnetIds: .* commas and no spaces"),
        ({"SubnetIds": "subnet-1", "SecurityGroupIds": "default"}, "SecurityGroupIds: .* security group ids"),
        ({"KmsKeyId": "alias/models"}, "KmsKeyId: .* ARN of a KMS key"),
        ({"AutoRollback": "maybe"}, "AutoRollback: .* yes or no"),
        ({"LogRetentionDays": "8"}, "LogRetentionDays: .* 7, 14, 30"),
        ({"ModelS3Uri": "s3://models/coder/"}, "rule OneModelSource: .*Give one of them"),
        ({"ModelId": ""}, "rule SomeModelSource: .*Give one of them"),
        (
            {"ModelId": "", "ModelS3Uri": "s3://models/coder/", "ModelTokenSecretArn": TOKEN_SECRET},
            "rule TokenForTheHub: .*without ModelId",
        ),
        ({"ScaleToZero": "yes"}, "rule ZeroInstances: .*Set MinInstances to 0"),
        ({"MinInstances": "0"}, "rule SomeInstances: .*Set ScaleToZero to yes"),
        ({"MinInstances": "3", "MaxInstances": "2"}, "rule MinInstancesWithinMax: MinInstances is above MaxInstances"),
        ({"SubnetIds": "subnet-1"}, "rule SubnetsWithSecurityGroups: .*Give both"),
        ({"SecurityGroupIds": "sg-1"}, "rule SubnetsWithSecurityGroups: .*Give both"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    template: dict[str, Any], wrong: dict[str, str], message: str
) -> None:
    (only,) = check_parameters(template, given(**wrong))
    assert re.match(message, only)


def test_the_openai_family_takes_one_source_or_none_but_not_two(template: dict[str, Any]) -> None:
    (message,) = check_parameters(template, given("openai", ModelS3Uri="s3://models/coder/"))
    assert message.startswith("rule OneModelSource: ")


def test_every_minimum_above_the_maximum_is_refused_and_no_other(template: dict[str, Any]) -> None:
    pairs = product(*(template["Parameters"][name]["AllowedValues"] for name in ("MinInstances", "MaxInstances")))
    for least, most in pairs:
        zero = "yes" if least == 0 else "no"
        asked = given(MinInstances=str(least), MaxInstances=str(most), ScaleToZero=zero)
        refused = check_parameters(template, asked)
        assert len(refused) == (least > most), (least, most)


def test_no_condition_joins_more_than_cloudformation_takes(template: dict[str, Any]) -> None:
    def sizes(node: Any) -> list[int]:
        if isinstance(node, list):
            return [size for item in node for size in sizes(item)]
        if not isinstance(node, dict):
            return []
        own = [len(node[name]) for name in ("Fn::And", "Fn::Or") if name in node]
        return own + [size for value in node.values() for size in sizes(value)]

    assert set(sizes([template["Rules"], template["Conditions"]])) <= set(range(2, 11))


def test_what_must_be_given_is_what_no_default_can_know(template: dict[str, Any]) -> None:
    required = {name for name, spec in template["Parameters"].items() if "Default" not in spec}
    assert required == {"EndpointName", "ContainerFamily", "Image"}


def test_every_parameter_says_what_it_is_and_what_is_right(template: dict[str, Any]) -> None:
    for name, spec in template["Parameters"].items():
        assert spec["Description"], name
        assert spec["ConstraintDescription"], name


def test_the_parent_learns_what_the_catalogue_needs(template: dict[str, Any]) -> None:
    outputs = template["Outputs"]
    assert set(outputs) == {"EndpointName", "EndpointArn", "InferenceComponentName", "ScalesToZero"}
    assert outputs["InferenceComponentName"]["Condition"] == "ScalesToZero"
    assert outputs["ScalesToZero"]["Value"] == {"Ref": "ScaleToZero"}


@pytest.mark.parametrize(("source", "form"), list(product(SOURCES, ("fixed", "autoscaled"))))
def test_the_stack_can_be_made(project_root: Path, source: str, form: str) -> None:
    # moto knows no newer instance type and no alarm of a stack, and names the endpoint itself
    moreover = {"InstanceType": "ml.g4dn.12xlarge", "AutoRollback": "no", "EndpointName": f"{source}-{form}"}
    asked = given("vllm", source, form, "vpc", **moreover)
    with moto_services("eu-south-1") as client:
        formation, sagemaker = client("cloudformation"), client("sagemaker")
        formation.create_stack(
            StackName=f"{source}-{form}",
            TemplateBody=(project_root / "infra" / "model-endpoint.yaml").read_text(),
            Parameters=[{"ParameterKey": name, "ParameterValue": value} for name, value in asked.items()],
            Capabilities=["CAPABILITY_IAM"],
        )
        (stack,) = formation.describe_stacks(StackName=f"{source}-{form}")["Stacks"]
        outputs = {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}
        endpoint = sagemaker.describe_endpoint(EndpointName=outputs["EndpointName"])
        config = sagemaker.describe_endpoint_config(EndpointConfigName=endpoint["EndpointConfigName"])
        (only,) = config["ProductionVariants"]
        model = sagemaker.describe_model(ModelName=only["ModelName"])

    assert stack["StackStatus"] == "CREATE_COMPLETE"
    assert (outputs["EndpointArn"], outputs["ScalesToZero"]) == (endpoint["EndpointArn"], "no")
    assert "InferenceComponentName" not in outputs
    assert not config.get("DataCaptureConfig")
    assert only["InstanceType"] == "ml.g4dn.12xlarge"
    assert int(only["InitialInstanceCount"]) == {"fixed": 2, "autoscaled": 1}[form]
    assert model["PrimaryContainer"]["Image"] == IMAGE
    assert model["PrimaryContainer"]["Environment"] == {**SETTINGS["vllm"], **ENVIRONMENTS["vllm", source]}
    assert model["VpcConfig"]["Subnets"] == ["subnet-0a1b2c3d", "subnet-1a2b3c4d"]


def test_the_scaling_of_instances_is_one_that_application_auto_scaling_takes(template: dict[str, Any]) -> None:
    resources = made(template, given(form="autoscaled"))
    target, policy = resources["InstanceTarget"], resources["InstanceScaling"]
    limits = {name: int(target[name]) for name in ("MinCapacity", "MaxCapacity")}
    tracking = policy["TargetTrackingScalingPolicyConfiguration"]
    target_of_policy = {name: target[name] for name in ("ServiceNamespace", "ResourceId", "ScalableDimension")}
    with moto_services("eu-central-2") as client:
        sagemaker, scaling = client("sagemaker"), client("application-autoscaling")
        role = f"arn:aws:iam::{ACCOUNT}:role/execution"
        sagemaker.create_model(ModelName="m", ExecutionRoleArn=role, PrimaryContainer={"Image": IMAGE})
        served: Any = {"ModelName": "m", "InstanceType": "ml.g4dn.12xlarge", "InitialInstanceCount": 1}
        name = variant(resources)["VariantName"]
        sagemaker.create_endpoint_config(EndpointConfigName="c", ProductionVariants=[{"VariantName": name, **served}])
        sagemaker.create_endpoint(EndpointName=NAME, EndpointConfigName="c")
        scaling.register_scalable_target(**target_of_policy, **limits)
        scaling.put_scaling_policy(
            PolicyName=policy["PolicyName"],
            PolicyType=policy["PolicyType"],
            **target_of_policy,
            TargetTrackingScalingPolicyConfiguration={**tracking, "TargetValue": float(tracking["TargetValue"])},
        )
        (registered,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
        (stored,) = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]

    assert (registered["MinCapacity"], registered["MaxCapacity"]) == (1, 4)
    assert stored["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 40.0
