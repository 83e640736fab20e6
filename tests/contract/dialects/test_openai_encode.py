"""What OpenAI's ``POST /v1/completions`` and ``GET /v1/models`` answer, byte for byte.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

import httpx2 as httpx
import openai
import pytest

from completions.dialects.dialect import AnswerHead, ErrorHead, WireReply, WireRequest
from completions.dialects.openai import OpenAIDialect
from completions.domain.catalog import ModelRoute
from completions.domain.completion import (
    Choice,
    ChoiceDelta,
    Completion,
    CompletionChunk,
    CompletionRequest,
    FinishReason,
    Logprobs,
    Usage,
)
from completions.domain.errors import (
    AuthenticationError,
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    DuplicateRequestError,
    InvalidRequestError,
    LimitStatus,
    MeteringError,
    MethodNotAllowedError,
    ModelNotFoundError,
    PermissionDeniedError,
    QuotaExceededError,
    RateLimitError,
    RequestTooLargeError,
    ServiceError,
    TruncatedStreamError,
    UnknownPathError,
    UnsupportedParameterError,
)
from fakes import all_error_classes, delta, principal, request, route

DIALECT = OpenAIDialect()
HEAD = AnswerHead("request-1", 1_767_268_800, "demo", 12)
STOP = FinishReason.STOP
USAGE = Usage(2, 3)
ID = re.compile(rb'"id":"(cmpl-[A-Za-z0-9]{29})"')


def anonymous(body: bytes) -> bytes:
    """``body`` with each answer's id replaced, after a look at its form."""
    text, count = ID.subn(b'"id":"cmpl-X"', body)
    assert count == body.count(b'"id":')
    return text


def logprobs(*offsets: int) -> Logprobs:
    return Logprobs(("c", "d"), (-0.5, -0.25), ({"c": -0.5}, {"d": -0.25, "e": -2.0}), offsets)


def completion(*choices: Choice, usage: Usage = USAGE) -> Completion:
    return Completion("demo", choices or (Choice(0, "cd", STOP),), usage)


def answer(canonical: CompletionRequest, *choices: Choice, usage: Usage = USAGE) -> Any:
    return json.loads(DIALECT.encode(completion(*choices, usage=usage), canonical, HEAD).body)


def stream(chunks: Iterable[CompletionChunk], **overrides: Any) -> bytes:
    """A whole streamed answer."""
    encoder = DIALECT.stream_encoder(request(stream=True, **overrides), HEAD)
    return b"".join([*(encoder.chunk(chunk) for chunk in chunks), encoder.done()])


def frames(body: bytes) -> list[Any]:
    """The JSON payloads of a stream; the marker of its end is left out."""
    assert body.endswith(b"data: [DONE]\n\n")
    return [json.loads(frame.removeprefix(b"data: ")) for frame in body.split(b"\n\n")[:-2]]


# The buffered answer


def test_a_buffered_answer_byte_for_byte() -> None:
    reply = DIALECT.encode(completion(), request(), HEAD)
    assert anonymous(reply.body) == (
        b'{"id":"cmpl-X","object":"text_completion","created":1767268800,"model":"demo","choices":[{"text":"cd",'
        b'"index":0,"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":3,'
        b'"total_tokens":5}}'
    )


def test_a_buffered_answer_has_status_media_type_and_headers() -> None:
    reply = DIALECT.encode(completion(), request(), HEAD)
    assert (reply.status, reply.media_type) == (200, "application/json")
    assert reply.headers == {"openai-version": "2020-10-01", "openai-processing-ms": "12"}


def test_text_beyond_ascii_is_utf_8() -> None:
    reply = DIALECT.encode(completion(Choice(0, "\u20ac \U0001f600\n", STOP)), request(), HEAD)
    assert '"text":"\u20ac \U0001f600\\n"'.encode() in reply.body


