"""What goes to a TGI container in its own body and what is read from it, against the wire format of TGI 3.3.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from completions.backends.codec import EncodeOptions, Invocation
from completions.backends.payload_stream import document, records
from completions.backends.tgi import TgiCodec
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
    InvalidRequestError,
    TruncatedStreamError,
)
from fakes import request, route

Json = dict[str, Any]
CODEC = TgiCodec()
SCHEMA = '{"properties":{"a":{"type":"string"}}}'


def invocation(canonical: CompletionRequest, target: ModelRoute | None = None, **options: Any) -> Invocation:
    return CODEC.encode(canonical, target or route(), EncodeOptions(**options))


def parameters(canonical: CompletionRequest, target: ModelRoute | None = None) -> Json:
    found: Json = json.loads(invocation(canonical, target).body)["parameters"]
    return found


def sampled(**values: Any) -> CompletionRequest:
    return request(sampling=SamplingParams(**values))


def constrained(kind: ConstraintKind, value: str | None = None, **fields: Any) -> CompletionRequest:
    return request(constraint=Constraint(kind, value, **fields))


def decoded(stream: bytes, canonical: CompletionRequest | None = None) -> list[CompletionChunk]:
    decoder = CODEC.decoder(canonical or request())
    chunks = [chunk for record in records([stream]) if (chunk := decoder.decode(record)) is not None]
    decoder.finish()
    return chunks


def decoded_whole(value: object, canonical: CompletionRequest | None = None) -> CompletionChunk:
    decoder = CODEC.decoder(canonical or request(), whole=True)
    chunks = [decoder.decode(record) for record in document([json.dumps(value).encode()])]
    decoder.finish()
    (chunk,) = chunks
    assert chunk is not None
    return chunk


def sse(*values: object) -> bytes:
    """As TGI writes them: nothing between the field's name and its value."""
    return b"".join(b"data:" + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" for value in values)


def token(text: str, logprob: float | None = -0.5, *, special: bool = False) -> Json:
    return {"id": 7, "text": text, "logprob": logprob, "special": special}


def event(index: int, one: Json, **fields: Any) -> Json:
    return {"index": index, "token": one, "generated_text": None, "details": None} | fields


def last(index: int, one: Json, reason: str, text: str, *, prompt: int = 3, **fields: Any) -> Json:
    details = {"finish_reason": reason, "generated_tokens": index, "seed": None, "input_length": prompt}
    return event(index, one, generated_text=text, details=details, **fields)


# The request


def test_a_plain_request_is_encoded_byte_for_byte() -> None:
    assert invocation(request()).body == (
        b'{"inputs":"def f(","parameters":{"max_new_tokens":16,"return_full_text":false,"details":true,'
        b'"decoder_input_details":false,"do_sample":true,"temperature":1.0,"repetition_penalty":1.0,'
        b'"frequency_penalty":0.0},"stream":true}'
    )


def test_the_prompt_is_not_asked_back_since_most_kinds_of_model_would_give_it() -> None:
    assert parameters(request())["return_full_text"] is False


def test_a_greedy_request_names_nothing_that_has_tgi_sample() -> None:
    found = parameters(sampled(temperature=0, top_p=0.5, top_k=5))
    assert found["do_sample"] is False
    assert not {"temperature", "top_p", "top_k"} & found.keys()


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 2.0])
def test_a_sampled_request_says_so_since_temperature_one_alone_is_greedy(temperature: float) -> None:
    found = parameters(sampled(temperature=temperature))
    assert (found["do_sample"], found["temperature"]) == (True, temperature)


@pytest.mark.parametrize(("top_p", "sent"), [(1.0, None), (0.9, 0.9), (0.0, 1e-6)])
def test_top_p_stays_between_the_bounds_tgi_refuses(top_p: float, sent: float | None) -> None:
    assert parameters(sampled(top_p=top_p)).get("top_p") == sent


