"""What Scale's ``POST /v2/completions`` answers, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import httpx2 as httpx
import openai
import pytest

from completions.dialects import scale_wire
from completions.dialects.dialect import AnswerHead, ErrorHead, WireReply
from completions.dialects.scale import ScaleDialect
from completions.dialects.scale_wire import SchemaError, missing, pacific_time, pacific_zone
from completions.domain import errors
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
from fakes import all_error_classes, delta, request

NOW = datetime(2026, 1, 1, 8, 0, 0, tzinfo=UTC)
DIALECT = ScaleDialect(now=lambda: NOW)
HEAD = AnswerHead("request-1", 1, "m", 12)
STOP = FinishReason.STOP
USAGE = Usage(2, 3)
ID = re.compile(rb'"id":"cmpl-[A-Za-z0-9]{29}"')


def anonymous(body: bytes) -> bytes:
    """``body`` with each answer's id replaced, after a look at its form."""
    text, count = ID.subn(b'"id":"cmpl-X"', body)
    assert count == body.count(b'"id":')
    return text


def logprobs(*offsets: int) -> Logprobs:
    return Logprobs(("c", "d"), (-0.5, -0.25), ({"c": -0.5}, {"d": -0.25, "e": -2.0}), offsets)


def completion(*choices: Choice, usage: Usage = USAGE) -> Completion:
    return Completion("m", choices or (Choice(0, "cd", STOP),), usage)


def buffered(canonical: CompletionRequest, *choices: Choice, usage: Usage = USAGE) -> bytes:
    return DIALECT.encode(completion(*choices, usage=usage), canonical, HEAD).body


def stream(chunks: Iterable[CompletionChunk], **overrides: Any) -> bytes:
    """A whole streamed answer."""
    encoder = DIALECT.stream_encoder(request(stream=True, **overrides), HEAD)
    return b"".join([*(encoder.chunk(chunk) for chunk in chunks), encoder.done()])


def frames(body: bytes) -> list[Any]:
    """The JSON payloads of a stream; the marker of its end is left out."""
    assert body.endswith(b"data: [DONE]\r\n\r\n")
    return [json.loads(frame.removeprefix(b"data: ")) for frame in body.split(b"\r\n\r\n")[:-2]]


# The buffered answer: nulls are there


def test_a_buffered_answer_byte_for_byte() -> None:
    assert anonymous(buffered(request())) == (
        b'{"id":"cmpl-X","choices":[{"finish_reason":"stop","index":0,"logprobs":null,"text":"cd"}],"created":1,'
        b'"model":"m","system_fingerprint":null,"object":"text_completion","usage":{"completion_tokens":3,'
        b'"prompt_tokens":2,"total_tokens":5,"completion_tokens_details":null,"prompt_tokens_details":null}}'
    )


def test_a_buffered_answer_has_status_and_media_type() -> None:
    reply = DIALECT.encode(completion(), request(), HEAD)
    assert (reply.status, reply.media_type, reply.headers) == (200, "application/json", {})


def test_logprobs_keep_the_engines_offsets() -> None:
    canonical = request(logprobs=1, prompts=("abcd",))
    assert (
        b'"logprobs":{"text_offset":[0,1],"token_logprobs":[-0.5,-0.25],"tokens":["c","d"],"top_logprobs":[{"c":-0.5},'
        b'{"d":-0.25,"e":-2.0}]}'
    ) in buffered(canonical, Choice(0, "cd", STOP, logprobs(0, 1)))


def test_cached_prompt_tokens_are_told_when_there_are_some() -> None:
    usage = json.loads(buffered(request(), usage=Usage(8, 3, cached_tokens=4)))["usage"]
    assert usage["prompt_tokens_details"] == {"audio_tokens": 0, "cached_tokens": 4}


