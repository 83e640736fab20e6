"""What the local gateway reads of ``template.yaml``: functions, routes, and the gateway's own answers.

Only the intrinsics that decide those are evaluated (``Ref`` to a parameter, conditions, ``Fn::If``); the rest stay as
they are, for they name resources that exist on AWS alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # a PyYAML without libyaml reads the same, ten times as long
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

LAMBDA_DEFAULT_SECONDS: Final = 3
_NO_VALUE: Final = {"Ref": "AWS::NoValue"}
_GATEWAY_HEADER: Final = "gatewayresponse.header."
_FUNCTION_ARN: Final = re.compile(r"functions/\$\{(\w+)\.Arn\}(?::\w+)?/")


class TemplateError(Exception):
    """The template is missing, or is not what this reader understands."""


@dataclass(frozen=True, slots=True)
class Function:
    """One Lambda function. ``timeout`` is seconds; ``variables`` are those with a plain value."""

    name: str
    handler: str
    timeout: int
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of the API. ``path`` is API Gateway's: ``{name}`` and ``{name+}`` are parameters."""

    method: str
    path: str
    function: Function
    streamed: bool

    @property
    def entry_point(self) -> str:
        """``module:name`` of what is called: a streamed function's ASGI app, a buffered one's handler."""
        return (
            self.function.variables["APP_MODULE"] if self.streamed else ":".join(self.function.handler.rsplit(".", 1))
        )


@dataclass(frozen=True, slots=True)
class GatewayReply:
    """An answer the gateway makes itself; ``body`` holds ``$context`` variables, ``headers`` maps to expressions."""

    status: int | None = None
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatewayTemplate:
    """All that the gateway serves. Bodies of ``binary_media_types`` reach a function as base64."""

    routes: tuple[Route, ...]
    replies: Mapping[str, GatewayReply]
    binary_media_types: frozenset[str] = frozenset()


class _Loader(_SafeLoader):
    """YAML with CloudFormation's short intrinsics, read as their long form."""


def _intrinsic(loader: _SafeLoader, name: str, node: yaml.Node) -> Any:
    key = name if name in ("Ref", "Condition") else f"Fn::{name}"
    if isinstance(node, yaml.ScalarNode):
        value = str(loader.construct_scalar(node))
        return {key: value.split(".", 1) if key == "Fn::GetAtt" else value}
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
    """The routes of the API's definition as they are under ``parameters``.

    Raises ``TemplateError``.
    """
    tree = load_template(path)
    resolver = Resolver(tree, parameters)
    present = {name: (one["Type"], one.get("Properties", {})) for name, one in resolver.resources().items()}
    shared = resolver.resolve(tree.get("Globals", {}).get("Function", {}))
    functions = {
        name: _function(name, _merged(shared, properties))
        for name, (kind, properties) in present.items()
        if kind == "AWS::Serverless::Function"
    }
    routes: list[Route] = []
    replies: dict[str, GatewayReply] = {}
    binary: set[str] = set()
    for kind, properties in present.values():
        if kind == "AWS::Serverless::Api":
            routes += _defined_routes(properties.get("DefinitionBody", {}), functions)
            answers = properties.get("DefinitionBody", {}).get("x-amazon-apigateway-gateway-responses", {})
            replies |= {kind: _reply(reply) for kind, reply in answers.items()}
            binary |= set(properties.get("DefinitionBody", {}).get("x-amazon-apigateway-binary-media-types", ()))
    return GatewayTemplate(tuple(routes), replies, frozenset(binary))


def _function(name: str, properties: Mapping[str, Any]) -> Function:
    variables = properties.get("Environment", {}).get("Variables", {})
    plain = {key: value for key, value in variables.items() if isinstance(value, str)}
    return Function(name, properties["Handler"], properties.get("Timeout", LAMBDA_DEFAULT_SECONDS), plain)


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """SAM's globals under a resource's own properties: maps are merged, all else is replaced."""
    nested = {
        name: _merged(value, own[name])
        for name, value in shared.items()
        if isinstance(value, dict) and isinstance(own.get(name), dict)
    }
    return {**shared, **own, **nested}


def _defined_routes(definition: Mapping[str, Any], functions: Mapping[str, Function]) -> list[Route]:
    """The methods of an OpenAPI body whose integration names one of the functions."""
    routes = []
    for path, methods in definition.get("paths", {}).items():
        for method, operation in methods.items():
            integration = operation["x-amazon-apigateway-integration"]
            uri = str(integration["uri"])
            match = _FUNCTION_ARN.search(uri)
            if match is None or match[1] not in functions:
                raise TemplateError(f"{method.upper()} {path}: no function of this template in {uri}")
            streamed = integration.get("responseTransferMode") == "STREAM"
            routes.append(Route(method.upper(), path, functions[match[1]], streamed))
    return routes


def _reply(reply: Mapping[str, Any]) -> GatewayReply:
    return GatewayReply(
        status=reply.get("statusCode"),
        body=reply.get("responseTemplates", {}).get("application/json", ""),
        headers={
            name.removeprefix(_GATEWAY_HEADER): expression
            for name, expression in reply.get("responseParameters", {}).items()
        },
    )


class Resolver:
    """Evaluates conditions and parameters of a template. Raises ``TemplateError`` for a parameter it has not."""

    def __init__(self, tree: Mapping[str, Any], parameters: Mapping[str, str]) -> None:
        self._tree = tree
        declared = tree.get("Parameters", {})
        if unknown := sorted(set(parameters) - set(declared)):
            raise TemplateError(f"the template has no parameter {', '.join(unknown)}")
        self._parameters = {name: parameters.get(name, spec.get("Default")) for name, spec in declared.items()}
        self._conditions = tree.get("Conditions", {})

    def holds(self, condition: str | None) -> bool:
        """Whether a named condition is true; no condition is."""
        return condition is None or bool(self.resolve(self._conditions[condition]))

    def resources(self) -> dict[str, Any]:
        """Those whose condition holds, resolved."""
        return {
            name: self.resolve(resource)
            for name, resource in self._tree["Resources"].items()
            if self.holds(resource.get("Condition"))
        }

    def resolve(self, node: Any) -> Any:
        """``node`` with the known intrinsics evaluated."""
        if isinstance(node, list):
            return [value for value in map(self.resolve, node) if value != _NO_VALUE]
        if not isinstance(node, dict):
            return node
        if len(node) == 1:
            ((key, value),) = node.items()
            return self._intrinsic(key, value)
        resolved = {name: self.resolve(value) for name, value in node.items()}
        return {name: value for name, value in resolved.items() if value != _NO_VALUE}

    def _intrinsic(self, key: str, value: Any) -> Any:  # noqa: PLR0911 - one return an intrinsic
        match key:
            case "Ref" if value in self._parameters:
                return self._parameters[value]
            case "Condition" if isinstance(value, str) and value in self._conditions:
                return self.holds(value)
            case "Fn::Equals":
                left, right = self.resolve(value)
                return str(left) == str(right)  # parameters are strings, whatever their type
            case "Fn::Not":
                return not self.resolve(value[0])
            case "Fn::And":
                return all(self.resolve(value))
            case "Fn::Or":
                return any(self.resolve(value))
            case "Fn::If":
                condition, yes, no = value
                return self.resolve(yes if self.holds(condition) else no)
            case _:
                return {key: self.resolve(value)}
