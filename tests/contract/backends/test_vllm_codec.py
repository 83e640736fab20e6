"""What goes to a vLLM container and what is read from it, against the wire format of vLLM 0.27.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from completions.backends.codec import EncodeOptions
from completions.backends.payload_stream import records
from completions.backends.vllm import ROUTE_ATTRIBUTE, VllmCodec
from completions.domain.catalog import Capability, ModelLimits, ModelRoute, Parameter
from completions.domain.completion import (
    ChoiceDelta,
    CompletionChunk,
    CompletionRequest,
    Constraint,
    ConstraintKind,
    FinishReason,
    Logprobs,
    SamplingParams,
    Usage,
)
from completions.domain.errors import (
    BackendError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    InvalidRequestError,
    ServiceError,
    TruncatedStreamError,
)
from fakes import request, route

Json = dict[str, Any]
CODEC = VllmCodec()
OPTIONS = EncodeOptions()


def encoded(canonical: CompletionRequest, target: ModelRoute | None = None) -> Json:
    body: Json = json.loads(CODEC.encode(canonical, target or route(), OPTIONS).body)
    return body


def sampled(**values: Any) -> CompletionRequest:
    return request(sampling=SamplingParams(**values))


def decoded(stream: bytes, canonical: CompletionRequest | None = None, *, size: int = 1 << 20) -> list[CompletionChunk]:
    """The chunks of a stream that arrives in parts of ``size`` bytes."""
    decoder = CODEC.decoder(canonical or request())
    parts = [stream[at : at + size] for at in range(0, len(stream), size)]
    chunks = [chunk for record in records(parts) if (chunk := decoder.decode(record)) is not None]
    decoder.finish()
    return chunks


def sse(*values: Json) -> bytes:
    return b"".join(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" for value in values)


def record(text: str = "", finish_reason: str | None = None, *, index: int = 0, **fields: Any) -> Json:
    """One record of a stream, as vLLM writes it; it names the container's model path."""
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    choice |= {name: fields.pop(name) for name in ("logprobs", "stop_reason") if name in fields}
    head = {"id": "cmpl-7", "object": "text_completion", "created": 1, "model": "/opt/ml/model"}
    return head | {"choices": [choice]} | fields


def usage(prompt: int, completion: int, cached: int | None = None) -> Json:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **details}


def last_usage(*counts: int) -> Json:
    head = {"id": "cmpl-7", "object": "text_completion", "created": 1, "model": "/opt/ml/model"}
    return head | {"choices": [], "usage": usage(*counts)}


DONE = b"data: [DONE]\n\n"


# The request


def test_a_plain_request_is_encoded_byte_for_byte() -> None:
    assert CODEC.encode(request(), route(), OPTIONS).body == (
        b'{"prompt":"def f(","max_tokens":16,"n":1,"echo":false,"skip_special_tokens":true,'
        b'"spaces_between_special_tokens":true,"add_special_tokens":true,"include_stop_str_in_output":false,'
        b'"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"presence_penalty":0.0,"frequency_penalty":0.0,'
        b'"repetition_penalty":1.0,"min_tokens":0,"ignore_eos":false,"stream":true,'
        b'"stream_options":{"include_usage":true,"continuous_usage_stats":true}}'
    )


def test_a_full_request_is_encoded_byte_for_byte() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={50256: -100, 7: 5},
        seed=-9,
        min_tokens=3,
        ignore_eos=True,
        stop_token_ids=(2, 3),
    )
    canonical = request(
        prompts=("é", "b"),
        max_tokens=64,
        sampling=sampling,
        stop=("\n\n", "€"),
        include_stop=True,
        n=2,
        best_of=2,
        echo=True,
        logprobs=0,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        add_special_tokens=False,
        end_user="someone@example.com",
    )
    assert CODEC.encode(canonical, route(served_model="adapter-1"), OPTIONS).body.decode() == (
        '{"prompt":["é","b"],"model":"adapter-1","max_tokens":64,"n":2,"echo":true,"skip_special_tokens":false,'
        '"spaces_between_special_tokens":false,"add_special_tokens":false,"include_stop_str_in_output":true,'
        '"temperature":0.5,"top_p":0.25,"top_k":40,"min_p":0.125,"presence_penalty":-1.5,"frequency_penalty":1.5,'
        '"repetition_penalty":1.25,"min_tokens":3,"ignore_eos":true,"seed":-9,"logit_bias":{"50256":-100,"7":5},'
        '"stop_token_ids":[2,3],"stop":["\\n\\n","€"],"logprobs":0,"stream":true,'
        '"stream_options":{"include_usage":true,"continuous_usage_stats":true}}'
    )


