"""One request from its model to its settled record, over fakes.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest

from completions.domain.catalog import Capability, ModelPrice, Parameter
from completions.domain.completion import Choice, Completion, CompletionChunk, FinishReason, Logprobs, Usage
from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    DuplicateRequestError,
    InvalidRequestError,
    MeteringError,
    ModelNotFoundError,
    RateLimitError,
    TruncatedStreamError,
    UnsupportedParameterError,
)
from completions.domain.limits import Charge
from completions.domain.metering import Outcome, Timings, UsageRecord, plain_record
from completions.domain.ports import Registry
from completions.service.complete import CallContext, CompletionService, CompletionStream
from fakes import (
    InMemoryLedger,
    InMemoryRegistry,
    ManualClock,
    ScriptedBackend,
    ScriptItem,
    delta,
    principal,
    request,
    route,
)

STOP = FinishReason.STOP
ANSWER = [delta("c", usage=Usage(3, 1)), delta("d", STOP, usage=Usage(3, 2)), CompletionChunk((), Usage(3, 2, 1))]
STREAMED = request(stream=True)


class Bench:
    """A service over fakes, and a caller."""

    def __init__(
        self,
        backend: ScriptedBackend,
        *,
        ledger: InMemoryLedger | None = None,
        registry: Registry | None = None,
        clock: ManualClock | None = None,
    ) -> None:
        self.clock = clock or ManualClock()
        self.ledger = ledger or InMemoryLedger()
        self.backend = backend
        self.service = CompletionService(
            registry or InMemoryRegistry({}, [route(aliases=("alias",))]), backend, self.ledger, self.clock
        )

    def context(self, **overrides: Any) -> CallContext:
        fields = {"request_id": "request-1", "principal": principal(), "dialect": "openai", "arrived": 999.5}
        return CallContext(**{**fields, **overrides})

    def complete(self, canonical: Any = None, **context: Any) -> Completion:
        return self.service.complete(canonical or request(), self.context(**context))

    def stream(self, canonical: Any = None, **context: Any) -> CompletionStream:
        return self.service.stream(canonical or STREAMED, self.context(**context))

    @property
    def record(self) -> UsageRecord:
        """The one record there is."""
        (record,) = self.ledger.settled
        return record


def texts(stream: CompletionStream) -> list[str]:
    return [choice.text for chunk in stream for choice in chunk.choices]


# Success


def test_a_buffered_answer_is_the_joined_stream() -> None:
    assert Bench(ScriptedBackend(ANSWER)).complete() == Completion("demo", (Choice(0, "cd", STOP),), Usage(3, 2, 1))


def test_a_streamed_answer_is_what_the_backend_sends() -> None:
    with Bench(ScriptedBackend(ANSWER)).stream() as stream:
        assert list(stream) == ANSWER


def test_a_stream_tells_its_running_usage() -> None:
    with Bench(ScriptedBackend(ANSWER)).stream() as stream:
        assert [(next(stream), stream.usage)[1] for _ in range(3)] == [Usage(3, 1), Usage(3, 2), Usage(3, 2, 1)]


def test_a_success_settles_one_record() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    bench.complete()
    record = bench.record
    assert (record.outcome, record.usage, record.attempts, record.variant, record.error) == (
        Outcome.SUCCEEDED,
        Usage(3, 2, 1),
        1,
        "AllTraffic",
        None,
    )


def test_a_stream_read_to_its_end_settles_one_record_even_when_closed_twice() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    with bench.stream() as stream:
        texts(stream)
        stream.close()
    assert bench.record.outcome is Outcome.SUCCEEDED


def test_the_claim_names_who_asked_for_what() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    bench.complete(request(model="alias"))
    (claim,) = bench.ledger.reserved
    assert claim == bench.record.reservation
    assert (claim.record_id, claim.principal, claim.dialect, claim.model, claim.endpoint_name, claim.streamed) == (
        "request-1",
        principal(),
        "openai",
        "demo",
        "demo-endpoint",
        False,
    )
    assert claim.created_at == bench.clock.now()


def test_timings_count_from_arrival() -> None:
    clock = ManualClock()
    script: list[ScriptItem] = [lambda: clock.advance(0.25), ANSWER[0], lambda: clock.advance(1), *ANSWER[1:]]
    bench = Bench(ScriptedBackend(script), clock=clock)
    bench.complete(arrived=clock.monotonic() - 0.5)
    assert bench.record.timings == Timings(queue_ms=500, first_token_ms=750, total_ms=1750)


def test_the_backend_is_closed_after_success() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    bench.complete()
    assert [stream.closed for stream in bench.backend.streams] == [True]


# Refusals before the GPU


@pytest.mark.parametrize(
    ("model", "allowed"), [("nobody", None), ("demo", frozenset[str]()), ("alias", frozenset({"alias"})), ("", None)]
)
def test_a_model_unknown_or_not_allowed_does_not_exist(model: str, allowed: frozenset[str] | None) -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    with pytest.raises(ModelNotFoundError) as caught:
        bench.complete(request(model=model), principal=principal(allowed_models=allowed))
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert (bench.ledger.reserved, bench.ledger.settled, bench.backend.calls) == ([], [], [])


def test_a_key_may_use_an_allowed_model_through_its_alias() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    assert (
        bench.complete(request(model="alias"), principal=principal(allowed_models=frozenset({"demo"}))).model == "demo"
    )


def test_a_parameter_the_model_cannot_carry_is_refused_before_the_claim() -> None:
    bench = Bench(ScriptedBackend(ANSWER, capabilities={Parameter.LOGPROBS: Capability.REFUSED}))
    with pytest.raises(UnsupportedParameterError) as caught:
        bench.complete(request(logprobs=1))
    assert caught.value.param == "logprobs"
    assert (bench.ledger.reserved, bench.ledger.settled, bench.backend.calls) == ([], [], [])


def test_a_failed_claim_never_reaches_the_backend() -> None:
    bench = Bench(ScriptedBackend(ANSWER), ledger=InMemoryLedger(fail_reserve=True))
    with pytest.raises(MeteringError):
        bench.complete()
    assert (bench.backend.calls, bench.ledger.settled) == ([], [])


def test_the_same_request_twice_is_served_and_charged_once() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    bench.complete()
    with pytest.raises(DuplicateRequestError):
        bench.complete()
    assert (len(bench.backend.calls), len(bench.ledger.settled)) == (1, 1)


# Failures


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequestError("m"), Outcome.REFUSED),
        (ContextLengthError("m"), Outcome.REFUSED),
        (RateLimitError("m"), Outcome.REFUSED),
        (BackendUnavailableError("m"), Outcome.FAILED),
        (BackendTimeoutError("m"), Outcome.FAILED),
        (BackendError("m"), Outcome.FAILED),
    ],
)
@pytest.mark.parametrize("when", ["at the call", "before the first chunk"])
def test_a_failure_before_output_settles_one_record_without_tokens(
    error: CompletionError, outcome: Outcome, when: str
) -> None:
    bench = Bench(ScriptedBackend(refusal=error) if when == "at the call" else ScriptedBackend([error]))
    with pytest.raises(type(error)):
        bench.stream()
    record = bench.record
    assert (record.outcome, record.usage, record.error) == (outcome, Usage(0, 0), type(error).__name__)
    assert record.timings.first_token_ms is None


@pytest.mark.parametrize("error", [BackendError("m"), InvalidRequestError("m"), BackendTimeoutError("m")])
def test_a_failure_after_output_settles_what_was_generated(error: CompletionError) -> None:
    bench = Bench(ScriptedBackend([ANSWER[0], error]))
    with bench.stream() as stream, pytest.raises(type(error)):
        texts(stream)
    record = bench.record
    assert (record.outcome, record.usage, record.error) == (Outcome.FAILED, Usage(3, 1), type(error).__name__)
    assert bench.backend.streams[0].closed


@pytest.mark.parametrize("script", [[], ANSWER[:1], [*ANSWER[:1], CompletionChunk((), Usage(3, 1))]])
def test_an_answer_without_a_finish_reason_is_truncated(script: list[CompletionChunk]) -> None:
    bench = Bench(ScriptedBackend(script))
    with pytest.raises(TruncatedStreamError):
        bench.complete()
    assert (bench.record.outcome, bench.record.error) == (Outcome.FAILED, "TruncatedStreamError")


def test_an_answer_with_one_unfinished_choice_is_truncated() -> None:
    bench = Bench(ScriptedBackend([delta("a", STOP, index=0), delta("b", index=1)]))
    with pytest.raises(TruncatedStreamError):
        bench.complete(request(n=2, best_of=2))
    assert bench.record.outcome is Outcome.FAILED


@pytest.mark.parametrize("script", [[ZeroDivisionError()], [ANSWER[0], ZeroDivisionError()]])
def test_a_fault_of_ours_settles_one_failed_record(script: list[Any]) -> None:
    bench = Bench(ScriptedBackend(script))
    with pytest.raises(ZeroDivisionError):
        bench.complete()
    assert bench.record.outcome is Outcome.FAILED
    assert bench.backend.streams[0].closed


def test_a_fault_of_ours_at_the_call_settles_one_failed_record() -> None:
    bench = Bench(ScriptedBackend(refusal=ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        bench.complete()
    assert bench.record.outcome is Outcome.FAILED


# Callers who hang up


def test_a_caller_who_hangs_up_pays_the_last_running_count() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    stream = bench.stream()
    next(stream)
    stream.close()
    assert (bench.record.outcome, bench.record.usage) == (Outcome.ABORTED, Usage(3, 1))
    assert bench.backend.streams[0].closed


def test_a_caller_who_hangs_up_before_reading_pays_the_first_count() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    bench.stream().close()
    assert (bench.record.outcome, bench.record.usage) == (Outcome.ABORTED, Usage(3, 1))


def test_closing_twice_settles_once() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    stream = bench.stream()
    stream.close()
    stream.close()
    assert bench.record.outcome is Outcome.ABORTED


# Usage that never came


def test_a_caller_who_leaves_at_the_finish_reason_has_the_whole_answer() -> None:
    bench = Bench(ScriptedBackend([delta("cd", STOP, usage=Usage(3, 2)), CompletionChunk((), Usage(3, 2))]))
    stream = bench.stream(STREAMED)
    next(stream)
    stream.close()
    assert [record.outcome for record in bench.ledger.settled] == [Outcome.SUCCEEDED]


def test_ranked_results_cannot_be_streamed() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    with pytest.raises(InvalidRequestError) as caught:
        bench.stream(request(stream=True, best_of=2))
    assert caught.value.param == "best_of"
    assert bench.ledger.reserved == []


def test_each_wait_for_the_backend_is_cut_to_the_time_that_is_left() -> None:
    clock = ManualClock()
    backend = ScriptedBackend([delta("c"), lambda: clock.advance(2), delta("d", STOP)])
    bench = Bench(backend, clock=clock)
    bench.complete(request(deadline_ms=5_000))
    # half a second had gone before; two more go by while the second chunk is awaited
    assert backend.streams[0].waits == [4.5, 4.5, 2.5]


def test_without_a_deadline_no_wait_is_cut() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    bench.complete(request())
    assert bench.backend.streams[0].waits == []


def test_a_refusal_by_the_container_names_what_the_caller_wrote() -> None:
    refusal = InvalidRequestError("Too long.", param="prompt")
    bench = Bench(ScriptedBackend([refusal]))
    with pytest.raises(InvalidRequestError) as caught:
        bench.complete(request(param_names={"prompts": "messages"}))
    assert caught.value.param == "messages"


def test_stop_texts_beyond_the_containers_number_are_cut_here() -> None:
    backend = ScriptedBackend([delta("one F"), delta("IVE two", STOP)])
    bench = Bench(backend)
    answer = bench.complete(request(stop=("a1", "b2", "c3", "d4", "FIVE")))
    assert answer.choices[0].text == "one "
    assert backend.calls[0].request.stop == ("a1", "b2", "c3", "d4")


def test_an_infill_ends_at_the_familys_own_markers() -> None:
    backend = ScriptedBackend([delta("x<|file_sep|>y", STOP)])
    registry = InMemoryRegistry({}, [route(fim_family="qwen")])
    answer = Bench(backend, registry=registry).complete(
        request(prompts=("<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",))
    )
    assert answer.choices[0].text == "x"


def test_another_reading_of_the_models_name_is_tried() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    assert bench.complete(request(model="provider/alias", other_models=("alias",))).model == route().model_id


def test_without_a_count_each_delta_and_four_bytes_of_the_prompt_are_taken_for_a_token() -> None:
    bench = Bench(ScriptedBackend([delta("c"), delta("d"), delta("", STOP)]))
    assert bench.complete().usage == Usage(2, 2, estimated=True)
    assert bench.record.usage == Usage(2, 2, estimated=True)


def test_a_streamed_estimate_ends_the_stream() -> None:
    bench = Bench(ScriptedBackend([delta("c"), delta("d", STOP)]))
    with bench.stream() as stream:
        assert list(stream)[-1] == CompletionChunk((), Usage(2, 2, estimated=True))
    assert bench.record.outcome is Outcome.SUCCEEDED


def test_an_aborted_answer_without_a_count_is_estimated() -> None:
    bench = Bench(ScriptedBackend([delta("c"), delta("d", STOP)]))
    bench.stream().close()
    assert bench.record.usage == Usage(2, 1, estimated=True)


# best_of


def scored(index: int, text: str, *values: float | None) -> CompletionChunk:
    tokens = tuple(text[at : at + 1] for at in range(len(values)))
    probabilities = Logprobs(tokens, values, (None,) * len(values), tuple(range(len(values))))
    return delta(text, STOP, index=index, logprobs=probabilities)


RANKED = {Parameter.BEST_OF: Capability.EMULATED}
CANDIDATES = [
    scored(0, "ab", -1.0, -1.0),
    scored(1, "c", -0.9),
    scored(2, "defg", -0.1, -0.1, -0.1, -0.1),
    CompletionChunk((), Usage(3, 7)),
]


def test_the_best_candidates_by_mean_logprob_are_returned_in_order() -> None:
    answer = Bench(ScriptedBackend(CANDIDATES, capabilities=RANKED)).complete(request(n=2, best_of=3))
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "defg"), (1, "c")]


def test_discarded_candidates_are_paid_for() -> None:
    bench = Bench(ScriptedBackend(CANDIDATES, capabilities=RANKED))
    assert bench.complete(request(n=1, best_of=3)).usage == Usage(3, 7)
    assert bench.record.usage == Usage(3, 7)


def test_ranking_asks_the_backend_for_every_candidate_with_logprobs() -> None:
    bench = Bench(ScriptedBackend(CANDIDATES, capabilities=RANKED))
    bench.complete(request(n=2, best_of=3))
    asked = bench.backend.calls[0].request
    assert (asked.n, asked.logprobs) == (3, 0)


def test_logprobs_used_for_ranking_alone_are_dropped() -> None:
    answer = Bench(ScriptedBackend(CANDIDATES, capabilities=RANKED)).complete(request(n=2, best_of=3))
    assert [choice.logprobs for choice in answer.choices] == [None, None]


def test_logprobs_that_were_asked_for_are_kept() -> None:
    answer = Bench(ScriptedBackend(CANDIDATES, capabilities=RANKED)).complete(request(best_of=3, logprobs=0))
    assert answer.choices[0].logprobs is not None


def test_each_prompt_of_a_batch_is_ranked_by_itself() -> None:
    script = [scored(0, "a", -1.0), scored(1, "b", -2.0), scored(2, "c", -9.0), scored(3, "d", -8.0)]
    bench = Bench(ScriptedBackend(script, capabilities=RANKED))
    answer = bench.complete(request(prompts=("p", "q"), n=1, best_of=2))
    assert [choice.text for choice in answer.choices] == ["a", "d"]


def test_the_echoed_prompt_has_no_weight_in_the_ranking() -> None:
    # the prompt "xyz" costs -9 a token; of the candidates themselves, "A" (-1.0) is better than "BBBBBB" (-1.2)
    short = scored(0, "xyzA", None, -9.0, -9.0, -1.0)
    long = scored(1, "xyzBBBBBB", None, -9.0, -9.0, *[-1.2] * 6)
    bench = Bench(ScriptedBackend([short, long], capabilities=RANKED))
    answer = bench.complete(request(prompts=("xyz",), n=1, best_of=2, echo=True))
    assert [choice.text for choice in answer.choices] == ["xyzA"]


def test_a_container_that_ranks_by_itself_is_asked_to() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    bench.complete(request(n=1, best_of=3))
    asked = bench.backend.calls[0].request
    assert (asked.n, asked.best_of) == (1, 3)


# Deadlines


class Slow(Bench):
    """The second of three chunks comes ``pause`` seconds late."""

    def __init__(self, pause: float) -> None:
        middle = delta("x", usage=Usage(3, 2))
        super().__init__(ScriptedBackend([ANSWER[0], lambda: self.clock.advance(pause), middle, delta("d", STOP)]))


@pytest.mark.parametrize(
    ("canonical", "context"),
    [
        (request(), {"deadline": 1001.0}),
        (request(deadline_ms=1500), {}),
        (request(deadline_ms=1500), {"deadline": 9999.0}),
        (request(deadline_ms=99_000), {"deadline": 1001.0}),
    ],
)
def test_the_earliest_deadline_ends_an_answer_and_its_tokens_are_settled(
    canonical: Any, context: dict[str, Any]
) -> None:
    bench = Slow(pause=2)
    with pytest.raises(BackendTimeoutError):
        bench.complete(canonical, **context)
    assert (bench.record.outcome, bench.record.usage) == (Outcome.FAILED, Usage(3, 2))
    assert bench.backend.streams[0].closed


def test_an_answer_within_its_deadline_is_whole() -> None:
    bench = Slow(pause=0.5)
    assert bench.complete(deadline=1001.0).choices[0].text == "cxd"


# Metering that fails afterwards


def test_a_settlement_that_fails_does_not_take_the_answer_away() -> None:
    bench = Bench(ScriptedBackend(ANSWER), ledger=InMemoryLedger(fail_settle=True))
    assert bench.complete().choices[0].text == "cd"


def test_a_settlement_that_fails_does_not_hide_the_real_failure() -> None:
    bench = Bench(ScriptedBackend([BackendError("m")]), ledger=InMemoryLedger(fail_settle=True))
    with pytest.raises(BackendError):
        bench.complete()


# What is sent on


def test_a_suffix_reaches_the_backend_folded_into_the_prompt() -> None:
    registry = InMemoryRegistry({}, [route(fim_family="starcoder")])
    bench = Bench(ScriptedBackend(ANSWER), registry=registry)
    bench.complete(request(suffix="):"))
    asked = bench.backend.calls[0].request
    assert (asked.prompts, asked.suffix) == (("<fim_prefix>def f(<fim_suffix>):<fim_middle>",), None)


def test_the_backend_is_told_the_request_id() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    bench.complete(request_id="request-9")
    assert bench.backend.calls[0].call.inference_id == "request-9"


# The claim, which may be written while the model is asked


DUPLICATE = DuplicateRequestError("This request was already served.")


def test_nothing_of_an_answer_is_given_away_before_its_claim_is_written() -> None:
    bench = Bench(ScriptedBackend(ANSWER), ledger=InMemoryLedger(fail_confirm=DUPLICATE))
    with pytest.raises(DuplicateRequestError):
        bench.stream()
    assert bench.backend.streams[0].closed
    assert len(bench.ledger.settled) == 1


def test_a_claim_that_cannot_be_written_is_a_failure_of_ours() -> None:
    bench = Bench(ScriptedBackend(ANSWER), ledger=InMemoryLedger(fail_confirm=MeteringError("m")))
    with pytest.raises(MeteringError):
        bench.complete()


def test_a_record_costs_what_the_model_that_answered_costs() -> None:
    price = ModelPrice("2026-11", 10, 1, 100)
    registry = InMemoryRegistry({}, [route(price=price)])
    bench = Bench(ScriptedBackend(ANSWER), registry=registry)
    bench.complete()
    assert (bench.record.charge, bench.record.price_version) == (Charge(5, 2 * 10 + 1 * 1 + 2 * 100), "2026-11")
    assert bench.record.reservation.estimate.nanos >= bench.record.charge.nanos


def test_the_callers_own_name_is_the_records() -> None:
    bench = Bench(ScriptedBackend(ANSWER))
    bench.complete(record_id="idem-1", fingerprint="f")
    reservation = bench.record.reservation
    assert (reservation.record_id, reservation.request_id) == ("idem-1", "request-1")
    assert (reservation.caller_named, reservation.fingerprint) == (True, "f")


def test_a_record_that_cannot_be_written_is_in_the_log_whole() -> None:
    bench = Bench(ScriptedBackend(ANSWER), ledger=InMemoryLedger(fail_settle=True))
    with patch("completions.service.complete.logger.error") as error:
        bench.complete()
    ((event,), fields) = error.call_args
    assert event == "usage_record_unwritten"
    assert fields["record"] == plain_record(bench.record)
    assert json.loads(json.dumps(fields["record"])) == fields["record"]


def test_a_caller_who_goes_ends_the_wait_for_the_model_and_is_settled_as_gone() -> None:
    bench = Bench(ScriptedBackend([delta("c", usage=Usage(3, 1)), BackendError("The answer was given up.")]))
    stream = bench.stream()
    next(stream)
    stream.abort()
    assert bench.backend.streams[0].aborted
    with pytest.raises(BackendError):
        next(stream)
    assert (bench.record.outcome, bench.record.usage) == (Outcome.ABORTED, Usage(3, 1))
