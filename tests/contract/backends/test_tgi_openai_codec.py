"""What goes to a TGI container in OpenAI's body and what is read from it, against TGI 3.3's ``completions``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from completions.backends.codec import EncodeOptions, Invocation
from completions.backends.payload_stream import document, records
from completions.backends.tgi_openai import TgiOpenAICodec
from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import (
    ChoiceDelta,
    CompletionChunk,
    CompletionRequest,
    FinishReason,
    SamplingParams,
    Usage,
)
from completions.domain.errors import BackendError, TruncatedStreamError
from fakes import request, route

Json = dict[str, Any]
CODEC = TgiOpenAICodec()


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


def sse(*values: Json) -> bytes:
    return b"".join(b"data:" + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" for value in values)


def record(text: str, finish_reason: str = "", usage: tuple[int, int] | None = None) -> Json:
    """TGI's finish reason is empty until the last record, which alone has the usage."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    head = {"id": "", "object": "text_completion", "created": 1, "model": "/opt/ml/model", "choices": [choice]}
    if usage is None:
        return head
    prompt, completion = usage
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return head | {"usage": counts}


DONE = b"data:[DONE]\n\n"


# The request


def test_a_plain_request_is_encoded_byte_for_byte() -> None:
    assert invocation(request()).body == (
        b'{"prompt":"def f(","model":"tgi","max_tokens":16,"temperature":1.0,"repetition_penalty":1.0,'
        b'"frequency_penalty":0.0,"stream":true,"stream_options":{"include_usage":true}}'
    )


def test_an_unstreamed_answer_is_asked_for_without_stream_options() -> None:
    assert not {"stream", "stream_options"} & encoded(request(), streamed=False).keys()


def test_the_model_is_tgi_or_an_adapter() -> None:
    assert encoded(request())["model"] == "tgi"
    assert encoded(request(), route(adapter="lora-1"))["model"] == "lora-1"
    assert CODEC.route_faults(route(adapter="lora-1", served_model="tgi")) == []


def test_another_served_model_is_a_fault_since_tgi_would_take_it_for_an_adapter() -> None:
    assert [fault.field for fault in CODEC.route_faults(route(served_model="llama"))] == ["served_model"]


def test_a_greedy_request_has_no_top_p_which_would_have_tgi_sample() -> None:
    body = encoded(sampled(temperature=0, top_p=0.5))
    assert body["temperature"] == 0
    assert "top_p" not in body


@pytest.mark.parametrize(("top_p", "sent"), [(1.0, None), (0.9, 0.9), (0.0, 1e-6)])
def test_top_p_stays_between_the_bounds_tgi_refuses(top_p: float, sent: float | None) -> None:
    assert encoded(sampled(top_p=top_p)).get("top_p") == sent