def test_the_call_asks_for_the_real_completions_route_in_json() -> None:
    invocation = CODEC.encode(request(), route(), OPTIONS)
    assert (invocation.content_type, invocation.custom_attributes) == ("application/json", "route=/v1/completions")
    assert invocation.custom_attributes == ROUTE_ATTRIBUTE


@pytest.mark.parametrize(
    ("own", "sent"),
    [
        ("accept_eula=true", "accept_eula=true,route=/v1/completions"),
        ("accept_eula=true,route=/v1/other", "accept_eula=true,route=/v1/other"),
    ],
)
def test_a_routes_own_attributes_come_with_the_usual_one_unless_they_route(own: str, sent: str) -> None:
    assert CODEC.encode(request(), route(custom_attributes=own), OPTIONS).custom_attributes == sent


def test_the_plain_invocations_path_needs_no_attributes() -> None:
    plain = VllmCodec(routed=False)
    assert plain.encode(request(), route(), OPTIONS).custom_attributes is None
    assert plain.encode(request(), route(custom_attributes="a=b"), OPTIONS).custom_attributes == "a=b"
    assert [fault.field for fault in plain.route_faults(route(adapter="sql"))] == ["adapter"]
    assert not CODEC.route_faults(route(adapter="sql"))


def test_an_adapter_is_the_model_the_body_names() -> None:
    assert encoded(request(), route(adapter="sql", served_model="base"))["model"] == "sql"


def test_a_tenants_prompts_are_kept_apart_in_the_prefix_cache() -> None:
    salted = CODEC.encode(request(), route(), EncodeOptions(cache_salt="a1b2"))
    assert json.loads(salted.body)["cache_salt"] == "a1b2"
    assert "cache_salt" not in encoded(request())


def test_an_asynchronous_endpoint_is_asked_for_a_document() -> None:
    body = json.loads(CODEC.encode(request(), route(), EncodeOptions(streamed=False)).body)
    assert not {"stream", "stream_options"} & set(body)


@pytest.mark.parametrize("capability", [Capability.HONOURED, Capability.EMULATED])
def test_a_route_cannot_promise_what_vllm_has_no_word_for(capability: Capability) -> None:
    (fault,) = CODEC.route_faults(route(capabilities={Parameter.BEAM: capability}))
    assert (fault.field, "beam" in fault.message) == ("capabilities", True)


def test_a_route_may_take_a_parameter_away_and_lower_a_limit() -> None:
    abilities = CODEC.abilities(route(capabilities={Parameter.SEED: Capability.REFUSED}, limits=ModelLimits(stops=2)))
    assert (abilities.capabilities[Parameter.SEED], abilities.max_stops) == (Capability.REFUSED, 2)


@pytest.mark.parametrize("stream", [True, False])
def test_the_container_always_streams_with_running_usage(stream: bool) -> None:
    body = encoded(request(stream=stream, include_usage=stream))
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_the_callers_identity_stays_here() -> None:
    assert b"someone" not in CODEC.encode(request(end_user="someone"), route(), OPTIONS).body


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (("a",), "a"),
        (("a", "b"), ["a", "b"]),
        (((1, 2),), [1, 2]),
        (((1, 2), (3,)), [[1, 2], [3]]),
    ],
)
def test_each_form_of_prompt_keeps_its_form(prompts: tuple[Any, ...], expected: object) -> None:
    assert encoded(request(prompts=prompts))["prompt"] == expected


def test_the_prompt_stands_first_for_prefix_aware_routing() -> None:
    assert CODEC.encode(request(prompts=("once",)), route(served_model="m"), OPTIONS).body.startswith(
        b'{"prompt":"once"'
    )


def test_an_empty_prompt_becomes_the_models_document_start() -> None:
    assert encoded(request(prompts=("",)), route(document_start="<|endoftext|>"))["prompt"] == "<|endoftext|>"


