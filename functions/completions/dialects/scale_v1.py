"""Scale's first API: ``POST /v1/llm/completions-sync`` and ``-stream``, and the list of model endpoints.

Sources: scaleapi/llm-engine (``api/llms_v1.py``, ``common/dtos/llms``) and what its Python client reads of an answer. A
stream has no end marker: that client cannot read one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import Field

from completions.dialects.completion_fields import StopText
from completions.dialects.dialect import AnswerHead, Dialect, ErrorHead, Resource, StreamEncoder, WireReply, WireRequest
from completions.dialects.scale_wire import (
    EVENT_STREAM,
    FRAME_END,
    JSON,
    STREAM_HEADERS,
    GuidedFields,
    SchemaError,
    credential,
    encode_error,
    missing,
    no_member,
    one_of,
    parse_body,
    refuse_broken,
    stream_error,
    utc_now,
)
from completions.dialects.text_completion import to_json
from completions.domain.catalog import ModelRoute
from completions.domain.completion import (
    ChoiceDelta,
    Completion,
    CompletionChunk,
    CompletionRequest,
    Logprobs,
    SamplingParams,
    Usage,
)
from completions.domain.errors import CompletionError, ModelNotFoundError
from completions.domain.metering import Principal

_MODEL: Final = "model_endpoint_name"
_ENDPOINTS: Final = "/v1/llm/model-endpoints"
_ORDERS: Final[Mapping[str, Callable[[ModelRoute], tuple[float, str]]]] = {
    "newest": lambda route: (-route.created, route.model_id),
    "oldest": lambda route: (route.created, route.model_id),
    "alphabetical": lambda route: (0, route.model_id),
}
# the client knows a closed set of frameworks; every other container of ours runs vLLM inside
_FRAMEWORKS: Final[Mapping[str, str]] = {"tgi": "text_generation_inference"}
_PARAM_NAMES: Final[Mapping[str, str]] = {
    "model": _MODEL,
    "prompts": "prompt",
    "max_tokens": "max_new_tokens",
    "stop": "stop_sequences",
    "include_stop": "include_stop_str_in_output",
    "logprobs": "return_token_log_probs",
}
_Penalty = Annotated[float, Field(ge=0, le=2)]


class ScaleV1Body(GuidedFields, defer_build=False):
    """One text prompt, one choice."""

    prompt: str
    max_new_tokens: int
    temperature: Annotated[float, Field(ge=0, le=1)]
    stop_sequences: Annotated[list[StopText], Field(fail_fast=True)] | None = None
    return_token_log_probs: bool | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    def check_interactions(self) -> None:
        """The rules that hold between fields. Raises ``InvalidRequestError`` naming the one at fault."""
        greedy = self.temperature == 0
        refuse_broken(
            [
                ("max_new_tokens", self.max_new_tokens < 0, "must not be negative"),
                ("top_k", greedy and self.top_k not in (None, -1), "cannot be used when 'temperature' is 0"),
                ("top_p", greedy and self.top_p not in (None, 1), "cannot be used when 'temperature' is 0"),
                ("top_k", self.top_k == 0, "must be positive, or -1 for off"),
            ]
        )

    def to_request(self, model: str, *, streamed: bool) -> CompletionRequest:
        """The canonical request. A stream always ends in its counts."""
        name, constraint = one_of(self.constraints()) or ("constraint", None)
        return CompletionRequest(
            model,
            (self.prompt,),
            max_tokens=self.max_new_tokens,
            sampling=SamplingParams(
                temperature=self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=None if self.top_k == -1 else self.top_k,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
            ),
            stop=tuple(self.stop_sequences or ()),
            include_stop=self.include_stop_str_in_output or False,
            logprobs=1 if self.return_token_log_probs else None,
            constraint=constraint,
            skip_special_tokens=self.skip_special_tokens is not False,
            stream=streamed,
            include_usage=streamed,
            param_names={**_PARAM_NAMES, "constraint": name},
        )


class ScaleV1Dialect(Dialect):
    """See the module. ``streamed`` is the route's own: a body cannot say it. ``now`` is the time of error frames."""

    name = "scale_v1"
    keepalive = b": waiting\r\n\r\n"

    def __init__(self, streamed: bool, now: Callable[[], datetime] = utc_now) -> None:
        self._streamed = streamed
        self._now = now

    def credential(self, wire: WireRequest) -> str | None:
        return credential(wire)

    def decode(self, wire: WireRequest) -> CompletionRequest:
        model = wire.query.get(_MODEL)
        body = parse_body(ScaleV1Body, wire.body, [missing("query", _MODEL)] if model is None else [])
        body.check_interactions()
        return body.to_request(model or "", streamed=self._streamed)

    def encode(self, completion: Completion, request: CompletionRequest, head: AnswerHead) -> WireReply:
        choice = completion.choices[0]
        output = {
            "text": choice.text,
            "num_prompt_tokens": completion.usage.prompt_tokens,
            "num_completion_tokens": completion.usage.completion_tokens,
            "tokens": None if choice.logprobs is None else list(_tokens(choice.logprobs)),
        }
        body = {"request_id": head.request_id, "output": output}
        return WireReply(200, to_json(body).encode(), JSON, {})

    def stream_encoder(self, request: CompletionRequest, head: AnswerHead) -> StreamEncoder:
        return _ScaleV1StreamEncoder(head, self._now)

    def encode_error(self, error: CompletionError, head: ErrorHead) -> WireReply:
        return encode_error(error, head)

    def model_resources(self) -> tuple[Resource, ...]:
        """The list of model endpoints and what is below it; names may contain slashes."""
        return (
            Resource("GET", _ENDPOINTS, _list_endpoints),
            Resource("GET", _ENDPOINTS + "/{name:path}", _get_endpoint),
        )