@pytest.mark.parametrize(("seed", "sent"), [(0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (None, None)])
def test_a_negative_seed_becomes_an_unsigned_one_of_its_own(seed: int | None, sent: int | None) -> None:
    assert encoded(sampled(seed=seed)).get("seed") == sent


def test_tgi_is_told_the_first_four_stops_and_no_more() -> None:
    assert encoded(request(stop=("a", "b", "c", "d", "e")))["stop"] == ["a", "b", "c", "d"]
    assert CODEC.abilities(route()).max_stops == 4


def test_neither_a_cache_salt_nor_the_callers_identity_is_sent() -> None:
    body = invocation(request(end_user="someone"), cache_salt="0123abcd").body
    assert b"0123abcd" not in body
    assert b"someone" not in body


def test_an_operators_attributes_are_passed_on() -> None:
    assert invocation(request(), route(custom_attributes="accept_eula=true")).custom_attributes == "accept_eula=true"


# parameter -> a request that uses it, and where its value must stand in the body
SENTINELS: Mapping[Parameter, tuple[CompletionRequest, str, object]] = {
    Parameter.TEMPERATURE: (sampled(temperature=0.123), "temperature", 0.123),
    Parameter.TOP_P: (sampled(top_p=0.456), "top_p", 0.456),
    Parameter.SEED: (sampled(seed=31337), "seed", 31337),
    Parameter.FREQUENCY_PENALTY: (sampled(frequency_penalty=1.45), "frequency_penalty", 1.45),
    Parameter.REPETITION_PENALTY: (sampled(repetition_penalty=1.67), "repetition_penalty", 1.67),
}
EMULATED = {
    Parameter.N,
    Parameter.PROMPT_BATCH,
    Parameter.ECHO,
    Parameter.SUFFIX,
    Parameter.STOP,
    Parameter.INCLUDE_STOP,
}


@pytest.mark.parametrize("parameter", Parameter)
def test_each_parameter_is_forwarded_emulated_or_refused(parameter: Parameter) -> None:
    capability = CODEC.abilities(route()).capabilities[parameter]
    if parameter in SENTINELS:
        assert capability is Capability.HONOURED
    else:
        assert capability is (Capability.EMULATED if parameter in EMULATED else Capability.REFUSED)


@pytest.mark.parametrize("parameter", SENTINELS)
def test_an_honoured_parameter_stands_in_the_body(parameter: Parameter) -> None:
    canonical, name, value = SENTINELS[parameter]
    assert encoded(canonical)[name] == value
    assert encoded(request()).get(name) != value


def test_candidates_cannot_be_ranked_without_logprobs_even_on_a_routes_word() -> None:
    promised = route(capabilities={Parameter.BEST_OF: Capability.EMULATED})
    assert [fault.field for fault in CODEC.route_faults(promised)] == ["capabilities"]


# The answer

SAMPLE = b":\n\n" + sse(record("dé"), record("f \U0001f600€"), record("</s>", "eos_token", (9, 3))) + DONE
SAMPLE_CHUNKS = [
    # six bytes of prompt are taken for two tokens until the container counts nine
    CompletionChunk((ChoiceDelta(0, "dé"),), Usage(2, 1, estimated=True)),
    CompletionChunk((ChoiceDelta(0, "f \U0001f600€"),), Usage(2, 2, estimated=True)),
    # the text of the token that ends the answer is no part of it
    CompletionChunk((ChoiceDelta(0, "", None, FinishReason.STOP),), Usage(9, 3)),
]


def test_a_stream_is_decoded_whole() -> None:
    assert decoded(SAMPLE) == SAMPLE_CHUNKS


def test_a_stream_cut_in_two_at_any_byte_gives_the_same_chunks() -> None:
    for cut in range(len(SAMPLE) + 1):
        decoder = CODEC.decoder(request())
        found = [decoder.decode(item) for item in records([SAMPLE[:cut], SAMPLE[cut:]])]
        decoder.finish()
        assert [chunk for chunk in found if chunk is not None] == SAMPLE_CHUNKS


@pytest.mark.parametrize("lines", range(9))
def test_a_stream_that_ends_before_done_is_truncated(lines: int) -> None:
    whole = SAMPLE.splitlines(keepends=True)
    assert whole[8] == b"data:[DONE]\n"
    with pytest.raises(TruncatedStreamError):
        decoded(b"".join(whole[:lines]))


@pytest.mark.parametrize(
    ("word", "reason", "text"),
    [
        ("length", FinishReason.LENGTH, "x\n"),
        ("stop_sequence", FinishReason.STOP, "x\n"),  # the stop text stays in for the service to cut
        ("stop", FinishReason.STOP, "x\n"),
        ("eos_token", FinishReason.STOP, ""),
    ],
)
def test_each_finish_reason_has_its_canonical_one(word: str, reason: FinishReason, text: str) -> None:
    assert decoded(sse(record("x\n", word)) + DONE)[0].choices == (ChoiceDelta(0, text, None, reason),)


def test_an_unknown_finish_reason_is_a_backend_error() -> None:
    with pytest.raises(BackendError):
        decoded(sse(record("a", "a_new_word")) + DONE)


@pytest.mark.parametrize(
    ("counts", "usage"),
    [
        ((9, 3), Usage(9, 3)),
        # counted by the prefill, which is empty unless its log-probabilities are on
        ((0, 3), Usage(2, 3, estimated=True)),
    ],
)
def test_a_document_keeps_its_text_and_its_counts(counts: tuple[int, int], usage: Usage) -> None:
    decoder = CODEC.decoder(request(), whole=True)
    (chunk,) = [decoder.decode(one) for one in document([json.dumps(record("déf", "stop", counts)).encode()])]
    decoder.finish()
    assert chunk == CompletionChunk((ChoiceDelta(0, "déf", None, FinishReason.STOP),), usage)
