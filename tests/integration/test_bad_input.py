"""Whatever a client sends, it hears which field was wrong in OpenAI's error form, and is charged nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2 as httpx
import pytest

from ledger_reader import LedgerReader

KEY = {"Authorization": "Bearer sk-local"}
GOOD = {"model": "demo", "prompt": "import os\n", "max_tokens": 1}


def body(**fields: object) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, headers=KEY, timeout=30) as client:
        yield client


CASES = {
    "not JSON": (b"{model: demo}", 400, None, None, "JSON"),
    "nothing": (b"", 400, None, None, "JSON"),
    "not an object": (b"[1]", 400, None, None, "JSON object"),
    "bytes that are not UTF-8": (b'{"model": "\xff\xfe"}', 400, None, None, None),
    "a list for the model": (body(model=["demo"]), 400, "model", None, "model"),
    "a word for a number": (body(temperature="hot"), 400, "temperature", None, "temperature"),
    "a digit string for an integer": (body(max_tokens="5"), 400, "max_tokens", None, "max_tokens"),
    "a boolean for an integer": (body(n=True), 400, "n", None, "'n'"),
    "NaN": (b'{"model":"demo","prompt":"x","temperature":NaN}', 400, "temperature", None, "temperature"),
    "Infinity": (b'{"model":"demo","prompt":"x","top_p":Infinity}', 400, "top_p", None, "top_p"),
    "a lone surrogate": (b'{"model":"demo","prompt":"\\ud800"}', 400, "prompt", None, "half a character"),
    "a bias for an absurd token": (body(logit_bias={"9" * 5000: 1}), 400, "logit_bias", None, "logit_bias"),
    "an unknown model": (body(model="nope"), 404, "model", "model_not_found", "nope"),
    "an unknown field": (body(top_k=5), 400, None, None, "Unrecognized request argument supplied: top_k"),
    "two unknown fields": (body(a=1, b=2), 400, None, None, "arguments supplied: a, b"),
    "n of zero": (body(n=0), 400, "n", None, "'n'"),
    "an empty prompt list": (body(prompt=[]), 400, "prompt", None, "prompt"),
    "an empty token list": (body(prompt=[[]]), 400, "prompt", None, "prompt"),
    "a mixed prompt list": (body(prompt=["a", 1]), 400, "prompt", None, "prompt"),
    "a token id beyond the vocabulary": (body(prompt=[2_000_000_000]), 400, None, None, "vocab"),
    "no prompt": (b'{"model":"demo"}', 400, "prompt", None, "prompt"),
    "five stops": (body(stop=list("abcde")), 400, "stop", "array_above_max_length", "stop"),
    "best_of below n": (body(n=3, best_of=2), 400, "best_of", None, "best_of"),
    "stream_options without stream": (
        body(stream_options={"include_usage": True}),
        400,
        "stream_options",
        None,
        "stream_options",
    ),
    "a streamed best_of": (body(best_of=2, stream=True), 400, "best_of", None, "best_of"),
    "a suffix with echo": (body(suffix="x", echo=True), 400, "suffix", None, "suffix"),
    "infill markers in the prompt": (body(prompt="<|fim_prefix|>", suffix="x"), 400, "suffix", None, "suffix"),
    "a prompt longer than the context": (
        body(prompt="word " * 20_000),
        400,
        "prompt",
        "context_length_exceeded",
        "maximum context length is",
    ),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", "-"))
def test_a_bad_body_is_answered_with_the_field_at_fault(http: httpx.Client, case: str) -> None:
    content, status, param, code, words = CASES[case]

    reply = http.post("/v1/completions", content=content)

    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    if words is not None:
        assert words in error["message"]
    assert reply.headers["x-request-id"]


def test_a_refusal_before_the_model_is_asked_leaves_no_record(ledger: LedgerReader, http: httpx.Client) -> None:
    before = ledger.count()
    for content in (b"{", body(n=0), body(model="nope"), body(suffix="x", echo=True)):
        http.post("/v1/completions", content=content)
    assert ledger.count() == before


def test_seven_megabytes_are_too_large(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", content=body(prompt="x" * 7_000_000))

    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"
    assert reply.json()["error"]["message"]
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("headers", "code", "words"),
    [
        ({}, None, "No API key"),
        ({"Authorization": "Bearer sk-wrong"}, "invalid_api_key", "not known"),
        ({"Authorization": "Bearer"}, None, "Bearer YOUR_API_KEY"),
        ({"Authorization": "sk-local"}, None, "Bearer YOUR_API_KEY"),
        ({"Authorization": "Basic c2stbG9jYWw6"}, None, "Bearer YOUR_API_KEY"),
    ],
)
def test_a_missing_or_wrong_key_is_said_before_anything_else(
    base_url: str, headers: dict[str, str], code: str | None, words: str
) -> None:
    for content in (body(), b"not JSON"):
        reply = httpx.post(f"{base_url}/v1/completions", content=content, headers=headers)

        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == code
        assert words in reply.json()["error"]["message"]


def test_an_unknown_path_and_a_wrong_method_wear_the_same_error_form(http: httpx.Client) -> None:
    for reply in (http.get("/v1/nothing"), http.get("/v1/completions"), http.delete("/v1/models")):
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "unknown_url"


def test_neither_key_nor_prompt_comes_back_in_an_error(http: httpx.Client) -> None:
    secret = "the-secret-of-the-prompt"
    for fields in (
        {"prompt": [secret, 1]},
        {"temperature": secret},
        {"suffix": secret, "echo": True},
        {"stop": [secret] * 5},
    ):
        reply = http.post("/v1/completions", content=body(**{"prompt": secret, **fields}))
        assert reply.status_code == 400
        assert secret not in reply.text
        assert "sk-local" not in reply.text