class _ScaleV1StreamEncoder(StreamEncoder):
    """The last frame carries the counts, which may come after the last text: it is held back until the answer is whole.

    A frame has room for one token's log-probability, so the further tokens of a delta follow in frames without text.
    """

    media_type = EVENT_STREAM

    def __init__(self, head: AnswerHead, now: Callable[[], datetime]) -> None:
        self.headers = STREAM_HEADERS
        self._request_id = head.request_id
        self._now = now
        self._usage: Usage | None = None
        self._last: dict[str, Any] | None = None
        self._start = f'data: {{"request_id":{to_json(head.request_id)},"output":'

    def chunk(self, chunk: CompletionChunk) -> bytes:
        self._usage = chunk.usage or self._usage
        frames: list[str] = []
        for delta in chunk.choices:
            outputs = list(self._outputs(delta))
            if delta.finish_reason is not None:
                self._last = outputs.pop()
            frames += [self._frame(output) for output in outputs]
        return "".join(frames).encode()

    def done(self) -> bytes:
        output = self._last or {"text": ""}
        counts: dict[str, Any] = {"num_prompt_tokens": None, "num_completion_tokens": None}
        if self._usage is not None:
            counts["num_prompt_tokens"] = self._usage.prompt_tokens
            counts["num_completion_tokens"] = self._usage.completion_tokens
        token = {"token": output["token"]} if "token" in output else {}
        return self._frame({"text": output["text"], "finished": True, **counts, **token}).encode()

    def error(self, error: CompletionError) -> bytes:
        held = self._frame(self._last) if self._last is not None and self._last["text"] else ""
        body = {"error": stream_error(error, self._request_id, self._now())}
        return f"{held}{self._start}null,{to_json(body)[1:]}{FRAME_END}".encode()

    def _outputs(self, delta: ChoiceDelta) -> Iterator[dict[str, Any]]:
        tokens = [] if delta.logprobs is None else list(_tokens(delta.logprobs))
        if not (delta.text or tokens or delta.finish_reason is not None):
            return
        count = {} if self._usage is None else {"num_completion_tokens": self._usage.completion_tokens}
        yield {"text": delta.text, "finished": False, **count, **({"token": tokens[0]} if tokens else {})}
        for token in tokens[1:]:
            yield {"text": "", "finished": False, **count, "token": token}

    def _frame(self, output: Mapping[str, Any]) -> str:
        return f'{self._start}{to_json(output)},"error":null}}{FRAME_END}'


def _tokens(logprobs: Logprobs) -> Iterator[dict[str, Any]]:
    for token, value in zip(logprobs.tokens, logprobs.token_logprobs, strict=True):
        if value is not None:
            yield {"token": token, "log_prob": value}


def _list_endpoints(wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
    name = wire.query.get("name")
    order = wire.query.get("order_by")
    if order is not None and order not in _ORDERS:
        raise SchemaError([no_member(("query", "order_by"), order, tuple(_ORDERS))])
    found = [route for route in routes if name is None or name in (route.model_id, *route.aliases)]
    if order is not None:
        found.sort(key=_ORDERS[order])
    return _reply({"model_endpoints": [_endpoint(route) for route in found]})


def _get_endpoint(wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
    name = wire.path_parameters["name"]
    for route in routes:
        if name in (route.model_id, *route.aliases):
            return _reply(_endpoint(route))
    raise ModelNotFoundError(f"The model endpoint '{name[:200]}' does not exist.", param="name")


def _endpoint(route: ModelRoute) -> dict[str, Any]:
    """Where the model runs and how is the operator's business, so most of it is null."""
    return {
        "id": route.model_id,
        "name": route.model_id,
        "model_name": route.model_id,
        "source": "hugging_face",
        "status": "READY",
        "inference_framework": _FRAMEWORKS.get(route.family, "vllm"),
        "inference_framework_image_tag": route.family_version,
        "num_shards": None,
        "quantize": None,
        "checkpoint_path": None,
        "chat_template_override": None,
        "spec": None,
    }


def _reply(body: object) -> WireReply:
    return WireReply(200, to_json(body).encode(), JSON, {})
