"""The TGI stand-in answers as text-generation-inference 3.3 does: Generate, the OpenAI body, their rules and errors.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from completions_cli.local.ngram import ContextTable, NGramModel, standard_library
from completions_cli.local.tgi_container import create_tgi_container
from completions_cli.local.tokenizer import Special, Tokenizer
from scripted_model import ScriptedModel, visit_and_leave

Json = dict[str, Any]
MODEL = "/opt/ml/model"
EURO = (0xE2, 0x82, 0xAC)  # the byte tokens of one character
EOS = Special.END_OF_TEXT


@pytest.fixture
def scripted() -> ScriptedModel:
    return ScriptedModel.train(standard_library()[:1])


@pytest.fixture(scope="module")
def client() -> TestClient:
    model = NGramModel.train(standard_library()[:5])
    return TestClient(create_tgi_container(model, served_model=MODEL, max_total_tokens=100))


def serve(model: ScriptedModel, script: Sequence[int] | str, failure: str | None = None, **options: Any) -> TestClient:
    model.script = [ord(letter) for letter in script] if isinstance(script, str) else script
    model.failure = failure
    return TestClient(create_tgi_container(model, served_model=MODEL, **{"max_total_tokens": 100, **options}))


def inputs(text: str = "A", **parameters: Any) -> Json:
    return {"inputs": text, "parameters": parameters}


def generate(client: TestClient, body: Json) -> Json:
    """A whole Generate answer, which is a list of one."""
    response = client.post("/invocations", json=body)
    assert response.status_code == 200, response.text
    (answer,) = response.json()
    found: Json = answer
    return found


def frames(client: TestClient, body: Json) -> list[str]:
    response = client.post("/invocations", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, rest = response.text.split("\n\n")
    assert rest == ""
    return found


def events(client: TestClient, body: Json) -> list[Json]:
    """The events of a Generate stream: no space after ``data:``, no ``[DONE]``."""
    found = frames(client, body)
    assert all(frame.startswith("data:{") for frame in found)
    return [json.loads(frame.removeprefix("data:")) for frame in found]


def refusal(client: TestClient, body: Json) -> Json:
    response = client.post("/invocations", json=body)
    assert response.status_code == 422
    error: Json = response.json()
    return error


def test_health_checks_answer_200(client: TestClient) -> None:
    assert client.get("/ping").status_code == 200


# Generate


def test_a_whole_answer_is_a_list_of_one_text(scripted: ScriptedModel) -> None:
    response = serve(scripted, "ab").post("/invocations", json=inputs("AB"))
    assert response.json() == [{"generated_text": "ab"}]
    assert response.headers["x-prompt-tokens"] == "2"


def test_details_name_the_tokens_and_not_the_prompts_count(scripted: ScriptedModel) -> None:
    answer = generate(serve(scripted, "ab"), inputs(details=True))
    assert answer == {
        "generated_text": "ab",
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 3,
            "seed": None,
            "prefill": [],
            "tokens": [
                {"id": 97, "text": "a", "logprob": -1.0, "special": False},
                {"id": 98, "text": "b", "logprob": -1.0, "special": False},
                {"id": EOS, "text": "<|endoftext|>", "logprob": -2.0, "special": True},
            ],
        },
    }


def test_a_stream_is_an_event_a_token_the_special_ones_flagged(scripted: ScriptedModel) -> None:
    a, b, last = events(serve(scripted, "ab"), inputs("AB", details=True))
    assert a == {
        "index": 1,
        "token": {"id": 97, "text": "a", "logprob": -1.0, "special": False},
        "generated_text": None,
        "details": None,
    }
    assert b["index"] == 2
    assert last == {
        "index": 3,
        "token": {"id": EOS, "text": "<|endoftext|>", "logprob": -2.0, "special": True},
        "generated_text": "ab",
        "details": {"finish_reason": "eos_token", "generated_tokens": 3, "seed": None, "input_length": 2},
    }


def test_a_stream_without_details_has_none_at_its_end(scripted: ScriptedModel) -> None:
    last = events(serve(scripted, "ab"), inputs())[-1]
    assert (last["generated_text"], last["details"]) == ("ab", None)


def test_top_n_tokens_are_told_with_every_token(scripted: ScriptedModel) -> None:
    top = [{"id": 122, "text": "z", "logprob": -0.5, "special": False}]
    assert events(serve(scripted, "a"), inputs(top_n_tokens=1))[0]["top_tokens"] == top
    details = generate(serve(scripted, "a"), inputs(top_n_tokens=1, details=True, max_new_tokens=1))["details"]
    assert details["top_tokens"] == [top]


def test_an_incomplete_character_is_an_event_without_text(scripted: ScriptedModel) -> None:
    found = events(serve(scripted, EURO), inputs(max_new_tokens=3))
    assert [event["token"]["text"] for event in found] == ["", "", "\u20ac"]
    assert found[-1]["generated_text"] == "\u20ac"


def test_the_prompt_comes_back_on_request_in_the_whole_text_only(scripted: ScriptedModel) -> None:
    client = serve(scripted, "a")
    assert generate(client, inputs("AB", return_full_text=True))["generated_text"] == "ABa"
    first, last = events(client, inputs("AB", return_full_text=True))
    assert (first["token"]["text"], last["generated_text"]) == ("a", "ABa")


def test_the_prefill_is_filled_only_where_the_launcher_turned_it_on(scripted: ScriptedModel) -> None:
    body = inputs("AB", decoder_input_details=True)
    assert generate(serve(scripted, "a"), body)["details"]["prefill"] == []
    prefill = generate(serve(scripted, "a", prefill_logprobs=True), body)["details"]["prefill"]
    assert [(item["id"], item["text"], item["logprob"] is None) for item in prefill] == [
        (65, "A", True),
        (66, "B", False),
    ]


def test_truncate_keeps_the_prompts_end(scripted: ScriptedModel) -> None:
    last = events(serve(scripted, "a"), inputs("A B C", truncate=2, details=True))[-1]
    assert last["details"]["input_length"] == 2


# Stops and limits


def test_stop_text_stays_in_the_text(scripted: ScriptedModel) -> None:
    answer = generate(serve(scripted, "abcdef"), inputs(stop=["x", "cd"], details=True))
    assert answer["generated_text"] == "abcd"
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert answer["details"]["generated_tokens"] == 4


def test_a_stop_that_ends_inside_a_token_is_missed(scripted: ScriptedModel) -> None:
    # one token for the line break and its indent
    script = scripted.tokenizer.encode("x\n        y")
    assert len(script) == 3
    answer = generate(serve(scripted, script), inputs(stop=["\n  "], details=True))
    assert answer["generated_text"] == "x\n        y"
    assert answer["details"]["finish_reason"] == "eos_token"


def test_a_line_break_after_a_stop_does_not_hide_it() -> None:
    """The pattern is anchored by ``$``, which also matches before a last line break."""
    tokenizer = Tokenizer(["b\n", "b\n\n"])
    broken, twice = tokenizer.size - 2, tokenizer.size - 1
    model = ScriptedModel(tokenizer, {97: 1}, [ContextTable.count([97, 98], 1)])
    assert generate(serve(model, [97, broken, 99]), inputs(stop=["b"]))["generated_text"] == "ab\n"
    assert generate(serve(model, [97, twice, 99]), inputs(stop=["b"]))["generated_text"] == "ab\n\nc"


def test_the_limit_is_looked_at_before_stop_and_end_of_text(scripted: ScriptedModel) -> None:
    cases: list[tuple[list[int], Json]] = [([97, 98], {"stop": ["b"]}), ([97, EOS], {})]
    for script, parameters in cases:
        answer = generate(serve(scripted, script), inputs(max_new_tokens=2, details=True, **parameters))
        assert answer["details"]["finish_reason"] == "length"


def test_without_a_limit_the_rest_of_the_context_is_generated(scripted: ScriptedModel) -> None:
    answer = generate(serve(scripted, "a" * 200), inputs("A", details=True))
    assert answer["details"]["generated_tokens"] == 99
    assert answer["details"]["finish_reason"] == "length"


# Sampling


@pytest.mark.parametrize(
    ("body", "temperature"),
    [
        ({"inputs": "A"}, 1.0),
        ({"inputs": "A", "parameters": {}}, 0.0),
        (inputs(temperature=1.0), 0.0),
        (inputs(temperature=0.5), 0.5),
        (inputs(temperature=1.0, do_sample=True), 1.0),
        (inputs(top_k=5), 1.0),
        (inputs(top_p=0.9), 1.0),
        (inputs(do_sample=False), 0.0),
    ],
)
def test_it_is_greedy_unless_it_is_told_to_sample(scripted: ScriptedModel, body: Json, temperature: float) -> None:
    generate(serve(scripted, "a"), body)
    ((settings, _),) = scripted.asked
    assert settings.temperature == temperature


def test_the_seed_is_told_where_tokens_were_drawn(scripted: ScriptedModel) -> None:
    client = serve(scripted, "a")
    assert generate(client, inputs(seed=2**64 - 1, do_sample=True, details=True))["details"]["seed"] == 2**64 - 1
    assert generate(client, inputs(seed=5, details=True))["details"]["seed"] is None
    assert generate(client, inputs(do_sample=True, details=True))["details"]["seed"] in range(2**64)


def test_the_same_seed_gives_the_same_text(client: TestClient) -> None:
    body = inputs("import ", do_sample=True, seed=3, max_new_tokens=30)
    assert generate(client, body) == generate(client, body)


def test_best_of_returns_the_likeliest_and_shows_the_others(client: TestClient) -> None:
    body = inputs("import ", best_of=2, do_sample=True, details=True, max_new_tokens=8)
    details = generate(client, body)["details"]
    (other,) = details["best_of_sequences"]

    def mean(sequence: Json) -> float:
        scores: list[float] = [token["logprob"] for token in sequence["tokens"]]
        return sum(scores) / len(scores)

    assert mean(details) >= mean(other)


def test_parameters_it_does_not_know_are_ignored(scripted: ScriptedModel) -> None:
    unknown: Json = {"min_p": 0.5, "n": 3, "presence_penalty": 2, "logit_bias": {"98": 100}, "ignore_eos": True}
    answer = generate(serve(scripted, "a"), inputs(**unknown, min_tokens=9, stop_token_ids=[97], details=True))
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == ("a", "eos_token")
    ((settings, _),) = scripted.asked
    assert (settings.min_p, settings.presence_penalty, settings.logit_bias) == (0.0, 0.0, {})


def test_an_unknown_adapter_answers_from_the_base_model(scripted: ScriptedModel) -> None:
    client = serve(scripted, "a")
    assert generate(client, inputs(adapter_id="french")) == generate(client, inputs())


# Refusals

RULES = [
    (inputs(temperature=0), "`temperature` must be strictly positive"),
    (inputs(temperature=-1), "`temperature` must be strictly positive"),
    (inputs(top_p=0), "`top_p` must be > 0.0 and < 1.0"),
    (inputs(top_p=1.0), "`top_p` must be > 0.0 and < 1.0"),
    (inputs(top_k=0), "`top_k` must be strictly positive"),
    (inputs(repetition_penalty=0), "`repetition_penalty` must be strictly positive"),
    (inputs(frequency_penalty=2.1), "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    (inputs(typical_p=1), "`typical_p` must be > 0.0 and < 1.0"),
    (inputs(max_new_tokens=0), "`max_new_tokens` must be strictly positive"),
    (inputs(stop=["1", "2", "3", "4", "5"]), "`stop` supports up to 4 stop sequences. Given: 5"),
    (inputs(top_n_tokens=6), "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    (inputs(best_of=3, do_sample=True), "`best_of` must be > 0 and <= 2. Given: 3"),
    (inputs(best_of=2), "you must use sampling when `best_of` is > 1"),
    (inputs(best_of=2, do_sample=True, seed=1), "`seed` must not be set when `best_of` > 1"),
    (inputs(""), "`inputs` cannot be empty"),
    (inputs(truncate=0), "`truncate` must be strictly positive and less than 99. Given: 0"),
    (
        inputs("a!" * 3, max_new_tokens=95),
        "`inputs` tokens + `max_new_tokens` must be <= 100. Given: 6 `inputs` tokens and 95 `max_new_tokens`",
    ),
    (inputs("a!" * 50), "`inputs` must have less than 99 tokens. Given: 100"),
    (inputs(grammar={"type": "regex", "value": "a+"}), "grammar is not supported"),
]


@pytest.mark.parametrize(("body", "rule"), RULES)
def test_a_broken_rule_is_422_under_its_own_words(client: TestClient, body: Json, rule: str) -> None:
    assert refusal(client, body) == {"error": f"Input validation error: {rule}", "error_type": "validation"}


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        (inputs(temperature=0), "`temperature` must be strictly positive"),
        (inputs(best_of=2, do_sample=True), "`best_of` != 1 is not supported when streaming tokens"),
        (inputs(decoder_input_details=True), "`decoder_input_details` == true is not supported when streaming tokens"),
    ],
)
def test_in_a_stream_a_broken_rule_is_an_event_under_200(client: TestClient, body: Json, rule: str) -> None:
    expected = {"error": f"Input validation error: {rule}", "error_type": "validation"}
    assert events(client, body) == [expected]


@pytest.mark.parametrize(
    "body",
    [
        inputs(seed=-1),
        inputs(max_new_tokens=-1),
        inputs(max_new_tokens=1.5),
        inputs(temperature="hot"),
        inputs(stop="a"),
        inputs(do_sample=None),
        {"inputs": ["a"]},
        {"inputs": "a", "parameters": None},
        {"prompt": [65]},
        {"prompt": []},
        {"prompt": "a", "stop": "b"},
        {"text": "a"},
        [],
    ],
)
def test_what_fits_no_body_is_422_in_plain_text(client: TestClient, body: Json) -> None:
    response = client.post("/invocations", json=body)
    assert response.status_code == 422
    assert response.headers["content-type"].startswith("text/plain")
    assert "did not match any variant of untagged enum SagemakerRequest" in response.text


def test_what_is_not_json_is_422_in_plain_text(client: TestClient) -> None:
    response = client.post("/invocations", content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert response.headers["content-type"].startswith("text/plain")


def test_generate_comes_before_chat_and_chat_before_completion(client: TestClient) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert refusal(client, {**chat, "prompt": "a"})["error_type"] == "template_error"
    assert "generated_text" in generate(client, {**inputs("a", max_new_tokens=1), **chat, "prompt": "a"})


def test_a_failed_generation_is_424_and_an_event_in_a_stream(scripted: ScriptedModel) -> None:
    client = serve(scripted, "ab", failure="out of memory")
    error = {"error": "Request failed during generation: out of memory", "error_type": "generation"}
    response = client.post("/invocations", json=inputs())
    assert (response.status_code, response.json()) == (424, error)
    *tokens, last = events(client, inputs())
    assert len(tokens) == 2
    assert last == error


def test_comments_keep_a_stream_alive(scripted: ScriptedModel) -> None:
    found = frames(serve(scripted, "abc", keep_alive_every=2), inputs())
    assert [frame[:6] for frame in found] == ["data:{", "data:{", ":", "data:{", "data:{", ":"]


@pytest.mark.parametrize("body", [inputs(max_new_tokens=8000), {"prompt": "A", "max_tokens": 8000}])
def test_a_client_that_leaves_ends_the_generation(scripted: ScriptedModel, body: Json) -> None:
    scripted.script = [ord("a")] * 8000
    app = create_tgi_container(scripted, served_model=MODEL)
    visit_and_leave(app, "/invocations", {**body, "stream": True})
    assert scripted.closed
    assert scripted.produced < 8000


# The OpenAI body


def complete(client: TestClient, **body: Any) -> Json:
    response = client.post("/invocations", json={"prompt": "AB", **body})
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def chunks(client: TestClient, **body: Any) -> list[Json]:
    *found, done = frames(client, {"prompt": "AB", **body})
    assert done == "data: [DONE]"
    assert all(frame.startswith("data:{") for frame in found)
    return [json.loads(frame.removeprefix("data:")) for frame in found]


def test_an_openai_answer_maps_the_end_of_text_to_stop(scripted: ScriptedModel) -> None:
    answer = complete(serve(scripted, "ab", prefill_logprobs=True))
    assert (answer["object"], answer["id"], answer["model"]) == ("text_completion", "", MODEL)
    assert answer["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_an_openai_answer_counts_its_prompt_by_the_prefill(scripted: ScriptedModel) -> None:
    assert complete(serve(scripted, "ab"))["usage"]["prompt_tokens"] == 0


def test_an_openai_answer_keeps_stop_sequence_and_its_text(scripted: ScriptedModel) -> None:
    (choice,) = complete(serve(scripted, "abcd"), stop=["c"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop_sequence")


def test_openai_chunks_have_an_empty_finish_reason_until_the_end(scripted: ScriptedModel) -> None:
    first, last = chunks(serve(scripted, "abcd"), stop=["b"])
    assert list(first) == ["object", "id", "created", "model", "system_fingerprint", "choices"]
    assert first["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": ""}]
    assert last["choices"] == [{"index": 0, "text": "b", "logprobs": None, "finish_reason": "stop_sequence"}]
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


def test_openai_chunks_show_the_end_of_text(scripted: ScriptedModel) -> None:
    last = chunks(serve(scripted, "a"))[-1]
    assert last["choices"][0] == {
        "index": 0,
        "text": "<|endoftext|>",
        "logprobs": None,
        "finish_reason": "eos_token",
    }


def test_openai_temperature_zero_is_greedy_and_absent_is_sampled(scripted: ScriptedModel) -> None:
    client = serve(scripted, "a")
    complete(client, temperature=0)
    complete(client)
    complete(client, temperature=0.5)
    assert [settings.temperature for settings, _ in scripted.asked] == [0.0, 1.0, 0.5]


def test_several_prompts_come_unordered_and_are_counted_together(scripted: ScriptedModel) -> None:
    answer = complete(serve(scripted, "a", prefill_logprobs=True), prompt=["A", "BC"])
    assert [choice["index"] for choice in answer["choices"]] == [1, 0]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_several_streamed_prompts_end_with_a_usage_each(scripted: ScriptedModel) -> None:
    found = chunks(serve(scripted, "a"), prompt=["A", "BC"])
    assert [chunk["choices"][0]["index"] for chunk in found] == [0, 1, 0, 1]
    assert [chunk["usage"]["prompt_tokens"] for chunk in found if "usage" in chunk] == [1, 2]


def test_openai_fields_it_does_not_know_are_ignored(scripted: ScriptedModel) -> None:
    client = serve(scripted, "ab")
    assert (
        complete(client, n=3, logprobs=2, echo=True, top_k=0, model="french")["choices"] == complete(client)["choices"]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_suffix_and_a_fifth_prompt_are_422_streamed_or_not(client: TestClient, stream: bool) -> None:
    suffix = refusal(client, {"prompt": "a", "suffix": "b", "stream": stream})
    assert suffix == {
        "error": "Suffix is not supported and can be achieved by preprocessing the prompt.",
        "error_type": "suffix not supported",
    }
    batch = refusal(client, {"prompt": ["a"] * 5, "stream": stream})
    assert batch["error_type"] == "batch size exceeded"


def test_openai_streams_have_an_error_shape_of_their_own(client: TestClient) -> None:
    rule = "Input validation error: `top_p` must be > 0.0 and < 1.0"
    assert refusal(client, {"prompt": "a", "top_p": 1.0}) == {"error": rule, "error_type": "validation"}
    assert chunks(client, top_p=1.0) == [{"error": {"message": rule, "http_status_code": 422}}]