def test_an_empty_prompt_in_a_batch_becomes_the_models_document_start() -> None:
    assert encoded(request(prompts=("a", "")), route(document_start="<s>"))["prompt"] == ["a", "<s>"]


SCHEMA = '{"type":"object"}'
CONSTRAINTS: dict[str, tuple[Constraint, Json, Json]] = {
    "json_object": (
        Constraint(ConstraintKind.JSON_OBJECT),
        {"json_object": True},
        {"response_format": {"type": "json_object"}},
    ),
    "json_schema": (
        Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA, whitespace_pattern="[ ]?"),
        {"json": {"type": "object"}, "whitespace_pattern": "[ ]?"},
        {"guided_json": {"type": "object"}, "guided_whitespace_pattern": "[ ]?"},
    ),
    "regex": (Constraint(ConstraintKind.REGEX, "a+"), {"regex": "a+"}, {"guided_regex": "a+"}),
    "choice": (
        Constraint(ConstraintKind.CHOICE, choices=("yes", "no")),
        {"choice": ["yes", "no"]},
        {"guided_choice": ["yes", "no"]},
    ),
    "grammar": (
        Constraint(ConstraintKind.GRAMMAR, "root ::= x"),
        {"grammar": "root ::= x"},
        {"guided_grammar": "root ::= x"},
    ),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("version", [None, "0.12.0", "0.33"])
def test_a_constraint_is_one_structured_output(kind: str, version: str | None) -> None:
    constraint, structured, _ = CONSTRAINTS[kind]
    assert encoded(request(constraint=constraint), route(family_version=version))["structured_outputs"] == structured


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_a_constraint_for_an_older_container_is_guided_decoding(kind: str) -> None:
    constraint, _, guided = CONSTRAINTS[kind]
    body = encoded(request(constraint=constraint), route(family_version="0.11.2"))
    assert "structured_outputs" not in body
    assert {name: body[name] for name in guided} == guided


def test_greedy_decoding_is_temperature_zero() -> None:
    assert encoded(sampled(temperature=0))["temperature"] == 0


def test_several_greedy_candidates_are_sampled_from_the_likeliest_token_alone() -> None:
    body = encoded(request(n=3, best_of=3, sampling=SamplingParams(temperature=0)))
    assert (body["n"], body["temperature"] > 0, body["top_k"]) == (3, True, 1)


def test_top_p_zero_is_a_value_vllm_accepts_and_keeps_one_token() -> None:
    assert 0 < encoded(sampled(top_p=0))["top_p"] < 1e-3


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"])
def test_a_default_is_sent_so_that_the_models_own_cannot_replace_it(name: str) -> None:
    assert name in encoded(request())


