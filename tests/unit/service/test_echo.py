"""The prompt put in front of an answer on our side."""

from __future__ import annotations

from completions.domain.completion import ChoiceDelta, CompletionChunk, FinishReason, Logprobs, Usage
from completions.service.echo import with_echo
from fakes import delta, request


def test_each_choice_begins_with_its_own_prompt_once() -> None:
    chunks = [
        CompletionChunk((ChoiceDelta(0, "a"), ChoiceDelta(2, "b"))),
        CompletionChunk((ChoiceDelta(2, "c"), ChoiceDelta(3, "d"), ChoiceDelta(1, "e"))),
    ]
    echoed = with_echo(chunks, request(prompts=("p", "q"), n=2, best_of=2))
    assert [[(one.index, one.text) for one in chunk.choices] for chunk in echoed] == [
        [(0, "pa"), (2, "qb")],
        [(2, "c"), (3, "qd"), (1, "pe")],
    ]


def test_a_choice_that_says_nothing_still_echoes() -> None:
    (chunk,) = with_echo([delta("", FinishReason.LENGTH)], request(prompts=("p",)))
    assert chunk.choices[0].text == "p"


def test_offsets_count_from_the_start_of_the_echo_and_usage_stays() -> None:
    probabilities = Logprobs(("a", "b"), (-1.0, -2.0), (None, None), (0, 1))
    (chunk,) = with_echo([delta("ab", logprobs=probabilities, usage=Usage(1, 2))], request(prompts=("xyz",)))
    assert chunk.choices[0].logprobs is not None
    assert chunk.choices[0].logprobs.text_offset == (3, 4)
    assert chunk.usage == Usage(1, 2)
