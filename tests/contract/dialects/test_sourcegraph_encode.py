"""What Sourcegraph's two completion routes answer, byte for byte."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

import pytest

from completions.dialects import sourcegraph_wire
from completions.dialects.dialect import AnswerHead, ErrorHead, StreamEncoder, WireRequest
from completions.dialects.sourcegraph import SourcegraphDialect
from completions.dialects.sourcegraph_wire import MessagesError, UnsupportedVersionError
from completions.domain.completion import (
    Choice,
    Completion,
    CompletionChunk,
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
from fakes import all_error_classes, delta, request

CODE = SourcegraphDialect(streamed=False)
CHAT = SourcegraphDialect(streamed=True)
HEAD = AnswerHead("request-1", 1_767_268_800, "demo", 12)
STOP = FinishReason.STOP
CHUNKS = [delta("c"), delta("d", STOP), CompletionChunk((), Usage(2, 2))]
DONE = b"event: done\ndata: {}\n\n"
TEXT = "text/plain; charset=utf-8"


def logprobs(token: str, offset: int) -> Logprobs:
    return Logprobs((token,), (-0.5,), ({token: -0.5},), (offset,))


def encoder(*, cumulative: bool) -> StreamEncoder:
    return CODE.stream_encoder(request(stream=True, cumulative=cumulative), HEAD)


def stream(chunks: Iterable[CompletionChunk], *, cumulative: bool) -> bytes:
    """A whole streamed answer."""
    one = encoder(cumulative=cumulative)
    return b"".join([*(one.chunk(chunk) for chunk in chunks), one.done()])


def events(body: bytes) -> list[Any]:
    """The data of the ``completion`` events; every frame has the only form that Cody's parsers take."""
    assert body.endswith(DONE)
    frames = body.removesuffix(DONE).decode().split("\n\n")[:-1]
    lines = [frame.split("\n") for frame in frames]
    assert all(len(pair) == 2 and pair[0] == "event: completion" for pair in lines)
    return [json.loads(data.removeprefix("data: ")) for _, data in lines]


# The buffered answer


def answer(choice: Choice) -> bytes:
    return CODE.encode(Completion("demo", (choice,), Usage(2, 3)), request(), HEAD).body


def test_a_buffered_answer_byte_for_byte() -> None:
    assert answer(Choice(0, "cd", STOP)) == (
        b'{"completion":"cd","stopReason":"stop","usage":{"completion_tokens":3,"prompt_tokens":2,"total_tokens":5}}'
    )


def test_a_buffered_answer_with_logprobs_byte_for_byte() -> None:
    assert answer(Choice(0, "c", FinishReason.LENGTH, logprobs("c", 0))) == (
        b'{"completion":"c","stopReason":"length","logprobs":{"tokens":["c"],"token_logprobs":[-0.5],'
        b'"top_logprobs":[{"c":-0.5}],"text_offset":[0]},'
        b'"usage":{"completion_tokens":3,"prompt_tokens":2,"total_tokens":5}}'
    )


def test_a_buffered_answer_has_status_media_type_and_headers() -> None:
    reply = CODE.encode(Completion("demo", (Choice(0, "", STOP),), Usage(2, 0)), request(), HEAD)
    assert (reply.status, reply.media_type, reply.headers) == (200, "application/json", {"vary": "Authorization"})


@pytest.mark.parametrize("text", ["", "cd", "\u20ac\U0001f600", "<a href='x'>&amp;\u2028\u2029</a>", '\n\t\x00\x7f"\\'])
@pytest.mark.parametrize("reason", FinishReason)
def test_completion_and_stop_reason_are_always_text(text: str, reason: FinishReason) -> None:
    body = json.loads(answer(Choice(0, text, reason)))
    assert (body["completion"], body["stopReason"]) == (text, str(reason))


# The streamed answer


def test_a_cumulative_stream_byte_for_byte() -> None:
    assert stream(CHUNKS, cumulative=True) == (
        b'event: completion\ndata: {"completion":"c","stopReason":""}\n\n'
        b'event: completion\ndata: {"completion":"cd","stopReason":"stop"}\n\n'
        b"event: done\ndata: {}\n\n"
    )


def test_a_stream_of_deltas_byte_for_byte() -> None:
    assert stream(CHUNKS, cumulative=False) == (
        b'event: completion\ndata: {"deltaText":"c"}\n\n'
        b'event: completion\ndata: {"deltaText":"d","stopReason":"stop"}\n\n'
        b"event: done\ndata: {}\n\n"
    )