@pytest.mark.parametrize(("top_k", "sent"), [(None, None), (1, 1), (2**40, 2**31 - 1)])
def test_top_k_is_left_out_when_off_and_fits_32_bits(top_k: int | None, sent: int | None) -> None:
    assert parameters(sampled(top_k=top_k)).get("top_k") == sent


@pytest.mark.parametrize(
    ("seed", "sent"), [(0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**64 - 1), (-(2**63), 2**63), (None, None)]
)
def test_a_negative_seed_becomes_an_unsigned_one_of_its_own(seed: int | None, sent: int | None) -> None:
    assert parameters(sampled(seed=seed)).get("seed") == sent


@pytest.mark.parametrize("name", ["max_new_tokens", "do_sample", "repetition_penalty", "frequency_penalty"])
def test_a_default_is_sent_so_that_the_containers_own_cannot_replace_it(name: str) -> None:
    assert name in parameters(request())


def test_tgi_is_told_the_first_four_stops_and_no_more() -> None:
    assert parameters(request(stop=("a", "b", "c", "d", "e")))["stop"] == ["a", "b", "c", "d"]
    assert CODEC.abilities(route()).max_stops == 4


@pytest.mark.parametrize(("logprobs", "sent"), [(None, None), (0, None), (1, 1), (5, 5)])
def test_alternatives_are_top_n_tokens(logprobs: int | None, sent: int | None) -> None:
    assert parameters(request(logprobs=logprobs)).get("top_n_tokens") == sent
    assert CODEC.abilities(route()).max_logprobs == 5


def test_a_route_may_lower_the_limits() -> None:
    abilities = CODEC.abilities(route(limits=ModelLimits(stops=2, logprobs=1)))
    assert (abilities.max_stops, abilities.max_logprobs) == (2, 1)


def test_an_adapter_is_named_and_a_cache_salt_is_not() -> None:
    found = invocation(request(), route(adapter="lora-1"), cache_salt="0123abcd")
    assert json.loads(found.body)["parameters"]["adapter_id"] == "lora-1"
    assert b"0123abcd" not in found.body


def test_an_unstreamed_answer_is_asked_for_without_a_stream() -> None:
    assert json.loads(invocation(request(), streamed=False).body)["stream"] is False


def test_an_operators_attributes_are_passed_on_and_the_callers_identity_is_not() -> None:
    found = invocation(request(end_user="someone"), route(custom_attributes="accept_eula=true"))
    assert found.custom_attributes == "accept_eula=true"
    assert b"someone" not in found.body


def test_an_empty_prompt_becomes_the_models_document_start() -> None:
    assert json.loads(invocation(request(prompts=("",)), route(document_start="<s>")).body)["inputs"] == "<s>"


@pytest.mark.parametrize(
    ("canonical", "grammar"),
    [
        (constrained(ConstraintKind.REGEX, "a+"), {"type": "regex", "value": "a+"}),
        (constrained(ConstraintKind.JSON_SCHEMA, SCHEMA), {"type": "json", "value": json.loads(SCHEMA)}),
        (constrained(ConstraintKind.CHOICE, choices=("yes", "no")), {"type": "regex", "value": "(yes|no)"}),
        (
            constrained(ConstraintKind.CHOICE, choices=("a.b|c", "[x] \\ -")),
            {"type": "regex", "value": r"(a\.b\|c|\[x\] \\ -)"},
        ),
    ],
)
def test_each_constraint_is_a_grammar(canonical: CompletionRequest, grammar: Json) -> None:
    assert parameters(canonical)["grammar"] == grammar


@pytest.mark.parametrize("schema", ['{"type":"object"}', '{"type":"string"}', "true", "[]"])
def test_a_schema_without_properties_is_refused_by_the_callers_name(schema: str) -> None:
    canonical = request(
        constraint=Constraint(ConstraintKind.JSON_SCHEMA, schema), param_names={"constraint": "guided_json"}
    )
    with pytest.raises(InvalidRequestError, match="'guided_json' must have 'properties'") as caught:
        invocation(canonical)
    assert caught.value.param == "guided_json"


