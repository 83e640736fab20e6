"""What the service does in a container's place, over every family, against the container that does it itself.

The reference is vLLM's own answer wherever it has one. All the containers have the same model in them, which draws the
same tokens for the same seed, so the texts must be equal, not only alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Completion, CompletionChoice

from completions_cli.local.stack import LocalStack
from family_models import family_models
from ledger_reader import LedgerReader
from speakers import BASIC, data_frames

PROMPT = "class Parser:\n    def __init__(self"
PROMPTS = ["import os\n", "class A:\n    ", "def main():\n"]
FAMILIES = ["vllm-invocations", "openai", "lmi", "lmi-inputs", "lmi-rolling", "tgi", "tgi-openai"]
ONE_CHOICE = {"lmi-inputs", "lmi-rolling", "tgi", "tgi-openai"}
"""The families that return one choice a call, and take one prompt."""

RANKED = [family for family in FAMILIES if family != "tgi-openai"]  # it tells no log-probabilities to rank by
COUNTED = [family for family in FAMILIES if family != "lmi-rolling"]  # its streams never tell the prompt's length


@dataclass(frozen=True)
class Emulation:
    """One family in both dialects, and the records its requests leave."""

    family: str
    model: str
    sdk: OpenAI
    http: httpx.Client
    stack: LocalStack
    ledger: LedgerReader

    def ask(self, model: str | None = None, **fields: Any) -> Completion:
        """Through OpenAI's SDK."""
        body: dict[str, Any] = {"model": model or self.model, "prompt": PROMPT, "max_tokens": 12, **fields}
        answer = self.sdk.completions.create(**body)
        assert isinstance(answer, Completion)
        return answer

    def reference(self, **fields: Any) -> Completion:
        """What vLLM answers to the same."""
        return self.ask("demo", **fields)

    def streamed(self, **fields: Any) -> dict[int, str]:
        """The text of each choice of a stream."""
        body: dict[str, Any] = {"model": self.model, "prompt": PROMPT, "max_tokens": 12, "stream": True, **fields}
        return joined(choice for chunk in self.sdk.completions.create(**body) for choice in chunk.choices)

    def scale(self, model: str | None = None, **fields: Any) -> httpx.Response:
        """Through Scale's dialect."""
        body = {"model": model or self.model, "prompt": PROMPT, "max_tokens": 12, **fields}
        return self.http.post("/v2/completions", json=body, headers=BASIC)

    @property
    def calls(self) -> int:
        return self.stack.sagemaker.call_count[self.model]


def joined(choices: Iterator[CompletionChoice]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in choices:
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def texts(completion: Completion) -> list[str]:
    assert [choice.index for choice in completion.choices] == list(range(len(completion.choices)))
    return [choice.text for choice in completion.choices]


def counts(completion: Completion) -> tuple[int, int]:
    assert completion.usage is not None
    return completion.usage.prompt_tokens, completion.usage.completion_tokens


@pytest.fixture(scope="module")
def models(stack: LocalStack) -> Iterator[Mapping[str, str]]:
    with family_models(stack, "emulated", fim_family="qwen", document_start="<|endoftext|>") as names:
        yield names


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sdk(stack: LocalStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="sk-local", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(stack: LocalStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.base_url, timeout=30) as client:
        yield client


@pytest.fixture
def emulation(
    stack: LocalStack, ledger: LedgerReader, models: Mapping[str, str], family: str, sdk: OpenAI, http: httpx.Client
) -> Emulation:
    return Emulation(family, models[family], sdk, http, stack, ledger)


# Several choices


def test_three_candidates_differ_and_a_seed_brings_them_back(emulation: Emulation) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 1}
    first, again = emulation.ask(**asked), emulation.ask(**asked)

    assert len(set(texts(first))) == 3
    assert texts(again) == texts(first)
    assert texts(first) == texts(emulation.reference(**asked))
    assert emulation.streamed(**asked) == dict(enumerate(texts(first)))
    assert [choice["text"] for choice in emulation.scale(**asked).json()["choices"]] == texts(first)


def test_another_seed_is_another_answer(emulation: Emulation) -> None:
    assert texts(emulation.ask(n=3, seed=11)) != texts(emulation.ask(n=3, seed=400))


def test_without_a_seed_the_candidates_still_differ(emulation: Emulation) -> None:
    assert len(set(texts(emulation.ask(n=4, max_tokens=16, temperature=2)))) > 1


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "openai"], indirect=True)
def test_greedy_candidates_are_all_the_likeliest(emulation: Emulation) -> None:
    alone = emulation.reference(temperature=0)
    assert texts(emulation.ask(n=3, temperature=0)) == texts(alone) * 3


