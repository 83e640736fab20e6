"""What goes to a server of OpenAI's completions and what is read from it: OpenAI's documented fields, SGLang's and
llama.cpp's deviations.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from completions.backends.codec import EncodeOptions, Invocation
from completions.backends.openai_server import OPTIONAL, OpenAIServerCodec
from completions.backends.payload_stream import document, records
from completions.domain.catalog import Capability, ModelRoute, Parameter
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
    TruncatedStreamError,
)
from fakes import request, route

Json = dict[str, Any]
CODEC = OpenAIServerCodec()
EVERYTHING = route(capabilities=dict.fromkeys(OPTIONAL, Capability.HONOURED))


def invocation(canonical: CompletionRequest, target: ModelRoute | None = None, **options: Any) -> Invocation:
    return CODEC.encode(canonical, target or route(), EncodeOptions(**options))


def encoded(canonical: CompletionRequest, target: ModelRoute | None = None, **options: Any) -> Json:
    body: Json = json.loads(invocation(canonical, target, **options).body)
    return body


def sampled(**values: Any) -> CompletionRequest:
    return request(sampling=SamplingParams(**values))


def decoded(stream: bytes, canonical: CompletionRequest | None = None) -> list[CompletionChunk]:
    decoder = CODEC.decoder(canonical or request())
    chunks = [chunk for record in records([stream]) if (chunk := decoder.decode(record)) is not None]
    decoder.finish()
    return chunks


def decoded_whole(value: Json, canonical: CompletionRequest | None = None) -> CompletionChunk:
    decoder = CODEC.decoder(canonical or request(), whole=True)
    (chunk,) = [decoder.decode(record) for record in document([json.dumps(value).encode()])]
    decoder.finish()
    assert chunk is not None
    return chunk


def sse(*values: object) -> bytes:
    return b"".join(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" for value in values)


def record(text: str = "", finish_reason: str | None = None, *, index: int = 0, **fields: Any) -> Json:
    choice = {"index": index, "text": text, "logprobs": fields.pop("logprobs", None), "finish_reason": finish_reason}
    return {"id": "cmpl-7", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]} | fields


def usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def last_usage(prompt: int, completion: int) -> Json:
    return {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 1,
        "choices": [],
        "usage": usage(prompt, completion),
    }


DONE = b"data: [DONE]\n\n"


# The request


def test_a_plain_request_is_encoded_byte_for_byte() -> None:
    assert invocation(request()).body == (
        b'{"prompt":"def f(","max_tokens":16,"temperature":1.0,"top_p":1.0,"presence_penalty":0.0,'
        b'"frequency_penalty":0.0,"stream":true,"stream_options":{"include_usage":true}}'
    )


def test_an_unstreamed_answer_is_asked_for_without_stream_options() -> None:
    assert not {"stream", "stream_options"} & encoded(request(), streamed=False).keys()


@pytest.mark.parametrize(
    ("target", "model"),
    [
        (route(), None),
        (route(served_model="qwen"), "qwen"),
        (route(adapter="qwen:lora-1"), "qwen:lora-1"),
        (route(served_model="qwen", adapter="qwen:lora-1"), "qwen:lora-1"),
    ],
)
def test_the_model_is_the_adapter_or_the_served_one(target: ModelRoute, model: str | None) -> None:
    assert encoded(request(), target).get("model") == model


def test_neither_a_cache_salt_nor_the_callers_identity_is_sent() -> None:
    body = invocation(request(end_user="someone"), cache_salt="0123abcd").body
    assert b"0123abcd" not in body
    assert b"someone" not in body


def test_an_operators_attributes_are_passed_on() -> None:
    assert invocation(request(), route(custom_attributes="tenant=a")).custom_attributes == "tenant=a"


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty"])
def test_a_default_is_sent_so_that_the_servers_own_cannot_replace_it(name: str) -> None:
    assert name in encoded(request())


def test_a_declared_sampler_is_switched_off_by_name() -> None:
    # llama.cpp cuts at 40 tokens and at a twentieth of the likeliest one's probability unless it is told otherwise
    declared = route(
        capabilities=dict.fromkeys(
            (Parameter.TOP_K, Parameter.MIN_P, Parameter.REPETITION_PENALTY), Capability.HONOURED
        )
    )
    body = encoded(request(), declared)
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
    assert not {"top_k", "min_p", "repetition_penalty"} & encoded(request()).keys()


def test_a_nucleus_of_nothing_is_the_likeliest_token_alone() -> None:
    assert encoded(sampled(top_p=0.0))["top_p"] == 1e-6


@pytest.mark.parametrize(
    ("seed", "sent"),
    [
        (None, None),
        (0, 0),
        (-9, -9),
        (2**63 - 2, 2**63 - 2),
        (-(2**63), -(2**63)),
        # low 32 bits all ones mean no seed to llama.cpp
        (-1, -2),
        (2**32 - 1, 2**32 - 2),
        (2**63 - 1, 2**63 - 2),
    ],
)
def test_a_seed_is_itself_unless_it_would_be_none_at_all(seed: int | None, sent: int | None) -> None:
    assert encoded(sampled(seed=seed)).get("seed") == sent


def test_an_empty_prompt_becomes_the_models_document_start() -> None:
    assert encoded(request(prompts=("a", "")), route(document_start="<s>"))["prompt"] == ["a", "<s>"]


SCHEMA = '{"type":"object"}'
# parameter -> a request that uses it, and where its value must stand in the body
SENTINELS: Mapping[Parameter, tuple[CompletionRequest, str, object]] = {
    Parameter.PROMPT_BATCH: (request(prompts=("x1", "x2")), "prompt", ["x1", "x2"]),
    Parameter.ECHO: (request(echo=True), "echo", True),
    Parameter.LOGPROBS: (request(logprobs=4), "logprobs", 4),
    Parameter.N: (request(n=7, best_of=7), "n", 7),
    Parameter.STOP: (request(stop=("s1", "s2")), "stop", ["s1", "s2"]),
    Parameter.TEMPERATURE: (sampled(temperature=0.123), "temperature", 0.123),
    Parameter.TOP_P: (sampled(top_p=0.456), "top_p", 0.456),
    Parameter.SEED: (sampled(seed=31337), "seed", 31337),
    Parameter.PRESENCE_PENALTY: (sampled(presence_penalty=-1.23), "presence_penalty", -1.23),
    Parameter.FREQUENCY_PENALTY: (sampled(frequency_penalty=1.45), "frequency_penalty", 1.45),
    Parameter.LOGIT_BIAS: (sampled(logit_bias={42: -7.5}), "logit_bias", {"42": -7.5}),
}
OPTIONAL_SENTINELS: Mapping[Parameter, tuple[CompletionRequest, str, object]] = {
    Parameter.TOP_K: (sampled(top_k=31), "top_k", 31),
    Parameter.MIN_P: (sampled(min_p=0.789), "min_p", 0.789),
    Parameter.REPETITION_PENALTY: (sampled(repetition_penalty=1.67), "repetition_penalty", 1.67),
    Parameter.STOP_TOKEN_IDS: (sampled(stop_token_ids=(31337,)), "stop_token_ids", [31337]),
    Parameter.MIN_TOKENS: (sampled(min_tokens=5), "min_tokens", 5),
    Parameter.IGNORE_EOS: (sampled(ignore_eos=True), "ignore_eos", True),
    Parameter.SKIP_SPECIAL_TOKENS: (request(skip_special_tokens=False), "skip_special_tokens", False),
    Parameter.INCLUDE_STOP: (request(include_stop=True), "include_stop_str_in_output", True),
    Parameter.TOKEN_PROMPT: (request(prompts=((31337, 4),)), "prompt", [31337, 4]),
    Parameter.JSON_OBJECT: (
        request(constraint=Constraint(ConstraintKind.JSON_OBJECT)),
        "response_format",
        {"type": "json_object"},
    ),
    Parameter.JSON_SCHEMA: (
        request(constraint=Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA)),
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
    ),
}
EMULATED = {Parameter.SUFFIX, Parameter.BEST_OF}


@pytest.mark.parametrize("parameter", Parameter)
def test_each_parameter_is_forwarded_emulated_or_refused(parameter: Parameter) -> None:
    capability = CODEC.abilities(route()).capabilities[parameter]
    if parameter in SENTINELS:
        assert capability is Capability.HONOURED
    else:
        assert capability is (Capability.EMULATED if parameter in EMULATED else Capability.REFUSED)


@pytest.mark.parametrize("parameter", Parameter)
def test_a_route_may_declare_what_the_codec_has_a_word_for_and_nothing_else(parameter: Parameter) -> None:
    declared = route(capabilities={parameter: Capability.HONOURED})
    known = parameter in SENTINELS or parameter in OPTIONAL_SENTINELS
    assert [fault.field for fault in CODEC.route_faults(declared)] == ([] if known else ["capabilities"])


@pytest.mark.parametrize("parameter", [*SENTINELS, *OPTIONAL_SENTINELS])
def test_an_honoured_parameter_stands_in_the_body(parameter: Parameter) -> None:
    canonical, name, value = {**SENTINELS, **OPTIONAL_SENTINELS}[parameter]
    assert CODEC.abilities(EVERYTHING).capabilities[parameter] is Capability.HONOURED
    assert encoded(canonical, EVERYTHING)[name] == value
    assert encoded(request(), EVERYTHING).get(name) != value


def test_what_llama_cpp_lacks_may_be_emulated_instead() -> None:
    lacking = dict.fromkeys((Parameter.N, Parameter.PROMPT_BATCH, Parameter.ECHO), Capability.EMULATED)
    assert CODEC.route_faults(route(capabilities=lacking)) == []


def test_what_the_service_cannot_emulate_may_not_be_declared_so() -> None:
    declared = route(capabilities={Parameter.TOP_K: Capability.EMULATED})
    assert [fault.field for fault in CODEC.route_faults(declared)] == ["capabilities"]


def test_a_route_without_logprobs_cannot_rank_candidates() -> None:
    lacking = route(capabilities={Parameter.LOGPROBS: Capability.REFUSED})
    assert CODEC.abilities(lacking).capabilities[Parameter.BEST_OF] is Capability.REFUSED


def test_openais_own_limits_hold() -> None:
    abilities = CODEC.abilities(route())
    assert (abilities.max_stops, abilities.max_logprobs) == (4, 5)


def test_no_alternatives_are_asked_for_as_one_since_zero_means_none_at_all_to_llama_cpp() -> None:
    assert encoded(request(logprobs=0))["logprobs"] == 1
    assert "logprobs" not in encoded(request())


# The answer

SAMPLE = (
    b": ping\n\n"
    + sse(record("dé"), record("f \U0001f600€"), record("", "stop", matched_stop=2), last_usage(9, 3))
    + DONE
)
SAMPLE_CHUNKS = [
    # six bytes of prompt are taken for two tokens until the server counts nine
    CompletionChunk((ChoiceDelta(0, "dé"),), Usage(2, 1, estimated=True)),
    CompletionChunk((ChoiceDelta(0, "f \U0001f600€"),), Usage(2, 2, estimated=True)),
    CompletionChunk((ChoiceDelta(0, "", None, FinishReason.STOP),), Usage(2, 2, estimated=True)),
    CompletionChunk((), Usage(9, 3)),
]
# as llama.cpp's server writes it: the usage beside the last text, the chat layout of log-probabilities
LLAMA_LOGPROBS = {
    "content": [
        {
            "id": 55,
            "token": "4",
            "bytes": [52],
            "logprob": -4.75,
            "top_logprobs": [
                {"id": 84, "token": "Q", "bytes": [81], "logprob": -4.25},
                {"id": 204, "token": "", "bytes": [201], "logprob": -4.5},
            ],
        }
    ]
}
LLAMA_SAMPLE = (
    sse(record("4", logprobs=LLAMA_LOGPROBS), record("", "length", usage=usage(11, 4), timings={"cache_n": 10})) + DONE
)
LLAMA_CHUNKS = [
    CompletionChunk(
        (ChoiceDelta(0, "4", Logprobs(("4",), (-4.75,), ({"4": -4.75, "Q": -4.25, r"bytes:\xc9": -4.5},), (0,))),),
        Usage(2, 1, estimated=True),
    ),
    CompletionChunk((ChoiceDelta(0, "", None, FinishReason.LENGTH),), Usage(11, 4)),
]
SAMPLES = {"sglang": (SAMPLE, request(), SAMPLE_CHUNKS), "llama.cpp": (LLAMA_SAMPLE, request(logprobs=2), LLAMA_CHUNKS)}


@pytest.mark.parametrize("server", SAMPLES)
def test_a_stream_cut_in_two_at_any_byte_gives_the_same_chunks(server: str) -> None:
    sample, canonical, chunks = SAMPLES[server]
    for cut in range(len(sample) + 1):
        decoder = CODEC.decoder(canonical)
        found = [decoder.decode(item) for item in records([sample[:cut], sample[cut:]])]
        decoder.finish()
        assert [chunk for chunk in found if chunk is not None] == chunks


@pytest.mark.parametrize("lines", range(8))
def test_a_stream_that_ends_before_the_usage_is_truncated(lines: int) -> None:
    whole = SAMPLE.splitlines(keepends=True)
    assert whole[8].startswith(b'data: {"id": "cmpl-7", "object": "text_completion", "created": 1, "choices": []')
    with pytest.raises(TruncatedStreamError):
        decoded(b"".join(whole[:lines]))


def test_a_usage_after_every_finish_reason_ends_an_answer_without_done() -> None:
    assert decoded(SAMPLE.removesuffix(DONE)) == SAMPLE_CHUNKS


def test_a_usage_before_the_last_finish_reason_does_not() -> None:
    stream = sse(record("a", "stop", usage=usage(3, 1)), record("b", index=1, usage=usage(3, 1)))
    with pytest.raises(TruncatedStreamError):
        decoded(stream, request(n=2, best_of=2))


def test_a_stream_that_never_tells_its_usage_stays_estimated() -> None:
    found = decoded(sse(record("ab"), record("c", "stop")) + DONE)
    assert [chunk.usage for chunk in found] == [Usage(2, 1, estimated=True), Usage(2, 2, estimated=True)]


def test_an_estimate_goes_on_from_what_was_told_last() -> None:
    found = decoded(sse(record("a", usage=usage(9, 5)), record("b"), record("", "stop")) + DONE)
    assert [chunk.usage for chunk in found] == [
        Usage(9, 5),
        Usage(9, 6, estimated=True),
        Usage(9, 6, estimated=True),
    ]


def test_a_record_with_logprobs_counts_as_many_tokens_as_it_names() -> None:
    logprobs = {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [None, None],
        "text_offset": [0, 1],
    }
    found = decoded(sse(record("ab", "stop", logprobs=logprobs)) + DONE, request(logprobs=1))
    assert found[0].usage == Usage(2, 2, estimated=True)


ARRAYS = {
    "tokens": ["a", "é"],
    "token_logprobs": [-1.0, -0.5],
    "top_logprobs": [{"b": -0.25}, {"é": -0.5}],
    "text_offset": [-1, -1],  # SGLang does not count them
}
CONTENT = {
    "content": [
        {
            "token": "a",
            "logprob": -1.0,
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -0.25, "bytes": [98]}],
        },
        {"token": "é", "logprob": -0.5, "bytes": None, "top_logprobs": [{"token": "é", "logprob": -0.5}]},
    ]
}


@pytest.mark.parametrize("layout", [ARRAYS, {**ARRAYS, "text_offset": []}, CONTENT], ids=["arrays", "bare", "content"])
def test_both_layouts_of_logprobs_come_out_alike(layout: Json) -> None:
    delta = decoded(sse(record("aé", "stop", logprobs=layout)) + DONE, request(logprobs=1))[0].choices[0]
    assert delta.logprobs == Logprobs(("a", "é"), (-1.0, -0.5), ({"a": -1.0, "b": -0.25}, {"é": -0.5}), (0, 1))


@pytest.mark.parametrize("layout", [ARRAYS, CONTENT], ids=["arrays", "content"])
def test_the_alternative_that_was_only_asked_for_the_servers_sake_is_left_out(layout: Json) -> None:
    delta = decoded(sse(record("aé", "stop", logprobs=layout)) + DONE, request(logprobs=0))[0].choices[0]
    assert delta.logprobs == Logprobs(("a", "é"), (-1.0, -0.5), ({"a": -1.0}, {"é": -0.5}), (0, 1))


def test_logprobs_that_nobody_asked_for_are_left_out() -> None:
    assert decoded(sse(record("aé", "stop", logprobs=ARRAYS)) + DONE)[0].choices[0].logprobs is None


def test_the_first_token_of_an_echoed_prompt_has_no_probability() -> None:
    logprobs = {**ARRAYS, "token_logprobs": [None, -0.5], "top_logprobs": [None, {"é": -0.5}]}
    delta = decoded(sse(record("aé", "stop", logprobs=logprobs)) + DONE, request(logprobs=1, echo=True))[0].choices[0]
    assert delta.logprobs == Logprobs(("a", "é"), (None, -0.5), (None, {"é": -0.5}), (0, 1))


def test_the_pieces_of_a_character_share_its_offset() -> None:
    entries = [{"token": "", "logprob": -1.0, "bytes": [byte], "top_logprobs": []} for byte in "€".encode()]
    after = {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}
    stream = sse(record("€x", "stop", logprobs={"content": [*entries, after]})) + DONE
    logprobs = decoded(stream, request(logprobs=1))[0].choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == (r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "x")
    assert logprobs.text_offset == (0, 0, 0, 1)


def test_a_record_without_a_token_has_no_logprobs() -> None:
    stream = sse(record("", "stop", logprobs={"content": []})) + DONE
    assert decoded(stream, request(logprobs=1))[0].choices[0].logprobs is None


@pytest.mark.parametrize(
    "broken",
    [
        {**ARRAYS, "token_logprobs": [-1.0]},
        {"content": [{"token": "a", "logprob": -1.0, "bytes": [256], "top_logprobs": []}]},
        {"content": [{"token": "a"}]},
    ],
)
def test_logprobs_that_do_not_fit_are_a_backend_error(broken: Json) -> None:
    with pytest.raises(BackendError):
        decoded(sse(record("aé", "stop", logprobs=broken)) + DONE, request(logprobs=1))


def test_several_choices_have_one_usage() -> None:
    stream = sse(record("a", "stop"), record("b", "length", index=1), last_usage(3, 2)) + DONE
    found = decoded(stream, request(n=2, best_of=2))
    assert [chunk.usage for chunk in found] == [Usage(2, 1, estimated=True), Usage(2, 2, estimated=True), Usage(3, 2)]


def test_a_document_has_its_own_usage_or_an_estimate_from_its_text() -> None:
    assert decoded_whole(record("nine char", "stop", usage=usage(9, 3))).usage == Usage(9, 3)
    assert decoded_whole(record("nine char", "stop")).usage == Usage(2, 3, estimated=True)


def test_a_document_is_read_in_both_layouts() -> None:
    delta = decoded_whole(record("aé", "stop", logprobs=CONTENT), request(logprobs=1)).choices[0]
    assert delta.logprobs is not None
    assert delta.logprobs.tokens == ("a", "é")


@pytest.mark.parametrize("line", [b"data: {", b"data: null", b"data: []", b"<html>", b"data: {}", b"error: {}"])
def test_what_is_not_a_record_is_a_backend_error(line: bytes) -> None:
    with pytest.raises(BackendError) as caught:
        decoded(line + b"\n\n" + DONE)
    assert not isinstance(caught.value, TruncatedStreamError)


# Failures


def nested(code: Any, message: str = "the rule", kind: str = "BadRequestError") -> Json:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def flat(code: Any, message: str = "the rule", kind: str = "BadRequestError") -> Json:
    """SGLang's over HTTP."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


