"""HTTP glue, blind to dialects and containers: routes, the order of checks, buffered and streamed replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException

from completions.dialects.dialect import AnswerHead, Dialect, ModelListing, WireReply, WireRequest
from completions.domain.completion import CompletionRequest
from completions.domain.errors import (
    CompletionError,
    InvalidRequestError,
    MethodNotAllowedError,
    ModelNotFoundError,
    ServiceError,
    UnknownPathError,
)
from completions.domain.ports import Clock, Registry
from completions.observability import logger
from completions.service.complete import CallContext, CompletionService
from completions.web.arrival import Arrival
from completions.web.auth import authenticate
from completions.web.middleware import RequestMiddleware
from completions.web.sse import StreamedReply


class ListingDialect(Dialect, ModelListing, Protocol):
    """A dialect that also lists models."""


def completions_app(
    dialect: Dialect, paths: Sequence[str], service: CompletionService, registry: Registry, clock: Clock
) -> FastAPI:
    """The app that completes: ``POST`` on each of ``paths``."""
    app = _app(dialect, clock)

    def complete(wire: Annotated[WireRequest, Depends(_wire_request)], request: Request) -> Response:
        arrived: Arrival = request.state.arrival
        canonical = _decoded(dialect, wire, registry)
        principal = authenticate(dialect, wire, registry, canonical.model)
        context = CallContext(arrived.request_id, principal, dialect.name, arrived.at, arrived.deadline)
        if canonical.stream:
            stream = service.stream(canonical, context)
            encoder = dialect.stream_encoder(canonical, _head(arrived, stream.model, clock))
            return StreamedReply(stream, encoder, arrived.request_id)
        completion = service.complete(canonical, context)
        return _response(dialect.encode(completion, canonical, _head(arrived, completion.model, clock)))

    for path in paths:
        app.add_api_route(path, complete, methods=["POST"])
    return app


def models_app(dialect: ListingDialect, path: str, registry: Registry, clock: Clock) -> FastAPI:
    """The app that lists the models a key may use, at ``path`` and ``path/{id}``."""
    app = _app(dialect, clock)

    def list_models(wire: Annotated[WireRequest, Depends(_wire_request)]) -> Response:
        principal = authenticate(dialect, wire, registry)
        visible = [route for route in registry.routes() if principal.may_use(route.model_id)]
        return _response(dialect.encode_models(visible))

    def retrieve_model(model: str, wire: Annotated[WireRequest, Depends(_wire_request)]) -> Response:
        principal = authenticate(dialect, wire, registry, model)
        route = registry.route(model)
        if route is None or not principal.may_use(route.model_id):
            raise ModelNotFoundError(f"The model '{model[:200]}' does not exist.", param="model")
        return _response(dialect.encode_model(route))

    app.add_api_route(path, list_models, methods=["GET"])
    app.add_api_route(path + "/{model:path}", retrieve_model, methods=["GET"])  # ids may contain slashes
    return app


def _app(dialect: Dialect, clock: Clock) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestMiddleware, clock=clock, encode_error=dialect.encode_error)
    app.add_exception_handler(CompletionError, _error_handler(dialect))
    app.add_exception_handler(HTTPException, _error_handler(dialect))
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
    )


def _decoded(dialect: Dialect, wire: WireRequest, registry: Registry) -> CompletionRequest:
    """The canonical request; a caller without a key hears that first, whatever else is wrong."""
    try:
        return dialect.decode(wire)
    except InvalidRequestError:
        authenticate(dialect, wire, registry)
        raise


def _error_handler(dialect: Dialect) -> Callable[[Request, Exception], Response]:
    def handle(request: Request, error: Exception) -> Response:
        canonical = _canonical(request, error)
        request_id = request.state.arrival.request_id
        if isinstance(canonical, ServiceError):
            logger.warning(
                "request_failed", request_id=request_id, error=type(canonical).__name__, detail=canonical.detail
            )
        return _response(dialect.encode_error(canonical, request_id))

    return handle


def _canonical(request: Request, error: Exception) -> CompletionError:
    """Routing's own refusals in the domain's words."""
    if isinstance(error, CompletionError):
        return error
    place = f"{request.method} {request.url.path[:200]}"
    if isinstance(error, HTTPException) and error.status_code == 405:
        return MethodNotAllowedError(f"Not allowed: {place}.")
    return UnknownPathError(f"Unknown request URL: {place}.")


def _head(arrived: Arrival, model: str, clock: Clock) -> AnswerHead:
    elapsed_ms = round((clock.monotonic() - arrived.at) * 1000)
    return AnswerHead(arrived.request_id, int(clock.now().timestamp()), model, elapsed_ms)


def _response(reply: WireReply) -> Response:
    return Response(reply.body, reply.status, {"content-type": reply.media_type, **reply.headers})
