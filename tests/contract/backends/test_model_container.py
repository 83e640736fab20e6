"""The embedded model container answers as vLLM 0.27 in the AWS image does.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from starlette.testclient import TestClient

from completions_cli.local.model_container import create_model_container
from completions_cli.local.ngram import NGramModel, standard_library
from completions_cli.local.tokenizer import Special
from completions_cli.local.vllm_serving import StreamQuirks
from scripted_model import ScriptedModel, visit_and_leave

Json = dict[str, Any]
MODEL = "demo-vllm"
PROMPT = "def parse_args(self, args=None):\n    "
EURO = (0xE2, 0x82, 0xAC)  # the byte tokens of one character
EOS = Special.END_OF_TEXT


@pytest.fixture(scope="module")
def model() -> NGramModel:
    return NGramModel.train(standard_library())


@pytest.fixture(scope="module")
def client(model: NGramModel) -> TestClient:
    return TestClient(create_model_container(model, served_model=MODEL, max_model_len=512))


@pytest.fixture
def scripted() -> ScriptedModel:
    return ScriptedModel.train(standard_library()[:1])


def complete(client: TestClient, path: str = "/v1/completions", **body: object) -> Json:
    response = client.post(path, json={"prompt": PROMPT, **body})
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def choice(client: TestClient, **body: Any) -> Json:
    (only,) = complete(client, **body)["choices"]
    found: Json = only
    return found


def stream(client: TestClient, path: str = "/v1/completions", **body: object) -> list[Json]:
    """The chunks of a stream; every frame is checked to be ``data: ...`` and the last to be ``[DONE]``."""
    response = client.post(path, json={"prompt": PROMPT, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *frames, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def joined(chunks: Sequence[Json], index: int = 0) -> str:
    found = [item for chunk in chunks for item in chunk["choices"] if item["index"] == index]
    return "".join(item["text"] for item in found)


def refusal(client: TestClient, path: str = "/v1/completions", *, status: int = 400, **body: object) -> Json:
    response = client.post(path, json={"prompt": PROMPT, **body})
    assert response.status_code == status
    error: Json = response.json()["error"]
    assert error["code"] == status
    assert list(error) == ["message", "type", "param", "code"]
    return error


def serve(model: ScriptedModel, script: Sequence[int] | str, failure: str | None = None) -> TestClient:
    model.script = [ord(letter) for letter in script] if isinstance(script, str) else script
    model.failure = failure
    return TestClient(create_model_container(model, served_model=MODEL))


# Service routes


@pytest.mark.parametrize(("method", "path"), [("GET", "/ping"), ("POST", "/ping"), ("GET", "/health")])
def test_health_checks_answer_200(client: TestClient, method: str, path: str) -> None:
    assert client.request(method, path).status_code == 200


def test_models_lists_the_served_model_as_vllm_does(client: TestClient) -> None:
    body = client.get("/v1/models").json()
    (card,) = body["data"]
    assert body["object"] == "list"
    assert isinstance(card.pop("created"), int)
    assert card == {
        "id": MODEL,
        "object": "model",
        "owned_by": "vllm",
        "root": MODEL,
        "parent": None,
        "max_model_len": 512,
        "permission": [],
    }


def test_tokenize_counts_what_the_usage_counts(client: TestClient, model: NGramModel) -> None:
    body = client.post("/tokenize", json={"prompt": PROMPT}).json()
    ids = model.tokenizer.encode(PROMPT)
    assert body == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    assert complete(client)["usage"]["prompt_tokens"] == len(ids)


# Plain answers


def test_an_answer_has_vllms_fields(client: TestClient) -> None:
    answer = complete(client, temperature=0, max_tokens=5)
    (only,) = answer["choices"]
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert isinstance(answer["created"], int)
    assert {key: value for key, value in only.items() if key != "text"} == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": None,
        "prompt_logprobs": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + 5,
        "completion_tokens": 5,
        "prompt_tokens_details": None,
    }


def test_the_callers_request_id_becomes_the_answers_id(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "abc"})
    assert response.json()["id"] == "cmpl-abc"


@pytest.mark.parametrize("body", [{}, {"max_tokens": None}])
def test_max_tokens_absent_or_null_is_16(client: TestClient, body: Json) -> None:
    assert complete(client, ignore_eos=True, **body)["usage"]["completion_tokens"] == 16


def test_max_tokens_is_clamped_to_the_room_left_in_the_context(client: TestClient) -> None:
    answer = complete(client, max_tokens=100_000, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_token_ids_are_a_prompt_like_their_text(client: TestClient, model: NGramModel) -> None:
    ids = model.tokenizer.encode(PROMPT)
    assert choice(client, prompt=ids, temperature=0) == choice(client, temperature=0)


@pytest.mark.parametrize("prompts", [["import os", "import sys"], [[65, 66], [67]]])
def test_choices_of_a_batch_are_numbered_prompt_by_prompt(client: TestClient, prompts: list[Any]) -> None:
    answer = complete(client, prompt=prompts, n=2, seed=3, max_tokens=4, ignore_eos=True)
    alone = [complete(client, prompt=prompt, n=2, seed=3, max_tokens=4, ignore_eos=True) for prompt in prompts]
    assert [item["index"] for item in answer["choices"]] == [0, 1, 2, 3]
    texts = [item["text"] for single in alone for item in single["choices"]]
    assert [item["text"] for item in answer["choices"]] == texts
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["usage"]["prompt_tokens"] == sum(single["usage"]["prompt_tokens"] for single in alone)


def test_the_same_seed_gives_the_same_text_and_candidates_differ(client: TestClient) -> None:
    first, second = (complete(client, seed=11, n=2, max_tokens=40)["choices"] for _ in range(2))
    assert first == second
    assert first[0]["text"] != first[1]["text"]


def test_best_of_and_unknown_fields_are_ignored(client: TestClient) -> None:
    answer = complete(client, temperature=0, best_of=3, guided_regex="a+", anything=1)
    assert answer["choices"] == complete(client, temperature=0)["choices"]


def test_logit_bias_decides_the_token(client: TestClient, model: NGramModel) -> None:
    (token,) = model.tokenizer.encode("import")
    found = choice(client, logit_bias={str(token): 100}, max_tokens=3, temperature=0)
    assert found["text"] == "importimportimport"


# End of a choice


def test_end_of_text_counts_as_a_token_and_has_no_stop_reason(scripted: ScriptedModel) -> None:
    answer = complete(serve(scripted, "ab"))
    found = answer["choices"][0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == ("ab", "stop", None)
    assert answer["usage"]["completion_tokens"] == 3


def test_ignore_eos_goes_on_to_the_limit(scripted: ScriptedModel) -> None:
    answer = complete(serve(scripted, [ord("a"), EOS, ord("b")]), ignore_eos=True, max_tokens=3)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "length")


def test_special_tokens_show_in_the_text_on_request(scripted: ScriptedModel) -> None:
    found = choice(serve(scripted, [Special.FIM_PAD, ord("a")]), skip_special_tokens=False, max_tokens=2)
    assert found["text"] == "<|fim_pad|>a"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_ends_the_choice_and_is_named(scripted: ScriptedModel, include: bool, text: str) -> None:
    client = serve(scripted, "abc")
    answer = complete(client, stop_token_ids=[ord("b")], include_stop_str_in_output=include)
    found = answer["choices"][0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == (text, "stop", ord("b"))
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_is_cut_and_its_tokens_are_counted(scripted: ScriptedModel, include: bool, text: str) -> None:
    answer = complete(serve(scripted, "abcdef"), stop=["x", "cd"], include_stop_str_in_output=include)
    found = answer["choices"][0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == (text, "stop", "cd")
    assert answer["usage"]["completion_tokens"] == 4


def test_a_stop_may_begin_and_end_inside_a_token(scripted: ScriptedModel) -> None:
    client = serve(scripted, scripted.tokenizer.encode("x\n        y"))
    assert choice(client, stop="\n  ")["text"] == "x"


def test_a_stop_string_before_min_tokens_does_not_stop(scripted: ScriptedModel) -> None:
    assert choice(serve(scripted, "abab"), stop="b", min_tokens=2)["text"] == "aba"


def test_a_choice_that_ends_by_length_releases_what_could_have_been_a_stop(scripted: ScriptedModel) -> None:
    client = serve(scripted, "abc")
    body: Json = {"stop": "bcd", "max_tokens": 3}
    assert choice(client, **body)["text"] == joined(stream(client, **body)) == "abc"


# Streams


def test_a_chunk_has_vllms_fields(scripted: ScriptedModel) -> None:
    first, *_ = stream(serve(scripted, "ab"))
    assert list(first) == ["id", "object", "created", "model", "choices"]
    assert first["choices"] == [
        {
            "index": 0,
            "text": "a",
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
    ]


def test_a_frame_is_compact_json_in_utf8(scripted: ScriptedModel) -> None:
    response = serve(scripted, EURO).post("/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 3})
    assert '"text":"\u20ac"'.encode() in response.content


@pytest.mark.parametrize(
    "body",
    [
        {"seed": 1},
        {"temperature": 0},
        {"seed": 2, "stop": ["self", "\n"]},
        {"seed": 3, "stop": "return", "include_stop_str_in_output": True},
        {"seed": 4, "echo": True},
        {"seed": 5, "n": 3, "prompt": ["import ", "def "]},
        {"seed": 6, "echo": True, "max_tokens": 0},
        {"seed": 7, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    ],
)
def test_a_stream_joins_to_the_plain_answer(client: TestClient, body: Json) -> None:
    body = {"max_tokens": 60, **body}
    plain = complete(client, **body)
    chunks = stream(client, stream_options={"include_usage": True}, **body)
    for expected in plain["choices"]:
        assert joined(chunks, expected["index"]) == expected["text"]
        ends = [item for chunk in chunks for item in chunk["choices"] if item["finish_reason"] is not None]
        (end,) = [item for item in ends if item["index"] == expected["index"]]
        assert (end["finish_reason"], end["stop_reason"]) == (expected["finish_reason"], expected["stop_reason"])
    plain["usage"].pop("prompt_tokens_details")
    assert chunks[-1]["usage"] == plain["usage"]


def test_all_chunks_of_a_stream_share_id_created_and_model(client: TestClient) -> None:
    chunks = stream(client, n=2, stream_options={"include_usage": True})
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


def test_candidates_of_a_stream_advance_in_turn(client: TestClient) -> None:
    chunks = stream(client, n=3, max_tokens=2, ignore_eos=True)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 2, 0, 1, 2]


def test_an_incomplete_character_is_held_back_until_its_last_byte(scripted: ScriptedModel) -> None:
    chunks = stream(serve(scripted, [*EURO, ord("a")]), max_tokens=4)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["", "", "\u20ac", "a"]


def test_a_stop_string_never_leaks_and_the_text_before_it_arrives(scripted: ScriptedModel) -> None:
    chunks = stream(serve(scripted, "abcd"), stop="cd")
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["", "a", "b", ""]
    assert chunks[-1]["choices"][0]["stop_reason"] == "cd"


def test_usage_comes_last_with_no_choices(scripted: ScriptedModel) -> None:
    *chunks, last = stream(serve(scripted, "ab"), prompt=[65], stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 1, "total_tokens": 4, "completion_tokens": 3}
    assert not any("usage" in chunk for chunk in chunks)


def test_empty_stream_options_already_turn_usage_on(scripted: ScriptedModel) -> None:
    assert "usage" not in stream(serve(scripted, "a"))[-1]
    assert "usage" in stream(serve(scripted, "a"), stream_options={})[-1]


def test_continuous_usage_tells_each_choices_own_counts(scripted: ScriptedModel) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(serve(scripted, "a"), prompt=[65, 66], n=2, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 2]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}
    assert last["usage"] == {"prompt_tokens": 2, "total_tokens": 6, "completion_tokens": 4}


def test_continuous_usage_needs_include_usage(scripted: ScriptedModel) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert not any("usage" in chunk for chunk in stream(serve(scripted, "a"), stream_options=options))


def test_a_failure_within_a_stream_is_an_error_frame_before_done(scripted: ScriptedModel) -> None:
    *chunks, last = stream(serve(scripted, "ab", failure="out of memory"))
    assert joined(chunks) == "ab"
    error = {"message": "out of memory", "type": "InternalServerError", "param": None, "code": 500}
    assert last == {"error": error}


def test_a_failure_of_a_plain_answer_is_a_500(scripted: ScriptedModel) -> None:
    error = refusal(serve(scripted, "ab", failure="out of memory"), status=500)
    assert (error["type"], error["message"]) == ("InternalServerError", "out of memory")


def test_a_client_that_leaves_ends_the_generation(scripted: ScriptedModel) -> None:
    scripted.script = [ord("a")] * 8000
    app = create_model_container(scripted, served_model=MODEL)
    visit_and_leave(app, "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 8000})
    assert scripted.closed
    assert scripted.produced < 8000


def test_generation_is_paced_by_tokens_per_second(scripted: ScriptedModel) -> None:
    scripted.script = [ord("a")] * 5
    client = TestClient(create_model_container(scripted, served_model=MODEL, tokens_per_second=100))
    response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
    assert response.elapsed.total_seconds() >= 0.05


# What streams and errors of other versions and settings look like


def quirky(model: ScriptedModel, script: str, quirks: StreamQuirks, failure: str | None = None) -> TestClient:
    model.script = [ord(letter) for letter in script]
    model.failure = failure
    return TestClient(create_model_container(model, served_model=MODEL, quirks=quirks))


def test_a_chunk_may_carry_several_tokens(scripted: ScriptedModel) -> None:
    client = quirky(scripted, "abcd", StreamQuirks(tokens_per_chunk=2))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(client, logprobs=0, stream_options=options)
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["ab", "cd", ""]
    assert [chunk["choices"][0]["logprobs"]["tokens"] for chunk in chunks[:-1]] == [
        ["a", "b"],
        ["c", "d"],
        ["<|endoftext|>"],
    ]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 4, 5, 5]


def test_chunks_of_several_tokens_belong_to_one_choice_each(scripted: ScriptedModel) -> None:
    client = quirky(scripted, "abcd", StreamQuirks(tokens_per_chunk=3))
    chunks = stream(client, n=2, max_tokens=4)
    assert [(item["index"], item["text"]) for chunk in chunks for item in chunk["choices"]] == [
        (0, "abc"),
        (1, "abc"),
        (0, "d"),
        (1, "d"),
    ]


def test_a_chunk_may_carry_no_token(scripted: ScriptedModel) -> None:
    client = quirky(scripted, "ab", StreamQuirks(empty_chunk_every=1))
    chunks = [chunk["choices"][0] for chunk in stream(client, logprobs=0)]
    assert [chunk["text"] for chunk in chunks] == ["a", "", "b", "", ""]
    assert chunks[1]["logprobs"] == {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]


def test_keep_alive_comments_stand_between_frames(scripted: ScriptedModel) -> None:
    client = quirky(scripted, "abc", StreamQuirks(keep_alive_every=2))
    text = client.post("/v1/completions", json={"prompt": "a", "stream": True}).text
    frames = text.split("\n\n")
    assert [frame[:6] for frame in frames] == ["data: ", "data: ", ": keep", "data: ", "data: ", ": keep", "data: ", ""]
    assert frames[2] == ": keep-alive"


def test_the_errors_of_older_versions_are_flat(scripted: ScriptedModel) -> None:
    client = TestClient(create_model_container(scripted, served_model=MODEL, flat_errors=True))
    response = client.post("/v1/completions", json={"prompt": "a", "temperature": 3})
    message = "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)"
    assert response.status_code == 400
    assert response.json() == {
        "object": "error",
        "message": message,
        "type": "BadRequestError",
        "param": "temperature",
        "code": 400,
    }


def test_tokens_may_be_shown_by_their_ids(scripted: ScriptedModel) -> None:
    logprobs = choice(serve(scripted, "a"), logprobs=1, return_tokens_as_token_ids=True, max_tokens=1)["logprobs"]
    assert logprobs["tokens"] == ["token_id:97"]
    assert logprobs["top_logprobs"] == [{"token_id:97": -1.0, "token_id:122": -0.5}]


# Logprobs and echo


def test_logprobs_are_four_arrays_of_one_entry_a_token(scripted: ScriptedModel) -> None:
    logprobs = choice(serve(scripted, "ab"), logprobs=1)["logprobs"]
    assert logprobs == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-1.0, -1.0, -2.0],
        "tokens": ["a", "b", "<|endoftext|>"],
        "top_logprobs": [{"a": -1.0, "z": -0.5}, {"b": -1.0, "z": -0.5}, {"<|endoftext|>": -2.0}],
    }


def test_logprobs_zero_is_the_chosen_token_alone(scripted: ScriptedModel) -> None:
    logprobs = choice(serve(scripted, "a"), logprobs=0)["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -1.0}, {"<|endoftext|>": -2.0}]


def test_up_to_twenty_alternatives_are_told(client: TestClient) -> None:
    logprobs = choice(client, logprobs=20, max_tokens=4, seed=1)["logprobs"]
    for token, own, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == own
        assert 20 <= len(top) <= 21


def test_a_token_that_is_not_utf8_is_shown_as_bytes(scripted: ScriptedModel) -> None:
    logprobs = choice(serve(scripted, EURO), logprobs=0, max_tokens=3)["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]


def test_echo_puts_the_prompt_before_the_text(scripted: ScriptedModel) -> None:
    assert choice(serve(scripted, "ab"), echo=True)["text"] == PROMPT + "ab"


def test_echo_with_logprobs_scores_the_prompt_and_not_its_first_token(client: TestClient, model: NGramModel) -> None:
    ids = model.tokenizer.encode(PROMPT)
    found = choice(client, echo=True, logprobs=2, max_tokens=3, temperature=0, ignore_eos=True)
    logprobs = found["logprobs"]
    assert logprobs["tokens"][: len(ids)] == [model.tokenizer.token_text(token) for token in ids]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][3] == pytest.approx(model.logprob(ids[:3], ids[3]))
    assert len(logprobs["tokens"]) == len(ids) + 3
    for token, (start, end) in zip(logprobs["tokens"], pairwise(logprobs["text_offset"]), strict=False):
        assert found["text"][start:end] == token


def test_echo_without_tokens_scores_the_prompt_and_counts_the_hidden_token(client: TestClient) -> None:
    answer = complete(client, echo=True, logprobs=0, max_tokens=0)
    found = answer["choices"][0]
    assert (found["text"], found["finish_reason"]) == (PROMPT, "length")
    assert len(found["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 1


def test_a_streamed_echo_arrives_with_the_first_token(scripted: ScriptedModel) -> None:
    client = serve(scripted, "ab")
    first, second, _ = stream(client, prompt=[65], echo=True, logprobs=0)
    assert (first["choices"][0]["text"], second["choices"][0]["text"]) == ("Aa", "b")
    assert first["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0]
    assert second["choices"][0]["logprobs"]["text_offset"] == [2]


def test_streamed_logprobs_join_to_the_plain_ones(client: TestClient) -> None:
    body: Json = {"seed": 9, "logprobs": 2, "echo": True, "max_tokens": 20}
    plain = choice(client, **body)["logprobs"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in stream(client, **body)]
    assert {key: [item for chunk in chunks for item in chunk[key]] for key in plain} == plain


# Refusals


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": 0, "n": 3}, "n must be 1 when using greedy sampling, got 3."),
        ({"temperature": 2.1}, "temperature must be in [0, 2], got 2.1. (parameter=temperature, value=2.1)"),
        ({"temperature": -1}, "temperature must be in [0, 2], got -1.0. (parameter=temperature, value=-1.0)"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5."),
        ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2.0."),
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
        ({"frequency_penalty": -3}, "frequency_penalty must be in [-2, 2], got -3.0."),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0."),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"max_tokens": -1, "echo": True}, "max_tokens must be at least 1, got -1."),
        ({"min_tokens": 17}, "min_tokens must be in [0, max_tokens=16], got 17."),
        ({"stop": ["a", ""]}, "stop cannot contain an empty string."),
        ({"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        ({"logprobs": -2}, "`logprobs` must be a positive value or -1."),
        ({"logprobs": "3"}, "`logprobs` must be an integer."),
        ({"logit_bias": {"99999": 1}}, "out-of-vocab token ids"),
        ({"logit_bias": {"-1": 1}}, "out-of-vocab token ids"),
        ({"stream_options": {"include_usage": True}}, "Stream options can only be defined when `stream=True`."),
        ({"suffix": "x"}, "suffix is not currently supported"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs is not currently supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not currently supported"),
        ({"use_beam_search": True}, "use_beam_search is not currently supported"),
        ({"cache_salt": ""}, "Parameter 'cache_salt' must be a non-empty string"),
        ({"cache_salt": "a" * 1025}, "Parameter 'cache_salt' must have at most 1024 characters"),
        ({"cache_salt": "a@b"}, "Parameter 'cache_salt' must have"),
        ({"cache_salt": "a/b"}, "Parameter 'cache_salt' must have"),
        ({"cache_salt": "a\\b"}, "Parameter 'cache_salt' must have"),
        ({"cache_salt": "a\0b"}, "Parameter 'cache_salt' must have"),
        ({"prompt": ""}, "Either prompt or prompt_embeds must be provided and non-empty."),
        ({"prompt": None}, "Either prompt or prompt_embeds must be provided and non-empty."),
        ({"prompt": []}, "The decoder prompt cannot be empty"),
        ({"prompt": ["a", ""]}, "The decoder prompt cannot be empty"),
        ({"prompt": [[65], []]}, "The decoder prompt cannot be empty"),
        ({"prompt": [65, 999_999]}, "Token id 999999 is out of vocabulary"),
        ({"prompt": ["a"] * 1025}, "prompt list length 1025 exceeds the maximum allowed count of 1024."),
        ({"prompt": [65] * 512}, "This model's maximum context length is 512 tokens."),
        ({"prompt": [65] * 600, "stream": True}, "This model's maximum context length is 512 tokens."),
    ],
)
def test_a_broken_rule_is_a_bad_request_on_both_routes(client: TestClient, body: Json, message: str) -> None:
    for path in ("/v1/completions", "/invocations"):
        error = refusal(client, path, **body)
        assert error["type"] == "BadRequestError"
        assert message in error["message"]


@pytest.mark.parametrize("salt", ["a", "a" * 1024, "tenant-1:\u00e9"])
def test_a_cache_salt_changes_nothing(client: TestClient, salt: str) -> None:
    assert choice(client, cache_salt=salt, temperature=0) == choice(client, temperature=0)


def test_values_that_turn_a_feature_off_are_accepted(client: TestClient) -> None:
    off: Json = {
        "response_format": {"type": "text"},
        "use_beam_search": False,
        "bad_words": [],
        "suffix": None,
        "seed": -1,
    }
    assert complete(client, **off)["choices"]


WRONG_TYPES = [
    ("temperature", "hot"),
    ("prompt", ["a", 1]),
    ("prompt", [-1]),
    ("stop", ["1", "2", "3", "4", "5"]),
    ("seed", 2**63),
    ("logit_bias", [1]),
]


@pytest.mark.parametrize(("field", "value"), WRONG_TYPES)
def test_a_wrong_type_names_the_field_on_the_completions_route(client: TestClient, field: str, value: Any) -> None:
    error = refusal(client, **{field: value})
    assert (error["type"], error["param"]) == ("Bad Request", f"body.{field}")
    assert "validation error" in error["message"]


@pytest.mark.parametrize(("field", "value"), WRONG_TYPES)
def test_a_wrong_type_ends_in_the_one_generic_refusal_of_invocations(
    client: TestClient, field: str, value: Any
) -> None:
    error = refusal(client, "/invocations", **{field: value})
    expected = (
        "Cannot find suitable handler for request. Expected one of: ['ChatCompletionRequest', 'CompletionRequest']"
    )
    assert (error["message"], error["type"], error["param"]) == (expected, "BadRequestError", None)


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize"])
def test_another_content_type_is_refused(client: TestClient, path: str) -> None:
    response = client.post(path, content=json.dumps({"prompt": "a"}), headers={"content-type": "text/plain"})
    assert response.status_code == 400
    assert "Only 'application/json' is allowed" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"\xff", b""])
def test_a_body_that_is_not_json_is_refused_in_each_routes_own_shape(client: TestClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    completions = client.post("/v1/completions", content=body, headers=headers)
    invocations = client.post("/invocations", content=body, headers=headers)
    assert (completions.status_code, completions.json()["error"]["type"]) == (400, "Bad Request")
    assert (invocations.status_code, list(invocations.json())) == (400, ["detail"])


@pytest.mark.parametrize("body", [[], "text", 1, None])
def test_a_body_that_is_no_object_is_refused(client: TestClient, body: object) -> None:
    sent: Json = {"content": json.dumps(body), "headers": {"content-type": "application/json"}}
    responses = [client.post(path, **sent) for path in ("/v1/completions", "/invocations")]
    assert [response.status_code for response in responses] == [400, 400]
    assert "Cannot find suitable handler" in responses[1].json()["error"]["message"]


# Model names and SageMaker's routes


@pytest.mark.parametrize("name", [MODEL, "", None])
def test_the_served_an_empty_and_no_model_name_are_accepted(client: TestClient, name: str | None) -> None:
    assert complete(client, model=name)["model"] == MODEL


def test_another_model_name_is_not_found(client: TestClient) -> None:
    error = refusal(client, status=404, model="other")
    assert (error["type"], error["message"]) == ("NotFoundError", "The model `other` does not exist.")


def test_invocations_throws_the_bodys_model_away(client: TestClient) -> None:
    assert complete(client, "/invocations", model="other")["model"] == MODEL


def test_invocations_takes_the_model_from_the_adapter_header(client: TestClient) -> None:
    headers = {"X-Amzn-SageMaker-Adapter-Identifier": "lora"}
    response = client.post("/invocations", json={"prompt": "a"}, headers=headers)
    assert response.status_code == 404


@pytest.mark.parametrize("attributes", ["route=/v1/completions", "tenant=1,route=/v1/completions,x=2"])
def test_the_route_attribute_reaches_the_completions_route(client: TestClient, attributes: str) -> None:
    headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes}
    found = post(client, {"prompt": "a", "temperature": "hot"}, headers)
    assert found["error"]["param"] == "body.temperature"
    assert post(client, {"prompt": "a", "model": "other"}, headers)["error"]["code"] == 404


def test_the_route_attribute_reaches_tokenize(client: TestClient, model: NGramModel) -> None:
    headers = {"X-Amzn-SageMaker-Custom-Attributes": "route=/tokenize"}
    assert post(client, {"prompt": PROMPT}, headers)["count"] == len(model.tokenizer.encode(PROMPT))


def test_other_custom_attributes_change_nothing(client: TestClient) -> None:
    headers = {"X-Amzn-SageMaker-Custom-Attributes": "tenant=1"}
    assert post(client, {"prompt": "a", "model": "other"}, headers)["model"] == MODEL


def test_chat_is_not_served(client: TestClient) -> None:
    error = refusal(client, "/invocations", messages=[{"role": "user", "content": "hi"}])
    assert (error["type"], error["param"]) == ("BadRequestError", "messages")


def test_invocations_streams_like_the_completions_route(client: TestClient) -> None:
    body: Json = {"seed": 1, "max_tokens": 20}
    assert joined(stream(client, "/invocations", **body)) == joined(stream(client, **body))


def post(client: TestClient, body: Json, headers: Mapping[str, str]) -> Json:
    answer: Json = client.post("/invocations", json=body, headers=headers).json()
    return answer
