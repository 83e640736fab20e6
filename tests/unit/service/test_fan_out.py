"""Several calls behind one answer: numbers, sums, failures, and nothing left running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing

import pytest

from completions.domain.catalog import Abilities, Capability, Parameter
from completions.domain.completion import ChoiceDelta, CompletionChunk, CompletionRequest, FinishReason, Usage
from completions.domain.errors import BackendError, RateLimitError
from completions.service import fan_out
from completions.service.fan_out import SIDE_BY_SIDE, Job
from completions.service.plan import PlannedCall, planned
from fakes import collected, delta, request, route

STOP = FinishReason.STOP
TWO_BY_TWO = request(prompts=("p", "q"), n=2, best_of=2)


def plan(canonical: CompletionRequest = TWO_BY_TWO) -> tuple[PlannedCall, ...]:
    capabilities = dict.fromkeys(Parameter, Capability.HONOURED)
    capabilities |= dict.fromkeys((Parameter.N, Parameter.PROMPT_BATCH), Capability.EMULATED)
    return planned(canonical, route(), Abilities(capabilities)).calls


def job(*items: CompletionChunk | BaseException) -> Callable[[], Generator[CompletionChunk]]:
    def begin() -> Generator[CompletionChunk]:
        for item in items:
            if isinstance(item, BaseException):
                raise item
            yield item

    return begin


def answer(text: str, prompt_tokens: int, completion_tokens: int, cached: int = 0) -> list[CompletionChunk]:
    return [delta(text), delta("", STOP, usage=Usage(prompt_tokens, completion_tokens, cached))]


def merged(
    calls: Sequence[PlannedCall],
    lead: Iterable[CompletionChunk],
    jobs: Sequence[Job],
    *,
    stop: Callable[[], None] = lambda: None,
    heard: list[Usage] | None = None,
) -> Generator[CompletionChunk]:
    """The answers of all calls; ``heard`` is told what nobody read."""
    unheard = [] if heard is None else heard
    return fan_out.merged(calls, lead, jobs, stop=stop, unheard=unheard.append)


def fan_threads() -> list[threading.Thread]:
    """Those that are still there when they had a moment to end."""
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("fan-out")]:
        thread.join(5)
    return [thread for thread in threading.enumerate() if thread.name.startswith("fan-out")]


def test_every_call_is_its_own_choice_and_prompts_are_counted_once() -> None:
    texts = [answer("a", 3, 1, 0), answer("b", 3, 2, 3), answer("c", 5, 4, 0), answer("d", 5, 8, 5)]
    chunks = list(merged(plan(), iter(texts[0]), [job(*one) for one in texts[1:]]))
    assert [(choice.index, choice.text) for choice in collected(chunks)] == list(enumerate("abcd"))
    assert [chunk.usage for chunk in chunks if chunk.usage][-1] == Usage(3 + 5, 1 + 2 + 4 + 8, 0)


def test_a_single_call_passes_through() -> None:
    chunks = answer("a", 1, 1)
    assert list(merged(plan(request()), iter(chunks), [])) == chunks


def test_calls_run_side_by_side_and_not_all_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(SIDE_BY_SIDE - 1, timeout=10)

    def begin() -> Generator[CompletionChunk]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()  # every free place but the lead's is taken before any of them goes on
        yield delta("x", STOP)
        with lock:
            running -= 1

    count = 1 + 2 * (SIDE_BY_SIDE - 1)
    hold = threading.Event()

    def lead() -> Generator[CompletionChunk]:
        yield delta("x")
        hold.wait(10)
        yield delta("", STOP)

    seen: list[ChoiceDelta] = []
    for chunk in merged(plan(request(n=count, best_of=count)), lead(), [begin] * (count - 1)):
        seen += chunk.choices
        if len(seen) == count:
            hold.set()
    assert most <= SIDE_BY_SIDE
    assert {one.index for one in seen} == set(range(count))


def test_the_failure_of_one_call_is_the_failure_of_the_request() -> None:
    failure = RateLimitError("busy")
    jobs = [job(delta("b"), failure), job(*answer("c", 1, 1)), job(*answer("d", 1, 1))]
    with pytest.raises(RateLimitError) as caught:
        list(merged(plan(), iter(answer("a", 1, 1)), jobs))
    assert caught.value is failure
    assert not fan_threads()


def test_letting_go_ends_every_call() -> None:
    closed = []

    def endless(name: str) -> Callable[[], Generator[CompletionChunk]]:
        def begin() -> Generator[CompletionChunk]:
            try:
                while True:
                    yield delta(name)
            finally:
                closed.append(name)

        return begin

    with closing(merged(plan(), endless("a")(), [endless(name) for name in "bcd"])) as chunks:
        seen = set()
        for chunk in chunks:
            seen.add(chunk.choices[0].text)
            if len(seen) == 4:
                break
    assert sorted(closed) == ["a", "b", "c", "d"]
    assert not fan_threads()


def test_a_choice_nobody_asked_for_is_an_unreadable_answer() -> None:
    with pytest.raises(BackendError):
        list(merged(plan(), iter(answer("a", 1, 1)), [job(delta("b", STOP, index=1))] * 3))


def test_one_estimate_makes_the_sum_an_estimate() -> None:
    usages = [Usage(1, 1), Usage(1, 1, estimated=True), Usage(1, 1), Usage(1, 1)]
    jobs = [job(delta("x", STOP, usage=usage)) for usage in usages]
    chunks = list(merged(plan(), jobs[0](), jobs[1:]))
    assert chunks[-1].usage == Usage(2, 4, estimated=True)


def test_an_unexpected_failure_is_not_lost_in_its_thread() -> None:
    with pytest.raises(ZeroDivisionError):
        list(merged(plan(), iter(answer("a", 1, 1)), [job(ZeroDivisionError())] * 3))


def test_what_was_generated_and_never_read_is_still_counted() -> None:
    many = [delta("x", usage=Usage(3, number)) for number in range(1, 30)]
    heard: list[Usage] = []
    with closing(merged(plan(), iter(many), [job(*many)] * 3, heard=heard)) as chunks:
        for _ in range(4):
            read = next(chunks)
    assert read.usage is not None
    (usage,) = heard
    assert usage.completion_tokens >= read.usage.completion_tokens
    assert usage.prompt_tokens <= 6


def test_a_failure_does_not_wait_for_a_call_that_has_not_begun() -> None:
    silent, stopped = threading.Event(), threading.Event()

    def begin() -> Generator[CompletionChunk]:
        silent.wait(10)
        yield delta("late")

    failing = job(delta("b"), RateLimitError("busy"))
    with pytest.raises(RateLimitError):
        list(merged(plan(), iter(answer("a", 1, 1)), [failing, begin, begin], stop=stopped.set))
    assert stopped.is_set()
    assert not silent.is_set()
    silent.set()
