"""A request that is claimed and handed in by one function, and fetched and settled by another."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest

from completions.domain.catalog import Capability, ModelPrice, ModelRoute, Parameter
from completions.domain.completion import Choice, Completion, CompletionChunk, CompletionRequest, FinishReason, Usage
from completions.domain.errors import (
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    DuplicateRequestError,
    MeteringError,
    ModelNotFoundError,
    TruncatedStreamError,
)
from completions.domain.events import RetryLaterError
from completions.domain.metering import Outcome
from completions.domain.ports import AsynchronousBackend, Ticket, UpstreamCall
from completions.domain.submissions import UnansweredError
from completions.metering.replay import read_logged
from completions.service.complete import CallContext
from completions.service.submitted import SubmittedCompletions
from fakes import InMemoryLedger, InMemoryRegistry, ManualClock, ScriptedBackend, delta, principal, request, route

TICKET = Ticket("s3://answers/1.out", "s3://failures/1.out")
PRICE = ModelPrice("2026-11", input_nanos=10, cached_input_nanos=1, output_nanos=100)
ANSWER = [delta(" a, b):", FinishReason.STOP, usage=Usage(3, 4))]


class Queue(AsynchronousBackend):
    """Takes every request, and hands out ``answer``."""

    def __init__(self, answer: Sequence[CompletionChunk] | CompletionError, refusal: CompletionError | None = None):
        self.submitted: list[tuple[CompletionRequest, UpstreamCall]] = []
        self._answer = answer
        self._refusal = refusal

    def submit(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall) -> Ticket:
        self.submitted.append((request, call))
        if self._refusal is not None:
            raise self._refusal
        call.dispatched()
        return TICKET

    def collect(self, ticket: Ticket, request: CompletionRequest, route: ModelRoute) -> Sequence[CompletionChunk]:
        assert ticket == TICKET
        if isinstance(self._answer, CompletionError):
            raise self._answer
        return self._answer


class Bench:
    """The use case over fakes."""

    def __init__(self, queue: Queue, ledger: InMemoryLedger | None = None, **capabilities: Capability) -> None:
        self.clock = ManualClock()
        self.ledger = ledger or InMemoryLedger()
        routes = [route(asynchronous=True, price=PRICE), route(model_id="prompt", asynchronous=False)]
        abilities = ScriptedBackend(capabilities={Parameter(name): one for name, one in capabilities.items()})
        self.submitted = SubmittedCompletions(InMemoryRegistry({}, routes), abilities, queue, self.ledger, self.clock)

    def context(self) -> CallContext:
        return CallContext("msg-1", principal(), "openai", self.clock.monotonic(), record_id="msg-1", fingerprint="f")

    @property
    def hour(self) -> timedelta:
        return timedelta(hours=1)


def test_only_what_its_model_answers_later_and_in_one_call_is_taken() -> None:
    bench = Bench(Queue(ANSWER), n=Capability.EMULATED)

    assert bench.submitted.takes(request(), principal())
    assert not bench.submitted.takes(request(n=2, best_of=2), principal())
    assert not bench.submitted.takes(request(model="prompt"), principal())
    with pytest.raises(ModelNotFoundError):
        bench.submitted.takes(request(model="nobody's"), principal())


def test_a_claim_stands_before_the_model_is_asked_and_outlives_the_function() -> None:
    queue = Queue(ANSWER)
    bench = Bench(queue)

    submission = bench.submitted.submit(request(max_tokens=8), bench.context(), bench.clock.now() + bench.hour)

    (reservation,) = bench.ledger.reserved
    assert (reservation.record_id, reservation.fingerprint, reservation.caller_named) == ("msg-1", "f", True)
    assert reservation.lasts_until == bench.clock.now() + bench.hour
    assert bench.ledger.settled == []
    ((_, call),) = queue.submitted
    assert (call.inference_id, call.tenant, call.wait_seconds) == ("msg-1", "team:search", 3600)
    assert (submission.ticket, submission.model) == (TICKET, "demo")


def test_what_the_queue_refuses_is_settled_where_it_was_refused() -> None:
    bench = Bench(Queue(ANSWER, ContextLengthError("too long", param="prompts")))

    with pytest.raises(ContextLengthError):
        bench.submitted.submit(request(), bench.context(), bench.clock.now() + bench.hour)

    (record,) = bench.ledger.settled
    assert (record.outcome, record.attempts, record.usage) == (Outcome.REFUSED, 0, Usage(0, 0))


@pytest.mark.parametrize("error", [DuplicateRequestError("again"), MeteringError("away")])
def test_what_cannot_be_claimed_is_not_handed_in(error: CompletionError) -> None:
    queue = Queue(ANSWER)
    bench = Bench(queue, InMemoryLedger(fail_confirm=error))

    with pytest.raises(type(error)):
        bench.submitted.submit(request(), bench.context(), bench.clock.now() + bench.hour)
    assert queue.submitted == []


def test_an_answer_becomes_a_completion_and_the_record_it_is_settled_with() -> None:
    bench = Bench(Queue(ANSWER))
    submission = bench.submitted.submit(request(), bench.context(), bench.clock.now() + bench.hour)
    bench.clock.advance(90)

    collected = bench.submitted.collect(request(), submission)

    assert collected.completion == Completion("demo", (Choice(0, " a, b):", FinishReason.STOP),), Usage(3, 4))
    assert collected.nanos == 3 * 10 + 4 * 100
    assert collected.total_ms == 90_000
    record = read_logged(collected.record)  # what the usage table is settled from
    assert (record.record_id, record.outcome, record.prompt_tokens, record.completion_tokens) == (
        "msg-1",
        Outcome.SUCCEEDED,
        3,
        4,
    )
    assert (record.nanos, record.price_version, record.total_ms, record.attempts) == (430, "2026-11", 90_000, 1)


def test_an_answer_without_an_end_is_a_failure() -> None:
    bench = Bench(Queue([delta("a")]))
    submission = bench.submitted.submit(request(), bench.context(), bench.clock.now() + bench.hour)

    with pytest.raises(TruncatedStreamError):
        bench.submitted.collect(request(), submission)


class Away(InMemoryRegistry):
    """A table that cannot be read, or that has forgotten its models."""

    def __init__(self, failure: CompletionError | None) -> None:
        super().__init__({}, [])
        self._failure = failure

    def route(self, model: str) -> ModelRoute | None:
        if self._failure is not None:
            raise self._failure
        return None


@pytest.mark.parametrize(
    ("failure", "error"),
    [(BackendUnavailableError("away", detail="throttled"), RetryLaterError), (None, UnansweredError)],
    ids=["unread", "forgotten"],
)
def test_a_registry_that_is_away_is_no_failure_of_the_model(
    failure: CompletionError | None, error: type[Exception]
) -> None:
    bench = Bench(Queue(ANSWER))
    submission = bench.submitted.submit(request(), bench.context(), bench.clock.now() + bench.hour)
    abilities = ScriptedBackend()
    later = SubmittedCompletions(Away(failure), abilities, Queue(ANSWER), bench.ledger, bench.clock)

    with pytest.raises(error):
        later.collect(request(), submission)