# parameter -> a request that uses it, and where its value must stand in the body
SENTINELS: Mapping[Parameter, tuple[CompletionRequest, str, object]] = {
    Parameter.JSON_OBJECT: (
        request(constraint=Constraint(ConstraintKind.JSON_OBJECT)),
        "structured_outputs",
        {"json_object": True},
    ),
    Parameter.JSON_SCHEMA: (
        request(constraint=Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"null"}')),
        "structured_outputs",
        {"json": {"type": "null"}},
    ),
    Parameter.REGEX: (
        request(constraint=Constraint(ConstraintKind.REGEX, "a+")),
        "structured_outputs",
        {"regex": "a+"},
    ),
    Parameter.CHOICE: (
        request(constraint=Constraint(ConstraintKind.CHOICE, choices=("q1", "q2"))),
        "structured_outputs",
        {"choice": ["q1", "q2"]},
    ),
    Parameter.GRAMMAR: (
        request(constraint=Constraint(ConstraintKind.GRAMMAR, "root ::= q")),
        "structured_outputs",
        {"grammar": "root ::= q"},
    ),
    Parameter.WHITESPACE_PATTERN: (
        request(constraint=Constraint(ConstraintKind.REGEX, "a+", whitespace_pattern="[q]?")),
        "structured_outputs",
        {"regex": "a+", "whitespace_pattern": "[q]?"},
    ),
    Parameter.TOKEN_PROMPT: (request(prompts=((31337, 4),)), "prompt", [31337, 4]),
    Parameter.PROMPT_BATCH: (request(prompts=("x1", "x2")), "prompt", ["x1", "x2"]),
    Parameter.ECHO: (request(echo=True), "echo", True),
    Parameter.LOGPROBS: (request(logprobs=4), "logprobs", 4),
    Parameter.N: (request(n=7, best_of=7), "n", 7),
    Parameter.STOP: (request(stop=("s1", "s2")), "stop", ["s1", "s2"]),
    Parameter.INCLUDE_STOP: (request(include_stop=True), "include_stop_str_in_output", True),
    Parameter.STOP_TOKEN_IDS: (sampled(stop_token_ids=(31337,)), "stop_token_ids", [31337]),
    Parameter.TEMPERATURE: (sampled(temperature=0.123), "temperature", 0.123),
    Parameter.TOP_P: (sampled(top_p=0.456), "top_p", 0.456),
    Parameter.TOP_K: (sampled(top_k=31), "top_k", 31),
    Parameter.MIN_P: (sampled(min_p=0.789), "min_p", 0.789),
    Parameter.SEED: (sampled(seed=2**63 - 1), "seed", 2**63 - 1),
    Parameter.PRESENCE_PENALTY: (sampled(presence_penalty=-1.23), "presence_penalty", -1.23),
    Parameter.FREQUENCY_PENALTY: (sampled(frequency_penalty=1.45), "frequency_penalty", 1.45),
    Parameter.REPETITION_PENALTY: (sampled(repetition_penalty=1.67), "repetition_penalty", 1.67),
    Parameter.LOGIT_BIAS: (sampled(logit_bias={42: -7.5}), "logit_bias", {"42": -7.5}),
    Parameter.MIN_TOKENS: (sampled(min_tokens=5), "min_tokens", 5),
    Parameter.IGNORE_EOS: (sampled(ignore_eos=True), "ignore_eos", True),
    Parameter.SKIP_SPECIAL_TOKENS: (request(skip_special_tokens=False), "skip_special_tokens", False),
    Parameter.SPACES_BETWEEN_SPECIAL_TOKENS: (
        request(spaces_between_special_tokens=False),
        "spaces_between_special_tokens",
        False,
    ),
    Parameter.ADD_SPECIAL_TOKENS: (request(add_special_tokens=False), "add_special_tokens", False),
}


@pytest.mark.parametrize("parameter", Parameter)
def test_each_parameter_is_forwarded_or_said_not_to_be(parameter: Parameter) -> None:
    capability = CODEC.abilities(route()).capabilities[parameter]
    assert (capability is Capability.HONOURED) == (parameter in SENTINELS)


@pytest.mark.parametrize("parameter", SENTINELS)
def test_an_honoured_parameter_stands_in_the_body(parameter: Parameter) -> None:
    canonical, name, value = SENTINELS[parameter]
    assert encoded(canonical)[name] == value
    assert encoded(request()).get(name) != value


@pytest.mark.parametrize("parameter", [Parameter.SUFFIX, Parameter.BEST_OF])
def test_what_vllm_dropped_is_emulated(parameter: Parameter) -> None:
    assert CODEC.abilities(route()).capabilities[parameter] is Capability.EMULATED


# The answer

SAMPLE = (
    b": keep-alive\n\n"
    + sse(
        record("d\u00e9", usage=usage(3, 1)),
        record("f \U0001f600\u20ac", usage=usage(3, 2)),
        record("", "stop", stop_reason="\n\n", usage=usage(3, 3)),
        last_usage(3, 3, 2),
    )
    + DONE
)
SAMPLE_CHUNKS = [
    CompletionChunk((ChoiceDelta(0, "d\u00e9"),), Usage(3, 1)),
    CompletionChunk((ChoiceDelta(0, "f \U0001f600\u20ac"),), Usage(3, 2)),
    CompletionChunk((ChoiceDelta(0, "", None, FinishReason.STOP),), Usage(3, 3)),
    CompletionChunk((), Usage(3, 3, 2)),
]


def test_a_recorded_stream_is_decoded_whole() -> None:
    assert decoded(SAMPLE) == SAMPLE_CHUNKS


@pytest.mark.parametrize("size", range(1, 40))
def test_a_recorded_stream_in_small_parts_gives_the_same_chunks(size: int) -> None:
    assert decoded(SAMPLE, size=size) == SAMPLE_CHUNKS


