"""A real llama.cpp server behind the SageMaker stand-in, asked in the generic OpenAI completions body.

Needs the extra ``llama`` and a model file: ``COMPLETIONS_TEST_GGUF=model.gguf``, any model will do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import boto3
import httpx2 as httpx
import pytest
from botocore.config import Config

from completions.backends.circuit import EndpointCircuits
from completions.backends.openai_server import OpenAIServerCodec
from completions.backends.sagemaker import SageMakerBackend
from completions.clients import SystemClock
from completions.domain.catalog import Capability, Parameter
from completions.domain.completion import CompletionRequest, SamplingParams, Usage
from completions.domain.errors import ContextLengthError, UnsupportedParameterError
from completions.service.complete import CallContext, CompletionService
from completions_cli.local.gguf import serving_gguf
from completions_cli.local.sagemaker_runtime import SageMakerRuntime
from fakes import InMemoryLedger, InMemoryRegistry, principal, request, route

MODEL_FILE = os.environ.get("COMPLETIONS_TEST_GGUF")

pytestmark = [
    pytest.mark.skipif(find_spec("xllamacpp") is None, reason="needs the extra 'llama' (xllamacpp)"),
    pytest.mark.skipif(MODEL_FILE is None, reason="COMPLETIONS_TEST_GGUF names no model file"),
]

LLAMA = route(
    family="openai",
    endpoint_name="llama",
    capabilities={
        **dict.fromkeys((Parameter.N, Parameter.PROMPT_BATCH, Parameter.ECHO), Capability.EMULATED),
        **dict.fromkeys((Parameter.TOP_K, Parameter.MIN_P, Parameter.TOKEN_PROMPT), Capability.HONOURED),
    },
    context_length=1_000_000,  # the server itself is to refuse what does not fit
)
GREEDY = SamplingParams(temperature=0)
PROMPT = "import os\nimport "


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving_gguf(Path(MODEL_FILE or "")) as url:
        yield url


@pytest.fixture
def ledger() -> InMemoryLedger:
    return InMemoryLedger()


@pytest.fixture
def service(server: str, ledger: InMemoryLedger) -> Iterator[CompletionService]:
    with SageMakerRuntime({"llama": f"{server}/v1/completions"}) as runtime:
        config = Config(retries={"total_max_attempts": 1}, read_timeout=60)
        with closing(boto3.client("sagemaker-runtime", endpoint_url=runtime.url, config=config)) as client:
            backend = SageMakerBackend(client, {"openai": OpenAIServerCodec()}, EndpointCircuits(5, 30), 60)
            yield CompletionService(InMemoryRegistry({}, [LLAMA]), backend, ledger, SystemClock())


def context(name: str = "llama-1") -> CallContext:
    return CallContext(name, principal(), "openai", arrived=SystemClock().monotonic())


def told(server: str, **body: Any) -> dict[str, Any]:
    """The server's own unstreamed answer."""
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "top_k": -1, "min_p": 0.0, **body}
    answer: dict[str, Any] = httpx.post(f"{server}/v1/completions", json=fields, timeout=60).raise_for_status().json()
    return answer


def streamed_text(server: str) -> str:
    """The server's own streamed text. Its unstreamed one ends otherwise when the last character is incomplete."""
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "top_k": -1, "min_p": 0.0, "stream": True}
    lines = httpx.post(f"{server}/v1/completions", json=fields, timeout=60).raise_for_status().text.splitlines()
    values = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(value["choices"][0]["text"] for value in values)


def asked(**overrides: Any) -> CompletionRequest:
    fields: dict[str, Any] = {"prompts": (PROMPT,), "max_tokens": 8, "sampling": GREEDY}
    return request(**(fields | overrides))


def test_the_route_is_one_the_codec_can_serve() -> None:
    assert OpenAIServerCodec().route_faults(LLAMA) == []


def test_buffered_and_streamed_text_and_usage_are_the_servers_own(
    server: str, service: CompletionService, ledger: InMemoryLedger
) -> None:
    expected = told(server)
    counts = expected["usage"]["prompt_tokens"], expected["usage"]["completion_tokens"]

    whole = service.complete(asked(), context())
    with service.stream(asked(stream=True), context("llama-2")) as stream:
        streamed = "".join(delta.text for chunk in stream for delta in chunk.choices)

    assert whole.choices[0].text == streamed == streamed_text(server)
    assert whole.choices[0].finish_reason == expected["choices"][0]["finish_reason"]
    for usage in (whole.usage, stream.usage, *(record.usage for record in ledger.settled)):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.estimated) == (*counts, False)


@pytest.mark.parametrize("alternatives", [0, 2])
def test_logprobs_in_the_chat_layout_become_four_arrays(
    server: str, service: CompletionService, alternatives: int
) -> None:
    expected = told(server, logprobs=max(alternatives, 1))["choices"][0]["logprobs"]["content"]

    (choice,) = service.complete(asked(logprobs=alternatives), context()).choices

    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx([entry["logprob"] for entry in expected], abs=1e-3)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(expected)
    assert all(0 <= offset <= len(choice.text) for offset in choice.logprobs.text_offset)
    for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
        assert top is not None
        assert token in top
        assert len(top) <= alternatives + 1


def test_what_the_server_refuses_is_emulated(server: str, service: CompletionService) -> None:
    single = told(server)
    whole = service.complete(asked(prompts=(PROMPT, PROMPT), n=2, best_of=2, echo=True), context())
    assert [choice.text for choice in whole.choices] == [PROMPT + streamed_text(server)] * 4
    assert whole.usage.completion_tokens == 4 * single["usage"]["completion_tokens"]
    assert whole.usage.prompt_tokens == 2 * single["usage"]["prompt_tokens"]


@pytest.mark.parametrize("seed", [-7, -1, 2**63 - 1])
def test_a_seed_repeats_itself_and_a_token_prompt_is_read(service: CompletionService, seed: int) -> None:
    sampled = asked(prompts=((1, 2, 3),), sampling=SamplingParams(temperature=1.0, seed=seed), max_tokens=16)
    first, second = (service.complete(sampled, context(name)) for name in ("llama-1", "llama-2"))
    assert first.choices[0].text == second.choices[0].text != ""
    assert first.usage == Usage(3, first.usage.completion_tokens, first.usage.cached_tokens)


def test_a_prompt_beyond_the_context_is_the_callers_fault(service: CompletionService) -> None:
    with pytest.raises(ContextLengthError, match="maximum context length") as caught:
        service.complete(asked(prompts=("x " * 50_000,)), context())
    assert caught.value.param == "prompt"


def test_what_the_server_would_ignore_is_refused(service: CompletionService) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        service.complete(asked(sampling=SamplingParams(repetition_penalty=1.2)), context())
    assert caught.value.param == "repetition_penalty"
