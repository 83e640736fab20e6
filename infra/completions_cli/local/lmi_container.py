"""An LMI (djl-serving) container on the laptop: the embedded model behind the async vLLM handler or the rolling batch.

Stands in for LMI 28. Streams are JSON lines for every schema, and errors are the handler's own: what cannot be parsed
is a 424, and what vLLM refuses leaves as a 500 whose text holds vLLM's own words. Chat is not served.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator
from uuid import uuid4

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from completions_cli.local.generation import GenerationEngine
from completions_cli.local.lmi_rolling import RollingForm, RollingWriter
from completions_cli.local.lmi_wire import InputParsingError, InputsForm, LineFormatter, whole_body
from completions_cli.local.ngram import NGramModel
from completions_cli.local.streamed import compact_json, streamed
from completions_cli.local.vllm_serving import Answer, CompletionServing, StreamQuirks
from completions_cli.local.vllm_wire import (
    CompletionRequest,
    JsonObject,
    RequestRefusedError,
    UnknownModelError,
    error_body,
)

JSON_LINES = "application/jsonlines"
ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"


class LmiContainer:
    """The handler behind ``/invocations`` and ``/predictions/{model}``."""

    def __init__(self, serving: CompletionServing, *, rolling: bool) -> None:
        self._serving = serving
        self._rolling = rolling

    async def ping(self, _: Request) -> Response:
        """``/ping``."""
        return JSONResponse({"status": "Healthy"})

    async def predictions(self, request: Request) -> Response:
        """``/predictions/{model}``: the one model there is."""
        model = request.path_params["model"]
        if model != self._serving.served_model:
            body = {"code": 404, "type": "ModelNotFoundException", "message": f"Model not found: {model}"}
            return JSONResponse(body, status_code=404)
        return await self.invocations(request)

    async def invocations(self, request: Request) -> Response:
        """``/invocations``: ``prompt``, then ``inputs``, then ``messages`` decides about the schema."""
        try:
            payload = self._payload(request, await request.body())
            return await self._dispatch(payload)
        except (InputParsingError, ValidationError) as error:
            return _error(424, f"Input parsing failed: {error}")

    def _payload(self, request: Request, body: bytes) -> JsonObject:
        try:
            payload = json.loads(body)
        except ValueError as error:
            raise InputParsingError(str(error)) from None
        if not isinstance(payload, dict):
            raise InputParsingError("the payload is not an object")
        adapter = request.headers.get(ADAPTER_HEADER) or payload.pop("adapters", None)
        if adapter:
            raise InputParsingError(f"LoRA adapter {adapter} not found in registry. Available adapters: []")
        payload.setdefault("model", self._serving.served_model)
        return payload

    async def _dispatch(self, payload: JsonObject) -> Response:
        if self._rolling:
            return await self._roll(RollingForm.parse(payload))
        if "prompt" in payload:
            return await self._complete(_completion_request(payload), None)
        if "inputs" in payload:
            form = InputsForm.parse(payload)
            return await self._complete(_completion_request(form.body), form)
        if "messages" in payload:
            return _vllm_error("This model serves text completions only.", "BadRequestError", "messages", 400)
        raise InputParsingError("invalid payload. must contain prompt, inputs, or messages")

    async def _complete(self, request: CompletionRequest, form: InputsForm | None) -> Response:
        """Answer in vLLM's format, or in that of ``inputs`` where there is a ``form``."""
        try:
            answer = self._serving.answer(request, uuid4().hex)
        except RequestRefusedError as error:
            return _vllm_error(str(error), "BadRequestError", error.param, 400)
        except UnknownModelError as error:
            return _vllm_error(str(error), "NotFoundError", "model", 404)
        if request.stream:
            return streamed(_completion_lines(answer) if form is None else _inputs_lines(answer, form), JSON_LINES)
        return await _document(lambda: answer.whole() if form is None else self._whole(answer, form))

    def _whole(self, answer: Answer, form: InputsForm) -> JsonObject:
        scored = answer.engine.score(answer.generation.prompts[0], 1) if form.prefill else []
        return whole_body(answer.whole(), form, answer.engine.model.tokenizer, scored)

    async def _roll(self, form: RollingForm) -> Response:
        try:
            answer = self._serving.answer(_completion_request(form.body), uuid4().hex)
        except RequestRefusedError as error:
            raise InputParsingError(str(error)) from None
        writer = RollingWriter(form, answer)
        if form.stream:
            return streamed((_line(line) for line in writer.lines()), JSON_LINES)
        return await _document(writer.whole)


