"""What happens when the model that was asked for cannot be: its fallbacks, the wait for one that starts, the bill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionChunk, FinishReason, Usage
from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    InvalidRequestError,
    RateLimitError,
    Recourse,
    UnsupportedParameterError,
)
from completions.domain.metering import Outcome, Principal
from completions.service.complete import CallContext, CompletionService
from fakes import (
    Attempt,
    InMemoryLedger,
    InMemoryRegistry,
    ManualClock,
    SequencedBackend,
    delta,
    principal,
    request,
    route,
)

STOP = FinishReason.STOP
BUSY = RateLimitError("busy", retry_after=1, recourse=Recourse.AGAIN)
ABSENT = BackendUnavailableError("absent", recourse=Recourse.ELSEWHERE)
STARTING = BackendUnavailableError("starting", retry_after=300, recourse=Recourse.WHEN_STARTED)
WAITING = CompletionChunk()


def answer(text: str) -> Sequence[CompletionChunk]:
    return [delta(text, usage=Usage(3, 1)), delta("", STOP, usage=Usage(3, 2))]


class Bench:
    """``big`` falls back to ``middle`` and then to ``small``; each has the attempts it is given."""

    def __init__(
        self, attempts: Mapping[str, Sequence[Attempt]], *, deadline: float | None = None, **fields: object
    ) -> None:
        self.clock = ManualClock(monotonic=1000.0)
        self.ledger = InMemoryLedger()
        self.backend = SequencedBackend({name: attempts.get(name, ()) for name in ("big", "middle", "small")})
        routes = [
            self.route("big", **{"fallbacks": ("middle", "small"), **fields}),
            self.route("middle"),
            self.route("small"),
        ]
        self.service = CompletionService(InMemoryRegistry({}, routes), self.backend, self.ledger, self.clock)
        self.deadline = deadline

    @staticmethod
    def route(name: str, **fields: object) -> ModelRoute:
        return route(model_id=name, endpoint_name=name, **fields)

    def context(self, *, patient: bool = False, owner: Principal | None = None) -> CallContext:
        return CallContext("request-1", owner or principal(), "openai", 1000.0, self.deadline, patient)

    def text(self, **fields: object) -> tuple[str, str]:
        completion = self.service.complete(request(model="big", **fields), self.context())
        return completion.model, completion.choices[0].text

    @property
    def asked(self) -> list[str]:
        return [call.route.endpoint_name for call in self.backend.calls]


@pytest.mark.parametrize("failure", [ABSENT, STARTING])
def test_a_model_that_cannot_answer_hands_over_to_its_fallback(failure: CompletionError) -> None:
    bench = Bench({"big": [failure], "middle": [answer("m")]})
    assert bench.text() == ("middle", "m")
    assert bench.asked == ["big", "middle"]


def test_a_busy_model_is_tried_again_before_its_fallback_is() -> None:
    bench = Bench({"big": [BUSY] * 3, "middle": [answer("m")]})
    assert bench.text() == ("middle", "m")
    assert bench.asked == ["big", "big", "big", "middle"]


def test_fallbacks_are_tried_in_their_order() -> None:
    bench = Bench({"big": [ABSENT], "middle": [ABSENT], "small": [answer("s")]})
    assert bench.text() == ("small", "s")


def test_one_record_names_the_model_that_answered_and_counts_every_call() -> None:
    bench = Bench({"big": [BUSY, ABSENT], "middle": [answer("m")]})
    bench.text()
    (record,) = bench.ledger.settled
    assert (record.reservation.model, record.model, record.endpoint_name) == ("big", "middle", "middle")
    assert (record.attempts, record.usage, record.outcome) == (3, Usage(3, 2), Outcome.SUCCEEDED)
    assert record.variant == "variant-of-middle"
    assert len(bench.ledger.reserved) == 1


def test_when_no_model_answers_the_first_ones_failure_is_told() -> None:
    bench = Bench({"big": [BUSY] * 3, "middle": [ABSENT], "small": [STARTING]})
    with pytest.raises(RateLimitError) as caught:
        bench.text()
    assert caught.value.retry_after == 1
    (record,) = bench.ledger.settled
    assert (record.attempts, record.usage) == (5, Usage(0, 0))


@pytest.mark.parametrize(
    "failure", [BackendError("m"), BackendTimeoutError("slow"), InvalidRequestError("top_p", param="top_p")]
)
def test_a_call_that_may_have_cost_something_is_never_made_again_anywhere(failure: CompletionError) -> None:
    bench = Bench({"big": [failure], "middle": [answer("m")]})
    with pytest.raises(type(failure)):
        bench.text()
    assert bench.asked == ["big"]


def test_once_output_has_begun_no_other_model_is_asked() -> None:
    bench = Bench({"big": [[delta("b", usage=Usage(3, 1)), BUSY]], "middle": [answer("m")]})
    with pytest.raises(RateLimitError):
        bench.text()
    assert bench.asked == ["big"]
    (record,) = bench.ledger.settled
    assert (record.outcome, record.usage) == (Outcome.FAILED, Usage(3, 1))


def test_a_fallback_the_key_may_not_use_is_passed_over() -> None:
    bench = Bench({"big": [ABSENT], "small": [answer("s")]})
    owner = principal(allowed_models=frozenset({"big", "small"}))
    completion = bench.service.complete(request(model="big"), bench.context(owner=owner))
    assert completion.model == "small"


def test_a_fallback_that_does_not_exist_is_passed_over() -> None:
    bench = Bench({"big": [ABSENT], "small": [answer("s")]}, fallbacks=("gone", "small"))
    assert bench.text() == ("small", "s")


def test_a_fallback_that_cannot_carry_the_request_is_passed_over() -> None:
    refused = {Parameter.ECHO: Capability.REFUSED}
    bench = Bench({"big": [ABSENT], "small": [answer("s")]})
    bench.service = CompletionService(
        InMemoryRegistry(
            {},
            [
                bench.route("big", fallbacks=("middle", "small")),
                bench.route("middle", capabilities=refused),
                bench.route("small"),
            ],
        ),
        bench.backend,
        bench.ledger,
        bench.clock,
    )
    assert bench.text(echo=True) == ("small", "s")


def test_what_the_first_model_cannot_carry_is_the_callers_to_know() -> None:
    bench = Bench({"middle": [answer("m")]}, capabilities={Parameter.ECHO: Capability.REFUSED})
    with pytest.raises(UnsupportedParameterError):
        bench.text(echo=True)
    assert bench.asked == []


def test_a_streams_model_is_the_one_that_answers() -> None:
    bench = Bench({"big": [ABSENT], "middle": [answer("m")]})
    with bench.service.stream(request(model="big", stream=True), bench.context()) as stream:
        assert stream.model == "middle"


# Scaled to zero


def test_a_model_scaled_to_zero_is_refused_at_once_unless_it_says_to_wait() -> None:
    bench = Bench({"big": [STARTING] * 9}, fallbacks=())
    with pytest.raises(BackendUnavailableError) as caught:
        bench.service.stream(request(model="big", stream=True), bench.context(patient=True))
    assert (caught.value.retry_after, bench.asked) == (300, ["big"])


def test_a_caller_that_cannot_be_kept_waiting_is_sent_away() -> None:
    bench = Bench({"big": [STARTING] * 9}, fallbacks=(), wait_for_start=True)
    with pytest.raises(BackendUnavailableError):
        bench.service.complete(request(model="big"), bench.context(patient=False))
    assert bench.asked == ["big"]


def test_a_patient_caller_hears_from_us_until_the_model_has_started() -> None:
    bench = Bench({"big": [STARTING] * 4 + [answer("b")]}, fallbacks=(), wait_for_start=True)
    with bench.service.stream(request(model="big", stream=True), bench.context(patient=True)) as stream:
        chunks = list(stream)
    assert chunks == [WAITING, WAITING, WAITING, *answer("b")]
    (record,) = bench.ledger.settled
    assert (record.outcome, record.usage, record.attempts) == (Outcome.SUCCEEDED, Usage(3, 2), 5)


def test_waiting_is_no_output() -> None:
    bench = Bench({"big": [STARTING] * 9}, fallbacks=(), wait_for_start=True, deadline=1025.0)
    stream = bench.service.stream(request(model="big", stream=True), bench.context(patient=True))
    with pytest.raises(BackendUnavailableError), stream:
        list(stream)
    (record,) = bench.ledger.settled
    assert (record.outcome, record.timings.first_token_ms, record.usage) == (Outcome.FAILED, None, Usage(0, 0))


def test_fallbacks_come_before_waiting() -> None:
    bench = Bench({"big": [STARTING, STARTING, answer("b")], "middle": [answer("m")]}, wait_for_start=True)
    with bench.service.stream(request(model="big", stream=True), bench.context(patient=True)) as stream:
        assert stream.model == "middle"
    assert bench.clock.slept == []


def test_the_model_itself_is_waited_for_when_no_fallback_answers() -> None:
    attempts: dict[str, Sequence[Attempt]] = {
        "big": [STARTING, STARTING, answer("b")],
        "middle": [ABSENT],
        "small": [ABSENT],
    }
    bench = Bench(attempts, wait_for_start=True)
    with bench.service.stream(request(model="big", stream=True), bench.context(patient=True)) as stream:
        assert (stream.model, list(stream)) == ("big", [WAITING, *answer("b")])


def test_a_caller_who_hangs_up_while_waiting_is_settled_as_aborted() -> None:
    bench = Bench({"big": [STARTING] * 9}, fallbacks=(), wait_for_start=True)
    stream = bench.service.stream(request(model="big", stream=True), bench.context(patient=True))
    next(stream)
    stream.close()
    (record,) = bench.ledger.settled
    assert (record.outcome, record.usage) == (Outcome.ABORTED, Usage(0, 0))


# Several calls for one request


def test_every_call_of_a_fan_out_has_a_name_of_its_own_and_the_same_tenant() -> None:
    emulated = {Parameter.N: Capability.EMULATED}
    bench = Bench({"big": [answer("a"), answer("b"), answer("c")]}, capabilities=emulated)
    completion = bench.service.complete(request(model="big", n=3, best_of=3), bench.context())
    assert sorted(choice.text for choice in completion.choices) == ["a", "b", "c"]
    calls = [call.call for call in bench.backend.calls]
    assert sorted(call.inference_id for call in calls) == ["request-1", "request-1-1", "request-1-2"]
    assert {call.tenant for call in calls} == {"team:search"}
    (record,) = bench.ledger.settled
    assert (record.usage, record.attempts) == (Usage(3, 6), 3)


def test_a_model_answers_all_of_a_request_or_none_of_it() -> None:
    emulated = {Parameter.N: Capability.EMULATED}
    bench = Bench({"big": [ABSENT], "middle": [answer("a"), answer("b")]}, capabilities=emulated)
    bench.service = CompletionService(
        InMemoryRegistry(
            {},
            [
                bench.route("big", fallbacks=("middle",), capabilities=emulated),
                bench.route("middle", capabilities=emulated),
            ],
        ),
        bench.backend,
        bench.ledger,
        bench.clock,
    )
    completion = bench.service.complete(request(model="big", n=2, best_of=2), bench.context())
    assert (completion.model, len(completion.choices)) == ("middle", 2)
    assert bench.asked == ["big", "middle", "middle"]