# parameter -> a request that uses it, and where its value must stand among the parameters
SENTINELS: Mapping[Parameter, tuple[CompletionRequest, str, object]] = {
    Parameter.LOGPROBS: (request(logprobs=4), "top_n_tokens", 4),
    Parameter.TEMPERATURE: (sampled(temperature=0.123), "temperature", 0.123),
    Parameter.TOP_P: (sampled(top_p=0.456), "top_p", 0.456),
    Parameter.TOP_K: (sampled(top_k=31), "top_k", 31),
    Parameter.SEED: (sampled(seed=31337), "seed", 31337),
    Parameter.FREQUENCY_PENALTY: (sampled(frequency_penalty=1.45), "frequency_penalty", 1.45),
    Parameter.REPETITION_PENALTY: (sampled(repetition_penalty=1.67), "repetition_penalty", 1.67),
    Parameter.REGEX: (constrained(ConstraintKind.REGEX, "z+"), "grammar", {"type": "regex", "value": "z+"}),
    Parameter.CHOICE: (
        constrained(ConstraintKind.CHOICE, choices=("x", "y")),
        "grammar",
        {"type": "regex", "value": "(x|y)"},
    ),
    Parameter.JSON_SCHEMA: (
        constrained(ConstraintKind.JSON_SCHEMA, SCHEMA),
        "grammar",
        {"type": "json", "value": json.loads(SCHEMA)},
    ),
}
EMULATED = {
    Parameter.N,
    Parameter.PROMPT_BATCH,
    Parameter.BEST_OF,
    Parameter.ECHO,
    Parameter.SUFFIX,
    Parameter.STOP,
    Parameter.INCLUDE_STOP,
    Parameter.SKIP_SPECIAL_TOKENS,
}


@pytest.mark.parametrize("parameter", Parameter)
def test_each_parameter_is_forwarded_emulated_or_refused(parameter: Parameter) -> None:
    capability = CODEC.abilities(route()).capabilities[parameter]
    if parameter in SENTINELS:
        assert capability is Capability.HONOURED
    else:
        assert capability is (Capability.EMULATED if parameter in EMULATED else Capability.REFUSED)


@pytest.mark.parametrize("parameter", SENTINELS)
def test_an_honoured_parameter_stands_among_the_parameters(parameter: Parameter) -> None:
    canonical, name, value = SENTINELS[parameter]
    assert parameters(canonical)[name] == value
    assert parameters(request()).get(name) != value


def test_a_route_that_promises_more_than_tgi_can_is_at_fault() -> None:
    promised = route(capabilities={Parameter.MIN_P: Capability.HONOURED, Parameter.SEED: Capability.REFUSED})
    assert [fault.field for fault in CODEC.route_faults(promised)] == ["capabilities"]
    assert [fault.field for fault in CODEC.route_faults(route(served_model="m"))] == ["served_model"]
    assert CODEC.route_faults(route(adapter="lora-1")) == []


# The stream

SAMPLE = b":\n\n" + sse(
    event(1, token("dé")),
    event(2, token("f \U0001f600€")),
    last(3, token("</s>", special=True), "eos_token", "déf \U0001f600€", prompt=9),
)
SAMPLE_CHUNKS = [
    # six bytes of prompt are taken for two tokens until the container counts nine
    CompletionChunk((ChoiceDelta(0, "dé"),), Usage(2, 1, estimated=True)),
    CompletionChunk((ChoiceDelta(0, "f \U0001f600€"),), Usage(2, 2, estimated=True)),
    CompletionChunk((ChoiceDelta(0, "", None, FinishReason.STOP),), Usage(9, 3)),
]


def test_a_stream_is_decoded_whole() -> None:
    assert decoded(SAMPLE) == SAMPLE_CHUNKS