def create_lmi_container(
    model: NGramModel,
    *,
    served_model: str = "lmi",
    tokens_per_second: float = 0,
    max_model_len: int = 8192,
    sleep: Callable[[float], object] = time.sleep,
    quirks: StreamQuirks | None = None,
    rolling_batch: bool = False,
) -> Starlette:
    """An ASGI app that answers like LMI. ``tokens_per_second`` paces each choice; 0 is full speed.

    ``rolling_batch`` is the mode of LMI 16 and older; ``quirks`` are those of the vLLM stream underneath the handler.
    """
    engine = GenerationEngine(model, max_model_len, tokens_per_second, sleep)
    serving = CompletionServing(engine, served_model, quirks or StreamQuirks())
    container = LmiContainer(serving, rolling=rolling_batch)
    return Starlette(
        routes=[
            Route("/ping", container.ping),
            Route("/invocations", container.invocations, methods=["POST"]),
            Route("/predictions/{model}", container.predictions, methods=["POST"]),
        ]
    )


def _completion_request(body: JsonObject) -> CompletionRequest:
    """What breaks a rule of the request model is the handler's failure to parse, not yet vLLM's refusal."""
    try:
        return CompletionRequest.parse(body)
    except RequestRefusedError as error:
        raise InputParsingError(str(error)) from None


def _completion_lines(answer: Answer) -> Generator[str, None, None]:
    """vLLM's chunks a line each, and a blank line where its ``[DONE]`` was."""
    try:
        for chunk in answer.chunks():
            yield _line(chunk)
    except Exception as error:
        logging.getLogger(__name__).exception("generation failed in a stream")
        yield _line(error_body(str(error), "InternalServerError", 500))
    yield "\n"


def _inputs_lines(answer: Answer, form: InputsForm) -> Generator[str, None, None]:
    """A line a chunk, a blank one for the usage and one for ``[DONE]``; an error line is the last."""
    formatter = LineFormatter(form)
    try:
        for chunk in answer.chunks():
            try:
                line = formatter.line(chunk)
            except IndexError as error:  # the formatter's own failure, told without vLLM's shape
                yield _line({"error": str(error), "code": 424})
                return
            yield "\n" if line is None else _line(line)
    except Exception as error:
        logging.getLogger(__name__).exception("generation failed in a stream")
        yield _line(error_body(str(error), "InternalServerError", 500))
        return
    yield "\n"


async def _document(make: Callable[[], JsonObject]) -> Response:
    try:
        body = await run_in_threadpool(make)
    except Exception:
        logging.getLogger(__name__).exception("generation failed")
        # the handler's exception is logged, and its words are lost on the way to the caller
        return JSONResponse({"code": 424, "message": "Async Inference Failure invoke handler failure"}, status_code=424)
    return Response(_line(body), media_type="application/json")


def _line(body: JsonObject) -> str:
    return compact_json(body) + "\n"


def _error(code: int, text: str) -> Response:
    return JSONResponse({"code": code, "error": text}, status_code=code)


def _vllm_error(message: str, kind: str, param: str | None, code: int) -> Response:
    """The formatter looks for a message and a code where vLLM no longer has them, and sends the object's repr."""
    return _error(500, f"error=ErrorInfo(message={message!r}, type={kind!r}, param={param!r}, code={code})")
