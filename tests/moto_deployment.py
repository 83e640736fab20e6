"""A whole deployment in moto: its CloudFormation makes what it can, the services' own APIs the rest.

What CloudFormation makes and moto's does not is asked of its service with the resource's own properties, which boto3
compares with the service's description of itself.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import boto3
from moto.cloudformation.parsing import get_model_map

from cloudformation import deployed, of_type, transformed
from completions_cli.local.template import Resolver, load_template

REGION: Final = "eu-west-3"  # no other test has anything there
FUNCTION: Final = "AWS::Lambda::Function"
ALARM: Final = "AWS::CloudWatch::Alarm"
ARN_OF_FUNCTION: Final = f"arn:aws:lambda:{REGION}:123456789012:function:"
ARN_OF_ALARM: Final = f"arn:aws:cloudwatch:{REGION}:123456789012:alarm:"
ARN_OF_MACHINE: Final = f"arn:aws:states:{REGION}:123456789012:stateMachine:"
LAYER_VERSION: Final = 27
LAYERS: Final = ("LambdaAdapterLayerArm64", "LambdaAdapterLayerX86")
NESTED: Final = ("Tables", "Pipelines", "Observability")

# Each with why moto's CloudFormation is not asked for it.
ASKED_OF_SERVICES: Final = {
    "AWS::ApiGateway::Deployment": "moto imports no Body by CloudFormation, and deploys no API without methods",
    "AWS::ApiGateway::Stage": "not known to it",
    "AWS::CloudWatch::Alarm": "not known to it",
    "AWS::CodeDeploy::Application": "not known to it",
    "AWS::CodeDeploy::DeploymentGroup": "not known to it",
    "AWS::Lambda::Alias": "not known to it",
    "AWS::Lambda::EventInvokeConfig": "not known to it",
    "AWS::Lambda::EventSourceMapping": "names an alias",
    "AWS::Lambda::Permission": "names an alias",
    "AWS::Lambda::Function": "moto gives it neither layers nor an architecture by CloudFormation",
    "AWS::Lambda::Version": "of such a function",
    "AWS::S3::BucketPolicy": "not known to it",
    "AWS::SNS::Subscription": "not known to it",
    "AWS::SQS::QueuePolicy": "not known to it",
    "AWS::Scheduler::Schedule": "not known to it",
    "AWS::StepFunctions::StateMachine": "moto's has no definition that lies in S3, and neither logs nor tracing",
}
# Not known to it either, and off in a deployment that sets nothing: the edge's choices, and the managed instances.
LEFT_OUT: Final = {
    "AWS::ApiGateway::Account",
    "AWS::ApiGateway::ApiKey",
    "AWS::ApiGateway::BasePathMapping",
    "AWS::ApiGateway::DomainName",
    "AWS::ApiGateway::UsagePlan",
    "AWS::ApiGateway::UsagePlanKey",
    "AWS::Lambda::CapacityProvider",
    "AWS::WAFv2::WebACL",
    "AWS::WAFv2::WebACLAssociation",
}


def not_known_to_moto(root: Path) -> set[str]:
    """The types of the service's templates that moto's CloudFormation cannot make."""
    nested = ("tables", "pipelines", "observability", "managed-instances")
    templates = (transformed(root), *(load_template(root / f"infra/{name}.yaml") for name in nested))
    return {one["Type"] for tree in templates for one in tree["Resources"].values()} - set(get_model_map())


@dataclass(frozen=True, eq=False)
class Deployment:
    """The stack ``name`` in the moto at ``url``. ``asked`` are the properties that its services were given."""

    url: str
    name: str
    resources: Mapping[str, Any]
    asked: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str) -> Any:
        return boto3.client(service, endpoint_url=self.url, region_name=REGION)  # type: ignore[call-overload]

    @cached_property
    def names(self) -> dict[str, str]:
        """What the logical ids of CloudFormation's resources became; of nested stacks, as Tables.UsageTable."""
        found = {}
        for stack in ("", *NESTED):
            asked = {"StackName": f"{self.name}-{stack}".removesuffix("-")}
            for one in self.client("cloudformation").describe_stack_resources(**asked)["StackResources"]:
                if "PhysicalResourceId" in one:  # moto's buses have none
                    found[f"{stack}.{one['LogicalResourceId']}".removeprefix(".")] = one["PhysicalResourceId"]
        return found

    def bring_code(self) -> None:
        """What `sam package` uploads. Nothing is run of it."""
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as code:
            code.writestr("run.sh", "")
        s3 = self.client("s3")
        s3.create_bucket(Bucket=self.name, CreateBucketConfiguration={"LocationConstraint": REGION})
        s3.put_object(Bucket=self.name, Key="code.zip", Body=archive.getvalue())

    def create(
        self, stack: str, tree: Mapping[str, Any], parameters: Mapping[str, str], links: Mapping[str, Any]
    ) -> dict[str, str]:
        """By CloudFormation; its outputs, among them the properties of what it is not asked for, evaluated by it."""
        resources = Resolver(tree, parameters).resources()
        made, outputs = {}, dict(tree.get("Outputs", {}))
        for name, one in resources.items():
            kind, properties = one["Type"], one.get("Properties", {})
            if kind == "AWS::Lambda::Alias":
                continue  # of a version, which there is not yet
            if kind in (*ASKED_OF_SERVICES, "AWS::CloudFormation::Stack", "Body"):
                outputs[name] = properties
            elif kind not in LEFT_OUT:
                made[name] = {"Type": kind, "Properties": properties}
        asked = {name: one if "Value" in one else {"Value": {"Fn::ToJsonString": one}} for name, one in outputs.items()}
        cloudformation = self.client("cloudformation")
        given = [{"ParameterKey": key, "ParameterValue": str(value)} for key, value in parameters.items()]
        made, asked = _linked(made, links), _linked(asked, links)
        template = {"Parameters": tree.get("Parameters", {}), "Resources": made, "Outputs": asked}
        name = f"{self.name}-{stack}".removesuffix("-")
        cloudformation.create_stack(StackName=name, TemplateBody=json.dumps(template), Parameters=given)
        (state,) = cloudformation.describe_stacks(StackName=name)["Stacks"]
        assert state["StackStatus"] == "CREATE_COMPLETE"
        return {one["OutputKey"]: one["OutputValue"] for one in state["Outputs"]}

    def function(self, logical_id: str) -> str:
        """Its name, as CloudFormation would begin it."""
        return f"{self.name}-{logical_id}"

    def configuration(self, function: str) -> dict[str, Any]:
        """Of the version that the alias serves."""
        asked = {"FunctionName": self.function(function), "Qualifier": "live"}
        return dict(self.client("lambda").get_function_configuration(**asked))