def test_choices_keep_their_order_and_index() -> None:
    choices = json.loads(buffered(request(n=2), Choice(0, "a", STOP), Choice(1, "b", STOP)))["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "a"), (1, "b")]


def test_text_beyond_ascii_is_utf_8() -> None:
    assert '"text":"\u20ac \U0001f600\\n"'.encode() in buffered(request(), Choice(0, "\u20ac \U0001f600\n", STOP))


# The streamed answer: nulls are left out

CHUNKS = [delta("c"), delta("d", STOP), CompletionChunk((), Usage(2, 3))]
START = b'data: {"id":"cmpl-X","choices":['
END = b'],"created":1,"model":"m","object":"text_completion"'


def test_a_stream_byte_for_byte() -> None:
    assert anonymous(stream(CHUNKS)) == (
        START
        + b'{"index":0,"text":"c"}'
        + END
        + b"}\r\n\r\n"
        + START
        + b'{"finish_reason":"stop","index":0,"text":"d"}'
        + END
        + b"}\r\n\r\ndata: [DONE]\r\n\r\n"
    )


def test_a_stream_ends_in_its_usage_when_asked_for() -> None:
    body = anonymous(stream(CHUNKS, include_usage=True))
    assert body.endswith(
        START
        + END
        + b',"usage":{"completion_tokens":3,"prompt_tokens":2,"total_tokens":5}}\r\n\r\ndata: [DONE]\r\n\r\n'
    )
    assert body.count(b'"usage"') == 1


def test_no_usage_is_sent_unless_asked_for() -> None:
    assert b"usage" not in stream([delta("c", usage=Usage(2, 1)), *CHUNKS])


def test_an_error_frame_byte_for_byte() -> None:
    encoder = DIALECT.stream_encoder(request(stream=True), HEAD)
    assert encoder.error(ServiceError("It broke.")) == (
        b'data: {"error":{"status_code":500,"content":{"error":"Internal error occurred. Our team has been notified.",'
        b'"timestamp":"2026-01-01 00:00:00 PST"}}}\r\n\r\n'
    )


def test_an_error_frame_names_the_request_when_the_model_failed() -> None:
    frame = DIALECT.stream_encoder(request(stream=True), HEAD).error(TruncatedStreamError("cut"))
    assert b'"error":"Upstream service error for request_id request-1"' in frame


def test_a_stream_has_media_type_and_headers() -> None:
    encoder = DIALECT.stream_encoder(request(stream=True), HEAD)
    assert encoder.media_type == "text/event-stream; charset=utf-8"
    assert encoder.headers == {"cache-control": "no-cache", "x-accel-buffering": "no"}


@pytest.mark.parametrize("chunk", [delta(""), CompletionChunk(), CompletionChunk((), Usage(1, 1))])
def test_a_chunk_that_says_nothing_is_not_sent(chunk: CompletionChunk) -> None:
    assert DIALECT.stream_encoder(request(stream=True), HEAD).chunk(chunk) == b""


def test_a_finish_without_text_is_sent() -> None:
    assert frames(stream([delta("", STOP)]))[0]["choices"] == [{"finish_reason": "stop", "index": 0, "text": ""}]


def test_streamed_logprobs_keep_the_engines_offsets_and_their_inner_nulls() -> None:
    echoed = Logprobs(("a", "c"), (None, -0.5), (None, {"c": -0.5}), (0, 1))
    values = frames(stream([delta("ac", logprobs=echoed)], logprobs=1))[0]["choices"][0]["logprobs"]
    assert values == {
        "text_offset": [0, 1],
        "token_logprobs": [None, -0.5],
        "tokens": ["a", "c"],
        "top_logprobs": [None, {"c": -0.5}],
    }


def test_each_choice_of_a_chunk_is_a_frame_of_its_own() -> None:
    found = frames(stream([CompletionChunk((ChoiceDelta(0, "a"), ChoiceDelta(1, "b")))], n=2, best_of=2))
    assert [[choice["index"] for choice in frame["choices"]] for frame in found] == [[0], [1]]


def test_no_line_end_of_the_text_cuts_a_frame() -> None:
    assert frames(stream([delta("a\r\n\r\nb\n\n", STOP)]))[0]["choices"][0]["text"] == "a\r\n\r\nb\n\n"


def test_the_id_is_the_same_in_every_frame_and_in_the_buffered_answer() -> None:
    assert set(ID.findall(stream(CHUNKS, include_usage=True))) == set(ID.findall(buffered(request())))


# The official OpenAI SDK on base /v2, as Scale's own documentation has it


def sdk(reply: WireReply) -> openai.OpenAI:
    def handle(sent: httpx.Request) -> httpx.Response:
        assert sent.url.path == "/v2/completions"
        headers = {"content-type": reply.media_type, **reply.headers}
        return httpx.Response(reply.status, content=reply.body, headers=headers)

    client = httpx.Client(transport=httpx.MockTransport(handle))
    return openai.OpenAI(api_key="sk", base_url="http://gateway/v2", http_client=client, max_retries=0)


def test_the_official_sdk_reads_the_stream() -> None:
    with sdk(WireReply(200, stream(CHUNKS, include_usage=True), "text/event-stream", {})) as client:
        found = list(client.completions.create(model="m", prompt="ab", stream=True))
    assert "".join(choice.text for chunk in found for choice in chunk.choices) == "cd"
    assert found[-1].usage is not None
    assert found[-1].usage.total_tokens == 5


def test_the_official_sdk_reads_the_buffered_answer() -> None:
    with sdk(DIALECT.encode(completion(), request(), HEAD)) as client:
        assert client.completions.create(model="m", prompt="ab").choices[0].text == "cd"


def test_the_official_sdk_raises_on_an_error_frame() -> None:
    encoder = DIALECT.stream_encoder(request(stream=True), HEAD)
    body = encoder.chunk(delta("c")) + encoder.error(TruncatedStreamError("The model stopped."))
    with sdk(WireReply(200, body, "text/event-stream", {})) as client, pytest.raises(openai.APIError):
        list(client.completions.create(model="m", prompt="ab", stream=True))


# Errors

STAMP = "2025-12-31 16:00:00 PST"
HEAD_OF_ERROR = ErrorHead("request-1", now=datetime(2026, 1, 1, tzinfo=UTC).timestamp())
GONE = {"detail": "The specified endpoint could not be found."}
UPSTREAM = "Upstream service error for request_id request-1"
BUSY = {"error": "Too many requests", "timestamp": STAMP, "detail": "So it went."}
OURS = "Internal error occurred. Our team has been notified."
INTERNAL = {"error": OURS, "timestamp": STAMP, "request_id": "request-1", "detail": OURS}
SO_IT_WENT = {"detail": "So it went."}
ERRORS: dict[type[CompletionError], tuple[int, dict[str, str]]] = {
    InvalidRequestError: (400, SO_IT_WENT),
    UnsupportedParameterError: (400, SO_IT_WENT),
    ContextLengthError: (400, SO_IT_WENT),
    RequestTooLargeError: (413, SO_IT_WENT),
    UnknownPathError: (404, {"detail": "Not Found"}),
    MethodNotAllowedError: (405, {"detail": "Method Not Allowed"}),
    AuthenticationError: (401, {"detail": "No authentication was passed in"}),
    PermissionDeniedError: (404, GONE),
    ModelNotFoundError: (404, GONE),
    RateLimitError: (429, BUSY),
    QuotaExceededError: (429, BUSY),
    DuplicateRequestError: (409, SO_IT_WENT),
    ServiceError: (500, INTERNAL),
    BackendError: (500, {"detail": UPSTREAM}),
    TruncatedStreamError: (500, {"detail": UPSTREAM}),
    BackendTimeoutError: (504, {"detail": f"{UPSTREAM}: So it went."}),
    BackendUnavailableError: (503, {"detail": f"{UPSTREAM}: So it went."}),
    MeteringError: (503, SO_IT_WENT),
    CompletionError: (500, INTERNAL),
}


def test_every_error_class_of_the_domain_has_a_row() -> None:
    assert set(ERRORS) == {kind for kind in all_error_classes() if kind.__module__ == errors.__name__}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_each_error_class_has_its_status_and_body(kind: type[CompletionError]) -> None:
    reply = DIALECT.encode_error(kind("So it went.", detail="hidden"), HEAD_OF_ERROR)
    assert (reply.status, reply.media_type) == (ERRORS[kind][0], "application/json")
    assert reply.body.decode() == json.dumps(ERRORS[kind][1], separators=(",", ":"))


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_each_error_class_has_the_same_status_and_text_in_a_stream(kind: type[CompletionError]) -> None:
    frame = DIALECT.stream_encoder(request(stream=True), HEAD).error(kind("So it went.", detail="hidden"))
    error = json.loads(frame.removeprefix(b"data: "))["error"]
    assert (error["status_code"], error["content"]["error"]) == (ERRORS[kind][0], ERRORS[kind][1]["detail"])


def test_a_missing_key_is_challenged() -> None:
    assert DIALECT.encode_error(AuthenticationError("m"), HEAD_OF_ERROR).headers == {"www-authenticate": "Bearer"}


@pytest.mark.parametrize("code", ["invalid_api_key", "malformed_credential"])
def test_a_key_that_is_wrong_is_not_told_from_one_that_cannot_be_read(code: str) -> None:
    reply = DIALECT.encode_error(AuthenticationError("m", code=code), HEAD_OF_ERROR)
    assert (reply.status, reply.body) == (401, b'{"detail":"Could not authenticate user"}')
    assert reply.headers == {"www-authenticate": "Bearer"}


def test_a_schema_fault_is_a_422_list_byte_for_byte() -> None:
    reply = DIALECT.encode_error(SchemaError([missing("body", "model")]), HEAD_OF_ERROR)
    assert (reply.status, reply.media_type) == (422, "application/json")
    assert reply.body == (b'{"detail":[{"type":"missing","loc":["body","model"],"msg":"Field required","input":null}]}')


@pytest.mark.parametrize(("retry_after", "seconds"), [(0.25, "1"), (1, "1"), (1.5, "2"), (2_592_000, "2592000")])
@pytest.mark.parametrize("kind", [RateLimitError, QuotaExceededError, BackendUnavailableError])
def test_the_time_to_wait_is_told_in_whole_seconds(
    kind: type[CompletionError], retry_after: float, seconds: str
) -> None:
    headers = DIALECT.encode_error(kind("m", retry_after=retry_after), HEAD_OF_ERROR).headers
    assert headers["retry-after"] == seconds


def test_nothing_is_said_about_waiting_when_nothing_is_known() -> None:
    assert DIALECT.encode_error(RateLimitError("m"), HEAD_OF_ERROR).headers == {}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_the_official_sdk_reads_every_refusal(kind: type[CompletionError]) -> None:
    reply = DIALECT.encode_error(kind("So it went."), HEAD_OF_ERROR)
    with sdk(reply) as client, pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="m", prompt="ab")
    assert caught.value.status_code == reply.status


