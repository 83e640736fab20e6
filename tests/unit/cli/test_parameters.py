"""A stack's parameters, refused as CloudFormation would refuse them, and read as SAM would read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from samcli.cli.types import CfnParameterOverridesType

from completions_cli.local.template import load_template
from completions_cli.parameters import NOT_CHECKED, SamConfigError, check_parameters, read_samconfig


def declared(**spec: Any) -> dict[str, Any]:
    """A template with one parameter, ``P``."""
    return {"Parameters": {"P": {"Type": "String", **spec}}}


def checked(spec: Mapping[str, Any], value: str) -> list[str]:
    return check_parameters(declared(**spec), {"P": value})


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ({}, ""),
        ({"AllowedValues": ["a", "b"]}, "b"),
        ({"AllowedValues": [1, 2]}, "2"),
        ({"AllowedValues": [True]}, "true"),  # as CloudFormation reads an unquoted yes
        ({"AllowedPattern": "[a-z]+"}, "abc"),
        ({"AllowedPattern": "^[a-z]*$"}, ""),
        ({"MinLength": 2, "MaxLength": 3}, "ab"),
        ({"MinLength": "2", "MaxLength": "3"}, "abc"),
        ({"Type": "Number"}, "-1.5e3"),
        ({"Type": "Number", "MinValue": 1, "MaxValue": 3}, "1"),
        ({"Type": "Number", "MinValue": 1, "MaxValue": 3}, "3"),
        ({"Type": "Number", "MinValue": "0.5"}, "0.5"),
        ({"Type": "CommaDelimitedList", "AllowedPattern": "[a-z]"}, "a, b,c"),
        ({"Type": "CommaDelimitedList", "AllowedPattern": "[a-z]"}, ""),
        ({"Type": "CommaDelimitedList", "AllowedValues": ["a", "b"]}, "b,a"),
        ({"Type": "List<Number>", "MinValue": 1}, "1, 2"),
    ],
)
def test_a_value_within_its_constraints_is_accepted(spec: dict[str, Any], value: str) -> None:
    assert checked(spec, value) == []


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        ({"AllowedValues": ["a", "b"]}, "c", 'P: "c" is none of "a", "b"'),
        ({"AllowedValues": ["a"]}, "", 'P: "" is none of "a"'),
        ({"AllowedPattern": "[a-z]+"}, "abc1", 'P: "abc1" does not match [a-z]+'),
        ({"AllowedPattern": "[a-z]+"}, "abc\n", 'P: "abc\\n" does not match [a-z]+'),
        ({"AllowedPattern": "\\w+"}, "é", 'P: "é" does not match \\w+'),
        ({"MinLength": 2}, "a", 'P: "a" is less than 2 characters'),
        ({"MaxLength": "2"}, "abc", 'P: "abc" is more than 2 characters'),
        ({"Type": "Number"}, "one", 'P: "one" is no number'),
        ({"Type": "Number"}, "", 'P: "" is no number'),
        ({"Type": "Number"}, "0x10", 'P: "0x10" is no number'),
        ({"Type": "Number"}, "nan", 'P: "nan" is no number'),
        ({"Type": "Number", "MinValue": 1}, "0.5", 'P: "0.5" is less than 1'),
        ({"Type": "Number", "MaxValue": 3}, "10", 'P: "10" is more than 3'),
        ({"Type": "Number", "AllowedValues": [1, 2]}, "3", 'P: "3" is none of "1", "2"'),
        ({"Type": "CommaDelimitedList", "AllowedPattern": "[a-z]"}, "a,B", 'P: "B" does not match [a-z]'),
        ({"Type": "CommaDelimitedList", "AllowedValues": ["a"]}, "a,c", 'P: "c" is none of "a"'),
        ({"Type": "List<Number>"}, "1,two", 'P: "two" is no number'),
        (
            {"Type": "Number", "MinValue": 1, "ConstraintDescription": "a number above 0."},
            "0",
            'P: "0" does not meet its constraint: a number above 0.',
        ),
    ],
)
def test_a_value_outside_its_constraints_is_named_with_what_is_right(
    spec: dict[str, Any], value: str, message: str
) -> None:
    assert checked(spec, value) == [message]


def test_a_default_is_checked_as_a_value_given_is() -> None:
    assert check_parameters(declared(Default="c", AllowedValues=["a"]), {}) == ['P: "c" is none of "a"']
    assert check_parameters(declared(Type="Number", Default=1, MinValue=1), {}) == []


@pytest.mark.parametrize("hidden", [True, "true"])
@pytest.mark.parametrize("described", [{}, {"ConstraintDescription": "hexadecimal digits."}])
def test_a_secret_is_refused_without_being_shown(hidden: bool | str, described: dict[str, str]) -> None:
    (message,) = checked({"NoEcho": hidden, "AllowedPattern": "[0-9a-f]+", **described}, "s3cret")
    assert message.startswith("P: its value does")
    assert "s3cret" not in message


def test_a_parameter_without_value_or_default_is_missed() -> None:
    assert check_parameters(declared(), {}) == ["P: it has no value, and the template no default for it"]


def test_a_parameter_the_template_does_not_have_is_named_with_the_nearest_it_has() -> None:
    template = {"Parameters": {"StageName": {"Type": "String", "Default": "prod"}}}
    assert check_parameters(template, {"StageNmae": "dev"}) == [
        "StageNmae: the template has no such parameter; did you mean StageName?"
    ]
    assert check_parameters(template, {"X": "dev"}) == ["X: the template has no such parameter"]


@pytest.mark.parametrize(
    "spec",
    [
        {"Type": "AWS::EC2::VPC::Id"},
        {"Type": "List<AWS::EC2::Subnet::Id>"},
        {"Type": "AWS::SSM::Parameter::Value<String>"},
        {"AllowedPattern": "\\p{Alpha}+"},  # Java's
    ],
)
def test_what_is_not_checked_is_said(spec: dict[str, Any]) -> None:
    (message,) = checked(spec, "vpc-1")
    assert message.startswith("P: ")
    assert message.endswith(NOT_CHECKED)


def test_every_parameter_that_is_wrong_has_its_message() -> None:
    template = {
        "Parameters": {
            "A": {"Type": "Number"},
            "B": {"Type": "String", "AllowedValues": ["x"]},
            "C": {"Type": "String"},
        }
    }
    names = [message.split(":")[0] for message in check_parameters(template, {"A": "x", "B": "y", "D": "z"})]
    assert names == ["D", "A", "B", "C"]


RULES = """
Parameters:
  Colour: {Type: String, Default: red}
  Size: {Type: Number, Default: 2}
  Zones: {Type: CommaDelimitedList, Default: "a,b"}
  None: {Type: CommaDelimitedList, Default: ""}
  Missing: {Type: String}
