"""What Sourcegraph's two completion routes accept and refuse, and the prompt that messages come to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from completions.dialects.dialect import ErrorHead, WireRequest
from completions.dialects.sourcegraph import SourcegraphDialect
from completions.domain.completion import CompletionRequest, SamplingParams
from completions.domain.errors import InvalidRequestError
from fakes import request

CODE = SourcegraphDialect(streamed=False)
CHAT = SourcegraphDialect(streamed=True)
ROUTES = {"code": CODE, "stream": CHAT}
MESSAGE = {"speaker": "human", "text": "def f("}
MINIMAL = {"model": "demo", "messages": [MESSAGE]}
HEAD = ErrorHead("request-1", now=0)
HUMAN_STOP = "\n\nHuman:"


def wire(body: bytes = b"", query: dict[str, str] | None = None, headers: dict[str, str] | None = None) -> WireRequest:
    return WireRequest("POST", "/.api/completions/code", query or {}, headers or {}, body)


def versioned(version: str | None) -> dict[str, str]:
    return {} if version is None else {"api-version": version}


def decode(dialect: SourcegraphDialect = CODE, version: str | None = "1", **fields: Any) -> CompletionRequest:
    """The canonical form of a minimal body with ``fields`` added."""
    return dialect.decode(wire(json.dumps(MINIMAL | fields).encode(), versioned(version)))


def decoded(body: str) -> CompletionRequest:
    return CODE.decode(wire(body.encode()))


def refusal(body: bytes, dialect: SourcegraphDialect = CODE, version: str | None = "1") -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        dialect.decode(wire(body, versioned(version)))
    assert caught.value.message
    return caught.value


def refused(dialect: SourcegraphDialect = CODE, version: str | None = "1", **fields: Any) -> InvalidRequestError:
    return refusal(json.dumps(MINIMAL | fields).encode(), dialect, version)


def with_field(text: str) -> str:
    """A minimal body with the raw JSON ``text`` at its end."""
    return f'{{"model":"demo","messages":[{{"speaker":"human","text":"a"}}],{text}}}'


# What is accepted


def test_a_minimal_body_on_the_code_route_has_the_documented_defaults() -> None:
    canonical = decode()
    assert canonical == request(
        max_tokens=256,
        sampling=SamplingParams(temperature=1, top_p=1, top_k=None),
        stop=(),
        echo=False,
        n=1,
        best_of=1,
        logprobs=None,
        stream=False,
        cumulative=True,
        param_names=canonical.param_names,
    )


def test_a_minimal_body_on_the_stream_route_has_the_documented_defaults() -> None:
    canonical = decode(CHAT)
    assert (canonical.stream, canonical.max_tokens, canonical.stop) == (True, 1024, (HUMAN_STOP,))


def test_a_typical_autocomplete_body_reaches_its_canonical_fields() -> None:
    stops = [
        "\n\n",
        "\n\r\n",
        "<|endoftext|>",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "a",
        "b",
        "c",
        "d",
    ]
    canonical = decode(
        version="8",
        model="fireworks::v1::code-qwen-7b",
        messages=[MESSAGE | {"text": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"}],
        maxTokensToSample=128,
        temperature=0.2,
        topK=40,
        topP=0.5,
        stopSequences=stops,
        stream=True,
        logprobs=3,
        timeoutMs=7000,
        fast=True,
        prediction={"type": "content"},
        tools=[{}],
        rewriteSpeculation=True,
        prompt="old",
        user="u",
        azureChatModel="x",
    )
    assert canonical == CompletionRequest(
        model="code-qwen-7b",
        other_models=("fireworks::v1::code-qwen-7b",),
        prompts=("<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",),
        max_tokens=128,
        sampling=SamplingParams(temperature=0.2, top_p=0.5, top_k=40),
        stop=tuple(stops),
        stream=True,
        cumulative=False,
        logprobs=3,
        deadline_ms=7000,
        param_names=canonical.param_names,
    )


@pytest.mark.parametrize(
    "name",
    [
        "maxTokensToSample",
        "temperature",
        "stopSequences",
        "topK",
        "topP",
        "stream",
        "logprobs",
        "timeoutMs",
        "unheardOf",
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_null_is_the_same_as_leaving_a_field_out(name: str, route: str) -> None:
    assert decode(ROUTES[route], **{name: None}) == decode(ROUTES[route])


@pytest.mark.parametrize(
    ("sent", "temperature"), [({}, 1), *(({"temperature": t}, r) for t, r in [(0, 0), (0.3, 0.3), (9, 1), (-2, 0)])]
)
def test_temperature_is_brought_into_its_range_and_zero_stays_greedy(sent: dict[str, Any], temperature: float) -> None:
    assert decode(**sent).sampling.temperature == temperature


@pytest.mark.parametrize(("top_k", "expected"), [(0, None), (-1, None), (-7, None), (1, 1), (40, 40)])
def test_top_k_below_one_is_off(top_k: int, expected: int | None) -> None:
    assert decode(topK=top_k).sampling.top_k == expected


@pytest.mark.parametrize(("top_p", "expected"), [(0, 1), (-1, 1), (-0.5, 1), (0.25, 0.25), (1, 1), (3, 1)])
def test_top_p_of_nothing_is_off(top_p: float, expected: float) -> None:
    assert decode(topP=top_p).sampling.top_p == expected


@pytest.mark.parametrize(("route", "default"), [("code", 256), ("stream", 1024)])
@pytest.mark.parametrize(("sent", "expected"), [(0, None), (-3, None), (1, 1), (100_000, 100_000)])
def test_no_limit_of_tokens_is_the_routes_own(route: str, default: int, sent: int, expected: int | None) -> None:
    assert decode(ROUTES[route], maxTokensToSample=sent).max_tokens == (expected or default)


@pytest.mark.parametrize(("sent", "expected"), [(0, 0), (1, 1), (5, 5), (6, 5), (40, 5), (255, 5)])
def test_logprobs_are_clamped_at_five(sent: int, expected: int) -> None:
    assert decode(logprobs=sent).logprobs == expected


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [True, False])
def test_the_bodys_stream_overrides_the_routes(route: str, stream: bool) -> None:
    assert decode(ROUTES[route], stream=stream).stream is stream


def test_any_number_of_stops_is_taken() -> None:
    stops = [f"stop-{number}" for number in range(40)]
    assert decode(stopSequences=stops).stop == tuple(stops)


def test_a_stop_that_is_empty_is_none() -> None:
    assert decode(stopSequences=["", "a", None, "a"]).stop == ("a",)


def test_the_stream_route_always_stops_at_the_humans_next_turn() -> None:
    assert decode(CHAT, stopSequences=["a", HUMAN_STOP]).stop == ("a", HUMAN_STOP)
    assert decode(CHAT, stopSequences=["a"]).stop == ("a", HUMAN_STOP)


def test_a_refusal_can_name_the_callers_own_fields() -> None:
    names = decode().param_names
    assert (names["top_k"], names["top_p"], names["stop"]) == ("topK", "topP", "stopSequences")


# JSON as Go reads it


@pytest.mark.parametrize(
    "name", ["MAXTOKENSTOSAMPLE", "maxtokenstosample", "MaxTokensToSample", "maxToken\u017fTo\u017fample"]
)
def test_field_names_match_in_any_case(name: str) -> None:
    fields: dict[str, Any] = {name: 7}
    assert decode(**fields).max_tokens == 7


def test_the_kelvin_sign_is_a_k() -> None:
    fields: dict[str, Any] = {"top\u212a": 7}
    assert decode(**fields).sampling.top_k == 7


def test_names_that_only_look_alike_are_unknown() -> None:
    fields: dict[str, Any] = {"me\u00dfages": 5, "max_tokens": 7, "top_k": "x"}
    assert decode(**fields) == decode()


def test_inner_names_match_in_any_case_too() -> None:
    assert decode(messages=[{"ROLE": "user", "Content": [{"Type": "text", "TEXT": "a"}]}]).prompts == ("a",)


def test_the_last_of_two_equal_names_wins_whatever_its_case() -> None:
    assert decoded(with_field('"topK":1,"TOPK":2')).sampling.top_k == 2
    assert decoded(with_field('"TOPK":1,"topK":null')).sampling.top_k is None


def test_each_of_two_equal_names_must_have_the_right_type() -> None:
    assert refusal(with_field('"topK":"x","topK":2').encode()).message == "could not decode request body"


def test_what_follows_the_first_value_is_not_looked_at() -> None:
    assert decoded(with_field('"topK":1') + " trailing").sampling.top_k == 1


@pytest.mark.parametrize("literal", ["1e999", "[[[[]]]]", "9" * 6000, '"\\ud800"', "-0.0e-7", "{}"])
def test_an_unknown_field_may_hold_anything(literal: str) -> None:
    assert decoded(with_field(f'"tools":{literal}')).model == "demo"


BAD_INTEGERS = ['"5"', "1.0", "1.5", "1e2", "true", "[]", "{}", str(2**63), str(-(2**63) - 1), "9" * 6000]
WRONG: dict[str, list[str]] = {
    **dict.fromkeys(("maxTokensToSample", "topK"), BAD_INTEGERS),
    **{name: ['"0.5"', "true", "[]", "{}", "1e999", "-1e999", "9" * 6000] for name in ("temperature", "topP")},
    "logprobs": [*BAD_INTEGERS, "256", "-1", "-0", "1000"],
    "model": ["5", "true", "[]", "{}"],
    "stream": ['"true"', "1", "0", "[]", "{}"],
    "stopSequences": ['"a"', "5", "{}", "[5]", '["a",[]]', "[true]"],
    "messages": ['"a"', "5", "{}", "true", '["a"]', "[5]", "[[]]"],
    "messages.role": ["5", "[]", "true"],
    "messages.speaker": ["5", "[]", "true"],
    "messages.text": ["5", "[]", "true", "{}"],
    "messages.content": ["5", "true", "{}", '["a"]', "[5]"],
    "messages.part": ['{"type":5}', '{"type":"text","text":5}', '{"type":"file","file":"a"}', "[]"],
}


@pytest.mark.parametrize(("name", "literal"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_of_the_wrong_type_is_a_body_that_cannot_be_decoded(name: str, literal: str) -> None:
    inner = {
        "messages.role": '"messages":[{"text":"a","role":%s}]',
        "messages.speaker": '"messages":[{"text":"a","speaker":%s}]',
        "messages.text": '"messages":[{"speaker":"human","text":%s}]',
        "messages.content": '"messages":[{"speaker":"human","content":%s}]',
        "messages.part": '"messages":[{"speaker":"human","content":[%s]}]',
    }.get(name, f'"{name}":%s')
    reply = CODE.encode_error(refusal(with_field(inner % literal).encode()), HEAD)
    assert (reply.status, reply.body) == (400, b"could not decode request body\n")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" ", b"{", b"hello", b'{"a":1,}', b"{'a':1}", b'{"a":01}', b'{"a":"\n"}', b'\xef\xbb\xbf{"model":"a"}'),
        *(b"[]", b'"text"', b"5", b"true", b"NaN", b"\xff\xfe", b"\x85{}"),
        *(b'{"temperature":NaN}', b'{"x":Infinity}', b'{"x":-Infinity}', b'{"x":' + b"[" * 100_000),
    ],
    ids=repr,
)
def test_what_is_no_json_object_cannot_be_decoded(body: bytes) -> None:
    assert refusal(body).message == "could not decode request body"


@pytest.mark.parametrize("body", [b"null", b"{}", b'{"model":null}', b'{"messages":null}'])
def test_nothing_at_all_names_no_model(body: bytes) -> None:
    reply = CODE.encode_error(refusal(body), HEAD)
    assert reply.status == 400
    assert b"no model" in reply.body


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rb"\ud800", "\ufffd"),
        (rb"a\udfffb", "a\ufffdb"),
        (rb"\ude00\ud83d", "\ufffd\ufffd"),
        (rb"\ud83d\ude00", "\U0001f600"),
        (b"a\xffb", "a\ufffdb"),
        (b"\xe2\x82", "\ufffd\ufffd"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        ("\u20ac\U0001f600".encode(), "\u20ac\U0001f600"),
        (rb"\u0000", "\x00"),
    ],
)
def test_broken_text_is_replaced(text: bytes, expected: str) -> None:
    canonical = CODE.decode(wire(b'{"model":"demo","messages":[{"speaker":"human","text":"%s"}]}' % text))
    assert canonical.prompts == (expected,)


# The deadline


@pytest.mark.parametrize(
    ("header", "body", "expected"),
    [
        (None, None, None),
        ("7000", None, 7000),
        (None, 9000, 9000),
        ("7000", 9000, 7000),
        ("junk", 9000, 9000),
        ("junk", None, None),
        ("0", None, None),
        ("1.5", None, None),
        ("9" * 5000, None, None),
        (None, 0, None),
        (None, -5, None),
        (None, 1.5, None),
        (None, "7000", None),
        (None, {"a": 1}, None),
    ],
)
def test_the_callers_time_limit_is_read_and_junk_ignored(header: str | None, body: Any, expected: int | None) -> None:
    text = json.dumps(MINIMAL if body is None else {**MINIMAL, "timeoutMs": body}).encode()
    headers = {} if header is None else {"x-timeout-ms": header}
    assert CODE.decode(wire(text, headers=headers)).deadline_ms == expected


# Anything at all

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_NAMES = [
    *MINIMAL,
    "maxTokensToSample",
    "temperature",
    "stopSequences",
    "topK",
    "topP",
    "stream",
    "logprobs",
    "timeoutMs",
]
_TURN = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system"]) | _JSON,
        "speaker": st.sampled_from(["human", "assistant"]) | _JSON,
        "text": st.text() | _JSON,
        "content": st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})) | _JSON,
    },
)
_BODIES = st.fixed_dictionaries({}, optional=dict.fromkeys(_NAMES, _JSON) | {"messages": st.lists(_TURN, max_size=4)})


def _decodes_or_is_refused(body: bytes, version: str | None) -> None:
    for dialect in ROUTES.values():
        try:
            canonical = dialect.decode(wire(body, versioned(version)))
        except InvalidRequestError:
            continue
        (prompt,) = canonical.prompts
        assert isinstance(prompt, str)
        assert prompt.encode()
        assert 0 <= canonical.sampling.temperature <= 1
        assert 0 < canonical.sampling.top_p <= 1


@given(_BODIES | _JSON, st.sampled_from([None, "1", "2"]))
def test_any_json_value_is_decoded_or_refused(value: Any, version: str | None) -> None:
    _decodes_or_is_refused(json.dumps(value).encode(), version)


@given(st.sampled_from(_NAMES), _JSON)
def test_any_value_of_one_field_is_decoded_or_refused(name: str, value: Any) -> None:
    _decodes_or_is_refused(json.dumps(MINIMAL | {name: value}).encode(), "1")


@given(st.binary())
@example(b"\xed\xa0\x80")
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    _decodes_or_is_refused(body, None)