def test_a_recorded_stream_cut_in_two_at_any_byte_gives_the_same_chunks() -> None:
    for cut in range(len(SAMPLE) + 1):
        decoder = CODEC.decoder(request())
        found = [decoder.decode(item) for item in records([SAMPLE[:cut], SAMPLE[cut:]])]
        assert [chunk for chunk in found if chunk is not None] == SAMPLE_CHUNKS


def test_json_lines_without_the_sse_form_give_the_same_chunks() -> None:
    lines = b"".join(line.removeprefix(b"data: ") + b"\n" for line in SAMPLE.split(b"\n\n") if line[:1] == b"d")
    assert decoded(lines) == SAMPLE_CHUNKS


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("repetition", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("content_filter", FinishReason.CONTENT_FILTER),
    ],
)
def test_each_finish_reason_has_its_canonical_one(word: str, reason: FinishReason) -> None:
    assert decoded(sse(record("a", word)) + DONE)[0].choices[0].finish_reason is reason


@pytest.mark.parametrize("word", ["abort", "error", "a_new_word"])
def test_an_aborted_or_failed_choice_is_a_backend_error(word: str) -> None:
    with pytest.raises(BackendError):
        decoded(sse(record("a", word)) + DONE)


def test_running_usage_sums_candidates_and_counts_each_prompt_once() -> None:
    # two prompts of 3 and 5 tokens, two candidates each; the usage beside a choice is that choice's alone
    stream = sse(
        record("a", index=0, usage=usage(3, 1)),
        record("b", index=1, usage=usage(3, 1)),
        record("c", index=2, usage=usage(5, 1)),
        record("d", index=0, usage=usage(3, 2)),
        record("e", "stop", index=3, usage=usage(5, 4)),
    )
    chunks = decoded(stream + DONE, request(prompts=("p", "q"), n=2, best_of=2))
    assert [chunk.usage for chunk in chunks] == [Usage(3, 1), Usage(3, 2), Usage(8, 3), Usage(8, 4), Usage(8, 8)]


def test_the_last_usage_record_stands_for_the_whole_answer() -> None:
    stream = sse(record("a", "stop", usage=usage(3, 1)), last_usage(30, 10, 16)) + DONE
    assert decoded(stream)[-1] == CompletionChunk((), Usage(30, 10, 16))


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}])
def test_no_cached_tokens_are_told_as_none(details: Json | None) -> None:
    stream = sse(last_usage(3, 1) | {"usage": {**usage(3, 1), "prompt_tokens_details": details}}) + DONE
    assert decoded(stream)[-1].usage == Usage(3, 1, 0)


def test_a_record_without_usage_has_none() -> None:
    assert decoded(sse(record("a", "stop")) + DONE)[0].usage is None


def test_several_choices_in_one_record_are_several_deltas() -> None:
    both = record("a") | {"choices": [record("a")["choices"][0], record("b", "length", index=1)["choices"][0]]}
    chunk = decoded(sse(both) + DONE, request(n=2, best_of=2))[0]
    assert chunk.choices == (ChoiceDelta(0, "a"), ChoiceDelta(1, "b", None, FinishReason.LENGTH))


def test_logprobs_keep_their_four_arrays() -> None:
    logprobs = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -9999.0],
        "top_logprobs": [None, {"b": -9999.0, "c": -0.5}],
        "text_offset": [0, 1],
    }
    delta = decoded(sse(record("ab", "stop", logprobs=logprobs)) + DONE, request(logprobs=1, echo=True))[0].choices[0]
    assert delta.logprobs == Logprobs(("a", "b"), (None, -9999.0), (None, {"b": -9999.0, "c": -0.5}), (0, 1))


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity"])
def test_a_number_that_json_does_not_have_is_a_backend_error(literal: bytes) -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [0.125], "top_logprobs": [None], "text_offset": [0]}
    with pytest.raises(BackendError):
        decoded(sse(record("a", "stop", logprobs=logprobs)).replace(b"0.125", literal) + DONE)


@pytest.mark.parametrize("text", ["data: [DONE]", "[DONE]", '{"choices": []}'])
def test_text_that_looks_like_the_wire_format_is_text(text: str) -> None:
    assert decoded(sse(record(text, "stop")) + DONE)[0].choices[0].text == text


