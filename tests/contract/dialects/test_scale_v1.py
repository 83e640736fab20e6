"""Scale's first API: what its completion routes accept, refuse and answer, and its list of model endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions.dialects.dialect import AnswerHead, ErrorHead, WireReply, WireRequest
from completions.dialects.scale_v1 import ScaleV1Dialect
from completions.domain.catalog import ModelRoute
from completions.domain.completion import (
    Choice,
    Completion,
    CompletionChunk,
    CompletionRequest,
    Constraint,
    ConstraintKind,
    FinishReason,
    Logprobs,
    SamplingParams,
    Usage,
)
from completions.domain.errors import InvalidRequestError, ModelNotFoundError, TruncatedStreamError
from fakes import delta, principal, request, route

SYNC = ScaleV1Dialect(streamed=False)
STREAM = ScaleV1Dialect(streamed=True, now=lambda: datetime(2026, 1, 1, 8, tzinfo=UTC))
MINIMAL: dict[str, Any] = {"prompt": "def f(", "max_new_tokens": 20, "temperature": 0.2}
HEAD = AnswerHead("request-1", 1, "m", 12)
HEAD_OF_ERROR = ErrorHead("request-1", now=0)
STOP = FinishReason.STOP


def wire(body: bytes, query: dict[str, str] | None = None) -> WireRequest:
    found = {"model_endpoint_name": "demo"} if query is None else query
    return WireRequest("POST", "/v1/llm/completions-sync", found, {}, body)


def decode(dialect: ScaleV1Dialect = SYNC, **fields: Any) -> CompletionRequest:
    """The canonical form of a minimal body with ``fields`` added."""
    return dialect.decode(wire(json.dumps(MINIMAL | fields).encode()))


def refused(sent: WireRequest) -> tuple[int, Any]:
    """Status and ``detail`` of a refusal."""
    with pytest.raises(InvalidRequestError) as caught:
        SYNC.decode(sent)
    reply = SYNC.encode_error(caught.value, HEAD_OF_ERROR)
    return reply.status, json.loads(reply.body)["detail"]


def refused_fields(**fields: Any) -> tuple[int, Any]:
    return refused(wire(json.dumps(MINIMAL | fields).encode()))


# What is accepted


def test_a_minimal_body_has_the_documented_defaults() -> None:
    canonical = decode()
    assert canonical == request(
        max_tokens=20, sampling=SamplingParams(temperature=0.2), param_names=canonical.param_names
    )


def test_a_full_body_reaches_its_canonical_fields() -> None:
    canonical = decode(
        stop_sequences=["a", "b", "c", "d", "e"],
        return_token_log_probs=True,
        presence_penalty=1.5,
        frequency_penalty=0.5,
        top_k=40,
        top_p=0.75,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        guided_choice=["a", "b"],
    )
    assert canonical == request(
        max_tokens=20,
        sampling=SamplingParams(temperature=0.2, top_p=0.75, top_k=40, presence_penalty=1.5, frequency_penalty=0.5),
        stop=("a", "b", "c", "d", "e"),
        include_stop=True,
        logprobs=1,
        skip_special_tokens=False,
        constraint=Constraint(ConstraintKind.CHOICE, choices=("a", "b")),
        param_names=canonical.param_names,
    )


def test_the_route_decides_on_streaming_and_a_stream_has_its_usage() -> None:
    assert (decode(SYNC).stream, decode(SYNC).include_usage) == (False, False)
    assert (decode(STREAM).stream, decode(STREAM).include_usage) == (True, True)
    assert decode(SYNC, stream=True).stream is False


OPTIONAL = [
    *("stop_sequences", "return_token_log_probs", "presence_penalty", "frequency_penalty", "top_k", "top_p"),
    *("include_stop_str_in_output", "skip_special_tokens"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
]


def test_everything_the_official_client_sends_by_default_is_read() -> None:
    assert decode(SYNC, **dict.fromkeys(OPTIONAL), timeout=300) == decode()


def test_refused_parameters_are_named_as_the_caller_wrote_them() -> None:
    names = decode(guided_regex="a").param_names
    assert (names["model"], names["stop"], names["constraint"]) == (
        "model_endpoint_name",
        "stop_sequences",
        "guided_regex",
    )
    assert (names["max_tokens"], names["logprobs"]) == ("max_new_tokens", "return_token_log_probs")
    assert names["include_stop"] == "include_stop_str_in_output"


# What is refused

RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("prompt", ["", "a"], [None, 5, ["a"]]),
    ("max_new_tokens", [0, 100_000, "5"], [None, 1.5, "x"]),
    ("temperature", [0, 1], [None, -0.01, 1.01, 2]),
    ("presence_penalty", [0, 2], [-0.01, 2.01]),
    ("frequency_penalty", [0, 2], [-0.01, 2.01]),
    ("top_k", [-1, 1], [-2, "x"]),
    ("top_p", [0.01, 1], [0, 1.01]),
    ("stop_sequences", [[], ["a"]], ["a", [5], [""]]),
    ("guided_json", [{}], ["{}"]),
    ("guided_choice", [["a"]], [[], "a"]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, ends, _ in RANGES for value in ends])
def test_the_ends_of_each_range_are_accepted(name: str, value: Any) -> None:
    assert decode(**{name: value}).model == "demo"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, beyond in RANGES for value in beyond])
def test_a_value_outside_its_range_is_a_422_that_names_it(name: str, value: Any) -> None:
    status, detail = refused_fields(**{name: value})
    assert (status, {tuple(fault["loc"][:2]) for fault in detail}) == (422, {("body", name)})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": 0, "top_k": 5}, "top_k"),
        ({"temperature": 0, "top_k": 0}, "top_k"),
        ({"temperature": 0, "top_p": 0.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
        ({"guided_grammar": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_fields_that_do_not_go_together_are_a_400(fields: dict[str, Any], name: str) -> None:
    status, detail = refused_fields(**fields)
    assert status == 400
    assert f"'{name}'" in detail


@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_k": None}, {"top_p": 1}, {"top_p": None}])
def test_greedy_decoding_goes_with_sampling_turned_off(fields: dict[str, Any]) -> None:
    assert decode(temperature=0, **fields).sampling == SamplingParams(temperature=0)


MISSING = {"msg": "Field required", "type": "missing"}


@pytest.mark.parametrize("name", MINIMAL)
def test_a_required_field_left_out_is_missing(name: str) -> None:
    body = {key: value for key, value in MINIMAL.items() if key != name}
    assert refused(wire(json.dumps(body).encode())) == (422, [{**MISSING, "loc": ["body", name], "input": body}])


def test_the_missing_name_of_the_endpoint_stands_before_the_faults_of_the_body() -> None:
    _, detail = refused(wire(b'{"prompt":"a","temperature":0}', {}))
    assert [fault["loc"] for fault in detail] == [["query", "model_endpoint_name"], ["body", "max_new_tokens"]]
    assert detail[0] == {**MISSING, "loc": ["query", "model_endpoint_name"], "input": None}


def test_a_good_body_does_not_make_up_for_the_missing_name() -> None:
    assert refused(wire(json.dumps(MINIMAL).encode(), {}))[0] == 422
    assert [fault["loc"] for fault in refused(wire(b"", {}))[1]] == [["query", "model_endpoint_name"], ["body"]]


def test_malformed_json_is_all_that_is_told() -> None:
    assert [fault["type"] for fault in refused(wire(b"{", {}))[1]] == ["json_invalid"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys((*MINIMAL, *OPTIONAL), _JSON)) | _JSON)
def test_any_json_value_is_decoded_or_refused(value: Any) -> None:
    for body in (value, {**MINIMAL, **value} if isinstance(value, dict) else value):
        try:
            canonical = SYNC.decode(wire(json.dumps(body).encode()))
        except InvalidRequestError:
            continue
        assert canonical.choice_count == 1


# The buffered answer

PAIR = Logprobs(("c", "d"), (-0.5, -0.25), ({"c": -0.5}, {"d": -0.25}), (0, 1))


def buffered(logprobs: Logprobs | None) -> bytes:
    completion = Completion("m", (Choice(0, "cd", STOP, logprobs),), Usage(2, 3))
    reply = SYNC.encode(completion, request(), HEAD)
    assert (reply.status, reply.media_type) == (200, "application/json")
    return reply.body


def test_a_buffered_answer_byte_for_byte() -> None:
    assert buffered(None) == (
        b'{"request_id":"request-1","output":{"text":"cd","num_prompt_tokens":2,"num_completion_tokens":3,"tokens":null}}'
    )


def test_tokens_are_told_byte_for_byte() -> None:
    assert buffered(PAIR).endswith(b'"tokens":[{"token":"c","log_prob":-0.5},{"token":"d","log_prob":-0.25}]}}')


# The streamed answer


def stream(chunks: Iterable[CompletionChunk]) -> bytes:
    """A whole streamed answer."""
    encoder = STREAM.stream_encoder(request(stream=True), HEAD)
    return b"".join([*(encoder.chunk(chunk) for chunk in chunks), encoder.done()])


def outputs(body: bytes) -> list[Any]:
    found = [json.loads(frame.removeprefix(b"data: ")) for frame in body.split(b"\r\n\r\n")[:-1]]
    assert all(frame["error"] is None for frame in found)
    return [frame["output"] for frame in found]


START = b'data: {"request_id":"request-1","output":'


def test_a_stream_byte_for_byte() -> None:
    assert stream([delta("c"), delta("d", STOP), CompletionChunk((), Usage(2, 3))]) == (
        START
        + b'{"text":"c","finished":false},"error":null}\r\n\r\n'
        + START
        + b'{"text":"d","finished":true,"num_prompt_tokens":2,"num_completion_tokens":3},"error":null}\r\n\r\n'
    )


def test_a_stream_has_no_end_marker() -> None:
    assert b"[DONE]" not in stream([delta("c", STOP)])


def test_completion_tokens_are_counted_as_they_come_and_prompt_tokens_in_the_last_frame() -> None:
    found = outputs(stream([delta("c", usage=Usage(2, 1)), delta("d", STOP, usage=Usage(2, 2))]))
    assert found == [
        {"text": "c", "finished": False, "num_completion_tokens": 1},
        {"text": "d", "finished": True, "num_prompt_tokens": 2, "num_completion_tokens": 2},
    ]


def test_only_the_last_frame_is_finished() -> None:
    found = outputs(stream([delta("a"), CompletionChunk(), delta(""), delta("b"), delta("", FinishReason.LENGTH)]))
    assert [(output["text"], output["finished"]) for output in found] == [("a", False), ("b", False), ("", True)]


def test_each_token_has_a_frame_and_no_text_is_told_twice() -> None:
    found = outputs(stream([delta("cd", logprobs=PAIR), delta("cd", STOP, logprobs=PAIR)]))
    assert [(output["text"], output["token"]["token"]) for output in found] == [("cd", "c"), ("", "d")] * 2
    assert [output["finished"] for output in found] == [False, False, False, True]


def test_an_error_frame_byte_for_byte() -> None:
    encoder = STREAM.stream_encoder(request(stream=True), HEAD)
    assert encoder.error(TruncatedStreamError("cut")) == (
        b'data: {"request_id":"request-1","output":null,"error":{"status_code":500,"content":{"error":'
        b'"Upstream service error for request_id request-1","timestamp":"2026-01-01 00:00:00 PST"}}}\r\n\r\n'
    )


def test_held_back_text_is_sent_before_an_error() -> None:
    encoder = STREAM.stream_encoder(request(stream=True), HEAD)
    body = encoder.chunk(delta("c", STOP)) + encoder.error(TruncatedStreamError("cut"))
    assert body.startswith(START + b'{"text":"c","finished":false},"error":null}\r\n\r\n' + START + b"null,")


def test_a_stream_has_media_type_and_headers() -> None:
    encoder = STREAM.stream_encoder(request(stream=True), HEAD)
    assert encoder.media_type == "text/event-stream; charset=utf-8"
    assert encoder.headers == {"cache-control": "no-cache", "x-accel-buffering": "no"}


def test_the_official_clients_way_of_reading_lines_finds_every_frame() -> None:
    lines = stream([delta("data: a\r\n"), delta("t", STOP)]).splitlines()
    found = [json.loads(line.decode().lstrip("data:")) for line in lines if line.startswith(b"data:")]  # noqa: B005
    assert "".join(frame["output"]["text"] for frame in found) == "data: a\r\nt"


# Model endpoints


def listed(path: str, routes: list[ModelRoute], *, query: dict[str, str] | None = None, name: str = "") -> WireReply:
    (resource,) = [one for one in SYNC.model_resources() if one.path == path]
    sent = WireRequest("GET", path, query or {}, {}, b"", {"name": name})
    return resource.reply(sent, principal(), routes)


LIST = "/v1/llm/model-endpoints"
ONE = LIST + "/{name:path}"
ROUTES = [
    route(model_id="b", created=1, family_version="0.10"),
    route(model_id="org/a", created=2, family="tgi", aliases=("a",)),
]


def test_a_model_endpoint_byte_for_byte() -> None:
    assert listed(ONE, ROUTES, name="b").body == (
        b'{"id":"b","name":"b","model_name":"b","source":"hugging_face","status":"READY","inference_framework":"vllm",'
        b'"inference_framework_image_tag":"0.10","num_shards":null,"quantize":null,"checkpoint_path":null,'
        b'"chat_template_override":null,"spec":null}'
    )


@pytest.mark.parametrize("name", ["org/a", "a"])
def test_a_model_endpoint_is_found_by_its_name_and_its_alias(name: str) -> None:
    found = json.loads(listed(ONE, ROUTES, name=name).body)
    assert (found["name"], found["inference_framework"]) == ("org/a", "text_generation_inference")


def test_a_model_endpoint_that_is_not_there_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError):
        listed(ONE, ROUTES, name="c")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, ["b", "org/a"]),
        ({"name": "org/a"}, ["org/a"]),
        ({"name": "c"}, []),
        ({"order_by": "newest"}, ["org/a", "b"]),
        ({"order_by": "oldest"}, ["b", "org/a"]),
        ({"order_by": "alphabetical"}, ["b", "org/a"]),
    ],
)
def test_the_list_is_filtered_and_ordered_as_asked(query: dict[str, str], expected: list[str]) -> None:
    found = json.loads(listed(LIST, ROUTES, query=query).body)
    assert [endpoint["name"] for endpoint in found["model_endpoints"]] == expected


def test_an_unknown_order_is_a_422_in_fastapis_words() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        listed(LIST, ROUTES, query={"order_by": "size"})
    assert json.loads(SYNC.encode_error(caught.value, HEAD_OF_ERROR).body)["detail"] == [
        {
            "type": "enum",
            "loc": ["query", "order_by"],
            "msg": "Input should be 'newest', 'oldest' or 'alphabetical'",
            "input": "size",
            "ctx": {"expected": "'newest', 'oldest' or 'alphabetical'"},
        }
    ]