# Times


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        (datetime(2026, 1, 1, 8, tzinfo=UTC), "2026-01-01 00:00:00 PST"),
        (datetime(2026, 7, 1, 6, 59, 59, 999_999, tzinfo=UTC), "2026-06-30 23:59:59 PDT"),
        (datetime(2026, 3, 8, 9, 59, 59, tzinfo=UTC), "2026-03-08 01:59:59 PST"),
        (datetime(2026, 3, 8, 10, tzinfo=UTC), "2026-03-08 03:00:00 PDT"),
        (datetime(2026, 11, 1, 8, 59, 59, tzinfo=UTC), "2026-11-01 01:59:59 PDT"),
        (datetime(2026, 11, 1, 9, tzinfo=UTC), "2026-11-01 01:00:00 PST"),
    ],
)
@pytest.mark.parametrize("zone_data", [True, False])
def test_times_are_told_in_pacific_time(
    moment: datetime, expected: str, zone_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_there(name: str) -> ZoneInfo:
        raise ZoneInfoNotFoundError(name)

    if not zone_data:
        monkeypatch.setattr(scale_wire, "ZoneInfo", nothing_there)
    assert pacific_time(moment) == expected


def test_the_rule_agrees_with_the_zone_data_at_every_change() -> None:
    zone = ZoneInfo("America/Los_Angeles")
    for hour in range(24 * 366 * 10):
        moment = datetime(2025, 1, 1, tzinfo=UTC) + timedelta(hours=hour)
        if moment.month in (3, 11) and moment.day < 16:
            assert pacific_zone(moment).utcoffset(None) == moment.astimezone(zone).utcoffset()
