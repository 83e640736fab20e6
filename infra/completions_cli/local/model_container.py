"""A model container on the laptop: the embedded model behind vLLM's HTTP interface and SageMaker's two routes.

It stands in for the AWS vLLM image (vLLM 0.27), its route header included. Errors and status codes are the image's own,
because the code under test has to survive them. Chat is not served.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Generator
from typing import cast
from uuid import uuid4

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from completions_cli.local.generation import GenerationEngine
from completions_cli.local.ngram import NGramModel
from completions_cli.local.streamed import compact_json, streamed
from completions_cli.local.vllm_serving import Answer, CompletionServing, StreamQuirks
from completions_cli.local.vllm_wire import (
    CompletionRequest,
    InvalidBodyError,
    JsonObject,
    RequestRefusedError,
    UnknownModelError,
    error_body,
    flat_error_body,
)

HANDLERS = ["ChatCompletionRequest", "CompletionRequest"]
ROUTE_HEADER = b"x-amzn-sagemaker-custom-attributes"
ROUTE = re.compile(r"route=(/[^\s,]+)")
DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"


class TokenizeRequest(BaseModel):
    """Body of ``/tokenize``; the chat form is not served."""

    prompt: str


class RouteMiddleware:
    """``route=/path`` in the custom attributes sends an invocation to that path, as the AWS image does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/invocations":
            attributes = dict(scope["headers"]).get(ROUTE_HEADER, b"").decode("latin-1")
            route = ROUTE.search(attributes)
            if route is not None:
                scope = {**scope, "path": route.group(1), "raw_path": route.group(1).encode()}
        await self._app(scope, receive, send)


class ModelContainer:
    """The HTTP endpoints over one engine."""

    def __init__(self, serving: CompletionServing, *, flat_errors: bool) -> None:
        self._serving = serving
        self._engine = serving.engine
        self._tokenizer = serving.engine.model.tokenizer
        self._served_model = serving.served_model
        self._flat_errors = flat_errors
        self._started = int(time.time())

    async def health(self, _: Request) -> Response:
        """``/ping`` and ``/health``."""
        return Response()

    async def models(self, _: Request) -> Response:
        """``/v1/models``."""
        card = {"id": self._served_model, "object": "model", "created": self._started, "owned_by": "vllm"}
        card |= {"root": self._served_model, "parent": None, "max_model_len": self._engine.max_model_len}
        return JSONResponse({"object": "list", "data": [{**card, "permission": []}]})

    async def tokenize(self, request: Request) -> Response:
        """``/tokenize`` of a text prompt."""
        body = TokenizeRequest.model_validate(await _json_body(request))
        ids = self._tokenizer.encode(body.prompt)
        answer = {"count": len(ids), "max_model_len": self._engine.max_model_len, "tokens": ids, "token_strs": None}
        return JSONResponse(answer)

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        return await self._complete(request, CompletionRequest.parse(await _json_body(request)))

    async def invocations(self, request: Request) -> Response:
        """``/invocations``: chat is tried first; ``model`` is the adapter header's or null, whatever the body says."""
        _require_json(request)
        try:
            body = json.loads(await request.body())
        except ValueError as error:
            # The hosting decorators read the body before the route does, and have an error shape of their own.
            return JSONResponse({"detail": f"JSON decode error: {error}"}, status_code=400)
        if isinstance(body, dict):
            if body.get("messages") is not None:
                raise RequestRefusedError("This model serves text completions only.", "messages")
            body["model"] = request.headers.get("x-amzn-sagemaker-adapter-identifier")
        try:
            parsed = CompletionRequest.parse(body)
        except ValidationError:
            message = f"Cannot find suitable handler for request. Expected one of: {HANDLERS}"
            return self._error(message, "BadRequestError", 400)
        return await self._complete(request, parsed)

    def exception_handlers(self) -> dict[type[Exception], Callable[[Request, Exception], Response]]:
        """What each of our exceptions is on the wire."""
        return {
            RequestRefusedError: self._refused,
            UnknownModelError: self._unknown_model,
            InvalidBodyError: self._unreadable,
            ValidationError: self._wrong_types,
        }

    async def _complete(self, http: Request, request: CompletionRequest) -> Response:
        answer = self._serving.answer(request, http.headers.get("x-request-id", uuid4().hex))
        if request.stream:
            return streamed(self._frames(answer), "text/event-stream")
        try:
            return JSONResponse(await run_in_threadpool(answer.whole))
        except Exception as error:
            logging.getLogger(__name__).exception("generation failed")
            return self._error(str(error), "InternalServerError", 500)

    def _frames(self, answer: Answer) -> Generator[str, None, None]:
        """SSE frames. A failure becomes an error frame, under HTTP 200."""
        every = answer.quirks.keep_alive_every
        try:
            for number, chunk in enumerate(answer.chunks(), start=1):
                yield _frame(chunk)
                if every and number % every == 0:
                    yield KEEP_ALIVE
        except Exception as error:
            logging.getLogger(__name__).exception("generation failed in a stream")
            yield _frame(self._stream_error(str(error)))
        yield DONE

    def _stream_error(self, message: str) -> JsonObject:
        """Older versions put the flat shape into ``error``."""
        if self._flat_errors:
            return {"error": flat_error_body(message, "InternalServerError", 500)}
        return error_body(message, "InternalServerError", 500)

    def _error(self, message: str, kind: str, code: int, param: str | None = None) -> JSONResponse:
        shape = flat_error_body if self._flat_errors else error_body
        return JSONResponse(shape(message, kind, code, param), status_code=code)

    def _refused(self, _: Request, error: Exception) -> Response:
        return self._error(str(error), "BadRequestError", 400, cast("RequestRefusedError", error).param)

    def _unknown_model(self, _: Request, error: Exception) -> Response:
        return self._error(str(error), "NotFoundError", 404, "model")

    def _unreadable(self, _: Request, error: Exception) -> Response:
        return self._error(f"1 validation error:\n  {error}", "Bad Request", 400)

    def _wrong_types(self, _: Request, error: Exception) -> Response:
        """Schema errors are 400 and not 422, under the type ``Bad Request``. The offending input is not repeated."""
        errors = cast("ValidationError", error).errors(include_url=False, include_context=False, include_input=False)
        noun = "error" if len(errors) == 1 else "errors"
        lines = [f"{len(errors)} validation {noun}:", *(f"  {item}" for item in errors)]
        field = ".".join(["body", *(str(part) for part in errors[0]["loc"][:1])])
        return self._error("\n".join(lines), "Bad Request", 400, field)


