"""When an endpoint is left alone, for how long, and who finds out that it is back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NoReturn

import pytest

from completions.backends.circuit import EndpointCircuits
from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    InvalidRequestError,
    RateLimitError,
    Recourse,
)

FAILURE = BackendError("The model failed to answer.")


class Time:
    """The clock that circuits read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moment = 1_000.0
        monkeypatch.setattr("completions.backends.circuit.time", SimpleNamespace(monotonic=lambda: self.moment))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture
def circuits() -> EndpointCircuits:
    return EndpointCircuits(failures=3, seconds=30)


@pytest.fixture
def endpoint() -> str:
    return "endpoint"


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def ask() -> NoReturn:
        raise error

    return ask


def fail(circuits: EndpointCircuits, endpoint: str, error: CompletionError = FAILURE, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(type(error)) as caught:
            circuits.call(endpoint, raising(error))
        assert caught.value is error


def is_open(circuits: EndpointCircuits, endpoint: str) -> bool:
    try:
        return circuits.call(endpoint, lambda: False)
    except BackendUnavailableError as error:
        return error.detail == "circuit open"


def test_an_endpoint_that_answers_is_asked(circuits: EndpointCircuits, endpoint: str) -> None:
    assert circuits.call(endpoint, lambda: "answer") == "answer"


def test_failures_in_a_row_open_the_circuit(circuits: EndpointCircuits, endpoint: str, clock: Time) -> None:
    fail(circuits, endpoint, times=3)
    clock.moment += 10
    with pytest.raises(BackendUnavailableError) as caught:
        circuits.call(endpoint, raising(AssertionError("asked")))
    assert (caught.value.recourse, caught.value.retry_after) == (Recourse.ELSEWHERE, 20)


def test_a_success_in_between_starts_the_count_again(circuits: EndpointCircuits, endpoint: str, clock: Time) -> None:
    fail(circuits, endpoint, times=2)
    circuits.call(endpoint, lambda: None)
    fail(circuits, endpoint, times=2)
    assert not is_open(circuits, endpoint)


@pytest.mark.parametrize(
    "error",
    [BackendTimeoutError("slow"), BackendUnavailableError("m"), BackendError("m")],
)
def test_what_counts_is_an_endpoint_that_does_not_do_its_work(
    circuits: EndpointCircuits, endpoint: str, clock: Time, error: CompletionError
) -> None:
    fail(circuits, endpoint, error, times=3)
    assert is_open(circuits, endpoint)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("m"),
        RateLimitError("m", recourse=Recourse.AGAIN),
        BackendUnavailableError("overloaded", recourse=Recourse.AGAIN),
        BackendUnavailableError("no such endpoint", recourse=Recourse.ELSEWHERE),
        BackendUnavailableError("starting", recourse=Recourse.WHEN_STARTED),
    ],
)
def test_a_refusal_is_an_answer(circuits: EndpointCircuits, endpoint: str, clock: Time, error: CompletionError) -> None:
    fail(circuits, endpoint, times=2)
    fail(circuits, endpoint, error)
    fail(circuits, endpoint, times=2)
    assert not is_open(circuits, endpoint)


def test_after_the_pause_one_success_closes_it(circuits: EndpointCircuits, endpoint: str, clock: Time) -> None:
    fail(circuits, endpoint, times=3)
    clock.moment += 31
    assert circuits.call(endpoint, lambda: "back") == "back"
    clock.moment += 2
    fail(circuits, endpoint, times=2)
    assert not is_open(circuits, endpoint)


def test_after_the_pause_one_failure_opens_it_again(circuits: EndpointCircuits, endpoint: str, clock: Time) -> None:
    fail(circuits, endpoint, times=3)
    clock.moment += 31
    fail(circuits, endpoint)
    assert is_open(circuits, endpoint)


def test_one_endpoint_says_nothing_about_another(circuits: EndpointCircuits, endpoint: str, clock: Time) -> None:
    fail(circuits, endpoint, times=3)
    assert not is_open(circuits, endpoint + "/component")


def test_while_one_call_finds_out_the_others_are_turned_away(
    circuits: EndpointCircuits, endpoint: str, clock: Time
) -> None:
    fail(circuits, endpoint, times=3)
    clock.moment += 31
    assert circuits.call(endpoint, lambda: is_open(circuits, endpoint))
    assert not is_open(circuits, endpoint)


def test_where_the_one_that_finds_out_never_tells_another_does_in_time(
    circuits: EndpointCircuits, endpoint: str, clock: Time
) -> None:
    fail(circuits, endpoint, times=3)
    clock.moment += 31
    with pytest.raises(KeyboardInterrupt):
        circuits.call(endpoint, raising(KeyboardInterrupt()))
    assert is_open(circuits, endpoint)
    clock.moment += 31
    assert circuits.call(endpoint, lambda: "back") == "back"
    assert not is_open(circuits, endpoint)


def test_a_late_answer_to_an_earlier_call_does_not_close_it(
    circuits: EndpointCircuits, endpoint: str, clock: Time
) -> None:
    circuits.call(endpoint, lambda: fail(circuits, endpoint, times=3))
    assert is_open(circuits, endpoint)


def test_many_threads_lose_no_failure(endpoint: str) -> None:
    circuits = EndpointCircuits(failures=64, seconds=30)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: fail(circuits, endpoint), range(64)))
    assert is_open(circuits, endpoint)