@pytest.mark.parametrize("stream", [b"", sse(record("a")), sse(record("a", "stop"), last_usage(3, 1))])
def test_a_stream_without_done_is_truncated(stream: bytes) -> None:
    with pytest.raises(TruncatedStreamError):
        decoded(stream)


@pytest.mark.parametrize(
    "line", [b"data: {", b"data: null", b"data: []", b"<html>", b"data: {}", b'data: {"choices":[{}]}']
)
def test_what_is_not_a_record_is_a_backend_error(line: bytes) -> None:
    with pytest.raises(BackendError):
        decoded(line + b"\n\n" + DONE)


def nested(code: Any, message: str = "the rule", param: str | None = None) -> Json:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": code}}


def flat(code: Any, message: str = "the rule", param: str | None = None) -> Json:
    return {"object": "error", "message": message, "type": "BadRequestError", "param": param, "code": code}


@pytest.mark.parametrize("shape", [nested, flat])
def test_a_refusal_inside_the_stream_is_the_callers_in_both_shapes(shape: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^the rule$"):
        decoded(sse(shape(400)) + DONE)


@pytest.mark.parametrize("failure", [nested(500), flat(500), {"error": "Unauthorized"}, nested("boom"), nested(None)])
def test_a_failure_inside_the_stream_is_a_backend_error_without_its_text(failure: Json) -> None:
    with pytest.raises(BackendError) as caught:
        decoded(sse(record("a"), failure) + DONE)
    assert "the rule" not in caught.value.message
    assert "Unauthorized" not in caught.value.message


# The container's HTTP failures


@pytest.mark.parametrize("shape", [nested, flat])
def test_a_refusal_keeps_its_message_and_field_in_both_shapes(shape: Any) -> None:
    error = CODEC.decode_error(400, json.dumps(shape(400, "temperature must be non-negative.", "temperature")))
    assert (type(error), error.message, error.param) == (
        InvalidRequestError,
        "temperature must be non-negative.",
        "temperature",
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequestError),
        (413, InvalidRequestError),
        (422, InvalidRequestError),
        (429, BackendUnavailableError),
        (503, BackendUnavailableError),
        (401, BackendError),
        (404, BackendUnavailableError),
        (500, BackendError),
        (501, BackendError),
        (502, BackendError),
    ],
)
def test_each_status_is_its_canonical_error(status: int, kind: type[CompletionError]) -> None:
    assert type(CODEC.decode_error(status, json.dumps(nested(status)))) is kind


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("body", ["", "{", '{"error": {"message": "cut o', "<html>", "null", "[]", '{"error":"text"}'])
def test_a_body_that_cannot_be_read_still_gives_a_message(status: int, body: str) -> None:
    assert CODEC.decode_error(status, body).message


def test_the_appended_value_is_cut_from_a_message() -> None:
    message = "logprobs must be non-negative, got -1. (parameter=logprobs, value=-1)"
    error = CODEC.decode_error(400, json.dumps(nested(400, message, "logprobs")))
    assert (error.message, error.param) == ("logprobs must be non-negative, got -1.", "logprobs")


def test_a_prompt_beyond_the_context_keeps_the_phrase_that_clients_match() -> None:
    message = (
        "This model's maximum context length is 512 tokens. However, you requested 16 output tokens and your prompt "
        "contains 600 input tokens. (parameter=input_tokens, value=600)"
    )
    error = CODEC.decode_error(400, json.dumps(nested(400, message, "input_tokens")))
    assert type(error) is ContextLengthError
    assert "maximum context length is 512 tokens" in error.message
    assert "(parameter=" not in error.message


def test_a_pydantic_report_is_not_passed_on_because_it_quotes_the_caller() -> None:
    report = "[{'type': 'int_type', 'loc': ('body', 'n'), 'msg': 'Input should be valid', 'input': 'my secret prompt'}]"
    assert "secret" not in CODEC.decode_error(400, json.dumps(nested(400, report))).message


@pytest.mark.parametrize("status", [404, 500])
def test_the_containers_model_path_is_never_told(status: int) -> None:
    message = "The model `/opt/ml/model` does not exist."
    error = CODEC.decode_error(status, json.dumps(nested(status, message, "model")))
    assert isinstance(error, ServiceError)
    assert "/opt/ml" not in error.message