Resources: {}
"""


def broken(tmp_path: Path, rule: str, **values: str) -> list[str]:
    """The messages of a template with one rule."""
    path = tmp_path / "template.yaml"
    path.write_text(f"{RULES}\nRules:\n  R: {rule}\n")
    return check_parameters(load_template(path), {"Missing": "", **values})


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("!Equals [!Ref Colour, red]", True),
        ("!Equals [!Ref Colour, blue]", False),
        ('!Equals [!Ref Size, "2"]', True),
        ("!Equals [!Ref Size, 2]", True),
        ("!Not [!Equals [!Ref Colour, red]]", False),
        ("!And [!Equals [a, a], !Equals [b, b]]", True),
        ("!And [!Equals [a, a], !Equals [a, b]]", False),
        ("!Or [!Equals [a, b], !Equals [b, b]]", True),
        ("!Or [!Equals [a, b], !Equals [b, c]]", False),
        ("{'Fn::Contains': [[red, green], !Ref Colour]}", True),
        ("{'Fn::Contains': [[blue, green], !Ref Colour]}", False),
        ("{'Fn::Contains': [[1, 2], !Ref Size]}", True),
        ("{'Fn::Contains': [!Ref Zones, b]}", True),
        ("{'Fn::Contains': [!Ref Zones, c]}", False),
        ("{'Fn::EachMemberIn': [!Ref Zones, [a, b, c]]}", True),
        ("{'Fn::EachMemberIn': [!Ref Zones, [b, c]]}", False),
        ("{'Fn::EachMemberIn': [[!Ref Colour], [red]]}", True),
        ("{'Fn::EachMemberEquals': [!Ref Zones, a]}", False),
        ("{'Fn::EachMemberEquals': [[a, a], a]}", True),
        ("{'Fn::EachMemberEquals': [!Ref None, a]}", True),
        ("true", True),
        ("false", False),
    ],
)
def test_the_functions_of_rules_decide(tmp_path: Path, condition: str, holds: bool) -> None:
    asserted = f"{{Assertions: [{{Assert: {condition}, AssertDescription: as it must be}}]}}"
    assert broken(tmp_path, asserted) == ([] if holds else ["rule R: as it must be"])
    conditional = f"{{RuleCondition: {condition}, Assertions: [{{Assert: !Equals [a, b]}}]}}"
    assert broken(tmp_path, conditional) == (["rule R: its assertion is false"] if holds else [])


def test_a_value_given_decides_not_the_default(tmp_path: Path) -> None:
    rule = "{Assertions: [{Assert: !Equals [!Ref Colour, red], AssertDescription: red it is}]}"
    assert broken(tmp_path, rule, Colour="blue") == ["rule R: red it is"]


def test_each_assertion_of_a_rule_has_its_message(tmp_path: Path) -> None:
    rule = """{Assertions: [
      {Assert: !Equals [a, b], AssertDescription: one},
      {Assert: !Equals [a, a], AssertDescription: two},
      {Assert: !Equals [b, a], AssertDescription: three}]}"""
    assert broken(tmp_path, rule) == ["rule R: one", "rule R: three"]


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("{'Fn::EachMemberIn': [{'Fn::ValueOfAll': ['AWS::EC2::Subnet::Id', VpcId]}, [a]]}", "Fn::ValueOfAll asks"),
        ("{'Fn::Contains': [{'Fn::RefAll': 'AWS::EC2::VPC::Id'}, a]}", "Fn::RefAll asks the account"),
        ("!Equals [!Ref AWS::Region, eu-west-1]", "AWS::Region is known when the stack is made"),
        ("!If [a, b, c]", "Fn::If is no function of rules"),
        ("!Equals [!Sub 'x', x]", "Fn::Sub is no function of rules"),
        ("!Equals [a]", "Fn::Equals has operands it does not take"),
        ("{'Fn::Contains': [!Ref Colour, red]}", "Fn::Contains has operands it does not take"),
        ("maybe", '"maybe" is no condition'),
    ],
)
def test_a_rule_that_cannot_be_decided_is_said(tmp_path: Path, condition: str, reason: str) -> None:
    (message,) = broken(tmp_path, f"{{Assertions: [{{Assert: {condition}}}]}}")
    assert message.startswith(f"rule R: {reason}")
    assert message.endswith(NOT_CHECKED)


def test_what_is_decided_before_the_undecidable_counts(tmp_path: Path) -> None:
    rule = "{Assertions: [{Assert: !Or [!Equals [a, a], !Equals [!Ref AWS::Region, b]]}]}"
    assert broken(tmp_path, rule) == []


def test_a_rule_about_a_missing_parameter_adds_nothing_to_its_message(tmp_path: Path) -> None:
    path = tmp_path / "template.yaml"
    path.write_text(f"{RULES}\nRules: {{R: {{Assertions: [{{Assert: !Equals [!Ref Missing, a]}}]}}}}\n")
    assert check_parameters(load_template(path), {}) == ["Missing: it has no value, and the template no default for it"]


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "samconfig.toml"
    path.write_text(text)
    return path


def overrides(tmp_path: Path, value: str) -> dict[str, str]:
    """What is read of one ``parameter_overrides``, a TOML value."""
    path = config(tmp_path, f"version = 0.1\n[dev.deploy.parameters]\nparameter_overrides = {value}\n")
    return read_samconfig(path, "dev")


AS_SAM = [
    "A=b",
    'A=b C="d e"',
    "A=b  C='d e'   F=g",
    "A=b=c D=x,y",
    r"A=two\ words",
    r'A="say \"so\"" B=c',
    'A="" B=c',
    "A=it's",
    "A=s3://bucket/prefix/*",
    "ParameterKey=A,ParameterValue=b ParameterKey=C,ParameterValue='d e'",
    ["A=b", 'C="d e"'],
    ["A=b C=d", "E=f"],
    [{"A": "b"}, "C=d"],
    {"A": "b", "C": "d e"},
    {"A": 1, "B": 2.5, "C": True},
    {"A": ["x", " y"], "B": '"quoted"'},
    "",
    {},
]


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {as_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, str):
        return f"'''{value}'''"
    return "true" if value is True else str(value)


@pytest.mark.parametrize("value", AS_SAM, ids=str)
def test_parameters_are_read_as_sam_reads_them(tmp_path: Path, value: Any) -> None:
    assert overrides(tmp_path, as_toml(value)) == CfnParameterOverridesType().convert(value, None, None)


def test_a_string_and_a_list_and_a_table_say_the_same(tmp_path: Path) -> None:
    expected = {"StageName": "dev", "Extra": "a b"}
    assert overrides(tmp_path, "'StageName=dev Extra=\"a b\"'") == expected
    assert overrides(tmp_path, "['StageName=dev', 'Extra=\"a b\"']") == expected
    assert overrides(tmp_path, "{StageName = 'dev', Extra = 'a b'}") == expected


def test_each_environment_has_its_own_parameters(tmp_path: Path) -> None:
    text = """
