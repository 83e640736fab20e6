"""A TGI container on the laptop: the embedded model behind ``/invocations`` as text-generation-inference 3.3 has it.

The first body that fits decides: Generate, chat (not served), OpenAI completion. Streams have no space after ``data:``
and tell of refused requests under HTTP 200. An unstreamed answer counts its prompt only with prefill logprobs on.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Sequence

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from completions_cli.local.generation import GenerationEngine
from completions_cli.local.ngram import NGramModel
from completions_cli.local.streamed import compact_json, streamed
from completions_cli.local.tgi_answer import OpenAiForm, TgiAnswer
from completions_cli.local.tgi_wire import ChatBody, CompletionBody, GenerateBody, TgiError, validate
from completions_cli.local.vllm_wire import JsonObject

EVENT_STREAM = "text/event-stream"
DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ":\n\n"
NO_VARIANT = (
    "Failed to deserialize the JSON body into the target type: "
    "data did not match any variant of untagged enum SagemakerRequest"
)


class TgiContainer:
    """The HTTP endpoints over one engine, whose context is MAX_TOTAL_TOKENS."""

    def __init__(
        self, engine: GenerationEngine, served_model: str, *, keep_alive_every: int, prefill_logprobs: bool
    ) -> None:
        self._engine = engine
        self._served_model = served_model
        self._keep_alive_every = keep_alive_every
        self._prefill_logprobs = prefill_logprobs

    async def health(self, _: Request) -> Response:
        """``/ping`` and ``/health``."""
        return Response()

    async def invocations(self, request: Request) -> Response:
        """``/invocations``; what fits no body is a 422 in plain text."""
        try:
            body = _variant(json.loads(await request.body()))
        except ValueError:
            body = None
        try:
            if isinstance(body, GenerateBody):
                return await self._generate(body)
            if isinstance(body, CompletionBody):
                return await self._complete(body)
            if isinstance(body, ChatBody):
                raise TgiError("Template error: template not found", "template_error", 422)
        except TgiError as error:
            return JSONResponse(error.body, status_code=error.status)
        return PlainTextResponse(NO_VARIANT, status_code=422)

    async def _generate(self, body: GenerateBody) -> Response:
        if body.stream:
            return streamed(self._frames(self._events(body)), EVENT_STREAM, {"x-accel-buffering": "no"})
        answer = self._answer(body, stream=False)
        document = await run_in_threadpool(answer.whole)
        return JSONResponse([document], headers={"x-prompt-tokens": str(len(answer.request.prompt))})

    async def _complete(self, body: CompletionBody) -> Response:
        requests = body.generates()
        form = OpenAiForm(self._served_model, int(time.time()))
        if body.stream:
            choices = [self._choice_events(form, index, request) for index, request in enumerate(requests)]
            return streamed(self._frames(_in_turn(choices), done=True), EVENT_STREAM, {"x-accel-buffering": "no"})
        answers = [self._answer(request, stream=False) for request in requests]
        documents = await run_in_threadpool(lambda: [answer.whole() for answer in answers])
        return JSONResponse(form.whole(documents))

    def _answer(self, body: GenerateBody, *, stream: bool) -> TgiAnswer:
        request = validate(body, self._engine.model.tokenizer, self._engine.max_model_len, stream=stream)
        return TgiAnswer(self._engine, request, self._prefill_logprobs)

    def _events(self, body: GenerateBody) -> Generator[JsonObject, None, None]:
        try:
            yield from self._answer(body, stream=True).events()
        except TgiError as error:
            _log(error)
            yield error.body

    def _choice_events(self, form: OpenAiForm, index: int, body: GenerateBody) -> Generator[JsonObject, None, None]:
        try:
            for event in self._answer(body, stream=True).events():
                yield form.chunk(index, event)
        except TgiError as error:
            _log(error)
            yield error.openai_event

    def _frames(self, events: Generator[JsonObject, None, None], *, done: bool = False) -> Generator[str, None, None]:
        every = self._keep_alive_every
        for number, event in enumerate(events, start=1):
            yield f"data:{compact_json(event)}\n\n"
            if every and number % every == 0:
                yield KEEP_ALIVE
        if done:
            yield DONE


def create_tgi_container(
    model: NGramModel,
    *,
    served_model: str,
    tokens_per_second: float = 0,
    max_total_tokens: int = 8192,
    sleep: Callable[[float], object] = time.sleep,
    keep_alive_every: int = 0,
    prefill_logprobs: bool = False,
) -> Starlette:
    """An ASGI app that answers like TGI. ``tokens_per_second`` paces each prompt's answer; 0 is full speed.

    ``keep_alive_every`` puts a comment after so many events; ``prefill_logprobs`` is ENABLE_PREFILL_LOGPROBS.
    """
    engine = GenerationEngine(model, max_total_tokens, tokens_per_second, sleep)
    container = TgiContainer(engine, served_model, keep_alive_every=keep_alive_every, prefill_logprobs=prefill_logprobs)
    return Starlette(
        routes=[
            Route("/ping", container.health),
            Route("/health", container.health),
            Route("/invocations", container.invocations, methods=["POST"]),
        ]
    )


def _variant(payload: object) -> GenerateBody | ChatBody | CompletionBody | None:
    """The first body that ``payload`` fits."""
    for kind in (GenerateBody, ChatBody, CompletionBody):
        try:
            return kind.model_validate(payload)
        except ValidationError:
            continue
    return None


def _in_turn(choices: Sequence[Generator[JsonObject, None, None]]) -> Generator[JsonObject, None, None]:
    """An event of each choice in turn, until all have ended."""
    running = list(choices)
    while running:
        for choice in tuple(running):
            event = next(choice, None)
            if event is None:
                running.remove(choice)
            else:
                yield event


def _log(error: TgiError) -> None:
    if error.__cause__ is not None:
        logging.getLogger(__name__).error("generation failed in a stream", exc_info=error)
