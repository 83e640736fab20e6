"""A template as CloudFormation would see it: SAM's transform, then parameters and conditions decided."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from samtranslator.parser.parser import Parser
from samtranslator.translator.translator import Translator

from completions_cli.local.template import Resolver, load_template


def transformed(root: Path, **parameters: str) -> dict[str, Any]:
    """The template that CloudFormation deploys. Conditions are still to be decided."""
    template = load_template(root / "template.yaml")
    # what `sam package` would have uploaded
    template["Globals"]["Function"]["CodeUri"] = "s3://bucket/code.zip"
    for resource in template["Resources"].values():
        properties = resource.get("Properties", {})
        if resource["Type"] == "AWS::Serverless::Application":
            properties["Location"] = f"https://s3.amazonaws.com/bucket/{Path(properties['Location']).name}"
        elif resource["Type"] == "AWS::Serverless::StateMachine":
            properties["DefinitionUri"] = f"s3://bucket/{Path(properties['DefinitionUri']).name}"
    result: dict[str, Any] = Translator({}, Parser()).translate(template, parameter_values=parameters)
    return result


def deployed(root: Path, **parameters: str) -> dict[str, Any]:
    """The resources that there are under ``parameters``, by logical id. They are shared: nobody changes them."""
    return _deployed(root, tuple(parameters.items()))


@cache
def _deployed(root: Path, parameters: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return Resolver(transformed(root, **dict(parameters)), dict(parameters)).resources()


def of_type(resources: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The properties of every resource of a type, by logical id."""
    return {name: one.get("Properties", {}) for name, one in resources.items() if one["Type"] == kind}
