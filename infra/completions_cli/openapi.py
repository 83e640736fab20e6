"""``completions openapi``: the OpenAPI document of every public route, generated from the apps themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from fastapi import FastAPI
    from fastapi.routing import APIRoute

    from completions.dialects.documentation import Documentation, Operation, Reply

OUTPUT: Final = Path("infra/openapi/openapi.json")
_HEALTH: Final = ("GET", "/healthz")
_DASHBOARD: Final = ("GET", "/dashboard")
_GATEWAY_ERROR: Final = "GatewayError"
_UNKNOWN_PATH: Final = {404: "No such path."}
"""Of a route with a parameter, which not every text fits."""
_GATEWAY_STATUSES: Final = {
    413: "More bytes than the platform carries.",
    429: "The gateway's own limit was passed.",
    500: "The gateway failed.",
    502: "The function failed.",
    503: "The gateway is overloaded.",
    504: "The function did not answer in time.",
}
"""What API Gateway may answer in a function's stead, whatever the dialect."""
_ABOUT: Final = (
    "Text and code completions in three public API dialects. Answers carry `x-request-id`. What the gateway answers "
    "itself, unknown routes included, has the form of `GatewayError`, which the clients of every dialect can read."
)


def openapi(
    output: Annotated[Path, typer.Option(help="The file to write, or to compare with.")] = OUTPUT,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail when the file differs.")] = False,
) -> None:
    """Write the OpenAPI document, or check that the one on disk is current."""
    text = document_text()
    if not check:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
        return
    try:
        current = output.read_text()
    except OSError as error:
        current = ""
        typer.echo(f"completions openapi: {output}: {error.strerror}", err=True)
    if current != text:
        typer.echo(f"completions openapi: {output} is stale: run 'completions openapi'", err=True)
        raise typer.Exit(1)


def document_text() -> str:
    """The document as it is committed."""
    return json.dumps(build_document(), ensure_ascii=False, indent=2, sort_keys=True) + "\n"


def documentations() -> tuple[Documentation, ...]:
    """Every dialect's own, in the order of the README's columns."""
    from completions.dialects import openai_schema, scale_schema, sourcegraph_schema  # noqa: PLC0415 - not for --help

    return (
        openai_schema.DOCUMENTATION,
        scale_schema.SCALE,
        scale_schema.SCALE_V1,
        sourcegraph_schema.DOCUMENTATION,
    )


def build_document() -> dict[str, Any]:
    """All apps' documents in one. Raises ``ValueError`` when a route or its documentation lacks the other."""
    from completions import __version__  # noqa: PLC0415 - not for --help
    from completions.dialects import openai_batches_schema, organization_schema  # noqa: PLC0415

    published = (*documentations(), openai_batches_schema.DOCUMENTATION, organization_schema.DOCUMENTATION)
    operations = {_HEALTH: (_health(), ()), _DASHBOARD: (_dashboard(), ())} | {
        place: (operation, tuple(one.security)) for one in published for place, operation in one.operations.items()
    }
    paths: dict[str, dict[str, Any]] = {}
    undocumented = set(operations)
    for app in (*_apps(), _page_app()):
        for route in _routes(app):
            _document(route, operations)
        for path, methods in app.openapi()["paths"].items():
            paths.setdefault(path, {}).update(methods)
            undocumented -= {(method.upper(), path) for method in methods}
    if undocumented:
        raise ValueError(f"documented, but not served: {sorted(undocumented)}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Completions gateway", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": _merged([{_GATEWAY_ERROR: _gateway_error()}, *(one.schemas for one in published)]),
            "securitySchemes": _merged([one.security for one in published]),
        },
    }


def _apps() -> list[FastAPI]:
    """Built of no parts at all: nothing is asked of them before the first request."""
    from completions import batches_bootstrap, bootstrap  # noqa: PLC0415 - not for --help

    nothing: Any = None
    batches = batches_bootstrap.BatchParts(registry=nothing, batches=nothing, clock=nothing)
    parts = bootstrap.Parts(registry=nothing, backend=nothing, ledger=nothing, reports=nothing, clock=nothing)
    return [
        batches_bootstrap.batches_app(batches),
        *(
            build(parts)
            for build in (
                bootstrap.openai_completions_app,
                bootstrap.openai_models_app,
                bootstrap.organization_app,
                bootstrap.scale_completions_app,
                bootstrap.scale_v1_completions_app,
                bootstrap.scale_models_app,
                bootstrap.sourcegraph_completions_app,
                bootstrap.sourcegraph_site_app,
            )
        ),
    ]