@pytest.mark.parametrize("family", ["openai"], indirect=True)
def test_a_rule_that_only_the_server_knows_reaches_the_caller_in_its_words(emulation: Emulation) -> None:
    """Behind this one is vLLM, which takes no several greedy candidates; other servers of this family do."""
    with pytest.raises(openai.BadRequestError, match="greedy"):
        emulation.ask(n=3, temperature=0)


def test_a_choice_a_call_is_as_many_calls_and_one_record(emulation: Emulation) -> None:
    before = emulation.calls
    completion = emulation.ask(n=3, prompt=PROMPTS, seed=5)
    calls = emulation.calls - before

    assert calls == (9 if emulation.family in ONE_CHOICE else 1)
    assert completion._request_id is not None
    record = emulation.ledger.settled(completion._request_id)
    assert (record.attempts, record.outcome) == (calls, "succeeded")
    assert (record.prompt_tokens, record.completion_tokens) == counts(completion)


def test_batches_keep_the_order_of_their_prompts(emulation: Emulation) -> None:
    asked: dict[str, Any] = {"prompt": PROMPTS, "n": 2, "seed": 7}
    expected = texts(emulation.reference(**asked))
    assert texts(emulation.ask(**asked)) == expected
    assert emulation.streamed(**asked) == dict(enumerate(expected))
    assert [choice["text"] for choice in emulation.scale(**asked).json()["choices"]] == expected


@pytest.mark.parametrize("family", COUNTED, indirect=True)
def test_usage_counts_each_prompt_once_and_every_candidate(emulation: Emulation) -> None:
    asked: dict[str, Any] = {"prompt": PROMPTS, "n": 3, "seed": 5}
    assert counts(emulation.ask(**asked)) == counts(emulation.reference(**asked))
    prompts = [counts(emulation.ask(prompt=prompt))[0] for prompt in PROMPTS]
    assert counts(emulation.ask(**asked))[0] == sum(prompts)


