"""What goes to an LMI container with the OpenAI body and what is read from it, and the failures of every LMI handler.

Against djl-serving's asynchronous vLLM handler of the LMI 28 era.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from completions.backends.codec import Codec, EncodeOptions
from completions.backends.families import CODECS
from completions.backends.lmi import LmiCodec
from completions.backends.payload_stream import document, records
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
    Recourse,
    TruncatedStreamError,
)
from fakes import request, route

Json = dict[str, Any]
CODEC = LmiCodec()
OPTIONS = EncodeOptions()


def encoded(canonical: CompletionRequest, target: ModelRoute | None = None) -> Json:
    body: Json = json.loads(CODEC.encode(canonical, target or route(), OPTIONS).body)
    return body


def sampled(**values: Any) -> CompletionRequest:
    return request(sampling=SamplingParams(**values))


def constrained(kind: ConstraintKind, value: str | None = None, **fields: Any) -> CompletionRequest:
    return request(constraint=Constraint(kind, value, **fields))


def decoded(*parts: bytes, canonical: CompletionRequest | None = None, whole: bool = False) -> list[CompletionChunk]:
    decoder = CODEC.decoder(canonical or request(), whole=whole)
    found = document(parts) if whole else records(parts)
    chunks = [chunk for record in found if (chunk := decoder.decode(record)) is not None]
    decoder.finish()
    return chunks


def lines(*values: Json) -> bytes:
    """Records as LMI writes them: each on a line, no prefix."""
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)


def record(text: str = "", finish_reason: str | None = None, **fields: Any) -> Json:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    choice |= {name: fields.pop(name) for name in ("logprobs", "index") if name in fields}
    return {"id": "cmpl-7", "object": "text_completion", "created": 1, "model": "lmi", "choices": [choice], **fields}


def usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def last_usage(prompt: int, completion: int) -> Json:
    return record() | {"choices": [], "usage": usage(prompt, completion)}


# The request


def test_a_plain_request_is_encoded_byte_for_byte() -> None:
    assert CODEC.encode(request(), route(), OPTIONS).body == (
        b'{"prompt":"def f(","max_tokens":16,"n":1,"echo":false,"skip_special_tokens":true,'
        b'"spaces_between_special_tokens":true,"add_special_tokens":true,"include_stop_str_in_output":false,'
        b'"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"presence_penalty":0.0,"frequency_penalty":0.0,'
        b'"repetition_penalty":1.0,"min_tokens":0,"ignore_eos":false,"stream":true,'
        b'"stream_options":{"include_usage":true,"continuous_usage_stats":true}}'
    )


def test_a_streamed_answer_is_expected_in_json_lines_and_any_other_in_json() -> None:
    streamed = CODEC.encode(request(), route(), OPTIONS)
    whole = CODEC.encode(request(), route(), EncodeOptions(streamed=False))
    assert (streamed.content_type, streamed.accept) == ("application/json", "application/jsonlines")
    assert (whole.content_type, whole.accept) == ("application/json", "application/json")
    assert not {"stream", "stream_options"} & set(json.loads(whole.body))


@pytest.mark.parametrize("attributes", [None, "accept_eula=true"])
def test_the_operators_attributes_are_all_there_are(attributes: str | None) -> None:
    assert CODEC.encode(request(), route(custom_attributes=attributes), OPTIONS).custom_attributes == attributes


def test_the_prompt_stands_first_for_prefix_aware_routing() -> None:
    target = route(served_model="m", adapter="a")
    assert CODEC.encode(request(prompts=("once",)), target, OPTIONS).body.startswith(b'{"prompt":"once"')


def test_a_served_model_is_the_bodys_model() -> None:
    assert encoded(request(), route(served_model="lmi-7b"))["model"] == "lmi-7b"
    assert "model" not in encoded(request())


def test_an_adapter_goes_by_a_key_of_its_own_as_one_string() -> None:
    body = encoded(request(), route(adapter="sql", served_model="base"))
    assert (body["adapters"], body["model"]) == ("sql", "base")
    assert "adapters" not in encoded(request())


def test_a_tenants_prompts_are_kept_apart_in_the_prefix_cache() -> None:
    salted = CODEC.encode(request(), route(), EncodeOptions(cache_salt="a1b2"))
    assert json.loads(salted.body)["cache_salt"] == "a1b2"
    assert "cache_salt" not in encoded(request())


@pytest.mark.parametrize("stream", [True, False])
def test_the_container_always_streams_with_running_usage(stream: bool) -> None:
    body = encoded(request(stream=stream, include_usage=stream))
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_the_callers_identity_stays_here() -> None:
    assert b"someone" not in CODEC.encode(request(end_user="someone"), route(), OPTIONS).body


@pytest.mark.parametrize("version", [None, "18", "18.0", "20.0.0", "28.0"])
def test_a_constraint_is_a_structured_output_from_lmi_18_on(version: str | None) -> None:
    body = encoded(constrained(ConstraintKind.REGEX, "a+"), route(family_version=version))
    assert body["structured_outputs"] == {"regex": "a+"}
    assert "guided_regex" not in body


@pytest.mark.parametrize("version", ["15.0", "16.0", "17", "17.0.1"])
def test_a_constraint_is_guided_decoding_before_lmi_18(version: str) -> None:
    body = encoded(constrained(ConstraintKind.REGEX, "a+"), route(family_version=version))
    assert body["guided_regex"] == "a+"
    assert "structured_outputs" not in body


def test_a_version_that_is_none_stops_the_call_and_lets_another_model_answer() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        CODEC.encode(request(), route(family_version="latest"), OPTIONS)
    assert caught.value.recourse is Recourse.ELSEWHERE


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"])
def test_a_default_is_sent_so_that_the_models_own_cannot_replace_it(name: str) -> None:
    assert name in encoded(request())


# parameter -> a request that uses it, and where its value must stand in the body
SENTINELS: Mapping[Parameter, tuple[CompletionRequest, str, object]] = {
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
    Parameter.GRAMMAR: (
        constrained(ConstraintKind.GRAMMAR, "root ::= x"),
        "structured_outputs",
        {"grammar": "root ::= x"},
    ),
    Parameter.WHITESPACE_PATTERN: (
        constrained(ConstraintKind.REGEX, "a+", whitespace_pattern="[ ]?"),
        "structured_outputs",
        {"regex": "a+", "whitespace_pattern": "[ ]?"},
    ),
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


def test_what_vllm_dropped_is_emulated_and_what_it_never_had_is_refused() -> None:
    capabilities = CODEC.abilities(route()).capabilities
    assert capabilities[Parameter.SUFFIX] is capabilities[Parameter.BEST_OF] is Capability.EMULATED
    assert capabilities[Parameter.BEAM] is Capability.REFUSED


def test_a_route_may_take_a_parameter_away_and_lower_a_limit() -> None:
    abilities = CODEC.abilities(route(capabilities={Parameter.SEED: Capability.REFUSED}, limits=ModelLimits(stops=2)))
    assert (abilities.capabilities[Parameter.SEED], abilities.max_stops) == (Capability.REFUSED, 2)
    assert CODEC.abilities(route()).max_stops == 4


@pytest.mark.parametrize(
    ("fields", "faulty"),
    [
        ({}, []),
        ({"adapter": "sql", "served_model": "base", "family_version": "16.0"}, []),
        ({"adapter": "sql"}, []),
        ({"family_version": "15.0"}, []),
        ({"adapter": "sql", "family_version": "15.0"}, ["adapter"]),
        ({"family_version": "14.0"}, ["family_version"]),
        ({"family_version": "0.36.0"}, ["family_version"]),  # djl-serving's own
        ({"family_version": "latest"}, ["family_version"]),
        ({"capabilities": {Parameter.BEAM: Capability.HONOURED}}, ["capabilities"]),
        ({"capabilities": {Parameter.BEST_OF: Capability.HONOURED}}, ["capabilities"]),
        ({"capabilities": {Parameter.N: Capability.EMULATED, Parameter.SEED: Capability.REFUSED}}, []),
    ],
)
def test_what_a_route_cannot_ask_of_the_handler_is_a_fault(fields: Json, faulty: list[str]) -> None:
    assert [fault.field for fault in CODEC.route_faults(route(**fields))] == faulty


# The answer

SAMPLE_LINES = [
    record("d\u00e9", usage=usage(3, 1)),
    record("f \U0001f600\u20ac", usage=usage(3, 2)),
    record("", "stop", usage=usage(3, 3)),
    last_usage(3, 3),
]
SAMPLE = lines(*SAMPLE_LINES) + b"\n\n"  # blank where the event stream has its last word
SAMPLE_CHUNKS = [
    CompletionChunk((ChoiceDelta(0, "d\u00e9"),), Usage(3, 1)),
    CompletionChunk((ChoiceDelta(0, "f \U0001f600\u20ac"),), Usage(3, 2)),
    CompletionChunk((ChoiceDelta(0, "", None, FinishReason.STOP),), Usage(3, 3)),
    CompletionChunk((), Usage(3, 3)),
]


def test_a_stream_cut_in_two_at_any_byte_gives_the_same_chunks() -> None:
    for cut in range(len(SAMPLE) + 1):
        assert decoded(SAMPLE[:cut], SAMPLE[cut:]) == SAMPLE_CHUNKS


def test_a_stream_that_ends_anywhere_before_its_last_record_is_an_error() -> None:
    complete = len(lines(*SAMPLE_LINES)) - 1  # the line end may be missing
    for end in range(complete):
        with pytest.raises(BackendError):
            decoded(SAMPLE[:end])
    assert decoded(SAMPLE[:complete]) == SAMPLE_CHUNKS


@pytest.mark.parametrize("count", range(len(SAMPLE_LINES)))
def test_a_stream_that_stops_between_records_is_truncated(count: int) -> None:
    with pytest.raises(TruncatedStreamError):
        decoded(lines(*SAMPLE_LINES[:count]))


def test_running_usage_beside_a_choice_is_not_the_end() -> None:
    with pytest.raises(TruncatedStreamError):
        decoded(lines(record("a", "length", usage=usage(3, 16))))


def test_logprobs_keep_their_four_arrays() -> None:
    arrays = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.5}], "text_offset": [0]}
    chunks = decoded(lines(record("a", "stop", logprobs=arrays), last_usage(3, 1)), canonical=request(logprobs=1))
    assert chunks[0].choices[0].logprobs == Logprobs(("a",), (-0.5,), ({"a": -0.5, "b": -1.5},), (0,))


DOCUMENT = lines(record("d\u00e9f", "length", usage=usage(3, 16)))
DOCUMENT_CHUNKS = [CompletionChunk((ChoiceDelta(0, "d\u00e9f", None, FinishReason.LENGTH),), Usage(3, 16))]


def test_a_document_cut_in_two_at_any_byte_is_one_chunk_with_all_of_the_usage() -> None:
    for cut in range(len(DOCUMENT) + 1):
        assert decoded(DOCUMENT[:cut], DOCUMENT[cut:], whole=True) == DOCUMENT_CHUNKS


def test_a_document_that_never_came_is_truncated() -> None:
    with pytest.raises(TruncatedStreamError):
        decoded(b"\n", whole=True)


@pytest.mark.parametrize(
    "line", [b"{", b"null", b"[]", b"<html>", b"{}", b'{"choices":[{}]}', b'{"generated_text":""}']
)
def test_what_is_not_a_record_is_a_backend_error(line: bytes) -> None:
    with pytest.raises(BackendError):
        decoded(line + b"\n" + SAMPLE)


# Failures of every handler


EVERY_HANDLER = pytest.mark.parametrize("family", ["lmi", "lmi-inputs", "lmi-rolling"])
PYDANTIC = (
    "Input parsing failed: 1 validation error for CompletionRequest\ntemperature\n  Input should be a valid number, "
    "unable to parse string as a number [type=float_parsing, input_value='my secret prompt', input_type=str]\n    "
    "For further information visit https://errors.pydantic.dev/2.11/v/float_parsing"
)
PYDANTIC_NESTED = PYDANTIC.replace("\ntemperature\n", "\nprompt.list[int].0\n")
PYDANTIC_WHOLE_BODY = (
    "Input parsing failed: 1 validation error for CompletionRequest\n  Value error, a rule "
    "[type=value_error, input_value={'prompt': 'my secret prompt'}, input_type=dict]"
)
ROLLING_PAYLOAD = (
    "Input Parsing failed. Ensure that the request payload is valid. Invalid request payload. The 'inputs' field does "
    "not contain any content. Received payload {'inputs': 'my secret prompt'}"
)
RULE = "Input parsing failed: logprobs must be non-negative. (parameter=logprobs, value=-1)"
TOO_LONG = "This model's maximum context length is 512 tokens. However, your prompt contains 600 input tokens."


def vllm_repr(message: str, kind: str = "BadRequestError", code: int = 400, param: str | None = None) -> str:
    """A vLLM error object as Python prints it."""
    return f"error=ErrorInfo(message={message!r}, type={kind!r}, param={param!r}, code={code})"


def handler(error: str, code: int = 424) -> Json:
    return {"error": error, "code": code}


# name -> HTTP status, body, the canonical error and its recourse
FAILURES: Mapping[str, tuple[int, Json, type[CompletionError], Recourse]] = {
    "a value of the wrong type": (424, handler(PYDANTIC), InvalidRequestError, Recourse.NONE),
    "a nested value of the wrong type": (424, handler(PYDANTIC_NESTED), InvalidRequestError, Recourse.NONE),
    "a rule over the whole body": (424, handler(PYDANTIC_WHOLE_BODY), InvalidRequestError, Recourse.NONE),
    "a rolling batch's refusal": (424, handler(ROLLING_PAYLOAD), InvalidRequestError, Recourse.NONE),
    "a rule of vLLM's": (424, handler(RULE), InvalidRequestError, Recourse.NONE),
    "an adapter the asynchronous handler lacks": (
        424,
        handler("Input parsing failed: LoRA adapter sql not found in registry. Available adapters: ['other']"),
        BackendUnavailableError,
        Recourse.ELSEWHERE,
    ),
    "an adapter the rolling batch lacks": (
        424,
        handler("Input Parsing failed. Ensure that the request payload is valid. Adapter sql is not registered"),
        BackendUnavailableError,
        Recourse.ELSEWHERE,
    ),
    "a formatter that failed": (424, handler("Custom formatter failed: my secret prompt"), BackendError, Recourse.NONE),
    "a failed step of the batch": (
        424,
        handler("exception occurred during rolling batch inference"),
        BackendError,
        Recourse.NONE,
    ),
    "a failure without words": (424, handler(""), BackendError, Recourse.NONE),
    "a code alone": (424, {"code": 424}, BackendError, Recourse.NONE),
    "a Python process that failed": (
        424,
        {"code": 424, "message": "invoke handler failure", "error": "my secret prompt"},
        BackendError,
        Recourse.NONE,
    ),
    "an exception inside vLLM": (
        424,
        {"code": 424, "message": "Async Inference Failure my secret prompt", "properties": {}, "content": {}},
        BackendError,
        Recourse.NONE,
    ),
    "an engine that died": (500, {"code": 500, "message": "Inference Engine Failure"}, BackendError, Recourse.NONE),
    "no model": (
        400,
        {"code": 400, "type": "BadRequestException", "message": "Parameter model_name is required."},
        BackendUnavailableError,
        Recourse.ELSEWHERE,
    ),
    "another model": (
        404,
        {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: secret"},
        BackendUnavailableError,
        Recourse.ELSEWHERE,
    ),
    "a bad request": (
        400,
        {"code": 400, "type": "TranslateException", "message": "my secret prompt"},
        InvalidRequestError,
        Recourse.NONE,
    ),
    "a full queue": (
        503,
        {"code": 503, "type": "WlmCapacityException", "message": "Worker queue capacity exceeded for model: secret"},
        BackendUnavailableError,
        Recourse.AGAIN,
    ),
    "a throttle with its own status": (
        429,
        {"code": 429, "type": "WlmCapacityException", "message": "Worker queue capacity exceeded for model: secret"},
        BackendUnavailableError,
        Recourse.AGAIN,
    ),
    "a server error": (
        500,
        {"code": 500, "type": "InternalServerException", "message": "secret"},
        BackendError,
        Recourse.NONE,
    ),
    "no memory": (507, {"code": 507, "type": "WlmOutOfMemoryException", "message": "OOM"}, BackendError, Recourse.NONE),
    "the caller's mistake as a server error": (
        500,
        handler(vllm_repr("top_p must be in (0, 1]."), 500),
        InvalidRequestError,
        Recourse.NONE,
    ),
    "a prompt too long as a server error": (500, handler(vllm_repr(TOO_LONG), 500), ContextLengthError, Recourse.NONE),
    "an unknown model as a server error": (
        500,
        handler(vllm_repr("The model `secret` does not exist.", "NotFoundError", 404), 500),
        BackendUnavailableError,
        Recourse.ELSEWHERE,
    ),
    "vLLM's own failure": (
        500,
        handler(vllm_repr("my secret prompt", "InternalServerError", 500), 500),
        BackendError,
        Recourse.NONE,
    ),
    "an object printed in another order": (
        500,
        handler("type='BadRequestError' message='my secret prompt' code=400", 500),
        InvalidRequestError,
        Recourse.NONE,
    ),
    "an older vLLM's refusal": (400, handler("n must be at least 1.", 400), InvalidRequestError, Recourse.NONE),
}


@EVERY_HANDLER
@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_is_its_canonical_error_and_quotes_nothing_of_the_callers(family: str, name: str) -> None:
    status, body, kind, recourse = FAILURES[name]
    error = CODECS[family].decode_error(status, json.dumps(body))
    assert (type(error), error.recourse) == (kind, recourse)
    assert error.message
    assert "secret" not in f"{error.message} {error.detail} {error.param}"


@EVERY_HANDLER
@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_is_the_same_as_a_line_of_a_stream(family: str, name: str) -> None:
    _, body, kind, _ = FAILURES[name]
    for whole in (False, True):
        decoder = CODECS[family].decoder(request(), whole=whole)
        with pytest.raises(CompletionError) as caught:
            decoder.decode(json.dumps(body).encode())
        assert type(caught.value) is kind
        assert "secret" not in f"{caught.value.message} {caught.value.detail} {caught.value.param}"


@EVERY_HANDLER
@pytest.mark.parametrize(
    ("text", "message", "param"),
    [
        (PYDANTIC, "The model's container refused the value of 'temperature'.", "temperature"),
        (PYDANTIC_NESTED, "The model's container refused the value of 'prompt'.", "prompt"),
        (RULE, "logprobs must be non-negative.", None),
        (vllm_repr("top_p must be in (0, 1].", param="top_p"), "top_p must be in (0, 1].", "top_p"),
        (vllm_repr('it\'s "quoted"\n\u00e9'), 'it\'s "quoted"\n\u00e9', None),
        (vllm_repr("a rule. (parameter=n, value=my secret)"), "a rule.", None),
        (
            "object='error' message='a rule.' type='BadRequestError' param=None code=400",
            "a rule.",
            None,
        ),
    ],
)
def test_a_refusal_keeps_the_rule_and_the_field(family: str, text: str, message: str, param: str | None) -> None:
    error = CODECS[family].decode_error(500, json.dumps(handler(text, 500)))
    assert (type(error), error.message, error.param) == (InvalidRequestError, message, param)


def test_a_refusal_escaped_for_html_reads_the_same() -> None:
    body = json.dumps(handler(vllm_repr("a rule."), 500)).replace("'", "\\u0027").replace("=", "\\u003d")
    assert "'" not in body
    assert CODEC.decode_error(500, body).message == "a rule."


def test_a_message_that_names_another_status_does_not_change_its_own() -> None:
    text = vllm_repr("tokens type='BadRequestError' code=400", "InternalServerError", 500)
    assert type(CODEC.decode_error(500, json.dumps(handler(text, 500)))) is BackendError


@pytest.mark.parametrize("text", [PYDANTIC, PYDANTIC_WHOLE_BODY])
def test_a_refusal_that_is_cut_off_is_still_the_callers(text: str) -> None:
    body = json.dumps(handler(text))
    for end in range(body.index("CompletionRequest") + len("CompletionRequest\\n"), len(body)):
        error = CODEC.decode_error(424, body[:end])
        assert type(error) is InvalidRequestError
        assert error.message.startswith("The model's container refused the ")
        assert "secret" not in f"{error.message} {error.detail} {error.param}"


@pytest.mark.parametrize("rest", ["\\u00", "\\", "\n\x00"])
def test_a_body_cut_anywhere_is_read_as_far_as_it_goes(rest: str) -> None:
    assert type(CODEC.decode_error(424, '{"error":"Input parsing failed: ' + rest)) is InvalidRequestError


def test_words_that_cannot_be_recovered_leave_their_status() -> None:
    text = r"error=ErrorInfo(message='\xZZ', type='BadRequestError', param=None, code=400)"
    error = CODEC.decode_error(500, json.dumps(handler(text, 500)))
    assert (type(error), error.message) == (InvalidRequestError, "The model's container refused the request.")


@EVERY_HANDLER
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequestError),
        (404, BackendUnavailableError),
        (424, BackendError),
        (500, BackendError),
        (503, BackendUnavailableError),
        (507, BackendError),
    ],
)
@pytest.mark.parametrize("body", ["", "{", '{"error":', "<html>", "null", "[]", '"text"', '{"code":{}}'])
def test_a_body_that_cannot_be_read_leaves_the_status(
    family: str, status: int, kind: type[CompletionError], body: str
) -> None:
    error = CODECS[family].decode_error(status, body)
    assert type(error) is kind
    assert error.message


@pytest.mark.parametrize("message", ["a rule."])
@pytest.mark.parametrize("code", [400, 500])
def test_vllms_own_error_in_the_middle_of_a_stream(message: str, code: int) -> None:
    nested = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}
    flat = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": code}
    for failure in (nested, flat):
        with pytest.raises(CompletionError) as caught:
            decoded(lines(record("a"), failure))
        assert type(caught.value) is (InvalidRequestError if code == 400 else BackendError)
        assert (message == caught.value.message) == (code == 400)


def test_a_stream_that_broke_without_words_is_a_backend_error() -> None:
    with pytest.raises(BackendError) as caught:
        decoded(lines(record("a", usage=usage(3, 1))) + b'{"error":"","code":424}')
    assert not isinstance(caught.value, TruncatedStreamError)


def test_every_lmi_family_is_registered() -> None:
    codecs: list[Codec] = [CODECS[family] for family in ("lmi", "lmi-inputs", "lmi-rolling")]
    assert isinstance(codecs[0], LmiCodec)
    assert [codec.abilities(route()).capabilities[Parameter.STOP] for codec in codecs] == [
        Capability.HONOURED,
        Capability.HONOURED,
        Capability.EMULATED,
    ]