def deploy(root: Path, url: str, name: str, **parameters: str) -> Deployment:
    """What ``template.yaml`` and its nested stacks declare, but ``LEFT_OUT`` and what follows streams."""
    parameters = {"ReleaseId": "0123456789", **parameters}
    deployment = Deployment(url, name, deployed(root, **parameters))
    deployment.bring_code()
    trees = {stack: load_template(root / f"infra/{stack.lower()}.yaml") for stack in NESTED}
    alarms = {one: f"{name}-Observability-{one}" for one in of_type(trees["Observability"]["Resources"], ALARM)}
    links: dict[str, Any] = {f"Observability.Outputs.{one}": alarm for one, alarm in alarms.items()}
    for stack in ("Tables", "Pipelines"):
        # no more than the root gives them, which knows nothing of them yet
        given = {"ServiceName": name, "RetentionDays": "30"} if stack == "Pipelines" else {}
        # moto does not know that a bus's reference is its name
        outputs = deployment.create(stack, trees[stack], given, {"CompletionsBus": name})
        links |= {f"{stack}.Outputs.{one}": value for one, value in outputs.items()}
        deployment.asked.update(_read(outputs))
    _keep_tables(deployment, of_type(trees["Tables"]["Resources"], "AWS::DynamoDB::Table"))
    bucket = trees["Pipelines"]["Resources"]["PipelineBucket"]["Properties"]
    _keep_bucket(deployment, links["Pipelines.Outputs.PipelineBucketName"], bucket)
    for one, resource in deployment.resources.items():
        if resource["Type"] == "AWS::Lambda::Alias":
            function = deployment.function(resource["Properties"]["FunctionName"]["Ref"])
            links[one] = f"{ARN_OF_FUNCTION}{function}:{resource['Properties']['Name']}"
        elif resource["Type"] == FUNCTION:
            links |= {one: deployment.function(one), f"{one}.Arn": f"{ARN_OF_FUNCTION}{deployment.function(one)}"}
        elif resource["Type"] == "AWS::StepFunctions::StateMachine":
            links[one] = f"{ARN_OF_MACHINE}{name}-batches"
        elif resource["Type"] in ("AWS::ApiGateway::Deployment", "AWS::CodeDeploy::Application"):
            links[one] = one  # they are made later, and named then

    # A type of our own, for CloudFormation to evaluate the body
    body = {"Type": "Body", "Properties": {"Body": deployment.resources["Api"]["Properties"]["Body"]}}
    tree = {**transformed(root, **parameters), "Resources": {**deployment.resources, "ApiBody": body}, "Outputs": {}}
    deployment.asked.update(_read(deployment.create("", tree, parameters, links)))

    links = {**alarms, **{f"{one}.Arn": f"{ARN_OF_ALARM}{alarm}" for one, alarm in alarms.items()}}
    given = deployment.asked["Observability"]["Parameters"]
    for alarm, properties in _read(deployment.create("Observability", trees["Observability"], given, links)).items():
        deployment.client("cloudwatch").put_metric_alarm(AlarmName=alarms[alarm], **properties)
    _publish_functions(deployment)
    _let_in_callers(deployment)
    _make_state_machines(deployment, root)
    _write_policies(deployment)
    _open_gateway(deployment)
    _guard_deployments(deployment)
    return deployment