TOO_LONG = "request (40002 tokens) exceeds the available context size (2048 tokens), try increasing it"
# status, message, type -> canonical error
FAILURES: list[tuple[int, str, str, type[CompletionError]]] = [
    (400, "Field 'n': Value must be between 1 <= value <= 1, but got 2", "invalid_request_error", InvalidRequestError),
    (400, TOO_LONG, "exceed_context_size_error", ContextLengthError),
    (
        400,
        "The input (600 tokens) is longer than the model's context length (512 tokens).",
        "BadRequestError",
        ContextLengthError,
    ),
    (400, "This model's maximum context length is 512 tokens.", "BadRequestError", ContextLengthError),
    (400, "1 validation error: {'type': 'int', 'input': 'secret'}", "BadRequestError", InvalidRequestError),
    (422, "the rule", "x", InvalidRequestError),
    (429, "secret", "x", BackendUnavailableError),
    (503, "Loading model", "unavailable_error", BackendUnavailableError),
    (401, "secret", "authentication_error", BackendError),
    (404, "The model `/opt/secret` does not exist.", "NotFoundError", BackendUnavailableError),
    (500, "secret", "server_error", BackendError),
    (501, "secret", "not_supported_error", BackendError),
]


@pytest.mark.parametrize("shape", [nested, flat])
@pytest.mark.parametrize(("status", "message", "kind", "expected"), FAILURES)
def test_an_http_failure_is_its_canonical_error_in_both_shapes(
    status: int, message: str, kind: str, expected: type[CompletionError], shape: Any
) -> None:
    error = CODEC.decode_error(status, json.dumps(shape(status, message, kind)))
    assert type(error) is expected
    assert "secret" not in error.message


