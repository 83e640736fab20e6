"""Which failed calls are sent again, how long between, and until when; over fakes and a clock that is wound by hand."""

from __future__ import annotations

import pytest

from completions.domain.completion import CompletionChunk, FinishReason
from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    RateLimitError,
    Recourse,
    TruncatedStreamError,
)
from completions.domain.ports import UpstreamCall
from completions.service.dispatch import WAITING, Dispatcher, RetryPolicy, Upstream
from fakes import Attempt, ManualClock, SequencedBackend, delta, request, route

ANSWER = (delta("c"), delta("d", FinishReason.STOP))
BUSY = RateLimitError("busy", recourse=Recourse.AGAIN)
STARTING = BackendUnavailableError("starting", recourse=Recourse.WHEN_STARTED)
CALL = UpstreamCall("request-1", "team:search")


class Bench:
    def __init__(self, *attempts: Attempt, deadline: float | None = None, policy: RetryPolicy | None = None) -> None:
        self.clock = ManualClock(monotonic=1000.0)
        self.backend = SequencedBackend(attempts)
        self.dispatched = 0
        self.dispatcher = Dispatcher(self.backend, self.clock, policy or RetryPolicy(), self._count, deadline)

    def open(self, *, patient: bool = False, **fields: object) -> tuple[list[CompletionChunk], Upstream]:
        """What is yielded on the way, and the answer."""
        waiting = []
        opening = self.dispatcher.open(request(), route(**fields), CALL, patient=patient)
        while True:
            try:
                waiting.append(next(opening))
            except StopIteration as end:
                return waiting, end.value

    def _count(self) -> None:
        self.dispatched += 1


def test_an_answer_is_handed_over_with_its_first_chunk() -> None:
    waiting, upstream = Bench(ANSWER).open()
    assert (waiting, tuple(upstream)) == ([], ANSWER)


@pytest.mark.parametrize("failures", [1, 2])
def test_what_may_be_sent_again_is(failures: int) -> None:
    bench = Bench(*[BUSY] * failures, ANSWER)
    _, upstream = bench.open()
    assert tuple(upstream) == ANSWER
    assert (bench.dispatched, len(bench.clock.slept)) == (failures + 1, failures)


def test_the_pause_grows_and_is_random_and_bounded() -> None:
    policy = RetryPolicy(base_seconds=0.2, most_seconds=1.0)
    for retry, most in [(0, 0.2), (1, 0.4), (2, 0.8), (3, 1.0), (9, 1.0)]:
        delays = {policy.delay(retry) for _ in range(200)}
        assert len(delays) > 100
        assert min(delays) >= 0
        assert most / 2 < max(delays) <= most


def test_attempts_are_counted_and_the_last_failure_is_raised() -> None:
    last = BackendUnavailableError("last", recourse=Recourse.AGAIN)
    bench = Bench(BUSY, BUSY, last, ANSWER)
    with pytest.raises(BackendUnavailableError) as caught:
        bench.open()
    assert (caught.value, bench.dispatched) == (last, 3)


@pytest.mark.parametrize("recourse", [Recourse.NONE, Recourse.ELSEWHERE, Recourse.WHEN_STARTED])
def test_what_may_not_be_sent_again_is_not(recourse: Recourse) -> None:
    bench = Bench(BackendError("m", recourse=recourse), ANSWER)
    with pytest.raises(BackendError):
        bench.open()
    assert (bench.dispatched, bench.clock.slept) == (1, [])


def test_nothing_is_sent_again_once_the_deadline_would_pass_in_between() -> None:
    bench = Bench(*[BUSY] * 50, deadline=1001.0, policy=RetryPolicy(50, 0.4, 0.4))
    with pytest.raises(RateLimitError):
        bench.open()
    assert bench.clock.monotonic() < 1001.0
    assert 2 < bench.dispatched < 50


@pytest.mark.parametrize("failure", [BUSY, BackendUnavailableError("m", recourse=Recourse.AGAIN)])
def test_a_failure_in_the_first_record_counts_as_one_of_the_call(failure: CompletionError) -> None:
    bench = Bench([failure], ANSWER)
    assert tuple(bench.open()[1]) == ANSWER
    assert bench.backend.streams[0].closed


def test_a_failure_after_the_first_record_is_the_readers() -> None:
    bench = Bench([ANSWER[0], BUSY], ANSWER)
    _, upstream = bench.open()
    with pytest.raises(RateLimitError):
        list(upstream)
    assert bench.dispatched == 1


def test_a_stream_without_a_single_record_is_truncated() -> None:
    bench = Bench([])
    with pytest.raises(TruncatedStreamError):
        bench.open()
    assert bench.backend.streams[0].closed


def test_a_model_that_starts_is_waited_for_by_who_can_wait() -> None:
    bench = Bench(STARTING, STARTING, STARTING, STARTING, ANSWER)
    waiting, upstream = bench.open(patient=True)
    assert (waiting, tuple(upstream)) == ([WAITING] * 4, ANSWER)
    assert bench.clock.slept == [10.0] * 4


def test_a_model_that_does_not_start_in_time_is_given_up_before_the_deadline() -> None:
    bench = Bench(*[STARTING] * 9, deadline=1035.0)
    with pytest.raises(BackendUnavailableError):
        bench.open(patient=True)
    assert (bench.dispatched, bench.clock.monotonic()) == (4, 1030.0)


@pytest.mark.parametrize(
    ("deadline", "read_timeout", "wait"),
    [(None, None, None), (1007.0, None, 7.0), (None, 5.0, 5.0), (1007.0, 5.0, 5.0), (1003.0, 5.0, 3.0)],
)
def test_each_wait_is_bounded_by_the_deadline_and_the_models_own_timeout(
    deadline: float | None, read_timeout: float | None, wait: float | None
) -> None:
    bench = Bench(ANSWER, deadline=deadline)
    _, upstream = bench.open(read_timeout_seconds=read_timeout)
    list(upstream)
    assert bench.backend.calls[0].call.wait_seconds == wait
    assert bench.backend.streams[0].waits == ([] if wait is None else [wait] * 3)


def test_a_deadline_that_has_passed_asks_no_model() -> None:
    bench = Bench(ANSWER, deadline=999.0)
    with pytest.raises(BackendTimeoutError):
        bench.open()
    assert (bench.dispatched, bench.dispatcher.late) == (0, True)


def test_a_deadline_that_is_here_leaves_the_shortest_wait_a_socket_can_have() -> None:
    bench = Bench(ANSWER, deadline=1000.0)
    bench.open()
    assert bench.backend.calls[0].call.wait_seconds == 0.01


def test_once_stopped_no_call_goes_out_and_those_in_progress_are_ended() -> None:
    bench = Bench(ANSWER, ANSWER)
    bench.open()
    bench.dispatcher.stop()
    assert bench.backend.streams[0].aborted
    with pytest.raises(BackendTimeoutError):
        bench.open()
    assert bench.dispatched == 1


def test_a_timeout_is_never_repeated() -> None:
    bench = Bench(BackendTimeoutError("slow"), ANSWER)
    with pytest.raises(BackendTimeoutError):
        bench.open()
    assert bench.dispatched == 1
