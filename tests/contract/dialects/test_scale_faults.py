"""What Scale's API says of bodies without the published form, next to what FastAPI says; and how it reads a key."""

from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Annotated, Any, Literal

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from starlette.testclient import TestClient

from completions.dialects.dialect import ErrorHead, WireRequest
from completions.dialects.scale import ScaleBody, ScaleDialect
from completions.dialects.scale_v1 import ScaleV1Dialect
from completions.dialects.scale_wire import SchemaError
from completions.domain.completion import CompletionRequest
from completions.domain.errors import AuthenticationError, InvalidRequestError

DIALECT = ScaleDialect()
DIALECTS = (DIALECT, ScaleV1Dialect(streamed=False), ScaleV1Dialect(streamed=True))
MINIMAL = {"model": "demo", "prompt": "def f("}
HEAD = ErrorHead("request-1", now=0)


def wire(body: bytes = b"", **headers: str) -> WireRequest:
    return WireRequest("POST", "/v2/completions", {}, headers, body)


def decode(**fields: Any) -> CompletionRequest:
    """The canonical form of a minimal body with ``fields`` added."""
    return DIALECT.decode(wire(json.dumps(MINIMAL | fields).encode()))


def refusal(body: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        DIALECT.decode(wire(body))
    assert caught.value.message
    return caught.value


def refused(**fields: Any) -> InvalidRequestError:
    return refusal(json.dumps(MINIMAL | fields).encode())


def reply(body: bytes) -> tuple[int, Any]:
    """Status and ``detail`` of the refusal of ``body``."""
    answer = DIALECT.encode_error(refusal(body), HEAD)
    return answer.status, json.loads(answer.body)["detail"]


def faults(body: bytes) -> list[dict[str, Any]]:
    status, detail = reply(body)
    assert status == 422
    assert isinstance(detail, list)
    return detail


def faults_of(**fields: Any) -> list[dict[str, Any]]:
    return faults(json.dumps(MINIMAL | fields).encode())


# The lists


@pytest.mark.parametrize("name", ["model", "prompt"])
def test_a_required_field_left_out_is_missing(name: str) -> None:
    body = {key: value for key, value in MINIMAL.items() if key != name}
    assert faults(json.dumps(body).encode()) == [
        {"type": "missing", "loc": ["body", name], "msg": "Field required", "input": body}
    ]


def test_the_model_may_not_be_null() -> None:
    assert faults_of(model=None) == [
        {"type": "string_type", "loc": ["body", "model"], "msg": "Input should be a valid string", "input": None}
    ]


def test_an_empty_body_is_missing() -> None:
    assert faults(b"") == [{"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}]


def test_malformed_json_is_told_with_its_position() -> None:
    assert faults(b"{") == [
        {
            "type": "json_invalid",
            "loc": ["body", 1],
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": "Expecting property name enclosed in double quotes"},
        }
    ]


def test_a_wrong_prompt_has_an_entry_for_each_form() -> None:
    places = [fault["loc"][:2] for fault in faults_of(prompt=5)]
    assert places == [["body", "prompt"]] * 4


class PeerFormatText(BaseModel):
    type: Literal["text"]


class PeerFormatJson(BaseModel):
    type: Literal["json_object"]


class PeerOptions(BaseModel):
    include_usage: bool | None = None


class Peer(BaseModel):
    """A few of the fields, for FastAPI itself to judge. They stand in the order in which ours are judged."""

    model: Annotated[str, Field(min_length=1)]
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    logit_bias: dict[str, Annotated[int, Field(ge=-100, le=100)]] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: PeerOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    guided_decoding_backend: Literal["outlines", "lm-format-enforcer"] | None = None


PEER = FastAPI()


@PEER.post("/v2/completions")
def _peer(body: Peer) -> None:
    """Only its refusals matter."""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"{",
        b" ",
        b"[1,",
        b'{"model":"m" "n":1}',
        b'{"model":"m","user":"a\nb"}',
        rb'{"model":"\x"}',
        b'"text"',
        b"[]",
        b"5",
        b'{"prompt":"a"}',
        b'{"prompt":"a","model":null}',
        b'{"prompt":"a","model":""}',
        b'{"prompt":"a","model":"m","n":"x"}',
        b'{"prompt":"a","model":"m","n":1.5}',
        b'{"prompt":"a","model":"m","n":0}',
        b'{"prompt":"a","model":"m","n":129,"best_of":-1,"temperature":2.5}',
        b'{"prompt":"a","model":"m","temperature":-0.5}',
        b'{"prompt":"a","model":"m","temperature":"hot"}',
        b'{"prompt":"a","model":"m","temperature":[]}',
        b'{"prompt":"a","model":"m","seed":9223372036854775808}',
        b'{"prompt":"a","model":"m","stream":"perhaps"}',
        b'{"prompt":"a","model":"m","stream":{}}',
        b'{"prompt":"a","model":"m","stream":true,"stream_options":"x"}',
        b'{"prompt":"a","model":"m","stream":true,"stream_options":{"include_usage":7}}',
        b'{"prompt":"a","model":"m","logit_bias":[]}',
        b'{"prompt":"a","model":"m","logit_bias":{"1":101,"2":"x"}}',
        b'{"prompt":"a","model":"m","guided_decoding_backend":"x"}',
        b'{"prompt":"a","model":"m","top_k":-2}',
        b"\xff",
        b"[" * 100_000,
        b'{"prompt":"a","model":"m","n":' + b"1" * 5000 + b"}",
    ],
    ids=lambda body: body[:60].decode("latin-1"),
)
def test_a_refusal_is_the_same_as_that_of_fastapi(body: bytes) -> None:
    headers = {"content-type": "application/json"}
    theirs = TestClient(PEER, raise_server_exceptions=False).post("/v2/completions", content=body, headers=headers)
    ours = [fault for fault in _listed(reply(body)[1]) if not isinstance(fault, dict) or _is_peers(fault)]
    assert (reply(body)[0], ours) == (theirs.status_code, _listed(theirs.json()["detail"]))


def _listed(detail: Any) -> list[Any]:
    return detail if isinstance(detail, list) else [detail]


def _is_peers(fault: dict[str, Any]) -> bool:
    """Ours knows more fields than its peer."""
    return bool(fault["loc"][-1] != "prompt")


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"])
@pytest.mark.parametrize("start", [b'{"model":"demo","prompt":"NaN \\" 1e999","x":[1.5,', b'{"temperature":', b"["])
def test_a_number_that_is_none_is_told_with_its_position(start: bytes, literal: bytes) -> None:
    (fault,) = faults(start + literal + (b"]" if start.endswith((b",", b"[")) else b"") + b"}" * start.count(b"{"))
    assert (fault["type"], fault["loc"]) == ("json_invalid", ["body", len(start)])


@pytest.mark.parametrize("name", ["temperature", "min_p", "length_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_text_that_spells_no_number_is_refused(name: str, value: str) -> None:
    assert [fault["type"] for fault in faults_of(**{name: value})] == ["finite_number"]


@pytest.mark.parametrize("text", [r"\ud800", r"\udfff", r"\ude00\ud83d", r"\\\ud800", r"\uD83D\\ude00"])
@pytest.mark.parametrize("field", ["prompt", "model", "unknown"])
def test_half_a_surrogate_pair_is_told_with_its_position(field: str, text: str) -> None:
    start = f'{{"model":"demo","prompt":"a","{field}":"'
    (fault,) = faults(f'{start}{text}"}}'.encode())
    assert (fault["type"], fault["ctx"]) == ("json_invalid", {"error": "Lone surrogate"})
    assert fault["loc"][1] >= len(start)


@pytest.mark.parametrize(
    ("text", "expected"), [(r"\ud83d\ude00", "\U0001f600"), (r"\\ud800", "\\ud800"), (r"\\\\ud800", "\\\\ud800")]
)
def test_whole_pairs_and_escaped_backslashes_are_text(text: str, expected: str) -> None:
    assert DIALECT.decode(wire(f'{{"model":"demo","prompt":"{text}"}}'.encode())).prompts == (expected,)


# Bounds


@pytest.mark.parametrize(
    "field",
    [
        '"prompt":[' + ",".join(["1.5"] * 20_000) + "]",
        '"prompt":[' + ",".join(["[[]]"] * 20_000) + "]",
        '"stop":[' + ",".join(["1"] * 20_000) + "]",
        '"stop_token_ids":[' + ",".join(['""'] * 20_000) + "]",
        '"guided_choice":[' + ",".join(["1"] * 20_000) + "]",
        '"logit_bias":{' + ",".join(f'"{number}":""' for number in range(20_000)) + "}",
    ],
    ids=lambda field: field[:20],
)
def test_refusing_a_long_list_takes_memory_in_proportion_to_the_body(field: str) -> None:
    body = f'{{"model":"demo","prompt":"a",{field}}}'.encode()
    tracemalloc.start()
    try:
        error = refusal(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(body)
    assert len(DIALECT.encode_error(error, HEAD).body) < 20_000


def test_at_most_64_faults_are_listed() -> None:
    found = faults_of(logit_bias={str(number): 500 for number in range(1000)}, n=0, top_k=-2)
    assert len(found) == 64


def test_a_long_name_is_cut() -> None:
    assert faults_of(logit_bias={"x" * 10_000: 500})[0]["loc"][2] == "x" * 256


def test_many_biases_are_all_read() -> None:
    biases = {str(number): 1 for number in range(1000)}
    assert decode(logit_bias=biases).sampling.logit_bias == dict.fromkeys(range(1000), 1)


@pytest.mark.parametrize("length", [1023, 1024, 1025, 1_000_000])
@pytest.mark.parametrize("value", ["", "\u20ac\n", [], ["", None, 1.5], {}, {"a": {"b": [True]}, "\u20ac": ""}])
def test_an_input_of_more_than_a_kibibyte_is_left_out(value: Any, length: int) -> None:
    fill = length - len(json.dumps([value, ""], ensure_ascii=False, separators=(",", ":")).encode())
    (fault,) = faults_of(n=[value, "x" * fill])
    assert ("input" in fault) is (length <= 1024)


@pytest.mark.parametrize(("depth", "told"), [(512, True), (513, False)])
def test_an_input_nested_without_end_is_left_out(depth: int, told: bool) -> None:
    (fault,) = faults(b'{"model":"demo","prompt":"a","n":' + b"[" * depth + b"]" * depth + b"}")
    assert ("input" in fault) is told


def test_the_error_carries_the_first_fault() -> None:
    error = refused(n=0, temperature=3)
    assert isinstance(error, SchemaError)
    assert (error.param, error.message) == ("n", "body.n: Input should be greater than or equal to 1")


# Anything at all

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = list(ScaleBody.model_fields)
_BODIES = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, _JSON)) | _JSON


def _decodes_or_is_refused(body: bytes) -> None:
    try:
        canonical = DIALECT.decode(wire(body))
    except InvalidRequestError as error:
        refused_with = DIALECT.encode_error(error, HEAD)
        assert refused_with.status in (400, 422)
        json.loads(refused_with.body, parse_constant=pytest.fail)
        return
    assert canonical.best_of >= canonical.n >= 1


@given(_BODIES)
def test_any_json_value_is_decoded_or_refused(value: Any) -> None:
    _decodes_or_is_refused(json.dumps(value).encode())


@given(st.sampled_from(FIELDS), _JSON)
def test_any_value_of_one_field_is_decoded_or_refused(name: str, value: Any) -> None:
    _decodes_or_is_refused(json.dumps(MINIMAL | {name: value}).encode())


@given(st.binary())
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    _decodes_or_is_refused(body)


@pytest.mark.parametrize(
    ("field", "start", "end"), [("guided_json", b'{"a":', b"}"), ("n", b"[", b"]"), ("response_format", b"[", b"]")]
)
def test_a_value_nested_to_the_readers_limit_is_read_or_refused(field: str, start: bytes, end: bytes) -> None:
    for depth in range(850, 1010):
        value = start * depth + b"1" + end * depth
        _decodes_or_is_refused(b'{"model":"demo","prompt":"a","%s":%s}' % (field.encode(), value))


# The credential, which both versions read alike


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"authorization": ""}, None),
        ({"x-api-key": ""}, None),
        ({"x-api-key": "sk-1"}, "sk-1"),
        ({"authorization": "Bearer sk-1"}, "sk-1"),
        ({"authorization": "bearer  sk-1 "}, "sk-1"),
        ({"authorization": basic("sk-1:")}, "sk-1"),
        ({"authorization": basic("sk-1:a:b")}, "sk-1"),
        ({"authorization": basic("\u20ac:")}, "\u20ac"),
        ({"authorization": basic("sk-1:").replace("Basic", "basic")}, "sk-1"),
        ({"authorization": basic("sk-1:"), "x-api-key": "sk-2"}, "sk-1"),
        ({"authorization": "Bearer sk-1", "x-api-key": "sk-2"}, "sk-1"),
    ],
)
def test_each_form_of_credential_is_read(headers: dict[str, str], expected: str | None) -> None:
    wire = WireRequest("POST", "/", {}, headers, b"")
    assert [dialect.credential(wire) for dialect in DIALECTS] == [expected] * 3


@pytest.mark.parametrize(
    "header",
    [
        *("Bearer", "Bearer ", "Basic", "Basic ", "Basic !", "Basic sk-1", "Token sk-1", "sk-1", "Basic \u20ac"),
        basic(":password"),
        basic("sk-1"),
        "Basic " + base64.b64encode(b"\xff:").decode(),
    ],
)
def test_a_malformed_credential_is_refused(header: str) -> None:
    for dialect in DIALECTS:
        with pytest.raises(AuthenticationError) as caught:
            dialect.credential(WireRequest("POST", "/", {}, {"authorization": header}, b""))
        assert dialect.encode_error(caught.value, HEAD).status == 401
