"""HTTP glue, blind to dialects and containers: routes, the order of checks, buffered and streamed replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException

from completions.dialects.dialect import AnswerHead, Dialect, ErrorHead, Resource, WireReply, WireRequest
from completions.domain.completion import CompletionRequest
from completions.domain.errors import (
    CompletionError,
    InvalidRequestError,
    LimitStatus,
    MethodNotAllowedError,
    ServiceError,
    UnknownPathError,
)
from completions.domain.ports import Clock, Registry
from completions.observability import logger
from completions.service.complete import CallContext, CompletionService
from completions.web.arrival import Arrival
from completions.web.auth import authenticate, require_admin
from completions.web.idempotency import logical_request
from completions.web.middleware import RequestMiddleware
from completions.web.sse import StreamedReply


def completions_app(
    endpoints: Mapping[str, Dialect], service: CompletionService, registry: Registry, clock: Clock
) -> FastAPI:
    """The app that completes: ``POST`` on each path, in the dialect that speaks there."""
    app = _app(next(iter(endpoints.values())), clock)
    for path, dialect in endpoints.items():
        app.add_api_route(path, _completing(dialect, service, registry, clock), methods=["POST"])
    return app


def resources_app(dialect: Dialect, resources: Sequence[Resource], registry: Registry, clock: Clock) -> FastAPI:
    """The app of a dialect's other routes; each needs a key, and sees the models that key may use."""
    app = _app(dialect, clock)
    for resource in resources:
        app.add_api_route(resource.path, _replying(dialect, resource, registry, clock), methods=[resource.method])
    return app


def _completing(
    dialect: Dialect, service: CompletionService, registry: Registry, clock: Clock
) -> Callable[..., Response]:
    def complete(wire: Annotated[WireRequest, Depends(_wire_request)], request: Request) -> Response:
        arrived: Arrival = request.state.arrival
        request.state.dialect = dialect
        canonical = _decoded(dialect, wire, registry, clock)
        request.state.canonical = canonical
        principal = authenticate(dialect, wire, registry, clock, canonical.model)
        patient = canonical.stream and arrived.streamed and dialect.keepalive is not None
        context = CallContext(
            arrived.request_id,
            principal,
            dialect.name,
            arrived.at,
            arrived.deadline,
            patient,
            *logical_request(wire, principal),
        )
        if canonical.stream:
            stream = service.stream(canonical, context)
            encoder = dialect.stream_encoder(canonical, _head(arrived, stream.model, stream.limits, clock))
            return StreamedReply(stream, encoder, arrived.request_id, dialect.keepalive or b"")
        completion = service.complete(canonical, context)
        head = _head(arrived, completion.model, completion.limits, clock)
        return _response(dialect.encode(completion, canonical, head))

    return complete


def _replying(dialect: Dialect, resource: Resource, registry: Registry, clock: Clock) -> Callable[..., Response]:
    def reply(wire: Annotated[WireRequest, Depends(_wire_request)]) -> Response:
        principal = authenticate(dialect, wire, registry, clock)
        if resource.admins:
            require_admin(principal)
        visible = [route for route in registry.routes() if principal.may_use(route.model_id)]
        return _response(resource.reply(wire, principal, visible))

    return reply


def _app(dialect: Dialect, clock: Clock) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestMiddleware, clock=clock, encode_error=dialect.encode_error)
    app.add_exception_handler(CompletionError, _error_handler(dialect, clock))
    app.add_exception_handler(HTTPException, _error_handler(dialect, clock))
    app.add_api_route("/healthz", _health, methods=["GET"])  # what Lambda Web Adapter waits for
    return app


def _health() -> Response:
    return Response("ok", media_type="text/plain")


async def _wire_request(request: Request) -> WireRequest:
    return WireRequest(
        method=request.method,
        path=request.url.path,
        query=dict(request.query_params),
        headers=dict(request.headers),
        body=await request.body(),
        path_parameters=request.path_params,
        query_items=request.query_params.multi_items(),
    )


def _decoded(dialect: Dialect, wire: WireRequest, registry: Registry, clock: Clock) -> CompletionRequest:
    """The canonical request; a caller without a key hears that first, whatever else is wrong."""
    try:
        return dialect.decode(wire)
    except InvalidRequestError:
        authenticate(dialect, wire, registry, clock)
        raise


def _error_handler(dialect: Dialect, clock: Clock) -> Callable[[Request, Exception], Response]:
    def handle(request: Request, error: Exception) -> Response:
        canonical = _canonical(request, error)
        request_id = request.state.arrival.request_id
        if isinstance(canonical, ServiceError):
            logger.warning(
                "request_failed", request_id=request_id, error=type(canonical).__name__, detail=canonical.detail
            )
        understood: CompletionRequest | None = getattr(request.state, "canonical", None)
        head = ErrorHead(request_id, clock.now().timestamp(), understood)
        spoken: Dialect = getattr(request.state, "dialect", dialect)
        response = _response(spoken.encode_error(canonical, head))
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)  # a 405 says which methods there are
        return response

    return handle


def _canonical(request: Request, error: Exception) -> CompletionError:
    """Routing's own refusals in the domain's words."""
    if isinstance(error, CompletionError):
        return error
    place = f"{request.method} {request.url.path[:200]}"
    if isinstance(error, HTTPException) and error.status_code == 405:
        return MethodNotAllowedError(f"Not allowed: {place}.")
    return UnknownPathError(f"Unknown request URL: {place}.")


def _head(arrived: Arrival, model: str, limits: Sequence[LimitStatus], clock: Clock) -> AnswerHead:
    elapsed_ms = round((clock.monotonic() - arrived.at) * 1000)
    return AnswerHead(arrived.request_id, int(clock.now().timestamp()), model, elapsed_ms, tuple(limits))


def _response(reply: WireReply) -> Response:
    return Response(reply.body, reply.status, {"content-type": reply.media_type, **reply.headers})