def _linked(node: Any, links: Mapping[str, Any]) -> Any:
    """What moto cannot look up, in its place. A link is what stands in a ``Ref``, or in a ``GetAtt`` with its dot."""
    match node:
        case list():
            return [_linked(one, links) for one in node]
        case str():
            return re.sub(r"\$\{([\w.]+)\}", lambda found: str(links.get(found[1], found[0])), node)
        case {"Fn::GetAtt": [name, attribute]} if f"{name}.{attribute}" in links:
            return links[f"{name}.{attribute}"]
        case {"Ref": str(name)} if name in links:
            return links[name]
        case dict():
            return {key: _linked(one, links) for key, one in node.items()}
    return node


def _read(outputs: Mapping[str, str]) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in outputs.items() if value.startswith("{")}


def _keep_tables(deployment: Deployment, tables: Mapping[str, Any]) -> None:
    """What moto's CloudFormation passes over in a table."""
    client = deployment.client("dynamodb")
    for logical, declared in tables.items():
        name = deployment.client("cloudformation").describe_stack_resource(
            StackName=f"{deployment.name}-Tables", LogicalResourceId=logical
        )["StackResourceDetail"]["PhysicalResourceId"]
        recovery = declared["PointInTimeRecoverySpecification"]
        client.update_continuous_backups(TableName=name, PointInTimeRecoverySpecification=recovery)
        if expiry := declared.get("TimeToLiveSpecification"):
            client.update_time_to_live(TableName=name, TimeToLiveSpecification=expiry)


def _keep_bucket(deployment: Deployment, name: str, declared: Mapping[str, Any]) -> None:
    """What moto's CloudFormation passes over in a bucket."""
    client = deployment.client("s3")
    client.put_public_access_block(
        Bucket=name, PublicAccessBlockConfiguration=declared["PublicAccessBlockConfiguration"]
    )
    client.put_bucket_ownership_controls(Bucket=name, OwnershipControls=declared["OwnershipControls"])
    rules = []
    for rule in declared["LifecycleConfiguration"]["Rules"]:
        ends = {"Expiration": {"Days": 30}} if "ExpirationInDays" in rule else {}
        aborts = {key: value for key, value in rule.items() if key == "AbortIncompleteMultipartUpload"}
        rules.append({"ID": rule["Id"], "Status": rule["Status"], "Filter": {"Prefix": ""}, **ends, **aborts})
    client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": rules})


def _make_state_machines(deployment: Deployment, root: Path) -> None:
    for name in of_type(deployment.resources, "AWS::StepFunctions::StateMachine"):
        asked = deployment.asked[name]
        text = (root / "infra" / asked["DefinitionS3Location"]["Key"]).read_text()
        for key, value in asked["DefinitionSubstitutions"].items():
            text = text.replace(f"${{{key}}}", value)
        deployment.client("stepfunctions").create_state_machine(
            name=asked["StateMachineName"],
            definition=text,
            roleArn=asked["RoleArn"],
            type=asked["StateMachineType"],
            loggingConfiguration=_camel(asked["LoggingConfiguration"]),
            tracingConfiguration=_camel(asked["TracingConfiguration"]),
        )


def _write_policies(deployment: Deployment) -> None:
    """Of the queues. The bucket's is not written, for moto denies what it denies without asking for its condition."""
    for asked in deployment.asked.values():
        for url in asked.get("Queues", ()):
            policy = {"Policy": json.dumps(asked["PolicyDocument"])}
            deployment.client("sqs").set_queue_attributes(QueueUrl=url, Attributes=policy)


