"""A model container on the laptop: the embedded model behind vLLM's HTTP interface and SageMaker's two routes.

It stands in for the AWS vLLM image (vLLM 0.27), its route header included. Errors and status codes are the image's own,
because the code under test has to survive them. Chat is not served.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import NoReturn, cast
from uuid import uuid4

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from completions_cli.local.generation import GenerationEngine, GenerationRequest, TokenEvent
from completions_cli.local.ngram import NGramModel, Step
from completions_cli.local.tokenizer import MAX_PIECE_CHARS
from completions_cli.local.vllm_wire import (
    ChoiceWriter,
    CompletionRequest,
    Envelope,
    InvalidBodyError,
    JsonObject,
    RequestRefusedError,
    UnknownModelError,
    check_sampling,
    error_body,
    settings_of,
    usage_body,
)

HANDLERS = ["ChatCompletionRequest", "CompletionRequest"]
ROUTE_HEADER = b"x-amzn-sagemaker-custom-attributes"
ROUTE = re.compile(r"route=(/[^\s,]+)")
DONE = "data: [DONE]\n\n"


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


@dataclass(frozen=True, slots=True)
class Answer:
    """One valid request on its way to the engine, and the two forms its answer can take."""

    engine: GenerationEngine
    request: CompletionRequest
    generation: GenerationRequest
    envelope: Envelope

    def whole(self) -> JsonObject:
        """Generate everything, answer once."""
        writers = self._writers()
        events: list[list[TokenEvent]] = [[] for _ in writers]
        for event in self.engine.run(self.generation):
            events[event.index].append(event)
        choices = [
            {**writer.write(produced), "prompt_logprobs": None}
            for writer, produced in zip(writers, events, strict=True)
        ]
        usage = {**self._usage(writers), "prompt_tokens_details": None}
        return self.envelope.body(
            choices, service_tier=None, system_fingerprint=None, usage=usage, kv_transfer_params=None
        )

    def stream(self) -> Generator[str, None, None]:
        """SSE frames: one chunk a token, then usage if asked for. A failure becomes an error frame, under HTTP 200."""
        try:
            for chunk in self._chunks():
                yield _frame(chunk)
        except Exception as error:
            logging.getLogger(__name__).exception("generation failed in a stream")
            yield _frame(error_body(str(error), "InternalServerError", 500))
        yield DONE

    def _chunks(self) -> Generator[JsonObject, None, None]:
        writers = self._writers()
        for event in self.engine.run(self.generation):
            writer = writers[event.index]
            chunk = self.envelope.body([writer.write([event])])
            if self.request.usage_on_each_chunk:
                chunk["usage"] = usage_body(len(writer.prompt), writer.tokens)
            yield chunk
        if self.request.usage_wanted:
            yield self.envelope.body([], usage=self._usage(writers))

    def _writers(self) -> list[ChoiceWriter]:
        """One a choice, in index order; the candidates of a prompt share its scores."""
        writers = []
        for prompt in self.generation.prompts:
            if self.request.echo and self.request.logprobs is not None:
                steps = self.engine.score(prompt, self.request.logprobs)
            else:
                steps = [Step(token, None) for token in prompt]
            tokenizer = self.engine.model.tokenizer
            writers += [ChoiceWriter(self.request, tokenizer, steps) for _ in range(self.request.n)]
        return writers

    def _usage(self, writers: list[ChoiceWriter]) -> JsonObject:
        """Each prompt once, every candidate's tokens."""
        return usage_body(sum(map(len, self.generation.prompts)), sum(writer.tokens for writer in writers))


