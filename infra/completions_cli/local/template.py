"""What the local gateway reads of ``template.yaml``: functions, routes, and the gateway's own answers.

Only the intrinsics that decide those are evaluated (``Ref`` to a parameter, conditions, ``Fn::If``); the rest stay as
they are, for they name resources that exist on AWS alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class TemplateError(Exception):
    """The template is missing, or is not what this reader understands."""


@dataclass(frozen=True, slots=True)
class Route:
    """One API event of a function. ``path`` is API Gateway's: ``{name}`` and ``{name+}`` are parameters."""

    function: str
    method: str
    path: str
    handler: str
    streamed: bool
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GatewayReply:
    """An answer the gateway makes itself; ``body`` holds ``$context`` variables."""

    status: int | None
    body: str


@dataclass(frozen=True, slots=True)
class GatewayTemplate:
    """All that the gateway serves."""

    routes: tuple[Route, ...]
    replies: Mapping[str, GatewayReply]


class _Loader(yaml.SafeLoader):
    """YAML with CloudFormation's short intrinsics, read as their long form."""


def _intrinsic(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> Any:
    key = name if name in ("Ref", "Condition") else f"Fn::{name}"
    if isinstance(node, yaml.ScalarNode):
        return {key: loader.construct_scalar(node)}
    if isinstance(node, yaml.SequenceNode):
        return {key: loader.construct_sequence(node, deep=True)}
    if isinstance(node, yaml.MappingNode):
        return {key: loader.construct_mapping(node, deep=True)}
    raise TemplateError(f"!{name}: unknown kind of node")


_Loader.add_multi_constructor("!", _intrinsic)


def load_template(path: Path) -> dict[str, Any]:
    """The template's tree, intrinsics in their long form. Raises ``TemplateError``."""
    try:
        tree = yaml.load(path.read_text(), _Loader)  # noqa: S506 - a SafeLoader with the intrinsics added
    except OSError as error:
        raise TemplateError(f"{path}: {error.strerror}; run this where the project's template.yaml is") from None
    except yaml.YAMLError as error:
        raise TemplateError(f"{path}: not YAML: {error}") from None
    if not isinstance(tree, dict) or "Resources" not in tree:
        raise TemplateError(f"{path}: not a CloudFormation template: it has no Resources")
    return tree


def read_gateway(path: Path, parameters: Mapping[str, str]) -> GatewayTemplate:
    """The routes of every function whose condition holds under ``parameters``. Raises ``TemplateError``."""
    tree = load_template(path)
    resolver = _Resolver(tree, parameters)
    routes: list[Route] = []
    replies: dict[str, GatewayReply] = {}
    for name, resource in tree["Resources"].items():
        if not resolver.holds(resource.get("Condition")):
            continue
        properties = resolver.resolve(resource.get("Properties", {}))
        if resource["Type"] == "AWS::Serverless::Function":
            routes += _routes(name, properties)
        elif resource["Type"] == "AWS::Serverless::Api":
            replies |= {kind: _reply(reply) for kind, reply in properties.get("GatewayResponses", {}).items()}
    return GatewayTemplate(tuple(routes), replies)


def _routes(function: str, properties: Mapping[str, Any]) -> list[Route]:
    variables = properties.get("Environment", {}).get("Variables", {})
    return [
        Route(
            function=function,
            method=event["Properties"]["Method"].upper(),
            path=event["Properties"]["Path"],
            handler=properties["Handler"],
            streamed=event["Properties"].get("ResponseTransferMode") == "RESPONSE_STREAM",
            variables={name: value for name, value in variables.items() if isinstance(value, str)},
        )
        for event in properties.get("Events", {}).values()
        if event["Type"] == "Api"
    ]


def _reply(reply: Mapping[str, Any]) -> GatewayReply:
    return GatewayReply(reply.get("StatusCode"), reply.get("ResponseTemplates", {}).get("application/json", ""))


class _Resolver:
    def __init__(self, tree: Mapping[str, Any], parameters: Mapping[str, str]) -> None:
        declared = tree.get("Parameters", {})
        if unknown := sorted(set(parameters) - set(declared)):
            raise TemplateError(f"the template has no parameter {', '.join(unknown)}")
        self._parameters = {name: parameters.get(name, spec.get("Default")) for name, spec in declared.items()}
        self._conditions = tree.get("Conditions", {})

    def holds(self, condition: str | None) -> bool:
        """Whether a named condition is true; no condition is."""
        return condition is None or bool(self.resolve(self._conditions[condition]))

    def resolve(self, node: Any) -> Any:
        """``node`` with the known intrinsics evaluated."""
        if isinstance(node, list):
            return [self.resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if len(node) == 1:
            ((key, value),) = node.items()
            return self._intrinsic(key, value)
        return {name: self.resolve(value) for name, value in node.items()}

    def _intrinsic(self, key: str, value: Any) -> Any:
        match key:
            case "Ref" if value in self._parameters:
                return self._parameters[value]
            case "Condition" if isinstance(value, str) and value in self._conditions:
                return self.holds(value)
            case "Fn::Equals":
                left, right = self.resolve(value)
                return left == right
            case "Fn::Not":
                return not self.resolve(value[0])
            case "Fn::If":
                condition, yes, no = value
                return self.resolve(yes if self.holds(condition) else no)
            case _:
                return {key: self.resolve(value)}
