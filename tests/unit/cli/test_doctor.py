"""What the doctor reads of ``samconfig.toml``, and what it finds without an account."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from samcli.cli.types import CfnParameterOverridesType

from completions_cli.doctor_aws import NotAnsweredError
from completions_cli.doctor_checks import BEFORE_AN_ACCOUNT, Check, Finding, Verdict, findings, ok
from completions_cli.doctor_plan import Plan, covers, overrides_text, read_plan, usual_models
from completions_cli.parameters import SamConfigError

IMAGE = "763104351884.dkr.ecr.eu-west-1.amazonaws.com/djl-inference:0.36.0-lmi28.0.0-cu130"
MODEL = f"""
[model.deploy.parameters]
template_file = "infra/model-endpoint.yaml"
stack_name = "completions-coder"
parameter_overrides = ["EndpointName=completions-coder", "ContainerFamily=lmi", "Image={IMAGE}", "ModelId=Qwen/Q"]
"""


def plan(tmp_path: Path, *overrides: str, more: str = MODEL, settings: str = "") -> Plan:
    """What ``[dev.deploy.parameters]`` comes to."""
    config = tmp_path / "samconfig.toml"
    config.write_text(
        f'[dev.deploy.parameters]\nstack_name = "completions-dev"\n{settings}\n'
        f"parameter_overrides = {json.dumps(overrides)}\n{more}"
    )
    return read_plan(config, "dev", usual_models(config))


def found(plan: Plan) -> list[Finding]:
    return list(findings(BEFORE_AN_ACCOUNT, plan))


def test_parameters_of_the_service_and_its_model_are_looked_at(tmp_path: Path) -> None:
    assert [(one.title, one.verdict, one.found) for one in found(plan(tmp_path, "StageName=dev"))] == [
        ("parameters", "ok", "template.yaml takes what dev gives"),
        ("model parameters model", "ok", "infra/model-endpoint.yaml takes what model gives"),
        ("model endpoint completions-coder", "ok", "ModelEndpointPattern * covers it"),
    ]


def test_a_wrong_parameter_is_named_with_what_is_right_and_where_it_is_given(tmp_path: Path) -> None:
    wrong = found(plan(tmp_path, "StageNam=dev", "ResponseMode=both", more=""))
    assert [(one.verdict, one.found) for one in wrong] == [
        ("failed", "StageNam: the template has no such parameter; did you mean StageName?"),
        ("failed", 'ResponseMode: "both" is none of "streamed", "buffered"'),
    ]
    assert {one.advice for one in wrong} == {"mend parameter_overrides of [dev.deploy.parameters]"}


def test_a_broken_rule_is_a_failure(tmp_path: Path) -> None:
    (one,) = found(plan(tmp_path, "Compute=managed-instances", "ManagedSubnetIds=subnet-1", more=""))
    assert one.verdict is Verdict.FAILED
    assert one.found.endswith("Compute managed-instances needs ManagedSecurityGroupIds.")


def test_a_models_wrong_parameter_names_its_environment(tmp_path: Path) -> None:
    wrong = [one for one in found(plan(tmp_path, more=MODEL.replace("ModelId=Qwen/Q", "MinInstances=0"))) if one.advice]
    assert {(one.check, one.subject, one.verdict) for one in wrong} == {("model parameters", "model", "failed")}
    assert len(wrong) == 2  # no source for the model, and no instances without ScaleToZero


def test_an_endpoint_that_the_functions_may_not_call_is_a_failure(tmp_path: Path) -> None:
    *_, last = found(plan(tmp_path, "ModelEndpointPattern=acme-*"))
    assert (last.title, last.verdict) == ("model endpoint completions-coder", "failed")
    assert last.found == "ModelEndpointPattern acme-* does not cover it, so the functions may not call it"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("completions-coder", "completions-coder is made by 2 stacks"),
        ("completions-writer", "writer has the stack_name completions-coder of another"),
    ],
)
def test_two_models_need_endpoints_and_stacks_of_their_own(tmp_path: Path, second: str, said: str) -> None:
    writer = MODEL.replace("[model.", "[writer.").replace("EndpointName=completions-coder", f"EndpointName={second}")
    planned = plan(tmp_path, more=MODEL + writer)
    both = read_plan(tmp_path / "samconfig.toml", "dev", ["model", "writer"])
    assert len(planned.models) == 1
    assert said in [one.found for one in found(both) if one.verdict == "failed"]


@pytest.mark.parametrize(
    ("pattern", "endpoint", "allowed"),
    [
        ("*", "coder", True),
        ("completions-*", "completions-coder", True),
        ("completions-*", "completions", False),
        ("completions-*", "my-completions-coder", False),
        ("*-coder-*", "acme-coder-2", True),
        ("coder", "coder", True),
        ("coder", "Coder", False),
    ],
)
def test_a_pattern_covers_what_iam_would_let_through(pattern: str, endpoint: str, allowed: bool) -> None:
    assert covers(pattern, endpoint) is allowed


def test_region_profile_and_stack_are_those_of_sam_deploy(tmp_path: Path) -> None:
    planned = plan(
        tmp_path, more='[dev.global.parameters]\nregion = "eu-west-1"\nprofile = "a"\n', settings='profile = "b"'
    )
    assert (planned.api.name, planned.region, planned.profile) == ("completions-dev", "eu-west-1", "b")
    given = read_plan(tmp_path / "samconfig.toml", "dev", [], stack="other", region="us-east-1")
    assert (given.api.name, given.region) == ("other", "us-east-1")


@pytest.mark.parametrize(
    ("text", "environment", "said"),
    [
        ("[dev.deploy.parameters]\n", "dev", "[dev.deploy.parameters]: there is no stack_name; or give --stack"),
        ("[dev.deploy.parameters]\n", "test", "there is no environment test; there are: dev"),
        ("[dev", "dev", "not TOML"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(
    tmp_path: Path, text: str, environment: str, said: str
) -> None:
    config = tmp_path / "samconfig.toml"
    config.write_text(text)
    with pytest.raises(SamConfigError, match=re.escape(said)):
        read_plan(config, environment, [])


@pytest.mark.parametrize("lacking", ["template_file", "stack_name"])
def test_a_models_environment_says_what_sam_would_deploy(tmp_path: Path, lacking: str) -> None:
    without = re.sub(f"{lacking} = .*", "", MODEL)
    with pytest.raises(SamConfigError, match=rf"\[model.deploy.parameters\]: there is no {lacking}"):
        plan(tmp_path, more=without)


def test_without_a_configuration_the_message_says_where_to_run(tmp_path: Path) -> None:
    with pytest.raises(SamConfigError, match=r"No such file or directory; run this where"):
        usual_models(tmp_path / "samconfig.toml")


@pytest.mark.parametrize(
    "value",
    ["", "top_k,min_p", 'a model\'s "name"', "$HOME `x` $(y)", "'quoted'", '"quoted"', "a\\", "\\ b\\\\ c\\'d", "1e3"],
)
def test_sam_reads_the_printed_parameters_as_it_reads_the_configuration(tmp_path: Path, value: str) -> None:
    given = {"SourcegraphDefaultModel": value, "StageName": "dev"}
    text = "[dev.deploy.parameters]\nstack_name = 's'\n[dev.deploy.parameters.parameter_overrides]\n"
    config = tmp_path / "samconfig.toml"
    config.write_text(text + "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
    file = tmp_path / "parameters.yaml"
    file.write_text(overrides_text(read_plan(config, "dev", [])))

    sam = CfnParameterOverridesType()
    read = sam.convert((f"file://{file}",), None, None)
    assert re.fullmatch("[0-9a-f]{10}", read.pop("ReleaseId"))
    assert read.pop("Architecture") == "arm64"  # the template's default, for which the functions are built
    assert read == sam.convert(given, None, None)


@pytest.mark.parametrize("release", ["1234567890", "12345e6789", "0000000001"])
def test_a_release_that_looks_like_a_number_stays_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: release)
    file = tmp_path / "parameters.yaml"
    file.write_text(overrides_text(plan(tmp_path)))
    assert CfnParameterOverridesType().convert((f"file://{file}",), None, None)["ReleaseId"] == release


def test_every_deployment_is_a_new_release(tmp_path: Path) -> None:
    assert plan(tmp_path).api.values["ReleaseId"] != plan(tmp_path).api.values["ReleaseId"]


def test_what_aws_does_not_answer_is_not_checked_and_the_others_are() -> None:
    def denied() -> list[Finding]:
        raise NotAnsweredError("sts:Ask", "AccessDenied", "no")

    def throttled() -> list[Finding]:
        raise NotAnsweredError("sts:Ask", "ThrottlingException", "<html>\n  slow\ndown")

    checks = [Check("a", denied), Check("b", throttled), Check("c", lambda: [ok("well")])]
    assert list(findings(checks)) == [
        Finding(Verdict.NOT_CHECKED, "needs sts:Ask", "allow sts:Ask to whoever runs this, or look yourself", "", "a"),
        Finding(Verdict.NOT_CHECKED, "sts:Ask: ThrottlingException: <html> slow down", "", "", "b"),
        Finding(Verdict.OK, "well", "", "", "c"),
    ]
