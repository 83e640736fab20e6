"""How batches are delivered again: what failed and all behind it, in halves, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import Any

import pytest

from completions_cli.local.schedule import run_schedule, scheduled_event
from completions_cli.local.stream_poller import StreamPoller
from completions_cli.local.triggers import ScheduleTrigger, StreamTrigger, Target

TARGET = Target("Worker", "module.handler", 3)


class NoWait(Event):
    """Passes time without taking any."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


class Function:
    """Keeps the numbers it was called with; ``answer`` makes the reply of them."""

    def __init__(self, answer: Callable[[list[int]], Any]) -> None:
        self.calls: list[list[int]] = []
        self._answer = answer

    def __call__(self, event: Mapping[str, Any]) -> Any:
        numbers = [int(record["dynamodb"]["SequenceNumber"]) for record in event["Records"]]
        self.calls.append(numbers)
        return self._answer(numbers)


def failing(numbers: Sequence[int]) -> dict[str, Any]:
    return {"batchItemFailures": [{"itemIdentifier": str(number)} for number in numbers]}


def deliver(function: Function, count: int, attempts: int = 4, bisect: bool = False) -> None:
    trigger = StreamTrigger(TARGET, "UsageTable", 100, attempts, bisect, [{}])
    poller = StreamPoller(None, trigger, function, NoWait())
    poller.deliver([{"dynamodb": {"SequenceNumber": str(number)}} for number in range(count)])


@pytest.mark.parametrize("reply", [None, {}, {"batchItemFailures": []}])
def test_what_worked_is_not_sent_again(reply: Any) -> None:
    function = Function(lambda _: reply)
    deliver(function, 3)
    assert function.calls == [[0, 1, 2]]


def test_the_first_that_failed_and_all_behind_it_come_again() -> None:
    replies = iter([failing([3, 1]), failing([])])
    function = Function(lambda _: next(replies))
    deliver(function, 5)
    assert function.calls == [[0, 1, 2, 3, 4], [1, 2, 3, 4]]


def test_a_function_that_raises_gets_all_of_it_again() -> None:
    outcomes = iter([True, False])

    def answer(_: list[int]) -> None:
        if next(outcomes):
            raise RuntimeError("broken")

    function = Function(answer)
    deliver(function, 2)
    assert function.calls == [[0, 1], [0, 1]]


def test_a_number_that_was_not_sent_fails_the_whole_batch() -> None:
    replies = iter([failing([99]), None])
    function = Function(lambda _: next(replies))
    deliver(function, 2)
    assert function.calls == [[0, 1], [0, 1]]


def test_it_ends_after_so_many_attempts() -> None:
    function = Function(failing)
    deliver(function, 1, attempts=3)
    assert len(function.calls) == 4


def test_halving_gets_everything_but_the_poison_through() -> None:
    done: set[int] = set()

    def answer(numbers: list[int]) -> None:
        if 5 in numbers:
            raise RuntimeError("poison")
        done.update(numbers)

    deliver(Function(answer), 8, bisect=True)
    assert done == set(range(8)) - {5}


def test_a_schedule_goes_on_after_a_failure() -> None:
    stop = Event()
    calls: list[Mapping[str, Any]] = []

    def call(event: Mapping[str, Any]) -> None:
        calls.append(event)
        if len(calls) == 3:
            stop.set()
        raise RuntimeError("broken")

    run_schedule(ScheduleTrigger(TARGET, "WorkerMinute", 0), call, stop)
    assert len(calls) == 3
    assert calls[0].keys() == scheduled_event("x").keys()
    assert calls[0]["resources"][0].endswith("/WorkerMinute")