@pytest.mark.parametrize("family", ["lmi-rolling"], indirect=True)
def test_a_prompt_that_is_never_counted_is_estimated_once_and_the_record_says_so(emulation: Emulation) -> None:
    completion = emulation.ask(prompt=PROMPTS, n=3, seed=5)
    quarter = sum(-(-len(prompt.encode()) // 4) for prompt in PROMPTS)
    assert counts(completion)[0] == quarter
    assert counts(completion)[1] == counts(emulation.reference(prompt=PROMPTS, n=3, seed=5))[1]
    assert completion._request_id is not None
    assert emulation.ledger.settled(completion._request_id).estimated


# The best of several


@pytest.mark.parametrize("family", RANKED, indirect=True)
def test_the_best_of_four_is_the_likeliest_of_the_four(emulation: Emulation) -> None:
    every = emulation.ask(n=4, seed=3, logprobs=0)

    def mean(choice: CompletionChoice) -> float:
        assert choice.logprobs is not None
        values = [value for value in choice.logprobs.token_logprobs or () if value is not None]
        return sum(values) / len(values)

    ranking = [choice.text for choice in sorted(every.choices, key=mean, reverse=True)]
    for n in (1, 2):
        before = emulation.calls
        best = emulation.ask(n=n, best_of=4, seed=3)
        assert texts(best) == ranking[:n]
        assert texts(best) == texts(emulation.reference(n=n, best_of=4, seed=3))
        assert all(choice.logprobs is None for choice in best.choices)
        assert counts(best) == counts(every)
        assert emulation.calls - before == (4 if emulation.family in ONE_CHOICE else 1)
    scale = emulation.scale(best_of=4, seed=3).json()
    assert [choice["text"] for choice in scale["choices"]] == ranking[:1]


@pytest.mark.parametrize("family", RANKED, indirect=True)
def test_the_best_of_each_prompt_stays_with_its_prompt(emulation: Emulation) -> None:
    asked: dict[str, Any] = {"prompt": PROMPTS, "best_of": 3, "seed": 9}
    assert texts(emulation.ask(**asked)) == texts(emulation.reference(**asked))


# The prompt around the answer


def test_echo_puts_the_prompt_before_every_choice(emulation: Emulation) -> None:
    asked: dict[str, Any] = {"prompt": PROMPTS, "n": 2, "seed": 7}
    plain = texts(emulation.ask(**asked))
    expected = [PROMPTS[number // 2] + text for number, text in enumerate(plain)]
    assert texts(emulation.ask(echo=True, **asked)) == expected
    assert emulation.streamed(echo=True, **asked) == dict(enumerate(expected))


def test_a_stop_in_the_echoed_prompt_stops_nothing(emulation: Emulation) -> None:
    completion = emulation.ask(echo=True, temperature=0, stop=["class"])
    assert texts(completion) == [PROMPT + texts(emulation.reference(temperature=0))[0]]


def test_suffix_fills_in_the_middle_as_on_vllm(emulation: Emulation) -> None:
    around = {"prompt": "def add(a, b):\n    return ", "suffix": "\n\nprint(add(1, 2))\n"}
    asked: dict[str, Any] = {**around, "max_tokens": 20, "temperature": 0}
    completion, reference = emulation.ask(**asked), emulation.reference(**asked)
    assert texts(completion) == texts(reference)
    assert completion.choices[0].finish_reason == reference.choices[0].finish_reason
    assert "<|" not in texts(completion)[0]
    assert emulation.scale(**asked).json()["choices"][0]["text"] == texts(reference)[0]


# Stop texts


@dataclass(frozen=True)
class Stop:
    """A stop text, and how much of the greedy answer stands before it."""

    text: str
    before: str


@pytest.fixture(scope="module")
def stops(sdk: OpenAI) -> Mapping[str, Stop]:
    """Where no token begins or ends, and from one token into the next, each behind a few tokens at least."""
    answer = sdk.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0, logprobs=0)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    base = offsets[0]
    inside = [(at - base + 1, at - base + len(token) - 1) for token, at in zip(tokens, offsets, strict=True)]
    across = [(at - base - 1, at - base + 1) for at in offsets]
    return {
        "inside a token": _first_new(choice.text, [place for place in inside[2:] if place[1] - place[0] >= 2]),
        "across two tokens": _first_new(choice.text, across[3:]),
    }


def _first_new(text: str, places: Sequence[tuple[int, int]]) -> Stop:
    """The first of ``places`` whose text has not stood in ``text`` before it."""
    start, end = next((start, end) for start, end in places if text.find(text[start:end]) == start)
    return Stop(text[start:end], text[:start])


@pytest.mark.parametrize("place", ["inside a token", "across two tokens"])
def test_an_answer_ends_before_its_stop_wherever_that_stands(
    emulation: Emulation, stops: Mapping[str, Stop], place: str
) -> None:
    stop = stops[place]
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "stop": ["zq-never", stop.text]}
    completion = emulation.ask(**asked)
    assert texts(completion) == [stop.before]
    assert completion.choices[0].finish_reason == "stop"
    assert texts(emulation.reference(**asked)) == [stop.before]
    assert emulation.streamed(**asked) == {0: stop.before}
    assert emulation.scale(**asked).json()["choices"][0]["text"] == stop.before


@pytest.mark.parametrize("place", ["inside a token", "across two tokens"])
@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "openai"], indirect=True)
def test_an_answer_ends_behind_a_stop_that_is_to_be_included(
    emulation: Emulation, stops: Mapping[str, Stop], place: str
) -> None:
    stop = stops[place]
    asked = {"max_tokens": 40, "temperature": 0, "stop": [stop.text], "include_stop_str_in_output": True}
    for model in (emulation.model, "demo"):
        (choice,) = emulation.scale(model, **asked).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (stop.before + stop.text, "stop")
        frames = data_frames(emulation.scale(model, stream=True, **asked))
        assert "".join(one["text"] for frame in frames for one in frame["choices"]) == stop.before + stop.text