@pytest.mark.parametrize(
    ("cumulative", "data"),
    [(True, b'{"completion":"","stopReason":"stop"}'), (False, b'{"deltaText":"","stopReason":"stop"}')],
)
@pytest.mark.parametrize("chunks", [[], [delta("", STOP)], [delta(""), CompletionChunk(), delta("", STOP)]])
def test_a_stream_without_text_still_has_one_completion(
    chunks: list[CompletionChunk], cumulative: bool, data: bytes
) -> None:
    assert stream(chunks, cumulative=cumulative) == b"event: completion\ndata: " + data + b"\n\n" + DONE


@pytest.mark.parametrize("cumulative", [True, False])
def test_an_error_in_a_stream_byte_for_byte(cumulative: bool) -> None:
    assert encoder(cumulative=cumulative).error(BackendError("The <model> failed.")) == (
        b'event: error\ndata: {"error":"The \\u003cmodel\\u003e failed."}\n\nevent: done\ndata: {}\n\n'
    )


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_stream_has_exactly_the_media_type_and_headers_that_cody_compares(cumulative: bool) -> None:
    one = encoder(cumulative=cumulative)
    assert one.media_type == "text/event-stream"
    assert one.headers == {
        "cache-control": "no-cache",
        "connection": "keep-alive",
        "x-accel-buffering": "no",
        "vary": "Authorization",
    }


@pytest.mark.parametrize("cumulative", [True, False])
def test_json_is_escaped_as_go_escapes_it(cumulative: bool) -> None:
    text = '<b>&\u2028\u2029"\\\n\r\t\x00\x1f\x7f\u20ac\U0001f600'
    escaped = '\\u003cb\\u003e\\u0026\\u2028\\u2029\\"\\\\\\n\\r\\t\\u0000\\u001f\x7f\u20ac\U0001f600"'.encode()
    assert b'":"' + escaped in stream([delta(text, STOP)], cumulative=cumulative)


@pytest.mark.parametrize("cumulative", [True, False])
def test_no_carriage_return_nor_line_feed_of_the_text_cuts_a_frame(cumulative: bool) -> None:
    body = stream([delta("a\r\n\r\n"), delta("\n\nb", STOP)], cumulative=cumulative)
    assert (body.count(b"\r"), len(events(body))) == (0, 2)


def test_both_forms_say_the_same_text_as_the_buffered_answer() -> None:
    pieces = ["def f(", "", "<a> & \u20ac", "\U0001f600\n\n", "\u2028", "end"]
    chunks = [*map(delta, pieces), delta("", STOP)]
    whole = "".join(pieces)
    cumulative = events(stream(chunks, cumulative=True))
    assert "".join(event["deltaText"] for event in events(stream(chunks, cumulative=False))) == whole
    assert (cumulative[-1]["completion"], cumulative[-1]["stopReason"]) == (whole, "stop")
    assert all(whole.startswith(event["completion"]) for event in cumulative)
    assert [event["stopReason"] for event in cumulative[:-1]] == [""] * (len(cumulative) - 1)


LOGPROBS = [delta("c", logprobs=logprobs("c", 0)), delta("<", STOP, logprobs=logprobs("<", 1))]


def test_logprobs_of_deltas_are_each_events_own() -> None:
    first, second = events(stream(LOGPROBS, cumulative=False))
    assert (first["logprobs"]["tokens"], second["logprobs"]["tokens"]) == (["c"], ["<"])


def test_cumulative_logprobs_byte_for_byte() -> None:
    assert stream(LOGPROBS, cumulative=True) == (
        b'event: completion\ndata: {"completion":"c","stopReason":"","logprobs":{"tokens":["c"],'
        b'"token_logprobs":[-0.5],"top_logprobs":[{"c":-0.5}],"text_offset":[0]}}\n\n'
        b'event: completion\ndata: {"completion":"c\\u003c","stopReason":"stop","logprobs":{"tokens":["c","\\u003c"],'
        b'"token_logprobs":[-0.5,-0.5],"top_logprobs":[{"c":-0.5},{"\\u003c":-0.5}],"text_offset":[0,1]}}\n\n'
        b"event: done\ndata: {}\n\n"
    )


