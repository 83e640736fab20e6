"""What Scale's ``POST /v2/completions`` accepts and refuses, and what a refusal says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from completions.dialects.dialect import ErrorHead, WireRequest
from completions.dialects.scale import ScaleDialect
from completions.domain.completion import BeamSearch, CompletionRequest, Constraint, ConstraintKind, SamplingParams
from completions.domain.errors import InvalidRequestError
from fakes import request

DIALECT = ScaleDialect()
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


def text_of(**fields: Any) -> str:
    """The text of a 400 that names the field it is about."""
    error = refused(**fields)
    status, detail = reply(json.dumps(MINIMAL | fields).encode())
    assert status == 400
    assert error.param in detail
    return str(detail)


# What is accepted


def test_a_minimal_body_has_the_documented_defaults() -> None:
    canonical = decode()
    assert canonical == request(
        max_tokens=16,
        sampling=SamplingParams(temperature=1, top_p=1),
        n=1,
        best_of=1,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        add_special_tokens=True,
        param_names=canonical.param_names,
    )


def test_a_full_body_reaches_its_canonical_fields() -> None:
    canonical = decode(
        best_of=3,
        top_k=40,
        min_p=0.25,
        use_beam_search=True,
        length_penalty=0.5,
        repetition_penalty=1.5,
        early_stopping=True,
        stop_token_ids=[7, 8],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        add_special_tokens=False,
        guided_regex="[a-z]+",
        guided_decoding_backend="outlines",
        guided_whitespace_pattern=" ?",
        echo=True,
        frequency_penalty=1.5,
        logit_bias={"50256": -100},
        logprobs=5,
        max_tokens=64,
        n=2,
        presence_penalty=-1.5,
        seed=-9,
        stop=["a", "b"],
        suffix="):",
        temperature=0.5,
        top_p=0.75,
        user="u-1",
    )
    assert canonical == request(
        max_tokens=64,
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.75,
            top_k=40,
            min_p=0.25,
            presence_penalty=-1.5,
            frequency_penalty=1.5,
            repetition_penalty=1.5,
            logit_bias={50256: -100},
            seed=-9,
            min_tokens=2,
            ignore_eos=True,
            stop_token_ids=(7, 8),
        ),
        stop=("a", "b"),
        include_stop=True,
        n=2,
        best_of=3,
        echo=True,
        logprobs=5,
        suffix="):",
        constraint=Constraint(ConstraintKind.REGEX, "[a-z]+"),
        beam=BeamSearch(0.5, True),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        add_special_tokens=False,
        end_user="u-1",
        param_names=canonical.param_names,
    )


NULLABLE = [
    *("best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed"),
    *("stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user", "top_k", "min_p"),
    *("use_beam_search", "length_penalty", "repetition_penalty", "early_stopping", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
    *("spaces_between_special_tokens", "add_special_tokens", "response_format", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern"),
]


@pytest.mark.parametrize("name", NULLABLE)
def test_null_is_the_same_as_leaving_a_field_out(name: str) -> None:
    assert decode(**{name: None}) == decode()


def test_a_null_prompt_is_the_start_of_a_document() -> None:
    assert decode(prompt=None).prompts == ("",)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("text", ("text",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_each_form_of_prompt_is_read(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert decode(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("name", "value", "same_as"),
    [
        ("max_tokens", "5", 5),
        ("max_tokens", 5.0, 5),
        ("max_tokens", True, 1),
        ("temperature", "0.5", 0.5),
        ("logprobs", "0", 0),
        ("top_k", "40", 40),
        ("echo", "true", True),
        ("echo", 1, True),
        ("logit_bias", {"1": "5"}, {"1": 5}),
    ],
)
def test_a_value_of_a_near_type_is_read_as_pydantic_reads_it(name: str, value: Any, same_as: Any) -> None:
    assert decode(**{name: value}) == decode(**{name: same_as})


def test_unknown_fields_are_ignored() -> None:
    assert decode(messages=[], truncate_prompt_tokens=5) == decode()


def test_the_last_of_two_equal_keys_wins() -> None:
    canonical = DIALECT.decode(wire(b'{"model":"demo","prompt":"a","max_tokens":1,"prompt":"b","max_tokens":2}'))
    assert (canonical.prompts, canonical.max_tokens) == (("b",), 2)


@pytest.mark.parametrize(("value", "expected"), [(-1, None), (0, None), (1, 1), (10_000, 10_000)])
def test_top_k_of_zero_or_minus_one_is_off(value: int, expected: int | None) -> None:
    assert decode(top_k=value).sampling.top_k == expected


@pytest.mark.parametrize("zero", ["temperature", "top_p"])
def test_zero_is_a_value_and_not_the_default(zero: str) -> None:
    assert getattr(decode(**{zero: 0}).sampling, zero) == 0


def test_best_of_left_out_is_n() -> None:
    assert (decode(n=2).n, decode(n=2).best_of) == (2, 2)


def test_usage_is_included_only_when_asked_for() -> None:
    assert decode(stream=True, stream_options={"include_usage": True}).include_usage
    assert not decode(stream=True).include_usage


def test_beam_search_has_the_engines_defaults() -> None:
    assert decode(use_beam_search=True).beam == BeamSearch(1.0, False)
    assert decode(use_beam_search=False, length_penalty=1, early_stopping=False).beam is None


@pytest.mark.parametrize("name", ["outlines", "lm-format-enforcer"])
def test_a_known_guided_decoding_backend_has_no_effect(name: str) -> None:
    assert decode(guided_decoding_backend=name) == decode()


# Constraints

SCHEMA = {"type": "object", "title": "\u20ac"}
SCHEMA_TEXT = '{"type":"object","title":"\u20ac"}'


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("guided_json", SCHEMA, Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA_TEXT)),
        ("guided_json", {}, Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        ("guided_regex", "a|b", Constraint(ConstraintKind.REGEX, "a|b")),
        ("guided_choice", ["yes", "no"], Constraint(ConstraintKind.CHOICE, choices=("yes", "no"))),
        ("guided_grammar", 'root ::= "a"', Constraint(ConstraintKind.GRAMMAR, 'root ::= "a"')),
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, Constraint(ConstraintKind.JSON_OBJECT)),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True, "description": "d"}},
            Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA_TEXT),
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x"}},
            Constraint(ConstraintKind.JSON_SCHEMA, "{}"),
        ),
    ],
)
def test_each_form_of_constraint_is_one_canonical_constraint(
    field: str, value: Any, expected: Constraint | None
) -> None:
    assert decode(**{field: value}).constraint == expected


def test_the_whitespace_pattern_belongs_to_json_alone() -> None:
    json_object = decode(response_format={"type": "json_object"}, guided_whitespace_pattern=" ?").constraint
    choice = decode(guided_choice=["a"], guided_whitespace_pattern=" ?").constraint
    assert json_object is not None
    assert choice is not None
    assert (json_object.whitespace_pattern, choice.whitespace_pattern) == (" ?", None)


CONSTRAINTS: dict[str, Any] = {
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "g",
    "response_format": {"type": "json_object"},
}


@pytest.mark.parametrize("first", CONSTRAINTS)
@pytest.mark.parametrize("second", CONSTRAINTS)
def test_two_constraints_at_once_are_refused(first: str, second: str) -> None:
    if first != second:
        text = text_of(**{first: CONSTRAINTS[first], second: CONSTRAINTS[second]})
        assert first in text
        assert second in text


def test_a_text_format_is_no_second_constraint() -> None:
    assert decode(guided_regex="a", response_format={"type": "text"}).constraint is not None


@pytest.mark.parametrize("field", CONSTRAINTS)
def test_a_refused_constraint_is_named_as_the_caller_wrote_it(field: str) -> None:
    assert decode(**{field: CONSTRAINTS[field]}).param_names["constraint"] == field


def test_refused_parameters_are_named_as_the_caller_wrote_them() -> None:
    names = decode().param_names
    assert (names["beam"], names["include_stop"]) == ("use_beam_search", "include_stop_str_in_output")
    assert names["prompts"] == "prompt"


# Ranges

RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("best_of", [0, 20], [-1, 21]),
    ("frequency_penalty", [-2, 2], [-2.01, 2.01]),
    ("logit_bias", [{"1": 100}, {"1": -100}], [{"1": 101}, {"1": -101}]),
    ("logprobs", [0, 5], [-1, 6]),
    ("max_tokens", [0, 100_000], [-1]),
    ("min_p", [0, 1], [-0.01, 1.01]),
    ("min_tokens", [0, 16], [-1]),
    ("n", [1, 128], [0, 129]),
    ("presence_penalty", [-2, 2], [-2.01, 2.01]),
    ("repetition_penalty", [0.01, 2], [0, -1]),
    ("seed", [2**63 - 1, -(2**63)], [2**63, -(2**63) - 1]),
    ("stop", ["a", ["a"], ["a", "b", "c", "d"]], [[], ["a", "b", "c", "d", "e"], [""]]),
    ("stop_token_ids", [[], [0]], [[-1], ["a"], 5]),
    ("temperature", [0, 2], [-0.01, 2.01, 10**400]),
    ("top_k", [-1], [-2]),
    ("top_p", [0, 1], [-0.01, 1.01]),
    ("guided_choice", [["a"], ["a", ""]], [[], [5], "a"]),
    ("guided_json", [{}], ["{}", []]),
    ("guided_decoding_backend", ["outlines", "lm-format-enforcer"], ["xgrammar", ""]),
    ("early_stopping", [False], ["never", 2]),
    ("response_format", [{"type": "text"}], [{"type": "xml"}, {}, "text", {"type": "json_schema"}]),
]
NAMES = ["a", "A-z_9", "x" * 64]
WRONG_NAMES = ["", "a b", "x" * 65, "\u00e9", "a\n"]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, ends, _ in RANGES for value in ends])
def test_the_ends_of_each_range_are_accepted(name: str, value: Any) -> None:
    assert decode(**{name: value}).model == "demo"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, beyond in RANGES for value in beyond])
def test_a_value_outside_its_range_is_a_422_that_names_it(name: str, value: Any) -> None:
    assert {tuple(fault["loc"][:2]) for fault in faults_of(**{name: value})} == {("body", name)}
    assert refused(**{name: value}).param is not None


def json_schema(name: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name}}


@pytest.mark.parametrize("name", NAMES)
def test_a_format_may_be_named_with_letters_digits_and_dashes(name: str) -> None:
    assert decode(response_format=json_schema(name)).constraint is not None


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_another_name_of_a_format_is_a_422(name: str) -> None:
    places = [fault["loc"] for fault in faults_of(response_format=json_schema(name))]
    assert ["body", "response_format", "ResponseFormatJsonSchema", "json_schema", "name"] in places


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True, "use_beam_search": False}, "early_stopping"),
    ],
)
def test_fields_that_do_not_go_together_are_a_400(fields: dict[str, Any], param: str) -> None:
    text_of(**fields)
    assert refused(**fields).param == param