@pytest.mark.parametrize("shape", [nested, flat])
@pytest.mark.parametrize(("status", "message", "kind", "expected"), FAILURES)
def test_the_same_failure_inside_a_stream_is_the_same_error(
    status: int, message: str, kind: str, expected: type[CompletionError], shape: Any
) -> None:
    with pytest.raises(CompletionError) as caught:
        decoded(sse(shape(status, message, kind)) + DONE)
    assert type(caught.value) is expected


def test_a_short_rule_is_the_callers_to_read_and_a_long_message_is_not() -> None:
    assert CODEC.decode_error(400, json.dumps(nested(400, "'n' must be 1."))).message == "'n' must be 1."
    quoting = "Unexpected text: " + "secret " * 50
    assert "secret" not in CODEC.decode_error(400, json.dumps(nested(400, quoting))).message


def test_a_prompt_beyond_the_context_keeps_the_phrase_that_clients_match() -> None:
    error = CODEC.decode_error(400, json.dumps(nested(400, TOO_LONG, "exceed_context_size_error")))
    assert "maximum context length" in error.message
    assert error.param == "prompt"


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("body", ["", "{", '{"error": {"message": "cut o', "<html>", "null", "[]"])
def test_a_body_that_cannot_be_read_still_gives_a_message(status: int, body: str) -> None:
    assert CODEC.decode_error(status, body).message