def _page_app() -> FastAPI:
    """The dashboard's function has no app; this stands in for it, so that its route is described as all others are."""
    from fastapi import FastAPI  # noqa: PLC0415 - not for --help

    app = FastAPI()
    app.add_api_route(_DASHBOARD[1], lambda: None, methods=[_DASHBOARD[0]])
    return app


def _routes(app: FastAPI) -> Iterator[APIRoute]:
    from fastapi.routing import APIRoute  # noqa: PLC0415 - not for --help

    return (route for route in app.routes if isinstance(route, APIRoute))


def _document(route: APIRoute, operations: Mapping[tuple[str, str], tuple[Operation, tuple[str, ...]]]) -> None:
    """Let FastAPI say about a route what its dialect publishes."""
    from starlette.responses import Response  # noqa: PLC0415 - not for --help

    method = next(iter(route.methods or ()))
    if (method, route.path_format) not in operations:
        raise ValueError(f"served, but not documented: {method} {route.path_format}")
    operation, security = operations[method, route.path_format]
    added = {**_UNKNOWN_PATH, **_GATEWAY_STATUSES} if route.param_convertors else _GATEWAY_STATUSES
    replies = _with_gateway(operation.replies, added)
    route.operation_id = operation.operation_id
    route.summary = operation.summary
    route.description = ""
    route.response_class = Response  # no media type of its own
    route.status_code = min(replies)
    route.response_description = replies[min(replies)].description
    route.responses = {
        status: {"description": reply.description, "content": dict(reply.content)} for status, reply in replies.items()
    }
    route.openapi_extra = _extra(operation, security)


def _extra(operation: Operation, security: Sequence[str]) -> dict[str, Any]:
    from completions.dialects.documentation import ref  # noqa: PLC0415 - not for --help

    extra: dict[str, Any] = {}
    if security:
        extra["security"] = [{name: []} for name in security]
    if operation.parameters:
        extra["parameters"] = list(operation.parameters)
    if operation.request is not None:
        media: dict[str, Any] = {"schema": ref(operation.request)}
        if operation.example is not None:
            media["example"] = operation.example
        extra["requestBody"] = {"required": True, "content": {operation.request_media: media}}
    return extra


def _with_gateway(replies: Mapping[int, Reply], added: Mapping[int, str]) -> dict[int, Reply]:
    from completions.dialects.documentation import JSON, Reply, ref  # noqa: PLC0415 - not for --help

    own = ref(_GATEWAY_ERROR)
    merged = dict(replies)
    for status, description in added.items():
        known = replies.get(status)
        if known is None:
            merged[status] = Reply(description, {JSON: {"schema": own}})
            continue
        schema = {"anyOf": [known.content[JSON]["schema"], own]} if JSON in known.content else own
        merged[status] = Reply(known.description, {**known.content, JSON: {"schema": schema}})
    return dict(sorted(merged.items()))


def _gateway_error() -> dict[str, Any]:
    from completions.dialects.documentation import STRING, nullable, record  # noqa: PLC0415 - not for --help

    error = record({"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)})
    return record({"error": error, "detail": STRING, "request_id": STRING})


def _health() -> Operation:
    from completions.dialects.documentation import STRING, TEXT, Operation, Reply  # noqa: PLC0415 - not for --help

    return Operation("health", "The service's version", {200: Reply("It is there.", {TEXT: {"schema": STRING}})})


def _dashboard() -> Operation:
    from completions.dialects.documentation import HTML, STRING, Operation, Reply  # noqa: PLC0415 - not for --help

    return Operation("dashboard", "A page that shows usage", {200: Reply("The page.", {HTML: {"schema": STRING}})})


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One mapping of all; a name may come twice only if it means the same."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if merged.setdefault(name, value) != value:
                raise ValueError(f"two components have the name {name}")
    return merged
