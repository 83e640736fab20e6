"""The LMI stand-in answers as djl-serving does: the OpenAI form, the ``inputs`` form, the rolling batch, and errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from completions_cli.local.lmi_container import create_lmi_container
from completions_cli.local.model_container import create_model_container
from completions_cli.local.ngram import NGramModel, standard_library
from completions_cli.local.tokenizer import Special
from completions_cli.local.vllm_serving import StreamQuirks
from scripted_model import ScriptedModel, visit_and_leave

Json = dict[str, Any]
PROMPT = "def parse_args(self, args=None):\n    "
EOS = Special.END_OF_TEXT


@pytest.fixture(scope="module")
def model() -> NGramModel:
    return NGramModel.train(standard_library()[:5])


@pytest.fixture(scope="module")
def client(model: NGramModel) -> TestClient:
    return TestClient(create_lmi_container(model, max_model_len=512))


@pytest.fixture
def scripted() -> ScriptedModel:
    return ScriptedModel.train(standard_library()[:1])


def serve(model: ScriptedModel, script: Sequence[int] | str, failure: str | None = None, **options: Any) -> TestClient:
    model.script = [ord(letter) for letter in script] if isinstance(script, str) else script
    model.failure = failure
    return TestClient(create_lmi_container(model, **options))


def ask(client: TestClient, body: Json) -> Json:
    """A whole answer: JSON and a line end."""
    response = client.post("/invocations", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.text.endswith("}\n")
    answer: Json = response.json()
    return answer


def lines(client: TestClient, body: Json) -> list[Json | None]:
    """Every line of a stream; ``None`` for a blank one."""
    response = client.post("/invocations", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].split(";")[0] == "application/jsonlines"
    assert "data:" not in response.text
    assert response.text.endswith("\n")
    return [json.loads(line) if line else None for line in response.text[:-1].split("\n")]


def inputs(text: str = "A", **parameters: Any) -> Json:
    return {"inputs": text, "parameters": parameters}


def failure(client: TestClient, body: Json) -> tuple[int, Json]:
    response = client.post("/invocations", json=body)
    return response.status_code, response.json()


def test_ping_is_healthy(client: TestClient) -> None:
    assert client.get("/ping").status_code == 200


def test_predictions_is_the_same_handler_for_the_one_model(client: TestClient) -> None:
    body = {"prompt": "a", "temperature": 0}
    assert client.post("/predictions/lmi", json=body).json()["choices"] == ask(client, body)["choices"]
    assert client.post("/predictions/other", json=body).status_code == 404


# The OpenAI form


def test_a_prompt_is_answered_as_vllm_answers_it(client: TestClient, model: NGramModel) -> None:
    vllm = TestClient(create_model_container(model, served_model="lmi", max_model_len=512))
    body = {"prompt": PROMPT, "seed": 4, "max_tokens": 12, "logprobs": 2, "n": 2, "cache_salt": "tenant"}
    direct = vllm.post("/v1/completions", json=body).json()
    answer = ask(client, body)
    assert (answer["choices"], answer["usage"]) == (direct["choices"], direct["usage"])
    assert (answer["object"], answer["model"]) == ("text_completion", "lmi")


def test_a_stream_is_json_lines_with_a_blank_one_where_done_was(scripted: ScriptedModel) -> None:
    *chunks, usage, blank = lines(serve(scripted, "ab"), {"prompt": [65], "stream_options": {"include_usage": True}})
    assert blank is None
    assert [chunk["choices"][0]["text"] for chunk in chunks if chunk] == ["a", "b", ""]
    assert usage is not None
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 1, "total_tokens": 4, "completion_tokens": 3}


def test_a_failure_in_a_stream_is_vllms_error_as_a_line(scripted: ScriptedModel) -> None:
    *chunks, error, blank = lines(serve(scripted, "ab", failure="out of memory"), {"prompt": "A"})
    assert len(chunks) == 2
    assert blank is None
    assert error == {"error": {"message": "out of memory", "type": "InternalServerError", "param": None, "code": 500}}


def test_a_failure_of_a_whole_answer_loses_its_words(scripted: ScriptedModel) -> None:
    status, body = failure(serve(scripted, "ab", failure="out of memory"), {"prompt": "A"})
    assert status == 424
    assert body["code"] == 424
    assert body["message"].startswith("Async Inference Failure")
    assert "memory" not in json.dumps(body)


# The inputs form, whole


def test_inputs_is_thirty_tokens_by_default_and_text_alone(scripted: ScriptedModel) -> None:
    assert ask(serve(scripted, "a" * 40), {"inputs": "A"}) == {"generated_text": "a" * 30}


def test_details_name_tokens_but_not_the_prompts_count(scripted: ScriptedModel) -> None:
    answer = ask(serve(scripted, "ab"), inputs(details=True, seed=5))
    assert answer == {
        "generated_text": "ab",
        "details": {
            "finish_reason": None,
            "generated_tokens": 3,
            "seed": 5,
            "prefill": [],
            "tokens": [
                {"id": 97, "text": "a", "logprob": -1.0},
                {"id": 98, "text": "b", "logprob": -1.0},
                {"id": EOS, "text": "<|endoftext|>", "logprob": -2.0},
            ],
        },
    }


def test_the_finish_reason_of_details_is_vllms_stop_reason(scripted: ScriptedModel) -> None:
    stopped = ask(serve(scripted, "abc"), inputs(details=True, stop=["b"]))
    limited = ask(serve(scripted, "abc"), inputs(details=True, max_new_tokens=2))
    assert (stopped["generated_text"], stopped["details"]["finish_reason"]) == ("a", "b")
    assert (limited["generated_text"], limited["details"]["finish_reason"]) == ("ab", None)


def test_stop_sequences_mean_nothing_and_stop_stops(scripted: ScriptedModel) -> None:
    client = serve(scripted, "abc")
    assert ask(client, inputs(stop_sequences=["b"]))["generated_text"] == "abc"
    assert ask(client, inputs(stop=["b"]))["generated_text"] == "a"


def test_the_prefill_lacks_the_prompts_first_token(client: TestClient, model: NGramModel) -> None:
    ids = model.tokenizer.encode(PROMPT)
    answer = ask(client, inputs(PROMPT, details=True, decoder_input_details=True, max_new_tokens=1))
    prefill = answer["details"]["prefill"]
    assert [item["id"] for item in prefill] == ids[1:]
    assert prefill[0]["logprob"] == pytest.approx(model.logprob(ids[:1], ids[1]))


def test_the_prefill_needs_details(scripted: ScriptedModel) -> None:
    assert ask(serve(scripted, "a"), inputs(decoder_input_details=True)) == {"generated_text": "a"}


def test_return_full_text_puts_the_prompt_first(scripted: ScriptedModel) -> None:
    assert ask(serve(scripted, "a"), inputs("AB", return_full_text=True))["generated_text"] == "ABa"


def test_do_sample_false_is_temperature_zero(scripted: ScriptedModel) -> None:
    client = serve(scripted, "a")
    ask(client, inputs(do_sample=False, temperature=0.7))
    ask(client, inputs(temperature=0.7))
    ask(client, inputs())
    assert [settings.temperature for settings, _ in scripted.asked] == [0.0, 0.7, 1.0]


def test_top_n_tokens_asks_for_choices_of_which_one_comes_back(scripted: ScriptedModel) -> None:
    answer = ask(serve(scripted, "ab"), inputs(top_n_tokens=3, details=True))
    assert answer["generated_text"] == "ab"
    assert answer["details"]["generated_tokens"] == 9
    assert len(scripted.asked) == 3


def test_ignore_eos_token_goes_on_to_the_limit(scripted: ScriptedModel) -> None:
    client = serve(scripted, [97, EOS, 98])
    assert ask(client, inputs(ignore_eos_token=True, max_new_tokens=3))["generated_text"] == "ab"


# The inputs form, streamed


def test_a_line_a_token_the_last_with_text_and_a_count_one_too_high(scripted: ScriptedModel) -> None:
    found = lines(serve(scripted, "ab"), inputs("AB", details=True, seed=7))
    token = {"index": 0, "generated_text": None, "details": None}
    last = {"finish_reason": "stop", "seed": 7, "generated_tokens": 4, "input_length": 2}
    assert found == [
        {**token, "token": {"id": 97, "text": "a", "logprob": -1.0}},
        {**token, "token": {"id": 98, "text": "b", "logprob": -1.0}},
        {
            "index": 0,
            "token": {"id": EOS, "text": "", "logprob": -2.0},
            "generated_text": "ab",
            "details": last,
        },
        None,  # the usage
        None,  # [DONE]
    ]


def test_without_details_the_last_line_has_the_text_alone(scripted: ScriptedModel) -> None:
    *_, last, _, _ = lines(serve(scripted, "abc"), inputs(max_new_tokens=2))
    assert last is not None
    assert (last["generated_text"], last["details"]) == ("ab", None)


def test_a_stream_tells_its_limit(scripted: ScriptedModel) -> None:
    *_, last, _, _ = lines(serve(scripted, "abc"), inputs(max_new_tokens=2, details=True))
    assert last is not None
    assert last["details"]["finish_reason"] == "length"


def test_a_streams_prompt_is_in_the_whole_text_only(scripted: ScriptedModel) -> None:
    first, *_, last, _, _ = lines(serve(scripted, "ab"), inputs("AB", return_full_text=True))
    assert first is not None
    assert last is not None
    assert first["token"]["text"] == "a"
    assert last["generated_text"] == "ABab"


def test_of_a_chunk_of_several_tokens_only_the_first_is_told(scripted: ScriptedModel) -> None:
    client = serve(scripted, "abcd", quirks=StreamQuirks(tokens_per_chunk=2))
    first, second, *_ = lines(client, inputs(max_new_tokens=4, details=True))
    assert first is not None
    assert second is not None
    assert first["token"] == {"id": 97, "text": "ab", "logprob": -1.0}
    assert second["token"] == {"id": 99, "text": "cd", "logprob": -1.0}
    assert (second["generated_text"], second["details"]["generated_tokens"]) == ("abcd", 5)


def test_a_chunk_without_a_token_breaks_the_formatter(scripted: ScriptedModel) -> None:
    first, error = lines(serve(scripted, "abc", quirks=StreamQuirks(empty_chunk_every=1)), inputs())
    assert first is not None
    assert error == {"error": "list index out of range", "code": 424}


def test_the_texts_of_several_choices_run_together(scripted: ScriptedModel) -> None:
    found = [line for line in lines(serve(scripted, "ab"), inputs(n=2, max_new_tokens=2)) if line]
    assert [line["index"] for line in found] == [0, 1, 0, 1]
    assert [line["generated_text"] for line in found] == [None, None, "aab", "aabb"]


def test_an_error_line_ends_an_inputs_stream(scripted: ScriptedModel) -> None:
    *tokens, error = lines(serve(scripted, "ab", failure="out of memory"), inputs())
    assert len(tokens) == 2
    assert error is not None
    assert error["error"]["message"] == "out of memory"


@pytest.mark.parametrize("rolling", [False, True])
def test_a_client_that_leaves_ends_the_generation(scripted: ScriptedModel, rolling: bool) -> None:
    scripted.script = [ord("a")] * 8000
    app = create_lmi_container(scripted, rolling_batch=rolling)
    visit_and_leave(app, "/invocations", {**inputs(max_new_tokens=8000), "stream": True})
    assert scripted.closed
    assert scripted.produced < 8000


# Errors


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_adapter_cannot_be_parsed(client: TestClient, stream: bool) -> None:
    text = "Input parsing failed: LoRA adapter french not found in registry. Available adapters: []"
    expected = (424, {"code": 424, "error": text})
    assert failure(client, {"prompt": "A", "adapters": "french", "stream": stream}) == expected
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "french"}
    assert client.post("/invocations", json={"prompt": "A"}, headers=header).json() == expected[1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "A", "temperature": "hot"}, "1 validation error for CompletionRequest\ntemperature"),
        ({"inputs": "A", "parameters": {"seed": 2**63}}, "1 validation error for CompletionRequest\nseed"),
        ({"inputs": "A", "parameters": {"logprobs": -2}}, "`logprobs` must be a positive value or -1."),
        ({"inputs": "A", "parameters": [1]}, ""),
        ({"inputs": "", "parameters": {}}, "non-empty"),
        ({"prompt": "A", "cache_salt": ""}, "cache_salt"),
        ({"text": "A"}, "invalid payload. must contain prompt, inputs, or messages"),
        (["A"], ""),
    ],
)
def test_a_body_that_makes_no_request_is_424(client: TestClient, body: Json, words: str) -> None:
    status, answer = failure(client, body)
    assert (status, list(answer), answer["code"]) == (424, ["code", "error"], 424)
    assert answer["error"].startswith("Input parsing failed: ")
    assert words in answer["error"]


def test_a_body_that_is_not_json_is_424(client: TestClient) -> None:
    response = client.post("/invocations", content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 424
    assert response.json()["error"].startswith("Input parsing failed: ")


def test_a_prefill_cannot_be_streamed(client: TestClient) -> None:
    body = {**inputs(details=True, decoder_input_details=True), "stream": True}
    assert failure(client, body)[0] == 424


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "kind", "code", "param"),
    [
        ({"prompt": "A", "temperature": 3}, "BadRequestError", 400, "'temperature'"),
        ({"inputs": "A", "parameters": {"top_p": 0}}, "BadRequestError", 400, "'top_p'"),
        ({"inputs": "A", "parameters": {"max_new_tokens": 0}}, "BadRequestError", 400, "'max_tokens'"),
        ({"prompt": [65] * 600}, "BadRequestError", 400, "'input_tokens'"),
        ({"prompt": "A", "model": "other"}, "NotFoundError", 404, "'model'"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "BadRequestError", 400, "'messages'"),
    ],
)
def test_what_vllm_refuses_leaves_as_500_with_the_objects_repr(
    client: TestClient, body: Json, kind: str, code: int, param: str, stream: bool
) -> None:
    status, answer = failure(client, {**body, "stream": stream})
    assert (status, list(answer), answer["code"]) == (500, ["code", "error"], 500)
    assert answer["error"].startswith("error=ErrorInfo(message=")
    assert answer["error"].endswith(f"type='{kind}', param={param}, code={code})")


# The rolling batch


def test_the_rolling_batch_streams_log_prob_and_three_finish_reasons(scripted: ScriptedModel) -> None:
    client = serve(scripted, "ab", rolling_batch=True)
    first, _, last = lines(client, inputs("AB", details=True))
    assert first == {"token": {"id": 97, "text": "a", "log_prob": -1.0}}
    assert last == {
        "token": {"id": EOS, "text": "", "log_prob": -2.0},
        "generated_text": "ab",
        "details": {"finish_reason": "eos_token", "generated_tokens": 3, "inputs": "AB"},
    }
    *_, limited = lines(client, inputs(details=True, max_new_tokens=1))
    assert limited is not None
    assert limited["details"]["finish_reason"] == "length"
    *_, stopped = lines(client, inputs(details=True, stop_sequences=["b"]))
    assert stopped is not None
    assert (stopped["generated_text"], stopped["details"]["finish_reason"]) == ("ab", "stop_sequence")


def test_a_whole_rolling_answer_has_its_inputs_tokens_and_prefill(scripted: ScriptedModel) -> None:
    client = serve(scripted, "ab", rolling_batch=True)
    answer = ask(client, inputs("AB", details=True, decoder_input_details=True, max_new_tokens=1))
    details = answer["details"]
    assert (answer["generated_text"], details["inputs"], details["generated_tokens"]) == ("a", "AB", 1)
    assert details["tokens"] == [{"id": 97, "text": "a", "log_prob": -1.0}]
    assert [(item["id"], item["log_prob"] is None) for item in details["prefill"]] == [(65, True), (66, False)]
    assert ask(client, inputs("AB")) == {"generated_text": "ab"}


def test_the_rolling_batch_samples_only_when_asked_to(scripted: ScriptedModel) -> None:
    client = serve(scripted, "a", rolling_batch=True)
    for parameters in ({}, {"temperature": 0.5}, {"do_sample": True}, {"do_sample": False, "temperature": 0.5}):
        ask(client, inputs(**parameters))
    assert [settings.temperature for settings, _ in scripted.asked] == [0.0, 0.5, 1.0, 0.0]


def test_a_rolling_stream_that_fails_says_so_in_its_last_line(scripted: ScriptedModel) -> None:
    *_, last = lines(serve(scripted, "a", failure="out of memory", rolling_batch=True), inputs())
    assert last is not None
    assert last["details"] == {"finish_reason": "error"}
    assert last["token"]["error_msg"] == "out of memory"


def test_the_rolling_batch_reads_no_prompt(scripted: ScriptedModel) -> None:
    status, answer = failure(serve(scripted, "a", rolling_batch=True), {"prompt": "A"})
    assert (status, answer["code"]) == (424, 424)
