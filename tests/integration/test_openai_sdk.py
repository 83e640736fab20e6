"""The official OpenAI SDK against the whole stack, in both response modes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion

from completions_cli.local.stack import LocalStack
from ledger_reader import LedgerReader

PROMPT = "def main():\n    "


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{base_url}/v1", api_key="sk-local", max_retries=0) as sdk:
        yield sdk


def test_create_returns_text_and_the_containers_own_token_counts(client: OpenAI) -> None:
    completion = client.completions.create(model="demo", prompt=PROMPT, max_tokens=12, temperature=0)

    assert completion.object == "text_completion"
    assert completion.model == "demo"
    assert [choice.index for choice in completion.choices] == [0]
    assert completion.choices[0].text
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].logprobs is None
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 12
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 12


def test_a_stream_joins_to_the_buffered_text_and_ends_in_usage(client: OpenAI) -> None:
    whole = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0)
    chunks = list(
        client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_include_usage_carries_no_usage(client: OpenAI) -> None:
    chunks = list(client.completions.create(model="demo", prompt=PROMPT, max_tokens=4, temperature=0, stream=True))

    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_batches_and_candidates_come_in_prompt_order(client: OpenAI) -> None:
    completion = client.completions.create(
        model="demo", prompt=["import os\n", "class A:\n"], n=2, max_tokens=6, seed=7, logprobs=0
    )

    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 24
    offsets = [
        choice.logprobs.text_offset[0]
        for choice in completion.choices
        if choice.logprobs and choice.logprobs.text_offset
    ]
    assert offsets == [len("import os\n")] * 2 + [len("class A:\n")] * 2


def test_every_candidate_of_a_stream_finishes_under_its_own_index(client: OpenAI) -> None:
    finished = [
        choice.index
        for chunk in client.completions.create(model="demo", prompt=PROMPT, n=3, max_tokens=5, seed=1, stream=True)
        for choice in chunk.choices
        if choice.finish_reason
    ]
    assert sorted(finished) == [0, 1, 2]


def test_best_of_returns_the_likeliest_and_bills_all(client: OpenAI) -> None:
    completion = client.completions.create(model="demo", prompt=PROMPT, best_of=4, n=1, max_tokens=8, seed=3)
    every = client.completions.create(model="demo", prompt=PROMPT, n=4, max_tokens=8, seed=3, logprobs=0)

    def mean(index: int) -> float:
        logprobs = every.choices[index].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        values = [value for value in logprobs.token_logprobs if value is not None]
        return sum(values) / len(values)

    best = max(range(4), key=mean)
    assert [choice.text for choice in completion.choices] == [every.choices[best].text]
    assert completion.choices[0].logprobs is None
    assert completion.usage == every.usage


def test_echo_with_logprobs_scores_the_prompt(client: OpenAI) -> None:
    completion = client.completions.create(
        model="demo", prompt="import os\n", echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    choice = completion.choices[0]

    assert choice.text.startswith("import os\n")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.token_logprobs[0] is None
    ends = [*choice.logprobs.text_offset[1:], len(choice.text)]
    slices = [choice.text[start:end] for start, end in zip(choice.logprobs.text_offset, ends, strict=True)]
    assert slices == choice.logprobs.tokens


def test_a_prompt_is_scored_without_generating_anything(client: OpenAI) -> None:
    # the token that the container generates and hides would end this text: nothing may show it
    prompt = "else:\n    getpass = unix_getpass\n"
    completion = client.completions.create(model="demo", prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    choice = completion.choices[0]
    assert choice.text == prompt
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == prompt
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.finish_reason == "length"


def test_an_echoed_prompt_leads_a_stream_in_each_index(client: OpenAI) -> None:
    prompts = ["# café ☕ 日本語 😀\n", "import os\n"]
    stream = client.completions.create(
        model="demo", prompt=prompts, echo=True, max_tokens=4, temperature=0, stream=True
    )
    texts: dict[int, list[str]] = {0: [], 1: []}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index].append(choice.text)
    for index, prompt in enumerate(prompts):
        assert texts[index][0].startswith(prompt)
        assert "\ufffd" not in "".join(texts[index])


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_slice_text_of_many_bytes_back(client: OpenAI, stream: bool) -> None:
    prompt = "# héllo 😀 日本\n"
    fields: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 6, "temperature": 0, "stop": ["zzz"]}
    answer = client.completions.create(model="demo", prompt=prompt, stream=stream, **fields)
    chunks = [answer] if isinstance(answer, Completion) else list(answer)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.text for choice in choices)
    offsets = [at for choice in choices if choice.logprobs for at in choice.logprobs.text_offset or []]
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or []]

    assert text.startswith(prompt)
    assert offsets == sorted(offsets)
    for token, at in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or text[at : at + len(token)] == token


def test_suffix_fills_in_the_middle(client: OpenAI) -> None:
    completion = client.completions.create(
        model="demo",
        prompt="def add(a, b):\n    return ",
        suffix="\n\nprint(add(1, 2))\n",
        max_tokens=20,
        temperature=0,
    )
    assert completion.choices[0].finish_reason in ("stop", "length")
    assert "\n" not in completion.choices[0].text


def test_stop_text_is_cut_and_never_streamed(client: OpenAI) -> None:
    whole = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    chunks = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop], stream=True
    )
    parts = [chunk.choices[0] for chunk in chunks]

    assert "".join(part.text for part in parts) == whole[: whole.index(stop)]
    assert parts[-1].finish_reason == "stop"


def test_an_empty_prompt_starts_a_document(client: OpenAI) -> None:
    completion = client.completions.create(model="demo", prompt="", max_tokens=5, temperature=0)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 1


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    assert {model.id for model in client.models.list()} >= {"demo", "demo-vllm", "demo-lmi", "demo-tgi"}
    model = client.models.retrieve("demo")
    assert (model.id, model.object) == ("demo", "model")


def test_an_unknown_model_id_with_a_slash_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("acme/unknown")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "acme/unknown" in caught.value.message


def test_a_bad_request_names_the_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt=PROMPT, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.code is None
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(base_url: str) -> None:
    with (
        OpenAI(base_url=f"{base_url}/v1", api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.completions.create(model="demo", prompt=PROMPT)
    assert caught.value.code == "invalid_api_key"
    assert caught.value.request_id


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nope", prompt=PROMPT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert caught.value.request_id


def test_the_request_id_leads_to_the_record(ledger: LedgerReader, client: OpenAI) -> None:
    completion = client.completions.create(model="demo", prompt=PROMPT, max_tokens=3, temperature=0)
    assert completion._request_id is not None
    record = ledger.settled(completion._request_id)
    assert completion.usage is not None
    assert (record.prompt_tokens, record.completion_tokens) == (
        completion.usage.prompt_tokens,
        completion.usage.completion_tokens,
    )


async def test_the_asynchronous_client_streams_too(stack: LocalStack) -> None:
    async with AsyncOpenAI(base_url=f"{stack.base_url}/v1", api_key="sk-local", max_retries=0) as client:
        stream = await client.completions.create(model="demo", prompt=PROMPT, max_tokens=5, temperature=0, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        whole = await client.completions.create(model="demo", prompt=PROMPT, max_tokens=5, temperature=0)
    assert text == whole.choices[0].text
