"""The official OpenAI client, synchronous and asynchronous, on base ``/v1`` and on Scale's ``/v2``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import LocalStack
from completions_cli.local.tables import LOCAL_KEY

PROMPT = "def main():\n    "
TOKENS = 12


@pytest.fixture(params=["/v1", "/v2"])
def sdk_url(request: pytest.FixtureRequest, base_url: str) -> str:
    """Each base in each response mode."""
    return f"{base_url}{request.param}"


@pytest.fixture
def sdk(sdk_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=sdk_url, api_key=LOCAL_KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def asynchronous_sdk(sdk_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=sdk_url, api_key=LOCAL_KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def v2(base_url: str) -> Iterator[OpenAI]:
    """The client on ``/v2`` alone."""
    with OpenAI(base_url=f"{base_url}/v2", api_key=LOCAL_KEY, max_retries=0) as client:
        yield client


def test_both_bases_answer_with_the_same_text_and_counts(base_url: str) -> None:
    answers = []
    for base in ("/v1", "/v2"):
        with OpenAI(base_url=base_url + base, api_key=LOCAL_KEY, max_retries=0) as client:
            completion = client.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
        assert completion.object == "text_completion"
        assert completion.model == "demo"
        assert completion.id.startswith("cmpl-")
        assert completion.usage is not None
        answers.append((completion.choices, completion.usage.prompt_tokens, completion.usage.completion_tokens))
    assert answers[0] == answers[1]
    assert answers[0][2] == TOKENS


def test_a_stream_joins_to_the_buffered_text_and_ends_quietly(sdk: OpenAI) -> None:
    whole = sdk.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    chunks = list(sdk.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True))

    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_include_usage_adds_one_last_chunk_without_choices(sdk: OpenAI) -> None:
    whole = sdk.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    *chunks, last = sdk.completions.create(
        model="demo",
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )

    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_candidates_of_a_batch_finish_under_their_own_indices(sdk: OpenAI) -> None:
    finished = [
        choice.index
        for chunk in sdk.completions.create(
            model="demo", prompt=["import os\n", "class A:\n"], n=2, max_tokens=5, seed=1, stream=True
        )
        for choice in chunk.choices
        if choice.finish_reason
    ]
    assert sorted(finished) == [0, 1, 2, 3]


def test_echo_without_new_tokens_scores_the_prompt(sdk: OpenAI) -> None:
    completion = sdk.completions.create(
        model="demo", prompt="import os\n", echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    (choice,) = completion.choices

    assert choice.text == "import os\n"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["import", " os", "\n"]
    assert choice.logprobs.text_offset == [0, 6, 9]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None and value < 0 for value in choice.logprobs.token_logprobs[1:])


async def test_the_asynchronous_client_creates_and_streams(asynchronous_sdk: AsyncOpenAI) -> None:
    create = asynchronous_sdk.completions.create
    whole = await create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    stream = await create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])

    assert text == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found(sdk: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.completions.create(model="nope", prompt=PROMPT, stream=stream)
    assert caught.value.request_id


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_key_is_an_authentication_error(sdk_url: str, stream: bool) -> None:
    with (
        OpenAI(base_url=sdk_url, api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.completions.create(model="demo", prompt=PROMPT, stream=stream)


async def test_the_asynchronous_client_raises_the_same_classes(asynchronous_sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await asynchronous_sdk.completions.create(model="nope", prompt=PROMPT, stream=True)


def test_a_throttled_endpoint_is_a_rate_limit_error(sdk: OpenAI, faults: LocalStack) -> None:
    faults.sagemaker.faults.replace("demo", [Fault(refusal=Refusal(kind="throttled"), calls=None)])
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError):
            sdk.completions.create(model="demo", prompt=PROMPT, stream=stream)


def test_a_failing_engine_is_a_server_error(sdk: OpenAI, faults: LocalStack) -> None:
    faults.sagemaker.faults.replace("demo", [Fault(refusal=Refusal(kind="internal"))])
    with pytest.raises(openai.InternalServerError):
        sdk.completions.create(model="demo", prompt=PROMPT)


def test_an_answer_that_breaks_off_raises_after_its_text(sdk: OpenAI, faults: LocalStack) -> None:
    whole = sdk.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0).choices[0].text
    faults.sagemaker.faults.replace("demo", [Fault(exception_after=1000)])
    seen = ""
    with pytest.raises(openai.APIError):  # noqa: PT012 - the text before the error is the other half of the claim
        for chunk in sdk.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True):
            seen += chunk.choices[0].text
    assert seen
    assert whole.startswith(seen)
    assert seen != whole


def test_a_bad_value_on_v2_is_unprocessable_and_lists_where(v2: OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        v2.completions.create(model="demo", prompt=PROMPT, temperature=3)
    assert isinstance(caught.value.body, dict)
    (fault,) = caught.value.body["detail"]
    assert fault == {
        "type": "less_than_equal",
        "loc": ["body", "temperature"],
        "msg": "Input should be less than or equal to 2",
        "input": 3,
        "ctx": {"le": 2.0},
    }


def test_errors_on_v2_wear_scales_body(v2: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        v2.completions.create(model="nope", prompt=PROMPT)
    assert caught.value.body == {"detail": "The specified endpoint could not be found."}


def test_scales_own_fields_pass_through_extra_body(v2: OpenAI) -> None:
    plain = v2.completions.create(model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    likeliest = v2.completions.create(
        model="demo", prompt=PROMPT, max_tokens=TOKENS, temperature=1, extra_body={"top_k": 1, "min_tokens": TOKENS}
    )
    assert likeliest.choices == plain.choices
