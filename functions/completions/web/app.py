"""HTTP glue, blind to dialects and containers: routes, the order of checks, buffered and streamed replies.

The apps are FastAPI's, as the project's users want them, and not Starlette's below it. What FastAPI would do to each
request is left out where nothing needs it (``_Route``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl

from anyio.to_thread import current_default_thread_limiter, run_sync
from starlette.exceptions import HTTPException
from starlette.types import Lifespan

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
from completions.web.auth import Authenticator, require_admin
from completions.web.cors import allow_origins
from completions.web.framework import APIRoute, FastAPI, Request, Response
from completions.web.idempotency import logical_request
from completions.web.middleware import RequestMiddleware
from completions.web.sse import StreamedReply

_Answer = Callable[[WireRequest, Request], Response]


def completions_app(
    endpoints: Mapping[str, Dialect],
    service: CompletionService,
    authenticator: Authenticator,
    clock: Clock,
    *,
    origins: Sequence[str] = (),
    requests_at_once: int = 1,
) -> FastAPI:
    """The app that completes: ``POST`` on each path, in the dialect that speaks there. ``origins`` are browsers'.

    Where ``requests_at_once`` are more than the thread pool serves, a server that runs the lifespan has more threads.
    """
    app = _app(next(iter(endpoints.values())), clock, origins, _threads_for(requests_at_once))
    for path, dialect in endpoints.items():
        _add_route(app, "POST", path, _completing(dialect, service, authenticator, clock))
    return app


def resources_app(
    dialect: Dialect,
    resources: Sequence[Resource],
    registry: Registry,
    authenticator: Authenticator,
    clock: Clock,
    *,
    origins: Sequence[str] = (),
) -> FastAPI:
    """The app of a dialect's other routes; each wants to know who asks, and shows the models that one may use."""
    app = _app(dialect, clock, origins)
    for resource in resources:
        _add_route(app, resource.method, resource.path, _replying(dialect, resource, registry, authenticator))
    return app


def _threads_for(requests: int) -> Lifespan[FastAPI]:
    """A thread waits for each request's next event, and another must be free to end it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        threads = current_default_thread_limiter()
        threads.total_tokens = max(threads.total_tokens, 2 * requests)
        yield

    return lifespan


def _completing(dialect: Dialect, service: CompletionService, authenticator: Authenticator, clock: Clock) -> _Answer:
    def complete(wire: WireRequest, request: Request) -> Response:
        arrived: Arrival = request.state.arrival
        request.state.dialect = dialect
        canonical = _decoded(dialect, wire, authenticator, arrived)
        request.state.canonical = canonical
        principal = authenticator.authenticate(dialect, wire, caller=arrived.caller, next_model=canonical.model)
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
            return StreamedReply(stream, encoder, arrived.request_id, dialect.keepalive or b"", live=arrived.streamed)
        completion = service.complete(canonical, context)
        head = _head(arrived, completion.model, completion.limits, clock)
        return _response(dialect.encode(completion, canonical, head))

    return complete


def _replying(dialect: Dialect, resource: Resource, registry: Registry, authenticator: Authenticator) -> _Answer:
    def reply(wire: WireRequest, request: Request) -> Response:
        principal = authenticator.authenticate(dialect, wire, caller=request.state.arrival.caller)
        if resource.admins:
            require_admin(principal)
        visible = [route for route in registry.routes() if principal.may_use(route.model_id)]
        return _response(resource.reply(wire, principal, visible))

    return reply


def _app(dialect: Dialect, clock: Clock, origins: Sequence[str], lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.add_middleware(RequestMiddleware, clock=clock, encode_error=dialect.encode_error)
    allow_origins(app, origins)
    app.add_exception_handler(CompletionError, _error_handler(dialect, clock))
    app.add_exception_handler(HTTPException, _error_handler(dialect, clock))
    # what Lambda Web Adapter waits for
    _add_route(app, "GET", "/healthz", lambda *_: Response("ok", media_type="text/plain"))
    return app


class _Route(APIRoute):
    """FastAPI's route, but for what it does to a request: no endpoint here has parameters or dependencies to solve."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


def _add_route(app: FastAPI, method: str, path: str, answer: _Answer) -> None:
    """Let ``answer``, which may wait for others, serve ``path``: in a thread, so that the loop serves others meanwhile.

    In the buffered form there are no others, and a thread would be made for each request.
    """

    async def serve(request: Request) -> Response:
        wire = await _wire_request(request)
        arrived: Arrival = request.state.arrival
        return await run_sync(answer, wire, request) if arrived.streamed else answer(wire, request)

    app.router.add_api_route(path, serve, methods=[method], response_model=None, route_class_override=_Route)


async def _wire_request(request: Request) -> WireRequest:
    query = parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    headers: dict[str, str] = {}
    for name, value in request.scope["headers"]:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return WireRequest(
        method=request.method,
        path=request.scope["path"],
        query=dict(query),
        headers=headers,
        body=await request.body(),
        path_parameters=request.path_params,
        query_items=query,
    )


def _decoded(dialect: Dialect, wire: WireRequest, authenticator: Authenticator, arrived: Arrival) -> CompletionRequest:
    """The canonical request; who may not ask at all hears that first, whatever else is wrong."""
    try:
        return dialect.decode(wire)
    except InvalidRequestError:
        authenticator.authenticate(dialect, wire, caller=arrived.caller)
        raise


def _error_handler(dialect: Dialect, clock: Clock) -> Callable[[Request, Exception], Coroutine[Any, Any, Response]]:
    async def handle(request: Request, error: Exception) -> Response:  # async, or a thread would be waited for
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
