"""Scale's own Python client, ``scale-llm-engine``, on the routes of Scale's first API."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from openai.types.completion import Completion

from clients.official_client import OfficialClient
from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import LocalStack

PROMPT = "def main():\n    "
TOKENS = 12

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def report(stack: LocalStack) -> Any:
    """What the client saw. ``demo-vllm`` is throttled for two requests, fails once, and then breaks off the answer."""
    client = OfficialClient("scale")
    throttled, failing = Refusal(kind="throttled"), Refusal(kind="internal")
    faults = [Fault(refusal=throttled, calls=6), Fault(refusal=failing), Fault(exception_after=1000)]
    stack.sagemaker.faults.replace("demo-vllm", faults)
    try:
        environment = {
            "LLM_ENGINE_BASE_PATH": stack.base_url,
            "SCALE_API_KEY": stack.key,
            "LLM_ENGINE_DISABLE_VERSION_CHECK": "true",  # it asks the package index, and prints what it finds
        }
        return client.report(environment, PROMPT)
    finally:
        stack.sagemaker.faults.replace("demo-vllm", [])


@pytest.fixture(scope="module")
def peer(stack: LocalStack) -> Completion:
    """The same request through OpenAI's route."""
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key=stack.key) as sdk:
        return sdk.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0, logprobs=1)


@pytest.fixture(scope="module")
def scores(peer: Completion) -> list[dict[str, object]]:
    """The peer's tokens as the client has them."""
    logprobs = peer.choices[0].logprobs
    assert logprobs is not None
    pairs = zip(logprobs.tokens or (), logprobs.token_logprobs or (), strict=True)
    return [{"token": token, "log_prob": value} for token, value in pairs]


def counts(output: dict[str, Any]) -> tuple[int, int]:
    return output["num_prompt_tokens"], output["num_completion_tokens"]


def test_an_answer_has_the_text_and_the_counts_of_the_openai_route(report: Any, peer: Completion) -> None:
    for answer in (report["sync"], report["asynchronous"]["sync"]):
        assert answer["request_id"]
        assert answer["output"]["text"] == peer.choices[0].text
        assert answer["output"]["tokens"] is None
        assert peer.usage is not None
        assert counts(answer["output"]) == (peer.usage.prompt_tokens, TOKENS)


@pytest.mark.parametrize("half", ["synchronous", "asynchronous"])
def test_a_stream_is_read_to_its_end_and_ends_in_the_counts(report: Any, peer: Completion, half: str) -> None:
    parts = report["stream"] if half == "synchronous" else report["asynchronous"]["stream"]
    outputs = [part["output"] for part in parts]

    assert "".join(output["text"] for output in outputs) == peer.choices[0].text
    assert [output["finished"] for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) > 2
    assert {part["request_id"] for part in parts} == {parts[0]["request_id"]}
    assert [part["error"] for part in parts] == [None] * len(parts)
    assert all(output["num_prompt_tokens"] is None for output in outputs[:-1])
    assert peer.usage is not None
    assert counts(outputs[-1]) == (peer.usage.prompt_tokens, TOKENS)


def test_token_log_probabilities_are_the_models_in_both_modes(report: Any, scores: list[dict[str, object]]) -> None:
    assert len(scores) == TOKENS
    assert report["sync, scored"]["output"]["tokens"] == scores
    assert [part["output"]["token"] for part in report["stream, scored"]] == scores


def test_a_stop_sequence_cuts_the_text_and_is_kept_on_request(report: Any, peer: Completion) -> None:
    before, stop, after = peer.choices[0].text.partition(" file")
    assert after
    assert report["stop"]["output"]["text"] == before
    assert "".join(part["output"]["text"] for part in report["stop, included"]) == before + stop


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("unknown model", "NotFoundError", "The specified endpoint could not be found."),
        ("unknown model, streamed", "NotFoundError", "The specified endpoint could not be found."),
        ("unknown model, looked up", "NotFoundError", "The specified endpoint could not be found."),
        ("wrong key", "UnauthorizedError", "Could not authenticate user"),
        ("wrong key, streamed", "UnauthorizedError", "Could not authenticate user"),
        ("wrong key, listing", "UnauthorizedError", "Could not authenticate user"),
        ("bad request", "BadRequestError", "top_k"),
        ("bad request, streamed", "BadRequestError", "top_k"),
        ("throttled", "RateLimitExceededError", "The model is busy; try again shortly."),
        ("throttled, streamed", "RateLimitExceededError", "The model is busy; try again shortly."),
        ("engine failure", "ServerError", "Upstream service error for request_id"),
    ],
)
def test_a_refusal_is_the_clients_own_error_class(report: Any, case: str, error: str, text: str) -> None:
    name, message = report["errors"][case]
    assert (name, text in message) == (error, True), message


def test_a_stream_that_breaks_off_ends_in_an_error_the_client_can_read(report: Any, peer: Completion) -> None:
    *parts, last = report["broken off"]
    text = "".join(part["output"]["text"] for part in parts)

    assert text
    assert peer.choices[0].text.startswith(text)
    assert not any(part["output"]["finished"] for part in parts)
    assert last["output"] is None
    assert last["error"]["status_code"] == 500
    assert last["error"]["content"]["error"]
    assert last["request_id"] == parts[0]["request_id"]


def test_models_are_listed_and_looked_up(report: Any, stack: LocalStack) -> None:
    endpoints = report["models"]["model_endpoints"]
    assert [endpoint["name"] for endpoint in endpoints] == sorted(stack.models)
    assert {endpoint["status"] for endpoint in endpoints} == {"READY"}
    assert {endpoint["name"]: endpoint["inference_framework"] for endpoint in endpoints} == {
        "demo": "vllm",
        "demo-vllm": "vllm",
        "demo-lmi": "vllm",  # the engine inside the container
        "demo-tgi": "text_generation_inference",
    }
    assert report["model"] == next(endpoint for endpoint in endpoints if endpoint["name"] == "demo")