class ModelContainer:
    """The HTTP endpoints over one engine."""

    def __init__(self, engine: GenerationEngine, served_model: str) -> None:
        self._engine = engine
        self._tokenizer = engine.model.tokenizer
        self._served_model = served_model
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
            return _error(message, "BadRequestError", 400)
        return await self._complete(request, parsed)

    async def _complete(self, http: Request, request: CompletionRequest) -> Response:
        if request.model and request.model != self._served_model:
            raise UnknownModelError(f"The model `{request.model}` does not exist.")
        envelope = Envelope.now(http.headers.get("x-request-id", uuid4().hex), self._served_model)
        answer = Answer(self._engine, request, self._generation(request), envelope)
        if request.stream:
            return StreamingResponse(_closing(answer.stream()), media_type="text/event-stream")
        try:
            return JSONResponse(await run_in_threadpool(answer.whole))
        except Exception as error:
            logging.getLogger(__name__).exception("generation failed")
            return _error(str(error), "InternalServerError", 500)

    def _generation(self, request: CompletionRequest) -> GenerationRequest:
        prompts = self._prompts(request)
        check_sampling(request, self._tokenizer.size)
        return GenerationRequest(
            prompts=prompts,
            settings=settings_of(request),
            max_tokens=max(1, request.token_limit),
            n=request.n,
            seed=None if request.seed == -1 else request.seed,
            stop=request.stops,
            include_stop=request.include_stop_str_in_output,
            ignore_eos=request.ignore_eos,
            skip_special_tokens=request.skip_special_tokens,
        )

    def _prompts(self, request: CompletionRequest) -> tuple[tuple[int, ...], ...]:
        """Token ids of every prompt, each of which fits into the context with room for a token."""
        for item in request.prompt_items:
            if len(item) > self._engine.max_model_len * MAX_PIECE_CHARS:  # cannot fit, and would take long to count
                self._refuse_length(f"at least {len(item) // MAX_PIECE_CHARS}")
        prompts = tuple(
            tuple(self._tokenizer.encode(item) if isinstance(item, str) else item) for item in request.prompt_items
        )
        if not all(prompts) or not prompts:
            raise RequestRefusedError("The decoder prompt cannot be empty", "prompt")
        for ids in prompts:
            self._check_ids(ids)
        return prompts

    def _check_ids(self, ids: tuple[int, ...]) -> None:
        if max(ids) >= self._tokenizer.size:
            raise RequestRefusedError(f"Token id {max(ids)} is out of vocabulary")
        if self._engine.room(ids) < 1:
            self._refuse_length(str(len(ids)))

    def _refuse_length(self, tokens: str) -> NoReturn:
        limit = f"This model's maximum context length is {self._engine.max_model_len} tokens."
        message = f"{limit} However, your prompt contains {tokens} input tokens. Please reduce its length."
        raise RequestRefusedError(message, "input_tokens", tokens)


def create_model_container(
    model: NGramModel,
    *,
    served_model: str,
    tokens_per_second: float = 0,
    max_model_len: int = 8192,
    sleep: Callable[[float], object] = time.sleep,
) -> Starlette:
    """An ASGI app that answers like the AWS vLLM image. ``tokens_per_second`` paces each choice; 0 is full speed."""
    container = ModelContainer(GenerationEngine(model, max_model_len, tokens_per_second, sleep), served_model)
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
        exception_handlers={
            RequestRefusedError: _refused,
            UnknownModelError: _unknown_model,
            InvalidBodyError: _unreadable,
            ValidationError: _wrong_types,
        },
    )


def _frame(body: JsonObject) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _closing(frames: Generator[str, None, None]) -> AsyncIterator[str]:
    """Run a generator in the thread pool; when the client goes away, close it, which ends the generation."""
    with closing(frames):
        async for frame in iterate_in_threadpool(frames):
            yield frame


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


def _error(message: str, kind: str, code: int, param: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(message, kind, code, param), status_code=code)


def _refused(_: Request, error: Exception) -> Response:
    return _error(str(error), "BadRequestError", 400, cast("RequestRefusedError", error).param)


def _unknown_model(_: Request, error: Exception) -> Response:
    return _error(str(error), "NotFoundError", 404, "model")


def _unreadable(_: Request, error: Exception) -> Response:
    return _error(f"1 validation error:\n  {error}", "Bad Request", 400)


def _wrong_types(_: Request, error: Exception) -> Response:
    """Schema errors are 400 and not 422, under the type ``Bad Request``. The offending input is not repeated."""
    errors = cast("ValidationError", error).errors(include_url=False, include_context=False, include_input=False)
    noun = "error" if len(errors) == 1 else "errors"
    lines = [f"{len(errors)} validation {noun}:", *(f"  {item}" for item in errors)]
    field = ".".join(["body", *(str(part) for part in errors[0]["loc"][:1])])
    return _error("\n".join(lines), "Bad Request", 400, field)