version = 0.1
[dev.deploy.parameters]
parameter_overrides = "A=1"
[prod.deploy.parameters]
parameter_overrides = "A=2"
[bare.deploy.parameters]
stack_name = "x"
[shared.global.parameters]
parameter_overrides = "A=3"
"""
    path = config(tmp_path, text)
    assert [read_samconfig(path, name) for name in ("dev", "prod", "bare", "shared")] == [
        {"A": "1"},
        {"A": "2"},
        {},
        {"A": "3"},
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"A=b C"', 'from C on, it is not Name=value or Name="a value"'),
        ('"A= C=d"', "from A on"),
        ("'A=\"b'", "from A on"),
        ("'Secret=\"s3cret'", "from Secret on"),
        ('"A-B=c"', "from A-B on"),
        ('"file://dev.yaml"', "files are not read"),
        ('"A=b A=c"', "A is given twice"),
        ('["A=b", {A = "c"}]', "A is given twice"),
        ("3", "a string, a table or a list of these is expected, not 3"),
        ("{A = {B = 'c'}}", "A: a string, a number or a list of these is expected"),
    ],
)
def test_what_is_no_parameter_is_said_with_its_place(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(SamConfigError) as caught:
        overrides(tmp_path, value)
    assert message in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/samconfig.toml: [dev.deploy.parameters] parameter_overrides")


def test_an_environment_that_is_not_there_is_said_with_those_that_are(tmp_path: Path) -> None:
    path = config(tmp_path, "version = 0.1\n[dev.deploy.parameters]\n[prod.deploy.parameters]\n")
    with pytest.raises(SamConfigError, match="there is no environment test; there are: dev, prod"):
        read_samconfig(path, "test")


@pytest.mark.parametrize(
    "text", ["dev = 1", "[dev]\ndeploy = 1", "[dev.deploy]\nparameters = 'x'"], ids=["env", "command", "parameters"]
)
def test_what_should_be_a_table_is_said(tmp_path: Path, text: str) -> None:
    with pytest.raises(SamConfigError, match=r"\[dev\.deploy\.parameters\]: not a table"):
        read_samconfig(config(tmp_path, text), "dev")


def test_a_file_that_is_not_there_or_not_toml_is_said(tmp_path: Path) -> None:
    with pytest.raises(SamConfigError, match="No such file"):
        read_samconfig(tmp_path / "samconfig.toml", "dev")
    with pytest.raises(SamConfigError, match=r"not TOML: .*line 2"):
        read_samconfig(config(tmp_path, "version = 0.1\ndev =\n"), "dev")
    (tmp_path / "samconfig.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SamConfigError, match="not TOML"):
        read_samconfig(tmp_path / "samconfig.toml", "dev")


@pytest.mark.parametrize("name", ["template.yaml", "infra/model-endpoint.yaml", "infra/observability.yaml"])
def test_the_projects_own_defaults_meet_their_own_constraints(project_root: Path, name: str) -> None:
    template = load_template(project_root / name)
    required = [name for name, spec in template["Parameters"].items() if "Default" not in spec]
    messages = [one for one in check_parameters(template, {}) if not one.startswith("rule ")]
    assert messages == [f"{name}: it has no value, and the template no default for it" for name in required]