def create_model_container(
    model: NGramModel,
    *,
    served_model: str,
    tokens_per_second: float = 0,
    max_model_len: int = 8192,
    sleep: Callable[[float], object] = time.sleep,
    quirks: StreamQuirks | None = None,
    flat_errors: bool = False,
) -> Starlette:
    """An ASGI app that answers like the AWS vLLM image. ``tokens_per_second`` paces each choice; 0 is full speed.

    ``flat_errors`` gives errors the shape older versions have: ``{"object": "error", "message": ...}``.
    """
    engine = GenerationEngine(model, max_model_len, tokens_per_second, sleep)
    serving = CompletionServing(engine, served_model, quirks or StreamQuirks())
    container = ModelContainer(serving, flat_errors=flat_errors)
    return Starlette(
        routes=[
            Route("/ping", container.health, methods=["GET", "POST"]),
            Route("/health", container.health),
            Route("/v1/models", container.models),
            Route("/v1/completions", container.completions, methods=["POST"]),
            Route("/tokenize", container.tokenize, methods=["POST"]),
            Route("/invocations", container.invocations, methods=["POST"]),
        ],
        middleware=[Middleware(RouteMiddleware)],
        exception_handlers=dict(container.exception_handlers()),
    )


def _frame(body: JsonObject) -> str:
    return f"data: {compact_json(body)}\n\n"


async def _json_body(request: Request) -> object:
    _require_json(request)
    try:
        return json.loads(await request.body())
    except ValueError as error:
        raise InvalidBodyError(f"JSON decode error: {error}") from error


def _require_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidBodyError("Unsupported Media Type: Only 'application/json' is allowed")