def test_a_stream_cut_in_two_at_any_byte_gives_the_same_chunks() -> None:
    for cut in range(len(SAMPLE) + 1):
        decoder = CODEC.decoder(request())
        found = [decoder.decode(item) for item in records([SAMPLE[:cut], SAMPLE[cut:]])]
        decoder.finish()
        assert found == SAMPLE_CHUNKS


def test_a_stream_a_byte_at_a_time_gives_the_same_chunks() -> None:
    decoder = CODEC.decoder(request())
    assert [decoder.decode(item) for item in records(bytes([byte]) for byte in SAMPLE)] == SAMPLE_CHUNKS


def test_a_space_after_the_field_name_makes_no_difference() -> None:
    assert decoded(SAMPLE.replace(b"data:", b"data: ")) == SAMPLE_CHUNKS


def test_a_done_that_a_proxy_adds_makes_no_difference() -> None:
    assert decoded(SAMPLE + b"data: [DONE]\n\n") == SAMPLE_CHUNKS


def test_a_done_without_a_last_event_ends_nothing() -> None:
    with pytest.raises(TruncatedStreamError):
        decoded(sse(event(1, token("a"))) + b"data: [DONE]\n\n")


@pytest.mark.parametrize("lines", range(7))
def test_a_stream_that_ends_after_any_line_but_the_last_is_truncated(lines: int) -> None:
    whole = SAMPLE.splitlines(keepends=True)
    assert len(whole) == 8
    with pytest.raises(TruncatedStreamError):
        decoded(b"".join(whole[:lines]))


@pytest.mark.parametrize(
    ("word", "reason"),
    [("length", FinishReason.LENGTH), ("eos_token", FinishReason.STOP), ("stop_sequence", FinishReason.STOP)],
)
def test_each_finish_reason_has_its_canonical_one(word: str, reason: FinishReason) -> None:
    assert decoded(sse(last(1, token("a"), word, "a")))[0].choices[0].finish_reason is reason


@pytest.mark.parametrize("word", ["error", "a_new_word", ""])
def test_an_unknown_finish_reason_is_a_backend_error(word: str) -> None:
    with pytest.raises(BackendError):
        decoded(sse(last(1, token("a"), word, "a")))


def test_a_stop_text_stays_in_for_the_service_to_cut() -> None:
    assert decoded(sse(last(1, token("x\n\n"), "stop_sequence", "x\n\n")))[0].choices[0].text == "x\n\n"


def test_special_tokens_are_dropped_unless_the_caller_keeps_them() -> None:
    stream = sse(event(1, token("<|file|>", special=True)), last(2, token("a"), "length", "a"))
    kept = request(skip_special_tokens=False)
    assert [chunk.choices[0].text for chunk in decoded(stream)] == ["", "a"]
    assert [chunk.choices[0].text for chunk in decoded(stream, kept)] == ["<|file|>", "a"]


@pytest.mark.parametrize("special", [True, False])
def test_the_token_that_ends_an_answer_is_never_part_of_it(special: bool) -> None:
    stream = sse(event(1, token("a")), last(2, token("</s>", special=special), "eos_token", "a"))
    assert "".join(chunk.choices[0].text for chunk in decoded(stream, request(skip_special_tokens=False))) == "a"


def test_logprobs_name_the_chosen_token_and_the_likeliest_ones() -> None:
    tops = [token("b", -0.25), token("a", -1.5), token("c", -1.5)]
    stream = sse(
        event(1, token("a", -1.5), top_tokens=tops),
        event(2, token("é", -0.25), top_tokens=[token("é", -0.25)]),
        last(3, token("</s>", special=True), "eos_token", "aé", top_tokens=[token("</s>")]),
    )
    found = [chunk.choices[0].logprobs for chunk in decoded(stream, request(logprobs=2))]
    assert found == [
        Logprobs(("a",), (-1.5,), ({"a": -1.5, "b": -0.25},), (0,)),
        Logprobs(("é",), (-0.25,), ({"é": -0.25},), (1,)),
        None,
    ]