def test_an_answer_that_is_cut_here_is_let_go_of(emulation: Emulation, stops: Mapping[str, Stop]) -> None:
    """What the cut answer used is no more than its tokens up to the stop, and those that were on their way."""
    stop = stops["inside a token"]
    completion = emulation.ask(max_tokens=400, temperature=0, stop=[stop.text])
    assert counts(completion)[1] < 400


# What cannot be done

REFUSED: Mapping[str, Sequence[tuple[str, Any]]] = {
    "tgi": (
        ("presence_penalty", 1),
        ("logit_bias", {"7": 5}),
        ("min_p", 0.5),
        ("min_tokens", 2),
        ("ignore_eos", True),
        ("stop_token_ids", [7]),
        ("add_special_tokens", False),
        ("prompt", [1, 2, 3]),
        ("guided_grammar", "root ::= x"),
        ("use_beam_search", True),
    ),
    "tgi-openai": (
        ("presence_penalty", 1),
        ("logit_bias", {"7": 5}),
        ("top_k", 5),
        ("min_p", 0.5),
        ("logprobs", 0),
        ("best_of", 2),
        ("skip_special_tokens", False),
        ("prompt", [[1, 2], [3]]),
        ("guided_regex", "a+"),
    ),
    "lmi-rolling": (
        ("logit_bias", {"7": 5}),
        ("min_tokens", 2),
        ("stop_token_ids", [7]),
        ("skip_special_tokens", False),
        ("prompt", [1, 2, 3]),
        ("guided_json", {"type": "object", "properties": {}}),
    ),
    "lmi-inputs": (("prompt", [1, 2, 3]), ("use_beam_search", True)),
    "openai": (
        ("top_k", 5),
        ("min_p", 0.5),
        ("repetition_penalty", 1.5),
        ("min_tokens", 2),
        ("ignore_eos", True),
        ("stop_token_ids", [7]),
        ("include_stop_str_in_output", True),
        ("prompt", [1, 2, 3]),
        ("guided_choice", ["a", "b"]),
    ),
    "lmi": (("use_beam_search", True),),
    "vllm-invocations": (("use_beam_search", True),),
}


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [(family, *case) for family, cases in REFUSED.items() for case in cases],
    indirect=["family"],
)
def test_what_no_one_can_do_is_refused_by_name_and_costs_nothing(emulation: Emulation, field: str, value: Any) -> None:
    before = emulation.calls
    reply = emulation.scale(**{field: value})
    assert reply.status_code == 400
    assert re.search(rf"'{field}'", reply.json()["detail"]), reply.text
    assert emulation.calls == before
    assert emulation.ledger.raw(reply.headers["x-request-id"]) is None


@pytest.mark.parametrize("family", sorted(ONE_CHOICE - {"tgi-openai"}), indirect=True)
def test_an_echo_that_would_need_the_prompts_probabilities_is_refused(emulation: Emulation) -> None:
    before = emulation.calls
    reply = emulation.scale(echo=True, logprobs=0)
    assert reply.status_code == 400
    assert "'echo' together with 'logprobs'" in reply.json()["detail"]
    assert emulation.calls == before


@pytest.mark.parametrize("family", sorted(ONE_CHOICE), indirect=True)
def test_more_calls_than_one_answer_is_worth_are_refused(emulation: Emulation) -> None:
    before = emulation.calls
    reply = emulation.scale(n=65, prompt=["a", "b"])
    assert reply.status_code == 400
    assert "at most 128" in reply.json()["detail"]
    assert emulation.calls == before