def test_cached_prompt_tokens_are_told_when_there_are_some() -> None:
    assert answer(request(), usage=Usage(8, 3, cached_tokens=4))["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 3,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_is_one_of_the_schemas(reason: FinishReason) -> None:
    known = {"stop", "length", "content_filter"}
    assert answer(request(), Choice(0, "cd", reason))["choices"][0]["finish_reason"] in known


def test_choices_keep_their_order_and_index() -> None:
    choices = answer(request(n=2), Choice(0, "a", STOP), Choice(1, "b", STOP))["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "a"), (1, "b")]


def test_a_buffered_answer_is_what_the_official_sdk_types() -> None:
    reply = DIALECT.encode(completion(Choice(0, "cd", STOP, logprobs(0, 1))), request(logprobs=1), HEAD)
    parsed = openai.types.Completion.model_validate_json(reply.body, strict=True)
    assert parsed.model_extra == {}


# Log-probabilities


def test_logprobs_byte_for_byte() -> None:
    reply = DIALECT.encode(completion(Choice(0, "cd", STOP, logprobs(0, 1))), request(logprobs=1, echo=True), HEAD)
    assert (
        b'"logprobs":{"tokens":["c","d"],"token_logprobs":[-0.5,-0.25],"top_logprobs":[{"c":-0.5},{"d":-0.25,"e":-2.0}],'
        b'"text_offset":[0,1]}'
    ) in reply.body


def test_logprobs_zero_is_an_object_with_the_chosen_tokens() -> None:
    chosen = Logprobs(("c",), (-0.5,), ({"c": -0.5},), (0,))
    values = answer(request(logprobs=0), Choice(0, "c", STOP, chosen))["choices"][0]["logprobs"]
    assert (values["tokens"], values["token_logprobs"]) == (["c"], [-0.5])


def test_the_first_token_of_an_echoed_prompt_has_null_logprobs() -> None:
    echoed = Logprobs(("a", "c"), (None, -0.5), (None, {"c": -0.5}), (0, 1))
    values = answer(request(logprobs=1, echo=True), Choice(0, "ac", STOP, echoed))["choices"][0]["logprobs"]
    assert (values["token_logprobs"][0], values["top_logprobs"][0]) == (None, None)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"prompts": ("abcd",)}, [4, 5]),
        ({"prompts": ("abcd",), "echo": True}, [0, 1]),
        ({"prompts": ("",)}, [0, 1]),
        ({"prompts": ("\U0001f600\u20ac",)}, [2, 3]),
        ({"prompts": ((7, 8, 9),)}, [0, 1]),
    ],
)
def test_offsets_count_from_the_prompts_start(overrides: dict[str, Any], expected: list[int]) -> None:
    choice = Choice(0, "cd", STOP, logprobs(0, 1))
    assert answer(request(logprobs=1, **overrides), choice)["choices"][0]["logprobs"]["text_offset"] == expected


def test_offsets_slice_the_token_out_of_prompt_and_text() -> None:
    choice = Choice(0, "cd", STOP, logprobs(0, 1))
    values = answer(request(logprobs=1, prompts=("ab",)), choice)["choices"][0]["logprobs"]
    assert ["abcd"[offset : offset + 1] for offset in values["text_offset"]] == values["tokens"]


def test_each_choices_offsets_count_from_its_own_prompt() -> None:
    choices = [Choice(index, "cd", STOP, logprobs(0, 1)) for index in range(4)]
    found = answer(request(logprobs=1, prompts=("a", "bbb"), n=2, best_of=2), *choices)["choices"]
    assert [choice["logprobs"]["text_offset"][0] for choice in found] == [1, 1, 3, 3]


def test_streamed_offsets_count_from_the_prompts_start() -> None:
    found = frames(stream([delta("cd", STOP, logprobs=logprobs(0, 1))], logprobs=1, prompts=("abc",)))
    assert found[0]["choices"][0]["logprobs"]["text_offset"] == [3, 4]


# The streamed answer

CHUNKS = [delta("c"), delta("d", STOP), CompletionChunk((), Usage(2, 3))]
START = b'data: {"id":"cmpl-X","object":"text_completion","created":1767268800,"choices":['


