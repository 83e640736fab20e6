"""What goes to an LMI container in its own schema and what is read from it, for both handlers that read it.

Against djl-serving's asynchronous vLLM handler and its vLLM rolling batch. Their failures are tested with LMI's others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from completions.backends.codec import Codec, EncodeOptions
from completions.backends.lmi_inputs import LmiInputsCodec
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
from completions.domain.errors import BackendError, BackendUnavailableError, InvalidRequestError, TruncatedStreamError
from fakes import request, route

Json = dict[str, Any]
ASYNC = LmiInputsCodec()
ROLLING = LmiInputsCodec(rolling=True)
OPTIONS = EncodeOptions()
BOTH = pytest.mark.parametrize("codec", [ASYNC, ROLLING], ids=["async", "rolling"])
CHAR_ESTIMATE = 2
"""``def f(`` is six bytes, and four of them are taken for a token."""


def encoded(codec: Codec, canonical: CompletionRequest, target: ModelRoute | None = None) -> Json:
    body: Json = json.loads(codec.encode(canonical, target or route(), OPTIONS).body)
    return body


def sampled(**values: Any) -> CompletionRequest:
    return request(sampling=SamplingParams(**values))


def constrained(kind: ConstraintKind, value: str | None = None, **fields: Any) -> CompletionRequest:
    return request(constraint=Constraint(kind, value, **fields))


def decoded(
    codec: Codec, *parts: bytes, canonical: CompletionRequest | None = None, whole: bool = False
) -> list[CompletionChunk]:
    decoder = codec.decoder(canonical or request(), whole=whole)
    found = document(parts) if whole else records(parts)
    chunks = [chunk for record in found if (chunk := decoder.decode(record)) is not None]
    decoder.finish()
    return chunks


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)


# The request


def test_a_plain_request_to_the_asynchronous_handler_is_encoded_byte_for_byte() -> None:
    assert ASYNC.encode(request(), route(), OPTIONS).body == (
        b'{"inputs":"def f(","parameters":{"max_new_tokens":16,"skip_special_tokens":true,'
        b'"spaces_between_special_tokens":true,"add_special_tokens":true,"include_stop_str_in_output":false,'
        b'"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"presence_penalty":0.0,"frequency_penalty":0.0,'
        b'"repetition_penalty":1.0,"min_tokens":0,"ignore_eos_token":false,"do_sample":true,"details":true},'
        b'"stream":true}'
    )


def test_a_plain_request_to_the_rolling_batch_is_encoded_byte_for_byte() -> None:
    assert ROLLING.encode(request(), route(), OPTIONS).body == (
        b'{"inputs":"def f(","parameters":{"max_new_tokens":16,"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,'
        b'"presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"ignore_eos_token":false,'
        b'"do_sample":true,"details":true},"stream":true}'
    )


@BOTH
def test_a_streamed_answer_is_expected_in_json_lines_and_any_other_in_json(codec: Codec) -> None:
    whole = codec.encode(request(), route(), EncodeOptions(streamed=False))
    assert codec.encode(request(), route(), OPTIONS).accept == "application/jsonlines"
    assert whole.accept == "application/json"
    assert json.loads(whole.body)["stream"] is False


@BOTH
def test_the_operators_attributes_are_all_there_are(codec: Codec) -> None:
    assert codec.encode(request(), route(), OPTIONS).custom_attributes is None
    assert codec.encode(request(), route(custom_attributes="a=b"), OPTIONS).custom_attributes == "a=b"


@BOTH
@pytest.mark.parametrize("temperature", [0, 0.0])
def test_greedy_decoding_does_not_sample(codec: Codec, temperature: float) -> None:
    parameters = encoded(codec, sampled(temperature=temperature))["parameters"]
    assert (parameters["do_sample"], parameters["temperature"]) == (False, 0)


@BOTH
def test_top_p_zero_is_a_value_vllm_accepts_and_keeps_one_token(codec: Codec) -> None:
    assert 0 < encoded(codec, sampled(top_p=0))["parameters"]["top_p"] < 1e-3


@BOTH
@pytest.mark.parametrize(
    "name",
    [
        "max_new_tokens",
        "do_sample",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "ignore_eos_token",
    ],
)
def test_a_default_is_sent_so_that_the_containers_own_cannot_replace_it(codec: Codec, name: str) -> None:
    assert name in encoded(codec, request())["parameters"]


@BOTH
def test_the_prompt_stands_first_and_an_empty_one_is_the_models_document_start(codec: Codec) -> None:
    target = route(document_start="<s>", adapter="a")
    assert codec.encode(request(prompts=("",)), target, OPTIONS).body.startswith(b'{"inputs":"<s>"')


@BOTH
def test_an_adapter_goes_by_a_key_of_its_own_as_one_string(codec: Codec) -> None:
    assert encoded(codec, request(), route(adapter="sql"))["adapters"] == "sql"
    assert "adapters" not in encoded(codec, request())


def test_a_tenants_prompts_are_kept_apart_where_there_is_a_word_for_it() -> None:
    salted = EncodeOptions(cache_salt="a1b2")
    assert json.loads(ASYNC.encode(request(), route(), salted).body)["parameters"]["cache_salt"] == "a1b2"
    assert b"a1b2" not in ROLLING.encode(request(), route(), salted).body


@BOTH
def test_stop_texts_go_by_the_handlers_own_name(codec: Codec) -> None:
    parameters = encoded(codec, request(stop=("s1", "s2")))["parameters"]
    here, there = ("stop", "stop_sequences") if codec is ASYNC else ("stop_sequences", "stop")
    assert parameters[here] == ["s1", "s2"]
    assert there not in parameters
    assert here not in encoded(codec, request())["parameters"]


@pytest.mark.parametrize(
    ("version", "name"),
    [(None, "structured_outputs"), ("18.0", "structured_outputs"), ("17.0", "guided_regex"), ("15.0", "guided_regex")],
)
def test_a_constraint_has_the_name_of_the_vllm_inside(version: str | None, name: str) -> None:
    target = route(family_version=version)
    parameters = encoded(ASYNC, constrained(ConstraintKind.REGEX, "a+"), target)["parameters"]
    assert {"structured_outputs", "guided_regex"} & set(parameters) == {name}


def test_a_version_that_is_none_stops_the_call() -> None:
    with pytest.raises(BackendUnavailableError):
        ASYNC.encode(request(), route(family_version="latest"), OPTIONS)


@BOTH
@pytest.mark.parametrize("fields", [{"prompts": ("a", "b")}, {"prompts": ((1, 2),)}, {"n": 2, "best_of": 2}])
def test_what_one_call_has_no_room_for_is_never_dropped(codec: Codec, fields: Json) -> None:
    with pytest.raises(InvalidRequestError):
        codec.encode(request(**fields), route(), OPTIONS)


# parameter -> a request that uses it, and where its value must stand among the parameters
BOTH_HONOUR: Mapping[Parameter, tuple[CompletionRequest, str, object]] = {
    Parameter.TEMPERATURE: (sampled(temperature=0.123), "temperature", 0.123),
    Parameter.TOP_P: (sampled(top_p=0.456), "top_p", 0.456),
    Parameter.TOP_K: (sampled(top_k=31), "top_k", 31),
    Parameter.MIN_P: (sampled(min_p=0.789), "min_p", 0.789),
    Parameter.SEED: (sampled(seed=2**63 - 1), "seed", 2**63 - 1),
    Parameter.PRESENCE_PENALTY: (sampled(presence_penalty=-1.23), "presence_penalty", -1.23),
    Parameter.FREQUENCY_PENALTY: (sampled(frequency_penalty=1.45), "frequency_penalty", 1.45),
    Parameter.REPETITION_PENALTY: (sampled(repetition_penalty=1.67), "repetition_penalty", 1.67),
    Parameter.IGNORE_EOS: (sampled(ignore_eos=True), "ignore_eos_token", True),
}
ASYNC_HONOURS: Mapping[Parameter, tuple[CompletionRequest, str, object]] = {
    **BOTH_HONOUR,
    Parameter.STOP: (request(stop=("s1", "s2")), "stop", ["s1", "s2"]),
    Parameter.INCLUDE_STOP: (request(include_stop=True), "include_stop_str_in_output", True),
    Parameter.STOP_TOKEN_IDS: (sampled(stop_token_ids=(31337,)), "stop_token_ids", [31337]),
    Parameter.LOGIT_BIAS: (sampled(logit_bias={42: -7.5}), "logit_bias", {"42": -7.5}),
    Parameter.MIN_TOKENS: (sampled(min_tokens=5), "min_tokens", 5),
    Parameter.SKIP_SPECIAL_TOKENS: (request(skip_special_tokens=False), "skip_special_tokens", False),
    Parameter.SPACES_BETWEEN_SPECIAL_TOKENS: (
        request(spaces_between_special_tokens=False),
        "spaces_between_special_tokens",
        False,
    ),
    Parameter.ADD_SPECIAL_TOKENS: (request(add_special_tokens=False), "add_special_tokens", False),
    Parameter.JSON_OBJECT: (constrained(ConstraintKind.JSON_OBJECT), "structured_outputs", {"json_object": True}),
    Parameter.JSON_SCHEMA: (
        constrained(ConstraintKind.JSON_SCHEMA, '{"type":"array"}'),
        "structured_outputs",
        {"json": {"type": "array"}},
    ),
    Parameter.REGEX: (constrained(ConstraintKind.REGEX, "a+"), "structured_outputs", {"regex": "a+"}),
    Parameter.CHOICE: (
        constrained(ConstraintKind.CHOICE, choices=("yes", "no")),
        "structured_outputs",
        {"choice": ["yes", "no"]},
    ),
    Parameter.GRAMMAR: (constrained(ConstraintKind.GRAMMAR, "r ::= x"), "structured_outputs", {"grammar": "r ::= x"}),
    Parameter.WHITESPACE_PATTERN: (
        constrained(ConstraintKind.REGEX, "a+", whitespace_pattern="[ ]?"),
        "structured_outputs",
        {"regex": "a+", "whitespace_pattern": "[ ]?"},
    ),
}
SENTINELS = [(ASYNC, parameter, sentinel) for parameter, sentinel in ASYNC_HONOURS.items()] + [
    (ROLLING, parameter, sentinel) for parameter, sentinel in BOTH_HONOUR.items()
]


@pytest.mark.parametrize(("codec", "parameter", "sentinel"), SENTINELS)
def test_an_honoured_parameter_stands_in_the_body(
    codec: Codec, parameter: Parameter, sentinel: tuple[CompletionRequest, str, object]
) -> None:
    canonical, name, value = sentinel
    assert codec.abilities(route()).capabilities[parameter] is Capability.HONOURED
    assert encoded(codec, canonical)["parameters"][name] == value
    assert encoded(codec, request())["parameters"].get(name) != value


@pytest.mark.parametrize("parameter", Parameter)
@pytest.mark.parametrize(
    ("codec", "forwarded"), [(ASYNC, ASYNC_HONOURS), (ROLLING, BOTH_HONOUR)], ids=["async", "rolling"]
)
def test_each_parameter_is_forwarded_or_said_not_to_be(
    codec: Codec, forwarded: Mapping[Parameter, object], parameter: Parameter
) -> None:
    # the chosen tokens' own log-probabilities come with every answer: nothing asks for them
    honoured = {*forwarded, Parameter.LOGPROBS}
    assert (codec.abilities(route()).capabilities[parameter] is Capability.HONOURED) == (parameter in honoured)


@pytest.mark.parametrize(
    ("codec", "emulated"),
    [
        (ASYNC, {"prompt_batch", "n", "best_of", "echo", "suffix"}),
        (ROLLING, {"prompt_batch", "n", "best_of", "echo", "suffix", "stop", "include_stop"}),
    ],
    ids=["async", "rolling"],
)
def test_what_the_schema_lacks_is_emulated_where_it_can_be(codec: Codec, emulated: set[str]) -> None:
    capabilities = codec.abilities(route()).capabilities
    assert {name for name in Parameter if capabilities[name] is Capability.EMULATED} == emulated


@BOTH
def test_token_ids_and_beams_are_refused_and_no_alternatives_are_named(codec: Codec) -> None:
    abilities = codec.abilities(route())
    assert abilities.capabilities[Parameter.TOKEN_PROMPT] is Capability.REFUSED
    assert abilities.capabilities[Parameter.BEAM] is Capability.REFUSED
    assert abilities.max_logprobs == 0


@BOTH
@pytest.mark.parametrize(
    ("fields", "faulty"),
    [
        ({"adapter": "sql"}, []),
        ({"served_model": "lmi"}, ["served_model"]),
        ({"family_version": "latest"}, ["family_version"]),
        ({"capabilities": {Parameter.BEAM: Capability.HONOURED}}, ["capabilities"]),
        ({"capabilities": {Parameter.N: Capability.HONOURED}}, ["capabilities"]),
        ({"capabilities": {Parameter.SEED: Capability.REFUSED}}, []),
    ],
)
def test_what_a_route_cannot_ask_of_the_schema_is_a_fault(codec: Codec, fields: Json, faulty: list[str]) -> None:
    assert [fault.field for fault in codec.route_faults(route(**fields))] == faulty


def test_only_the_asynchronous_handler_has_a_first_version() -> None:
    assert [fault.field for fault in ASYNC.route_faults(route(family_version="14.0"))] == ["family_version"]
    assert not ROLLING.route_faults(route(family_version="14.0", adapter="sql"))
    assert [fault.field for fault in ASYNC.route_faults(route(family_version="15.0", adapter="sql"))] == ["adapter"]


# The asynchronous handler's answer


def token(text: str, last: str | None = None, **details: Any) -> Json:
    """One line of its stream; ``last`` is the whole text."""
    value = {"id": 5, "text": text, "logprob": -0.25}
    return {"index": 0, "token": value, "generated_text": last, "details": details or None}


ASYNC_LINES = [
    token("d\u00e9"),
    token("f \U0001f600\u20ac"),
    token("", "d\u00e9f \U0001f600\u20ac", finish_reason="stop", seed=None, generated_tokens=4, input_length=7),
]
ASYNC_STREAM = lines(*ASYNC_LINES) + b"\n\n"  # blank where vLLM's usage and last word were
ASYNC_CHUNKS = [
    CompletionChunk((ChoiceDelta(0, "d\u00e9"),), Usage(CHAR_ESTIMATE, 1, estimated=True)),
    CompletionChunk((ChoiceDelta(0, "f \U0001f600\u20ac"),), Usage(CHAR_ESTIMATE, 2, estimated=True)),
    CompletionChunk((ChoiceDelta(0, "", None, FinishReason.STOP),), Usage(7, 3)),
]

# The rolling batch's answer


def rolled(text: str, last: str | None = None, **details: Any) -> Json:
    line: Json = {"token": {"id": 5, "text": text, "log_prob": -0.25}}
    return line if last is None else {**line, "generated_text": last, "details": details}


ROLLING_LINES = [
    rolled("d\u00e9"),
    rolled("f \U0001f600\u20ac"),
    rolled("</s>", "d\u00e9f \U0001f600\u20ac</s>", finish_reason="eos_token", generated_tokens=3, inputs="def f("),
]
ROLLING_CHUNKS = [
    CompletionChunk((ChoiceDelta(0, "d\u00e9"),), Usage(CHAR_ESTIMATE, 1, estimated=True)),
    CompletionChunk((ChoiceDelta(0, "f \U0001f600\u20ac"),), Usage(CHAR_ESTIMATE, 2, estimated=True)),
    CompletionChunk((ChoiceDelta(0, "</s>", None, FinishReason.STOP),), Usage(CHAR_ESTIMATE, 3, estimated=True)),
]

ASYNC_DOCUMENT: Json = {
    "generated_text": "d\u00e9f",
    "details": {
        "finish_reason": None,
        "generated_tokens": 2,
        "seed": None,
        "prefill": [],
        "tokens": [{"id": 5, "text": "d\u00e9", "logprob": -0.25}, {"id": 6, "text": "f", "logprob": -0.5}],
    },
}
ROLLING_DOCUMENT: Json = {
    "generated_text": "d\u00e9f",
    "details": {
        "finish_reason": "eos_token",
        "generated_tokens": 2,
        "inputs": "def f(",
        "tokens": [{"id": 5, "text": "d\u00e9", "log_prob": -0.25}, {"id": 6, "text": "f", "log_prob": -0.5}],
    },
}
DOCUMENT_CHUNKS = [
    CompletionChunk((ChoiceDelta(0, "d\u00e9f", None, FinishReason.STOP),), Usage(CHAR_ESTIMATE, 2, estimated=True))
]

STREAMS = pytest.mark.parametrize(
    ("codec", "answer", "chunks"),
    [
        (ASYNC, ASYNC_LINES, ASYNC_CHUNKS),
        (ROLLING, ROLLING_LINES, ROLLING_CHUNKS),
    ],
    ids=["async", "rolling"],
)


@STREAMS
def test_a_stream_cut_in_two_at_any_byte_gives_the_same_chunks(
    codec: Codec, answer: list[Json], chunks: list[CompletionChunk]
) -> None:
    stream = lines(*answer) + b"\n\n"
    for cut in range(len(stream) + 1):
        assert decoded(codec, stream[:cut], stream[cut:]) == chunks


@STREAMS
def test_the_same_stream_as_server_sent_events_gives_the_same_chunks(
    codec: Codec, answer: list[Json], chunks: list[CompletionChunk]
) -> None:
    # the rolling batch's ``output_formatter=sse``, in the two forms that are documented
    for prefix in (b"data:", b"data: "):
        stream = b"".join(prefix + lines(line) + b"\n" for line in answer)
        assert decoded(codec, stream) == chunks


@STREAMS
def test_a_stream_that_ends_anywhere_before_its_last_record_is_an_error(
    codec: Codec, answer: list[Json], chunks: list[CompletionChunk]
) -> None:
    complete = len(lines(*answer)) - 1  # the line end may be missing
    for end in range(complete):
        with pytest.raises(BackendError):
            decoded(codec, lines(*answer)[:end])
    assert decoded(codec, lines(*answer)[:complete]) == chunks


@STREAMS
def test_a_stream_that_stops_between_records_is_truncated(
    codec: Codec, answer: list[Json], chunks: list[CompletionChunk]
) -> None:
    for count in range(len(answer)):
        with pytest.raises(TruncatedStreamError):
            decoded(codec, lines(*answer[:count]))


@pytest.mark.parametrize(
    ("codec", "answer"),
    [(ASYNC, ASYNC_DOCUMENT), (ROLLING, ROLLING_DOCUMENT), (ROLLING, [ROLLING_DOCUMENT])],
    ids=["async", "rolling", "rolling-tgi-compat"],
)
def test_a_document_cut_in_two_at_any_byte_is_one_chunk(codec: Codec, answer: object) -> None:
    text = lines(answer)
    for cut in range(len(text) + 1):
        assert decoded(codec, text[:cut], text[cut:], whole=True) == DOCUMENT_CHUNKS


@BOTH
def test_a_document_that_never_came_is_truncated(codec: Codec) -> None:
    with pytest.raises(TruncatedStreamError):
        decoded(codec, b"\n", whole=True)


@BOTH
@pytest.mark.parametrize("fields", [{"generated_text": None}, {"details": None}, {"details": {"finish_reason": "x"}}])
def test_a_document_that_lacks_its_text_or_its_details_is_a_backend_error(codec: Codec, fields: Json) -> None:
    with pytest.raises(BackendError):
        decoded(codec, lines(ASYNC_DOCUMENT | fields), whole=True)


def test_a_list_of_several_documents_is_a_backend_error() -> None:
    with pytest.raises(BackendError):
        decoded(ROLLING, lines([ROLLING_DOCUMENT, ROLLING_DOCUMENT]), whole=True)


# Why an answer ended


@BOTH
@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("repetition", FinishReason.STOP),
        ("eos_token", FinishReason.STOP),
        ("stop_sequence", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
    ],
)
def test_each_finish_reason_of_a_stream_has_its_canonical_one(codec: Codec, word: str, reason: FinishReason) -> None:
    last = token("a", "a", finish_reason=word, generated_tokens=2)
    assert decoded(codec, lines(last))[0].choices[0].finish_reason is reason


@BOTH
@pytest.mark.parametrize("word", ["abort", "error", "a_new_word", None])
def test_a_stream_that_does_not_say_how_it_ended_is_a_backend_error(codec: Codec, word: str | None) -> None:
    with pytest.raises(BackendError) as caught:
        decoded(codec, lines(token("a", "a", finish_reason=word, generated_tokens=2)))
    assert not isinstance(caught.value, TruncatedStreamError)


@BOTH
def test_a_last_record_without_details_is_a_backend_error(codec: Codec) -> None:
    with pytest.raises(BackendError):
        decoded(codec, lines(token("a", "a")))


@pytest.mark.parametrize(
    ("stop_reason", "generated", "reason"),
    [
        (None, 15, FinishReason.STOP),
        (None, 16, FinishReason.LENGTH),
        ("\n\n", 16, FinishReason.STOP),
        ("length", 3, FinishReason.STOP),
        ("error", 3, FinishReason.STOP),
        ("", 16, FinishReason.STOP),
        (50256, 16, FinishReason.STOP),
        (0, 16, FinishReason.STOP),
    ],
)
def test_an_asynchronous_document_ends_by_vllms_stop_reason(
    stop_reason: str | int | None, generated: int, reason: FinishReason
) -> None:
    details = {**ASYNC_DOCUMENT["details"], "finish_reason": stop_reason, "generated_tokens": generated}
    chunks = decoded(ASYNC, lines(ASYNC_DOCUMENT | {"details": details}), canonical=request(max_tokens=16), whole=True)
    assert chunks[0].choices[0].finish_reason is reason


@pytest.mark.parametrize("key", ["finish_reason", "finish reason"])
@pytest.mark.parametrize(
    ("word", "reason"),
    [("eos_token", FinishReason.STOP), ("stop_sequence", FinishReason.STOP), ("length", FinishReason.LENGTH)],
)
def test_a_rolling_batchs_document_ends_by_its_own_word_in_both_spellings(
    key: str, word: str, reason: FinishReason
) -> None:
    answer = {"generated_text": "a", "details": {key: word, "generated_tokens": 16, "tokens": None}}
    assert decoded(ROLLING, lines(answer), whole=True)[0].choices[0].finish_reason is reason


ROLLING_FAILURES = [
    {
        "token": {"id": -1, "text": "", "log_prob": -1, "special_token": True, "error_msg": "my secret"},
        "generated_text": "",
        "details": {"finish_reason": "error", "generated_tokens": None, "inputs": None},
    },
    {"token": {"id": -1, "text": "", "logprob": -1, "special": True}, "details": {"finish_reason": "error"}},
    {"error": "exception occurred: my secret", "code": 424},
]


@pytest.mark.parametrize("failure", ROLLING_FAILURES)
def test_a_rolling_batch_that_fails_in_the_middle_is_a_backend_error(failure: Json) -> None:
    with pytest.raises(BackendError) as caught:
        decoded(ROLLING, lines(rolled("a"), failure))
    assert type(caught.value) is BackendError
    assert "secret" not in f"{caught.value.message} {caught.value.detail}"


def test_a_rolling_batchs_failed_document_is_never_put_down_to_the_caller() -> None:
    answer = {"generated_text": None, "error": "my secret", "code": 400, "details": {"finish_reason": "error"}}
    with pytest.raises(BackendError) as caught:
        decoded(ROLLING, lines(answer), whole=True)
    assert "secret" not in f"{caught.value.message} {caught.value.detail}"


def test_an_asynchronous_stream_whose_formatter_failed_is_a_backend_error() -> None:
    with pytest.raises(BackendError) as caught:
        decoded(ASYNC, lines(token("a"), {"error": "list index out of range", "code": 424}))
    assert type(caught.value) is BackendError


# Usage and log-probabilities


@pytest.mark.parametrize(("told", "generated"), [(9, 8), (1, 0), (0, 0)])
def test_a_count_that_is_one_too_many_never_falls_below_zero(told: int, generated: int) -> None:
    details = {"finish_reason": "length", "generated_tokens": told, "input_length": 5}
    assert decoded(ASYNC, lines(token("a", "a", **details)))[-1].usage == Usage(5, generated)


def test_only_an_asynchronous_stream_counts_one_token_too_many() -> None:
    details = {"finish_reason": "length", "generated_tokens": 9, "input_length": 5}
    assert decoded(ASYNC, lines(token("a", "a", **details)))[-1].usage == Usage(5, 8)
    assert decoded(ROLLING, lines(token("a", "a", **details)))[-1].usage == Usage(5, 9)


@BOTH
def test_without_the_containers_count_the_records_are_counted(codec: Codec) -> None:
    chunks = decoded(codec, lines(token("a"), token("b", "ab", finish_reason="length", generated_tokens=None)))
    assert chunks[-1].usage == Usage(CHAR_ESTIMATE, 2, estimated=True)


STREAM_LOGPROBS = [
    Logprobs(("d\u00e9",), (-0.25,), ({"d\u00e9": -0.25},), (0,)),
    Logprobs(("f \U0001f600\u20ac",), (-0.25,), ({"f \U0001f600\u20ac": -0.25},), (2,)),
]


@pytest.mark.parametrize(("codec", "answer"), [(ASYNC, ASYNC_LINES), (ROLLING, ROLLING_LINES)])
def test_each_token_of_a_stream_has_its_own_logprob_and_place(codec: Codec, answer: list[Json]) -> None:
    chunks = decoded(codec, lines(*answer), canonical=request(logprobs=0))
    assert [chunk.choices[0].logprobs for chunk in chunks[:2]] == STREAM_LOGPROBS
    last = chunks[2].choices[0].logprobs
    assert last is not None
    assert (last.token_logprobs, last.text_offset) == ((-0.25,), (6,))


@pytest.mark.parametrize(("codec", "answer"), [(ASYNC, ASYNC_DOCUMENT), (ROLLING, ROLLING_DOCUMENT)])
def test_each_token_of_a_document_has_its_own_logprob_and_place(codec: Codec, answer: Json) -> None:
    (chunk,) = decoded(codec, lines(answer), canonical=request(logprobs=0), whole=True)
    assert chunk.choices[0].logprobs == Logprobs(
        ("d\u00e9", "f"), (-0.25, -0.5), ({"d\u00e9": -0.25}, {"f": -0.5}), (0, 2)
    )


@BOTH
def test_a_token_whose_logprob_is_not_told_has_none(codec: Codec) -> None:
    line = {"token": {"id": -1, "text": "a", "log_prob": None}} | {"generated_text": "a"}
    line |= {"details": {"finish_reason": "length", "generated_tokens": 1}}
    assert decoded(codec, lines(line), canonical=request(logprobs=0))[0].choices[0].logprobs == Logprobs(
        ("a",), (None,), (None,), (0,)
    )


@BOTH
@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity"])
def test_a_number_that_json_does_not_have_is_a_backend_error(codec: Codec, literal: bytes) -> None:
    with pytest.raises(BackendError):
        decoded(codec, lines(token("a", "a", finish_reason="length")).replace(b"-0.25", literal))


@BOTH
@pytest.mark.parametrize("text", ["data: [DONE]", "[DONE]", '{"error": "x", "code": 424}'])
def test_text_that_looks_like_the_wire_format_is_text(codec: Codec, text: str) -> None:
    last = token(text, text, finish_reason="length", generated_tokens=2)
    assert decoded(codec, lines(last))[0].choices[0].text == text


@BOTH
@pytest.mark.parametrize(
    "line", [b"{", b"null", b"[]", b"<html>", b"{}", b'{"choices":[]}', b'{"token":{}}', b"[DONE]"]
)
def test_what_is_not_a_record_is_a_backend_error(codec: Codec, line: bytes) -> None:
    with pytest.raises(BackendError):
        decoded(codec, line + b"\n" + ASYNC_STREAM)