def test_logprobs_of_no_token_leave_the_arrays_whole() -> None:
    none = Logprobs((), (), (), ())
    chunks = [delta("", logprobs=none), LOGPROBS[0], delta("", logprobs=none), LOGPROBS[1]]
    assert events(stream(chunks, cumulative=True))[-1]["logprobs"]["text_offset"] == [0, 1]


@pytest.mark.parametrize("cumulative", [True, False])
def test_the_work_of_escaping_is_linear_in_the_text(cumulative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []
    original = sourcegraph_wire.go_escaped

    def counting(text: str) -> str:
        passed.append(len(text))
        return original(text)

    monkeypatch.setattr(sourcegraph_wire, "go_escaped", counting)
    tokens = 8000
    one = encoder(cumulative=cumulative)
    for place in range(tokens):
        one.chunk(delta("<tok>", logprobs=logprobs("<tok>", 5 * place)))
    assert 0 < sum(passed) < tokens * 250


# Errors

REFUSALS: dict[type[CompletionError], int] = {
    InvalidRequestError: 400,
    UnsupportedParameterError: 400,
    RequestTooLargeError: 413,
    UnknownPathError: 404,
    MethodNotAllowedError: 405,
    PermissionDeniedError: 403,
    ModelNotFoundError: 400,
    RateLimitError: 429,
    QuotaExceededError: 429,
    DuplicateRequestError: 409,
    UnsupportedVersionError: 406,
    CompletionError: 500,
}
FAILURES: dict[type[CompletionError], int] = {
    ContextLengthError: 400,
    ServiceError: 500,
    BackendError: 500,
    TruncatedStreamError: 500,
    BackendTimeoutError: 504,
    BackendUnavailableError: 503,
    MeteringError: 503,
}
BUFFERED = ErrorHead("request-1", 1_767_268_800, request())
STREAMED = ErrorHead("request-1", 1_767_268_800, request(stream=True))
UNREAD = ErrorHead("request-1", 1_767_268_800)
SAID = "Over the token limit."


def test_every_error_class_has_a_row() -> None:
    domain = {kind for kind in all_error_classes() if kind.__module__ == CompletionError.__module__}
    assert domain <= {*REFUSALS, *FAILURES, AuthenticationError}


STATUS = REFUSALS | FAILURES


@pytest.mark.parametrize(
    ("kind", "head"),
    [*((kind, head) for kind in STATUS for head in (BUFFERED, UNREAD)), *((kind, STREAMED) for kind in REFUSALS)],
)
def test_each_error_has_its_status_and_plain_text(kind: type[CompletionError], head: ErrorHead) -> None:
    reply = CODE.encode_error(kind(SAID), head)
    assert (reply.status, reply.media_type, reply.body) == (STATUS[kind], TEXT, f"{SAID}\n".encode())
    assert reply.headers == {"x-content-type-options": "nosniff", "vary": "Authorization"}


@pytest.mark.parametrize("kind", FAILURES, ids=lambda kind: kind.__name__)
def test_a_failure_is_an_event_when_a_stream_was_asked_for(kind: type[CompletionError]) -> None:
    reply = CODE.encode_error(kind(SAID), STREAMED)
    assert (reply.status, reply.media_type) == (200, "text/event-stream")
    assert reply.body == b'event: error\ndata: {"error":"Over the token limit."}\n\nevent: done\ndata: {}\n\n'
    assert reply.headers == encoder(cumulative=False).headers


@pytest.mark.parametrize("kind", STATUS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("head", [BUFFERED, STREAMED], ids=["buffered", "streamed"])
def test_an_errors_detail_is_never_sent(kind: type[CompletionError], head: ErrorHead) -> None:
    assert b"hidden" not in CODE.encode_error(kind("m", detail="hidden"), head).body


@pytest.mark.parametrize("streamed", [True, False])
def test_messages_that_make_no_prompt_are_a_failure_of_their_own_mode(streamed: bool) -> None:
    error = MessagesError("no")
    error.streamed = streamed
    assert CODE.encode_error(error, UNREAD).status == (200 if streamed else 400)


@pytest.mark.parametrize("head", [BUFFERED, STREAMED], ids=["buffered", "streamed"])
def test_a_context_that_overflows_is_told_in_the_words_cody_looks_for(head: ErrorHead) -> None:
    assert b"token limit" in CODE.encode_error(ContextLengthError("It does not fit."), head).body


@pytest.mark.parametrize("head", [BUFFERED, STREAMED], ids=["buffered", "streamed"])
def test_a_rate_limit_tells_the_limit_and_a_date(head: ErrorHead) -> None:
    error = RateLimitError("Slow down.", retry_after=29.5, status=LimitStatus("requests", 10, -3, 30))
    reply = CODE.encode_error(error, head)
    assert reply.status == 429
    assert reply.headers == {
        "x-content-type-options": "nosniff",
        "vary": "Authorization",
        "x-ratelimit-limit": "10",
        "x-ratelimit-remaining": "0",
        "retry-after": "Thu, 01 Jan 2026 12:00:30 GMT",
    }
    assert reply.body == (
        b"Slow down. Limit of code_completions: 10 out of 10 requests used. "
        b"Retry after Thu, 01 Jan 2026 12:00:30 GMT.\n"
    )


def test_a_rate_limit_of_the_stream_route_names_its_own_scope() -> None:
    error = RateLimitError("Slow down.", status=LimitStatus("tokens", 10, 4, 30))
    assert b"Limit of chat_completions: 6 out of 10 tokens used." in CHAT.encode_error(error, BUFFERED).body


# Authentication

NOT_SENT = "No access token was sent. Send one in the header 'Authorization: token YOUR_ACCESS_TOKEN'.\n"


@pytest.mark.parametrize("head", [UNREAD, STREAMED], ids=["unread", "streamed"])
@pytest.mark.parametrize(
    ("error", "body"),
    [
        (AuthenticationError("other words", code="invalid_api_key"), "Invalid access token.\n"),
        (AuthenticationError("other words"), NOT_SENT),
        (AuthenticationError("Tokens are switched off.", code="switched_off"), "Tokens are switched off.\n"),
    ],
)
def test_a_caller_who_is_not_known_hears_it_in_the_originals_words(
    error: AuthenticationError, body: str, head: ErrorHead
) -> None:
    reply = CODE.encode_error(error, head)
    assert (reply.status, reply.media_type, reply.body) == (401, TEXT, body.encode())
    assert reply.headers["x-content-type-options"] == "nosniff"


def sent(authorization: str | None, token: str | None = None) -> WireRequest:
    query = {} if token is None else {"token": token}
    headers = {} if authorization is None else {"authorization": authorization}
    return WireRequest("POST", "/.api/completions/code", query, headers, b"")


def basic(user: str, password: str = "") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    "header",
    [
        "token sgp_1",
        'token token="sgp_1"',
        'token Token = "sgp_1"',
        "token token=sgp_1",
        'token-sudo token="sgp_1",user="alice"',
        'token-sudo user="alice", token="sgp_1"',
        'token token="sgp\\_1"',
        basic("sgp_1"),
        basic("sgp_1", "ignored"),
    ],
)
def test_each_form_of_credential_gives_the_token(header: str) -> None:
    assert CODE.credential(sent(header)) == "sgp_1"


def test_a_token_of_base64_keeps_its_padding() -> None:
    assert CODE.credential(sent("token c2dw==")) == "c2dw=="


@pytest.mark.parametrize("header", ["token other", basic("other"), "Bearer other", "token"])
def test_the_querys_token_comes_first(header: str) -> None:
    assert CODE.credential(sent(header, token="sgp_1")) == "sgp_1"


@pytest.mark.parametrize("header", [None, "", "Bearer sgp_1", "Token sgp_1", "TOKEN sgp_1", "sgp_1", "Digest a=b"])
def test_any_other_scheme_is_anonymous(header: str | None) -> None:
    assert CODE.credential(sent(header, token="")) is None


@pytest.mark.parametrize(
    "header",
    [
        *("token", "token ", 'token token=""', 'token user="alice"', "token a=b", "token-sudo sgp_1", "token-sudo"),
        *('token-sudo user="alice"', 'token token="sgp', "Basic", "Basic !", "Basic OnA=", "Basic /w=="),
    ],
)
def test_a_known_scheme_with_a_broken_value_is_malformed(header: str) -> None:
    with pytest.raises(AuthenticationError) as caught:
        CODE.credential(sent(header))
    reply = CODE.encode_error(caught.value, UNREAD)
    assert (reply.status, reply.body) == (401, b"Invalid Authorization header.\n")
