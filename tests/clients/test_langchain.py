"""LangChain's ``OpenAI`` completions class, ``langchain-openai``."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from openai.types.completion import Completion

from clients.official_client import OfficialClient
from completions_cli.local.stack import LocalStack

PROMPTS = ("def main():\n    ", "import os\n", "class A:\n")
TOKENS = 12

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def report(stack: LocalStack) -> Any:
    """What the class saw."""
    client = OfficialClient("langchain")
    return client.report({"OPENAI_API_BASE": f"{stack.base_url}/v1", "OPENAI_API_KEY": stack.key}, *PROMPTS)


@pytest.fixture(scope="module")
def sdk(stack: LocalStack) -> Any:
    """OpenAI's own client."""
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key=stack.key) as client:
        yield client


@pytest.fixture(scope="module")
def peer(sdk: OpenAI) -> Completion:
    """The same prompts through OpenAI's own client."""
    return sdk.completions.create(model="demo", prompt=list(PROMPTS), max_tokens=TOKENS, temperature=0)


def usage(completion: Completion) -> dict[str, int]:
    assert completion.usage is not None
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: getattr(completion.usage, name) for name in names}


def test_an_invocation_is_the_text(report: Any, peer: Completion) -> None:
    assert report["invoke"] == report["asynchronous"]["invoke"] == peer.choices[0].text


def test_a_stop_text_cuts_the_answer(report: Any, peer: Completion) -> None:
    assert report["stop"] == peer.choices[0].text.partition(" file")[0]
    assert report["stop"] != report["invoke"]


@pytest.mark.parametrize("way", ["stream", "stream with usage", "asynchronous"])
def test_a_stream_joins_to_the_text(report: Any, peer: Completion, way: str) -> None:
    parts = report["asynchronous"]["stream"] if way == "asynchronous" else report[way]
    assert len(parts) > 2
    assert "".join(parts) == peer.choices[0].text


def test_a_streaming_invocation_is_the_same_text(report: Any, peer: Completion) -> None:
    assert report["streaming"] == peer.choices[0].text


def test_a_batch_comes_back_in_prompt_order(report: Any, peer: Completion) -> None:
    texts = [choice.text for choice in peer.choices]
    assert len(set(texts)) == len(PROMPTS)
    assert report["batch"] == report["asynchronous"]["batch"] == texts


def test_token_usage_is_counted_over_the_batch(report: Any, peer: Completion) -> None:
    assert report["generate"]["choices"] == [[[choice.text, "length"]] for choice in peer.choices]
    assert report["generate"]["usage"] == usage(peer)
    assert usage(peer)["completion_tokens"] == len(PROMPTS) * TOKENS


def test_candidates_are_grouped_by_prompt_and_all_counted(report: Any, peer: Completion) -> None:
    seen = report["two candidates"]
    assert seen["choices"] == [[[choice.text, "length"]] * 2 for choice in peer.choices]
    assert seen["usage"]["prompt_tokens"] == usage(peer)["prompt_tokens"]
    assert seen["usage"]["completion_tokens"] == 2 * len(PROMPTS) * TOKENS


def test_best_of_is_ranked_as_for_openais_own_client_and_bills_all(report: Any, sdk: OpenAI) -> None:
    best = sdk.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=TOKENS, temperature=1, seed=5, best_of=3, n=1
    )
    seen = report["best of three"]
    assert seen["choices"] == [[[best.choices[0].text, best.choices[0].finish_reason]]]
    assert seen["usage"] == usage(best)
    assert seen["usage"]["completion_tokens"] > TOKENS


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("unknown model", "NotFoundError", "Error code: 404 - The model 'nope' does not exist"),
        ("wrong key", "AuthenticationError", "Error code: 401"),
        ("bad request", "BadRequestError", "Error code: 400 - Invalid value for 'temperature'"),
    ],
)
def test_a_refusal_is_the_openai_error_class(report: Any, case: str, error: str, text: str) -> None:
    name, message = report[case]
    assert (name, message[: len(text)]) == (error, text)