def test_a_stream_byte_for_byte() -> None:
    assert anonymous(stream(CHUNKS)) == (
        START
        + b'{"text":"c","index":0,"logprobs":null,"finish_reason":null}],"model":"demo"}\n\n'
        + START
        + b'{"text":"d","index":0,"logprobs":null,"finish_reason":"stop"}],"model":"demo"}\n\ndata: [DONE]\n\n'
    )


def test_a_stream_with_usage_byte_for_byte() -> None:
    assert anonymous(stream(CHUNKS, include_usage=True)) == (
        START
        + b'{"text":"c","index":0,"logprobs":null,"finish_reason":null}],"model":"demo","usage":null}\n\n'
        + START
        + b'{"text":"d","index":0,"logprobs":null,"finish_reason":"stop"}],"model":"demo","usage":null}\n\n'
        + START
        + b'],"model":"demo","usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}}\n\ndata: [DONE]\n\n'
    )


def test_an_error_frame_byte_for_byte() -> None:
    encoder = DIALECT.stream_encoder(request(stream=True), HEAD)
    assert encoder.error(BackendError("The model failed.")) == (
        b'data: {"error":{"message":"The model failed.","type":"server_error","param":null,"code":null}}\n\n'
    )


def test_a_stream_has_media_type_and_headers() -> None:
    encoder = DIALECT.stream_encoder(request(stream=True), HEAD)
    assert encoder.media_type.partition(";")[0] == "text/event-stream"
    assert encoder.headers == {
        "openai-version": "2020-10-01",
        "openai-processing-ms": "12",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }


def test_no_usage_is_sent_unless_asked_for() -> None:
    running = [delta("c", usage=Usage(2, 1)), delta("d", STOP, usage=Usage(2, 2)), CompletionChunk((), Usage(2, 2))]
    assert b"usage" not in stream(running)


def test_the_usage_frame_holds_the_last_count_once() -> None:
    running = [delta("c", usage=Usage(2, 1)), delta("d", STOP, usage=Usage(2, 2)), CompletionChunk((), Usage(2, 3))]
    found = [frame for frame in frames(stream(running, include_usage=True)) if frame["usage"] is not None]
    assert [(frame["choices"], frame["usage"]["completion_tokens"]) for frame in found] == [([], 3)]


@pytest.mark.parametrize("chunk", [delta(""), CompletionChunk(), CompletionChunk((), Usage(1, 1))])
def test_a_chunk_that_says_nothing_is_not_sent(chunk: CompletionChunk) -> None:
    assert DIALECT.stream_encoder(request(stream=True), HEAD).chunk(chunk) == b""


