"""What holds for the answers of every container family alike: however they are cut, and whatever comes back instead.

The bytes are those of the local containers, which speak each family's wire format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from completions.backends.codec import EncodeOptions
from completions.backends.families import CODECS
from completions.backends.payload_stream import records
from completions.domain.catalog import ModelRoute
from completions.domain.completion import (
    CompletionChunk,
    CompletionRequest,
    SamplingParams,
)
from completions.domain.errors import CompletionError
from completions_cli.local.lmi_container import create_lmi_container
from completions_cli.local.model_container import create_model_container
from completions_cli.local.ngram import standard_library
from completions_cli.local.tgi_container import create_tgi_container
from fakes import request, route
from scripted_model import ScriptedModel


def model(family: str) -> ModelRoute:
    return route(family=family)


TEXT = "aé☕日😀z"
ASKED: Mapping[str, CompletionRequest] = {
    family: request(
        max_tokens=len(TEXT.encode()), logprobs=None if family == "tgi-openai" else 0, sampling=SamplingParams(seed=3)
    )
    for family in CODECS
}


@cache
def containers() -> Mapping[str, ASGIApp]:
    """What answers each family: a model that says ``TEXT``, a byte a token."""
    speaking = ScriptedModel.train(standard_library()[:1])
    speaking.script = list(TEXT.encode())
    vllm = create_model_container(speaking, served_model="m")
    lmi = create_lmi_container(speaking)
    tgi = create_tgi_container(speaking, served_model="m")
    rolling = create_lmi_container(speaking, rolling_batch=True)
    shared = {"vllm": vllm, "vllm-invocations": vllm, "openai": vllm, "lmi": lmi, "lmi-inputs": lmi}
    return {**shared, "lmi-rolling": rolling, "tgi": tgi, "tgi-openai": tgi}


@cache
def recorded(family: str, *, whole: bool = False) -> bytes:
    """The bytes that a container answers with."""
    invocation = CODECS[family].encode(ASKED[family], model(family), EncodeOptions(streamed=not whole))
    headers = {"content-type": invocation.content_type, "accept": invocation.accept}
    if invocation.custom_attributes is not None:
        headers["x-amzn-sagemaker-custom-attributes"] = invocation.custom_attributes
    reply = TestClient(containers()[family]).post("/invocations", content=invocation.body, headers=headers)
    assert reply.status_code == 200
    return reply.content


def chunks(family: str, parts: list[bytes]) -> list[CompletionChunk]:
    """What a stream in these parts means."""
    decoder = CODECS[family].decoder(ASKED[family])
    found = [chunk for record in records(parts) if (chunk := decoder.decode(record)) is not None]
    decoder.finish()
    return found


@pytest.mark.parametrize("family", CODECS)
def test_a_recorded_stream_says_what_the_model_said(family: str) -> None:
    found = chunks(family, [recorded(family)])
    assert "".join(delta.text for chunk in found for delta in chunk.choices) == TEXT
    reasons = [delta.finish_reason for chunk in found for delta in chunk.choices if delta.finish_reason]
    assert reasons == ["length"]
    last = [chunk.usage for chunk in found if chunk.usage is not None][-1]
    assert last.completion_tokens == len(TEXT.encode())


@pytest.mark.parametrize("family", CODECS)
def test_a_recorded_document_says_what_the_model_said(family: str) -> None:
    decoder = CODECS[family].decoder(ASKED[family], whole=True)
    chunk = decoder.decode(recorded(family, whole=True))
    decoder.finish()
    assert chunk is not None
    assert [(delta.text, delta.finish_reason) for delta in chunk.choices] == [(TEXT, "length")]
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == len(TEXT.encode())


@pytest.mark.parametrize("family", CODECS)
def test_a_stream_cut_in_two_at_any_byte_has_the_same_records(family: str) -> None:
    stream = recorded(family)
    one_piece = list(records([stream]))
    assert len(one_piece) >= len(TEXT.encode())
    for at in range(len(stream) + 1):
        assert list(records([stream[:at], stream[at:]])) == one_piece, at


@pytest.mark.parametrize("family", CODECS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_stream_cut_anywhere_has_the_same_meaning(family: str, data: st.DataObject) -> None:
    stream = recorded(family)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=40)))
    parts = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert chunks(family, parts) == chunks(family, [stream])


@pytest.mark.parametrize("family", CODECS)
def test_a_stream_a_byte_at_a_time_has_the_same_meaning(family: str) -> None:
    stream = recorded(family)
    assert chunks(family, [stream[at : at + 1] for at in range(len(stream))]) == chunks(family, [stream])


@pytest.mark.parametrize("family", CODECS)
def test_a_stream_that_ends_early_is_never_taken_for_a_whole_one(family: str) -> None:
    """All records but those after the last token: no family may call the answer complete."""
    lines = list(records([recorded(family)]))
    for kept in range(len(TEXT.encode())):
        decoder = CODECS[family].decoder(ASKED[family])
        for line in lines[:kept]:
            decoder.decode(line)
        with pytest.raises(CompletionError):
            decoder.finish()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places(inner, (*path, key))


def exchanged(value: Any, path: tuple[Any, ...], new: object) -> Any:
    """``value`` with ``new`` in one place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = exchanged(value[path[0]], path[1:], new)
    return copy


