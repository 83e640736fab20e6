"""What OpenAI's ``POST /v1/completions`` accepts and refuses, and what a refusal says.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions.dialects.dialect import WireRequest
from completions.dialects.openai import OpenAIDialect
from completions.domain.completion import CompletionRequest, SamplingParams
from completions.domain.errors import AuthenticationError, InvalidRequestError
from fakes import request

DIALECT = OpenAIDialect()
MINIMAL = {"model": "demo", "prompt": "def f("}


def wire(body: bytes = b"", **headers: str) -> WireRequest:
    return WireRequest("POST", "/v1/completions", {}, headers, body)


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


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in MINIMAL.items() if key != name}).encode()


# What is accepted


def test_a_minimal_body_has_the_documented_defaults() -> None:
    canonical = decode()
    names = canonical.param_names
    assert canonical == request(
        max_tokens=16,
        sampling=SamplingParams(temperature=1, top_p=1),
        n=1,
        best_of=1,
        echo=False,
        logprobs=None,
        stream=False,
        param_names=names,
    )


def test_a_full_body_reaches_its_canonical_fields() -> None:
    canonical = decode(
        suffix="):",
        max_tokens=64,
        temperature=0.5,
        top_p=0.25,
        n=2,
        best_of=3,
        echo=True,
        logprobs=5,
        stop=["a", "b"],
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        logit_bias={"50256": -100, "7": 5},
        seed=-9,
        user="u-1",
        stream=False,
    )
    assert canonical == request(
        suffix="):",
        max_tokens=64,
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.25,
            presence_penalty=-1.5,
            frequency_penalty=1.5,
            logit_bias={50256: -100, 7: 5},
            seed=-9,
        ),
        n=2,
        best_of=3,
        echo=True,
        logprobs=5,
        stop=("a", "b"),
        end_user="u-1",
        param_names=canonical.param_names,
    )


NULLABLE = [
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "top_p",
    "user",
]


@pytest.mark.parametrize("name", NULLABLE)
def test_null_is_the_same_as_leaving_a_field_out(name: str) -> None:
    assert decode(**{name: None}) == decode()


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("temperature", 0, lambda canonical: canonical.sampling.temperature),
        ("top_p", 0, lambda canonical: canonical.sampling.top_p),
        ("max_tokens", 0, lambda canonical: canonical.max_tokens),
        ("logprobs", 0, lambda canonical: canonical.logprobs),
        ("seed", 0, lambda canonical: canonical.sampling.seed),
    ],
)
def test_zero_is_a_value_and_not_the_default(name: str, value: int, read: Any) -> None:
    assert read(decode(**{name: value})) == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ("text",)),
        ("", ("",)),
        (None, ("",)),
        (["a"], ("a",)),
        (["a", "b"], ("a", "b")),
        (["a", ""], ("a", "")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([0], ((0,),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ("\U0001f600\u20ac\u0000", ("\U0001f600\u20ac\u0000",)),
    ],
)
def test_each_form_of_prompt_is_read(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert decode(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, ()), ("\n", ("\n",)), (["a"], ("a",)), (["a", "b", "c", "d"], ("a", "b", "c", "d"))],
)
def test_each_form_of_stop_is_read(stop: Any, expected: tuple[str, ...]) -> None:
    assert decode(stop=stop).stop == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 20),
        ("frequency_penalty", -2),
        ("frequency_penalty", 2),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"1": 100, "2": -100}),
        ("logit_bias", {}),
        ("logprobs", 5),
        ("max_tokens", 1_000_000),
        ("n", 128),
        ("presence_penalty", -2),
        ("presence_penalty", 2),
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("suffix", ""),
        ("temperature", 2),
        ("top_p", 1),
        ("user", ""),
    ],
)
def test_the_ends_of_each_range_are_accepted(name: str, value: Any) -> None:
    assert decode(**{name: value}).model == "demo"


def test_best_of_left_out_is_n() -> None:
    assert (decode(n=3).n, decode(n=3).best_of) == (3, 3)


def test_best_of_equal_to_n_may_be_streamed() -> None:
    assert decode(n=2, best_of=2, stream=True).stream


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        ({"include_usage": None}, False),
        ({}, False),
        ({"include_obfuscation": True}, False),
    ],
)
def test_usage_is_included_only_when_asked_for(options: dict[str, Any], expected: bool) -> None:
    assert decode(stream=True, stream_options=options).include_usage is expected


def test_the_last_of_two_equal_keys_wins() -> None:
    body = b'{"model":"demo","prompt":"a","max_tokens":1,"prompt":"b","max_tokens":2}'
    canonical = DIALECT.decode(wire(body))
    assert (canonical.prompts, canonical.max_tokens) == (("b",), 2)


# What is refused


@pytest.mark.parametrize("name", ["model", "prompt"])
def test_a_required_field_left_out_is_named(name: str) -> None:
    error = refusal(without(name))
    assert error.param == name
    assert name in error.message


INTEGERS = ("best_of", "logprobs", "max_tokens", "n", "seed")
NUMBERS = ("frequency_penalty", "presence_penalty", "temperature", "top_p")
WRONG: dict[str, list[Any]] = {
    **{name: ["5", 1.0, 1.5, True, [], {}] for name in INTEGERS},
    **{name: ["0.5", True, [], {}] for name in NUMBERS},
    **{name: ["true", 1, 0, []] for name in ("echo", "stream")},
    "model": [None, "", 5, ["demo"], True],
    "prompt": [
        *(5, True, {}, [], [[]], [[1], []], ["a", 1], [1, "a"], [[1], "a"], [["a"]]),
        *([1.0], [True], [None], [-1], [[1], [-1]], [2**31], [[[1]]]),
    ],
    "suffix": [5, ["a"], True],
    "user": [5, ["a"], {}],
    "logit_bias": [[], "1", {"1": "5"}, {"1": 1.5}, {"1": True}, {"1": None}],
    "stop": [5, True, {}, [5], ["a", None], [["a"]]],
    "stream_options": [True, [], "include_usage"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_of_the_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(**({"stream": True} if name == "stream_options" else {}), **{name: value})
    assert error.param == name
    assert name in error.message


OUTSIDE = [
    ("best_of", -1),
    ("best_of", 21),
    ("frequency_penalty", -2.01),
    ("frequency_penalty", 2.01),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": -101}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"\u0661": 1}),
    ("logprobs", -1),
    ("logprobs", 6),
    ("max_tokens", -1),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("presence_penalty", -2.01),
    ("presence_penalty", 2.01),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("stop", []),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("temperature", -0.01),
    ("temperature", 2.01),
    ("temperature", 10**400),
    ("top_p", -0.01),
    ("top_p", 1.01),
]


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_a_value_outside_its_range_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param == name
    assert name in error.message


def test_five_stops_have_a_code_of_their_own() -> None:
    error = refused(stop=["a", "b", "c", "d", "e"])
    assert (error.param, error.code) == ("stop", "array_above_max_length")


def test_an_unknown_field_is_refused_in_the_originals_words() -> None:
    error = refused(top_k=5)
    assert (error.message, error.param, error.code) == ("Unrecognized request argument supplied: top_k", None, None)


def test_unknown_fields_are_all_listed() -> None:
    assert refused(top_k=5, min_p=0).message == "Unrecognized request arguments supplied: top_k, min_p"


def test_chat_messages_are_an_unknown_field() -> None:
    assert "messages" in refused(messages=[]).message


def test_an_unknown_stream_option_is_refused_by_name() -> None:
    error = refused(stream=True, stream_options={"colour": "red"})
    assert error.param == "stream_options"
    assert "colour" in error.message


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
def test_stream_options_without_streaming_are_refused(stream: dict[str, Any]) -> None:
    error = refused(stream_options={"include_usage": True}, **stream)
    assert (error.param, error.code) == ("stream_options", None)


def test_best_of_below_n_is_refused() -> None:
    assert refused(n=3, best_of=2).param == "best_of"


@pytest.mark.parametrize("key", ["x", "-1", "1.5", "", "²", "2147483648", "9" * 5000])
def test_a_bias_for_what_is_no_token_id_is_refused(key: str) -> None:
    assert refused(logit_bias={key: 1}).param == "logit_bias"


def test_refusing_many_biases_takes_memory_in_proportion_to_the_body() -> None:
    biases = {str(number): "x" for number in range(50_000)}
    tracemalloc.start()
    error = refused(logit_bias=biases)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error.param == "logit_bias"
    assert peak < 100 * len(json.dumps(biases))


def test_a_field_let_through_is_understood() -> None:
    body = json.dumps({"model": "demo", "prompt": "ab", "top_k": 5, "min_p": 0.1}).encode()
    canonical = OpenAIDialect(frozenset({"top_k", "min_p"})).decode(
        WireRequest("POST", "/v1/completions", {}, {}, body)
    )
    assert (canonical.sampling.top_k, canonical.sampling.min_p) == (5, 0.1)


@pytest.mark.parametrize("value", [5, "wrong"])
def test_a_field_that_is_not_let_through_is_as_unknown_as_any(value: object) -> None:
    assert refused(top_k=value).message == "Unrecognized request argument supplied: top_k"


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "max_tokens"]
)
def test_a_number_that_is_none_is_refused(name: str, literal: bytes) -> None:
    refusal(b'{"model":"demo","prompt":"a","%s":%s}' % (name.encode(), literal))


@pytest.mark.parametrize("field", ["prompt", "suffix", "stop", "model", "user"])
@pytest.mark.parametrize("text", [rb"\ud800", rb"a\udfff", rb"\ude00\ud83d"])
def test_half_a_surrogate_pair_is_refused(field: str, text: bytes) -> None:
    refusal(b'{"model":"demo","prompt":"a","%s":"%s"}' % (field.encode(), text))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"hello",
        b'{"model":"demo",}',
        b"{'model': 'demo'}",
        b'{"model":"demo"}x',
        b"\xff\xfe",
        b'{"a":"\xff"}',
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    error = refusal(body)
    assert (error.param, error.code) == (None, None)
    assert "JSON" in error.message


@pytest.mark.parametrize("body", [b"null", b"[]", b'"text"', b"5", b"true", b'[{"model":"demo","prompt":"a"}]'])
def test_a_body_that_is_not_an_object_is_refused(body: bytes) -> None:
    error = refusal(body)
    assert (error.param, error.code) == (None, None)
    assert "object" in error.message


def test_a_body_nested_without_end_is_refused() -> None:
    refusal(b'{"model":"demo","prompt":' + b"[" * 100_000)


@pytest.mark.parametrize("bad", ["1.5", '{"a":1}', "[1.5]", "[[]]"])
def test_refusing_a_long_array_takes_memory_in_proportion_to_the_body(bad: str) -> None:
    # 6 MB may be sent, before any key is looked at, to a function of 512 MB
    body = f'{{"model":"demo","prompt":[{",".join([bad] * 20_000)}]}}'.encode()
    # threads that other tests have left running allocate, too: the least of several is ours
    assert min(peak_memory(body) for _ in range(5)) < 50 * len(body)


def peak_memory(body: bytes) -> int:
    """Bytes that refusing it takes at the most."""
    tracemalloc.start()
    try:
        refusal(body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_refusing_many_unknown_fields_takes_few_words() -> None:
    names = ",".join(f'"field{number}":1' for number in range(10_000))
    assert len(refusal(f'{{"model":"demo","prompt":"a",{names}}}'.encode()).message) < 10_000


@pytest.mark.parametrize("name", ["prompt", "suffix", "user", "stop"])
def test_a_refusal_never_quotes_the_callers_text(name: str) -> None:
    assert "my secret" not in refused(**{name: {"my": ["my secret"]}}).message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_BODIES = st.fixed_dictionaries({}, optional=dict.fromkeys((*MINIMAL, *NULLABLE), _JSON)) | _JSON


def _decodes_or_is_refused(body: bytes) -> None:
    try:
        canonical = DIALECT.decode(wire(body))
    except InvalidRequestError:
        return
    assert canonical.best_of >= canonical.n >= 1


@given(_BODIES)
def test_any_json_value_is_decoded_or_refused(value: Any) -> None:
    _decodes_or_is_refused(json.dumps(value).encode())


@given(st.sampled_from([*MINIMAL, *NULLABLE]), _JSON)
def test_any_value_of_one_field_is_decoded_or_refused(name: str, value: Any) -> None:
    _decodes_or_is_refused(json.dumps(MINIMAL | {name: value}).encode())


@given(st.binary())
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    _decodes_or_is_refused(body)


# The credential


def test_the_key_stands_behind_bearer() -> None:
    assert DIALECT.credential(wire(authorization="Bearer sk-1")) == "sk-1"


def test_the_scheme_may_be_spelled_in_any_case() -> None:
    assert DIALECT.credential(wire(authorization="bearer  sk-1 ")) == "sk-1"


def test_no_header_is_no_credential() -> None:
    assert DIALECT.credential(wire()) is None


@pytest.mark.parametrize("header", ["sk-1", "Bearer", "Bearer ", "Basic dTpw", "Token sk-1"])
def test_another_form_of_credential_is_malformed(header: str) -> None:
    with pytest.raises(AuthenticationError):
        DIALECT.credential(wire(authorization=header))