def test_a_finish_without_text_is_sent() -> None:
    assert frames(stream([delta("", STOP)]))[0]["choices"][0] == {
        "text": "",
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_logprobs_without_text_are_sent() -> None:
    assert frames(stream([delta("", logprobs=logprobs(0, 1))], logprobs=1))[0]["choices"][0]["logprobs"] is not None


def test_each_choice_of_a_chunk_is_a_frame_of_its_own() -> None:
    both = CompletionChunk((ChoiceDelta(0, "a"), ChoiceDelta(1, "b")))
    found = frames(stream([both], n=2, best_of=2))
    assert [[choice["index"] for choice in frame["choices"]] for frame in found] == [[0], [1]]


def test_no_line_feed_of_the_text_cuts_a_frame() -> None:
    assert frames(stream([delta("a\n\nb\r\n", STOP)]))[0]["choices"][0]["text"] == "a\n\nb\r\n"


def test_the_id_is_the_same_in_every_frame_and_in_the_buffered_answer() -> None:
    streamed = set(ID.findall(stream(CHUNKS, include_usage=True)))
    assert streamed == set(ID.findall(DIALECT.encode(completion(), request(), HEAD).body))
    assert len(streamed) == 1


def test_another_request_has_another_id() -> None:
    other = AnswerHead("request-2", HEAD.created, "demo", 12)
    first, second = (ID.findall(DIALECT.encode(completion(), request(), head).body) for head in (HEAD, other))
    assert first != second


# The official SDK as the reader


def sdk(reply: WireReply) -> openai.OpenAI:
    def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(
            reply.status, content=reply.body, headers={"content-type": reply.media_type, **reply.headers}
        )

    client = httpx.Client(transport=httpx.MockTransport(handle))
    return openai.OpenAI(api_key="sk", base_url="http://gateway/v1", http_client=client, max_retries=0)


def test_the_official_sdk_reads_the_stream() -> None:
    with sdk(WireReply(200, stream(CHUNKS, include_usage=True), "text/event-stream", {})) as client:
        found = list(client.completions.create(model="demo", prompt="ab", stream=True))
    assert "".join(choice.text for chunk in found for choice in chunk.choices) == "cd"
    assert found[-1].usage is not None


def test_the_official_sdk_raises_on_an_error_frame() -> None:
    encoder = DIALECT.stream_encoder(request(stream=True), HEAD)
    body = encoder.chunk(delta("c")) + encoder.error(TruncatedStreamError("The model stopped."))
    with (
        sdk(WireReply(200, body, "text/event-stream", {})) as client,
        pytest.raises(openai.APIError, match=r"The model stopped\."),
    ):
        list(client.completions.create(model="demo", prompt="ab", stream=True))


# Errors

INVALID = "invalid_request_error"
ERRORS: dict[type[CompletionError], tuple[int, str, str | None]] = {
    InvalidRequestError: (400, INVALID, None),
    UnsupportedParameterError: (400, INVALID, None),
    ContextLengthError: (400, INVALID, "context_length_exceeded"),
    RequestTooLargeError: (413, INVALID, "request_too_large"),
    UnknownPathError: (404, INVALID, "unknown_url"),
    MethodNotAllowedError: (405, INVALID, "method_not_supported"),
    AuthenticationError: (401, INVALID, None),
    PermissionDeniedError: (403, INVALID, None),
    ModelNotFoundError: (404, INVALID, "model_not_found"),
    RateLimitError: (429, "requests", "rate_limit_exceeded"),
    QuotaExceededError: (429, "insufficient_quota", "insufficient_quota"),
    DuplicateRequestError: (409, INVALID, "duplicate_request"),
    ServiceError: (500, "server_error", None),
    BackendError: (500, "server_error", None),
    TruncatedStreamError: (500, "server_error", None),
    BackendTimeoutError: (504, "server_error", None),
    BackendUnavailableError: (503, "server_error", None),
    MeteringError: (503, "server_error", None),
    CompletionError: (500, "server_error", None),
}


HEAD_OF_ERROR = ErrorHead("request-1", now=0)


def test_every_error_class_has_a_row() -> None:
    assert set(ERRORS) == all_error_classes()


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_each_error_class_has_its_status_type_and_code(kind: type[CompletionError]) -> None:
    status, name, code = ERRORS[kind]
    reply = DIALECT.encode_error(kind("So it went."), HEAD_OF_ERROR)
    assert (reply.status, reply.media_type) == (status, "application/json")
    assert json.loads(reply.body) == {"error": {"message": "So it went.", "type": name, "param": None, "code": code}}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_errors_own_field_and_code_win(kind: type[CompletionError]) -> None:
    error = json.loads(DIALECT.encode_error(kind("m", param="prompt", code="own"), HEAD_OF_ERROR).body)["error"]
    assert (error["param"], error["code"]) == ("prompt", "own")


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_errors_detail_is_never_sent(kind: type[CompletionError]) -> None:
    assert b"hidden" not in DIALECT.encode_error(kind("m", detail="hidden"), HEAD_OF_ERROR).body


@pytest.mark.parametrize(("status", "kind"), [(ERRORS[kind][0], kind) for kind in ERRORS])
def test_the_official_sdk_raises_its_class_for_each_status(status: int, kind: type[CompletionError]) -> None:
    with (
        sdk(DIALECT.encode_error(kind("So it went."), HEAD_OF_ERROR)) as client,
        pytest.raises(openai.APIStatusError) as caught,
    ):
        client.completions.create(model="demo", prompt="ab")
    assert (caught.value.status_code, caught.value.code) == (status, ERRORS[kind][2])


@pytest.mark.parametrize(
    ("retry_after", "seconds", "milliseconds"),
    [(1, "1", "1000"), (0.25, "0.25", "250"), (120, "120", "120000"), (2_592_000, "2592000", "2592000000")],
)
def test_the_time_to_wait_is_told_in_seconds_and_milliseconds(
    retry_after: float, seconds: str, milliseconds: str
) -> None:
    headers = DIALECT.encode_error(RateLimitError("m", retry_after=retry_after), HEAD_OF_ERROR).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == (seconds, milliseconds)


def test_nothing_is_said_about_waiting_when_nothing_is_known() -> None:
    assert DIALECT.encode_error(RateLimitError("m"), HEAD_OF_ERROR).headers == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.017, "17ms"), (1, "1s"), (59.6, "1m0s"), (360, "6m0s"), (3_600, "1h0m0s"), (90_061, "25h1m1s")],
)
@pytest.mark.parametrize("kind", ["requests", "tokens"])
def test_a_limit_that_was_hit_is_told_with_the_time_until_it_is_full(
    kind: Literal["requests", "tokens"], seconds: float, text: str
) -> None:
    error = RateLimitError("m", status=LimitStatus(kind, 100, 0, seconds))
    assert DIALECT.encode_error(error, HEAD_OF_ERROR).headers == {
        f"x-ratelimit-limit-{kind}": "100",
        f"x-ratelimit-remaining-{kind}": "0",
        f"x-ratelimit-reset-{kind}": text,
    }