@st.composite
def records_gone_wrong(draw: st.DrawFn, family: str, *, whole: bool) -> bytes:
    """A container's own record with something else in one place, or any bytes."""
    kind = draw(st.sampled_from(["bytes", "json", "exchanged", "exchanged", "exchanged"]))
    if kind == "bytes":
        return draw(st.binary(max_size=64))
    if kind == "json":
        return json.dumps(draw(JSON_VALUES)).encode()
    lines = [recorded(family, whole=True)] if whole else list(records([recorded(family)]))
    value = json.loads(draw(st.sampled_from([line for line in lines if line != b"[DONE]"])))
    path = draw(st.sampled_from(list(places(value))))
    return json.dumps(exchanged(value, path, draw(JSON_VALUES))).encode()


@pytest.mark.parametrize("family", CODECS)
@pytest.mark.parametrize("whole", [False, True], ids=["stream", "document"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_comes_back_is_a_chunk_or_a_canonical_error(family: str, whole: bool, data: st.DataObject) -> None:
    decoder = CODECS[family].decoder(ASKED[family], whole=whole)
    found: list[object] = []
    try:
        for record in data.draw(st.lists(records_gone_wrong(family, whole=whole), min_size=1, max_size=3)):
            found.append(decoder.decode(record))
        decoder.finish()
    except CompletionError as error:
        found.append(error)
    assert all(one is None or isinstance(one, CompletionChunk | CompletionError) for one in found)


STATUSES = (0, 400, 404, 413, 422, 424, 429, 500, 503, 507)


@pytest.mark.parametrize("family", CODECS)
@settings(max_examples=100, deadline=None)
@given(status=st.sampled_from(STATUSES), data=st.data())
def test_whatever_a_failure_says_is_a_canonical_error(family: str, status: int, data: st.DataObject) -> None:
    body = data.draw(st.text(max_size=64) | st.builds(json.dumps, JSON_VALUES))
    assert isinstance(CODECS[family].decode_error(status, body), CompletionError)


FAILURES = {
    "vLLM": {"error": {"message": "zq 😀😀 quoted", "type": "BadRequestError", "param": "max_tokens", "code": 400}},
    "older vLLM": {"object": "error", "message": "zq 😀😀 quoted", "type": "BadRequestError", "code": 400},
    "LMI": {"code": 424, "error": "Input parsing failed: zq 😀😀 quoted"},
    "LMI's repr": {"code": 500, "error": "type='BadRequestError' message='zq 😀😀 quoted' code=400"},
    "TGI": {"error": "Input validation error: `top_p` zq 😀😀 quoted", "error_type": "validation"},
}


@pytest.mark.parametrize("family", CODECS)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_cut_anywhere_is_told_in_whole_characters(family: str, failure: str) -> None:
    """SageMaker keeps 2048 characters, and Python's JSON writes a character beyond the first plane in two halves."""
    body = json.dumps(FAILURES[failure])
    assert "\\ud83d\\ude00" in body
    for at in range(len(body) + 1):
        for status in (400, 424, 500):
            error = CODECS[family].decode_error(status, body[:at])
            assert error.message.isprintable()
            assert (error.message + (error.param or "")).encode()