def test_no_alternatives_leave_the_chosen_token_alone() -> None:
    stream = sse(last(1, token("a", -1.5), "length", "a"))
    assert decoded(stream, request(logprobs=0))[0].choices[0].logprobs == Logprobs(
        ("a",), (-1.5,), ({"a": -1.5},), (0,)
    )
    assert decoded(stream)[0].choices[0].logprobs is None


def test_an_infinite_logprob_which_rust_writes_as_null_is_the_lowest() -> None:
    stream = sse(last(1, token("a", None), "length", "a"))
    logprobs = decoded(stream, request(logprobs=0))[0].choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == (-9999.0,)


def test_without_an_input_length_the_prompt_stays_estimated() -> None:
    final = last(1, token("a"), "length", "a")
    del final["details"]["input_length"]
    assert decoded(sse(final))[0].usage == Usage(2, 1, estimated=True)


@pytest.mark.parametrize(
    "line",
    [b"data:{", b"data:null", b"data:[]", b"<html>", b"data:{}", b'data:{"token":{}}', b'data:{"token":null}'],
)
def test_what_is_not_an_event_is_a_backend_error(line: bytes) -> None:
    with pytest.raises(BackendError) as caught:
        decoded(line + b"\n\n")
    assert not isinstance(caught.value, TruncatedStreamError)


def test_a_last_event_without_details_has_no_finish_reason_to_invent() -> None:
    with pytest.raises(BackendError):
        decoded(sse(event(1, token("a"), generated_text="a")))


# The whole document


def answer(**details: Any) -> Json:
    known = {"finish_reason": "eos_token", "generated_tokens": 3, "seed": 1, "prefill": [], "tokens": []}
    return {"generated_text": "ab", "details": known | details}


TOKENS = [token("a", -1.0), token("b", -2.0), token("</s>", -3.0, special=True)]


@pytest.mark.parametrize("wrap", [lambda one: [one], lambda one: one], ids=["listed", "bare"])
def test_a_document_is_one_answer_with_an_estimated_prompt(wrap: Any) -> None:
    assert decoded_whole(wrap(answer(tokens=TOKENS))) == CompletionChunk(
        (ChoiceDelta(0, "ab", None, FinishReason.STOP),), Usage(2, 3, estimated=True)
    )


def test_a_filled_prefill_counts_the_prompt() -> None:
    prefill = [{"id": 1, "text": "d", "logprob": None}] * 5
    assert decoded_whole([answer(prefill=prefill)]).usage == Usage(5, 3)


def test_a_documents_tokens_give_its_logprobs() -> None:
    tops = [[token("a", -1.0)], [token("c", -0.5)], [token("</s>", -3.0)]]
    delta = decoded_whole([answer(tokens=TOKENS, top_tokens=tops)], request(logprobs=1)).choices[0]
    assert delta.logprobs == Logprobs(("a", "b"), (-1.0, -2.0), ({"a": -1.0}, {"b": -2.0, "c": -0.5}), (0, 1))


def test_a_documents_special_tokens_come_from_its_tokens() -> None:
    tokens = [token("a"), token("<|file|>", special=True), token("</s>", special=True)]
    assert decoded_whole([answer(tokens=tokens)], request(skip_special_tokens=False)).choices[0].text == "a<|file|>"


@pytest.mark.parametrize(
    "value",
    [[], [answer(), answer()], {}, "text", [{"generated_text": "a"}], [answer(tokens=TOKENS, top_tokens=[[]])]],
)
def test_what_is_not_one_answer_is_a_backend_error(value: object) -> None:
    with pytest.raises(BackendError):
        decoded_whole(value)


def test_no_document_at_all_is_truncated() -> None:
    with pytest.raises(TruncatedStreamError):
        CODEC.decoder(request(), whole=True).finish()