def test_a_used_up_quota_is_not_to_be_retried() -> None:
    assert DIALECT.encode_error(QuotaExceededError("m"), HEAD_OF_ERROR).headers["x-should-retry"] == "false"


# Models


def listed(method: str, path: str, wire: WireRequest, *routes: ModelRoute) -> WireReply:
    """What the resource at ``path`` replies."""
    (resource,) = [one for one in DIALECT.model_resources() if (one.method, one.path) == (method, path)]
    return resource.reply(wire, principal(), routes)


LIST = WireRequest("GET", "/v1/models", {}, {}, b"")
ONE = WireRequest("GET", "/v1/models/org/demo", {}, {}, b"", {"model": "org/demo"})


def test_a_model_byte_for_byte() -> None:
    demo = route(model_id="org/demo", created=7, owned_by="us")
    assert listed("GET", "/v1/models/{model:path}", ONE, demo).body == (
        b'{"id":"org/demo","object":"model","created":7,"owned_by":"us"}'
    )


def test_a_model_is_found_by_its_alias() -> None:
    demo = route(model_id="demo", aliases=("org/demo",))
    assert json.loads(listed("GET", "/v1/models/{model:path}", ONE, demo).body)["id"] == "demo"


def test_a_model_that_is_not_there_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError, match="org/demo"):
        listed("GET", "/v1/models/{model:path}", ONE)


def test_a_model_cannot_be_deleted() -> None:
    with pytest.raises(PermissionDeniedError):
        listed("DELETE", "/v1/models/{model:path}", ONE)


def test_a_list_of_models_byte_for_byte() -> None:
    models = [route(model_id="a", created=1), route(model_id="b", created=2)]
    assert listed("GET", "/v1/models", LIST, *models).body == (
        b'{"object":"list","data":[{"id":"a","object":"model","created":1,"owned_by":"organization"},'
        b'{"id":"b","object":"model","created":2,"owned_by":"organization"}]}'
    )


def test_an_empty_list_of_models_byte_for_byte() -> None:
    assert listed("GET", "/v1/models", LIST).body == b'{"object":"list","data":[]}'