def _publish_functions(deployment: Deployment) -> None:
    functions = deployment.client("lambda")
    for layer in LAYERS:
        for _ in range(LAYER_VERSION):
            functions.publish_layer_version(LayerName=layer, Content={"S3Bucket": deployment.name, "S3Key": "code.zip"})
    for logical in of_type(deployment.resources, FUNCTION):
        name, properties = deployment.function(logical), deployment.asked[logical]
        properties["Code"] = {"S3Bucket": deployment.name, "S3Key": "code.zip"}
        properties["Tags"] = {one["Key"]: one["Value"] for one in properties["Tags"]}
        functions.create_function(FunctionName=name, **properties)
        version = functions.publish_version(FunctionName=name)["Version"]
        alias = deployment.resources[f"{logical}Aliaslive"]["Properties"]["Name"]
        functions.create_alias(FunctionName=name, Name=alias, FunctionVersion=version)


def _let_in_callers(deployment: Deployment) -> None:
    functions = deployment.client("lambda")
    for name in of_type(deployment.resources, "AWS::Lambda::Permission"):
        functions.add_permission(StatementId=name, **deployment.asked[name])
    for name in of_type(deployment.resources, "AWS::Lambda::EventInvokeConfig"):
        functions.put_function_event_invoke_config(**deployment.asked[name])
    for name in of_type(deployment.resources, "AWS::Scheduler::Schedule"):
        # where the template gives none, CloudFormation makes one of the stack's
        given = {"Name": f"{deployment.name}-{name}", **deployment.asked[name]}
        deployment.client("scheduler").create_schedule(**given)
    for name in of_type(deployment.resources, "AWS::SNS::Subscription"):
        asked = deployment.asked[name]
        given = {key: asked[key] for key in ("TopicArn", "Protocol", "Endpoint")}
        deployment.client("sns").subscribe(**given)


def follow_streams(deployment: Deployment) -> None:
    """Last, and not for every deployment: from then on each write starts the function, in a container if it can."""
    client = deployment.client("lambda")
    there = {one["EventSourceArn"] for one in client.list_event_source_mappings()["EventSourceMappings"]}
    for name in of_type(deployment.resources, "AWS::Lambda::EventSourceMapping"):
        asked = dict(deployment.asked[name])
        if asked["EventSourceArn"] in there:
            continue
        if scaling := asked.get("ScalingConfig"):
            # a parameter is a string, which CloudFormation makes the number that Lambda wants
            asked["ScalingConfig"] = {key: int(value) for key, value in scaling.items()}
        client.create_event_source_mapping(**asked)


def _open_gateway(deployment: Deployment) -> None:
    gateway, api = deployment.client("apigateway"), deployment.names["Api"]
    gateway.put_rest_api(restApiId=api, mode="overwrite", body=json.dumps(deployment.asked["ApiBody"]["Body"]))
    made = gateway.create_deployment(restApiId=api)["id"]
    stage = deployment.asked["ApiStage"]
    names = {"restApiId": api, "stageName": stage["StageName"]}
    gateway.create_stage(**names, deploymentId=made, tracingEnabled=stage["TracingEnabled"])
    patches = {f"/accessLogSettings/{key.lower()}": one for key, one in stage.get("AccessLogSetting", {}).items()}
    for one in stage["MethodSettings"]:
        method = f"{one['ResourcePath']}/{one['HttpMethod']}"
        patches[f"{method}/throttling/rateLimit"] = one["ThrottlingRateLimit"]
        patches[f"{method}/throttling/burstLimit"] = one["ThrottlingBurstLimit"]
        patches[f"{method}/logging/dataTrace"] = str(one["DataTraceEnabled"]).lower()
    operations = [{"op": "replace", "path": path, "value": str(value)} for path, value in patches.items()]
    gateway.update_stage(**names, patchOperations=operations)


def _guard_deployments(deployment: Deployment) -> None:
    codedeploy = deployment.client("codedeploy")
    (application,) = of_type(deployment.resources, "AWS::CodeDeploy::Application")
    codedeploy.create_application(applicationName=deployment.name, **_camel(deployment.asked[application]))
    for name in of_type(deployment.resources, "AWS::CodeDeploy::DeploymentGroup"):
        given = {**_camel(deployment.asked[name]), "applicationName": deployment.name}
        codedeploy.create_deployment_group(deploymentGroupName=name, **given)


def _camel(node: Any) -> Any:
    if isinstance(node, list):
        return [_camel(one) for one in node]
    if isinstance(node, dict):
        return {key[0].lower() + key[1:]: _camel(one) for key, one in node.items()}
    return node
