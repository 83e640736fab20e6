"""The use case: resolve the model, check the parameters, claim, ask the backend and its fallbacks, settle.

The claim is settled whatever happens: success, refusal, failure, or a caller who hangs up. It is settled in the
generator's own ``finally`` and not in a background task, which a cancelled response would skip.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Self

from completions.domain.catalog import ModelRoute
from completions.domain.completion import Completion, CompletionChunk, CompletionRequest, Usage
from completions.domain.errors import (
    BackendTimeoutError,
    CompletionError,
    InvalidRequestError,
    LimitStatus,
    MeteringError,
    Recourse,
)
from completions.domain.limits import Charge
from completions.domain.metering import Outcome, Principal, Reservation, UsageRecord, plain_record
from completions.domain.ports import Backend, Claim, Clock, Registry, UpstreamCall, UsageLedger
from completions.observability import logger
from completions.service.answer import Drafts, best_choices
from completions.service.dispatch import Dispatcher, RetryPolicy, Upstream
from completions.service.fan_out import Job, merged
from completions.service.meter import Meter
from completions.service.plan import Plan, chosen_route, planned
from completions.service.pricing import most


@dataclass(frozen=True, slots=True)
class CallContext:
    """Who asks, through what, and until when. ``arrived`` and ``deadline`` are readings of ``Clock.monotonic``.

    A ``patient`` caller can be kept waiting for a model that starts: empty chunks come first. ``record_id`` is the
    logical request's name where the caller gave it one, and ``fingerprint`` a digest of what was asked under it.
    """

    request_id: str
    principal: Principal
    dialect: str
    arrived: float
    deadline: float | None = None
    patient: bool = False
    record_id: str | None = None
    fingerprint: str | None = None


Keep = Callable[[Completion, UsageRecord], None]
"""What puts a whole answer somewhere safe while its request is still open in the books, with what it will come to."""


class CompletionStream:
    """An answer whose first chunk has arrived. Iterate it to the end or close it: either settles the claim.

    ``model`` is the id of the one that answers, ``limits`` what the key has left, ``usage`` the running count, and the
    final one at the end. ``abort`` ends a chunk that is being waited for; ``close`` is still to follow.
    """

    def __init__(self, attempt: _Attempt, first: CompletionChunk, rest: Generator[CompletionChunk]) -> None:
        self.model = attempt.plan.route.model_id
        self.limits = attempt.limits
        self.abort = attempt.abort
        self.usage = Usage(0, 0)
        self._first: CompletionChunk | None = first
        self._rest = rest
        self._pulling = Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> CompletionChunk:
        with self._pulling:
            chunk, self._first = self._first or next(self._rest), None
        self.usage = chunk.usage or self.usage
        return chunk

    def close(self) -> None:
        """Stop listening, from any thread; what was generated so far is settled as aborted.

        Waits for a chunk that is being pulled: a generator cannot be closed while it runs.
        """
        with self._pulling:
            self._rest.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CompletionService:
    """See the module. ``stream`` and ``complete`` raise any ``CompletionError``."""

    def __init__(
        self,
        registry: Registry,
        backend: Backend,
        ledger: UsageLedger,
        clock: Clock,
        retries: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
    ) -> None:
        self._registry = registry
        self._backend = backend
        self._ledger = ledger
        self._clock = clock
        self._retries = retries

    def stream(self, request: CompletionRequest, context: CallContext) -> CompletionStream:
        """Return once the first chunk is here, so that every earlier failure can still be a status.

        Candidates are ranked when all are whole, so a ``best_of`` above ``n`` cannot be streamed.
        """
        if request.best_of > request.n:
            raise InvalidRequestError("Results of 'best_of' greater than 'n' cannot be streamed.", param="best_of")
        return self._open(self._attempt(request, context))

    def complete(self, request: CompletionRequest, context: CallContext, keep: Keep | None = None) -> Completion:
        """The whole answer. Upstream is streamed all the same.

        ``keep`` is called with it before it is settled. What it raises ends the request as a failure.
        """
        attempt = self._attempt(request, context)
        drafts = Drafts()

        def whole(usage: Usage) -> Completion:
            ranked = attempt.plan.ranked
            choices = best_choices(drafts.choices(), request) if ranked else drafts.choices()
            return Completion(attempt.plan.route.model_id, choices, usage, tuple(attempt.limits))

        if keep is not None:
            attempt.before_settling = lambda record: keep(whole(record.usage), record)
        with self._open(attempt) as stream:
            for chunk in stream:
                drafts.add(chunk)
        return whole(stream.usage)

    def _attempt(self, request: CompletionRequest, context: CallContext) -> _Attempt:
        route = chosen_route(self._registry, request, context.principal)
        plan = planned(request, route, self._backend.abilities(route))
        plans = [plan, *self._fallbacks(request, route, context.principal)]
        return _Attempt(request, context, plans, plan)

    def _fallbacks(self, request: CompletionRequest, route: ModelRoute, principal: Principal) -> list[Plan]:
        """Plans for those of the route's fallbacks that the key may use and that can carry the request."""
        plans = []
        for name in route.fallbacks:
            fallback = self._registry.route(name)
            if fallback is None:
                logger.warning("fallback_unknown", model=route.model_id, fallback=name)
            elif principal.may_use(fallback.model_id):
                try:
                    plans.append(planned(request, fallback, self._backend.abilities(fallback)))
                except CompletionError as error:
                    logger.info("fallback_unfit", model=route.model_id, fallback=name, param=error.param)
        return plans

    def _open(self, attempt: _Attempt) -> CompletionStream:
        chunks = self._run(attempt)
        first = next(chunks)
        return CompletionStream(attempt, first, chunks)

    def _run(self, attempt: _Attempt) -> Generator[CompletionChunk]:
        context, route = attempt.context, attempt.plan.route
        reservation = self._reservation(attempt, context)
        claim = self._ledger.reserve(reservation)
        attempt.limits = claim.limits
        meter = Meter(reservation, route, attempt.plan.request, context.arrived, self._clock)
        try:
            yield from self._answer(attempt, meter, claim)
            meter.tally.require_finished()
            meter.outcome = Outcome.SUCCEEDED
            if meter.tally.usage.estimated:
                yield CompletionChunk(usage=meter.tally.usage)
            if attempt.before_settling is not None:
                attempt.before_settling(meter.record())
        except GeneratorExit:
            meter.outcome = Outcome.SUCCEEDED if meter.tally.finished else Outcome.ABORTED
            raise
        except CompletionError as error:
            meter.fail(error)
            if attempt.aborted:
                meter.outcome = Outcome.ABORTED
            if error.param is not None:  # a codec knows the canonical name alone
                canonical = "prompts" if error.param == "prompt" else error.param
                error.param = attempt.request.param_names.get(canonical, error.param)
            raise
        finally:
            _settle(claim, meter.record())

    def _answer(self, attempt: _Attempt, meter: Meter, claim: Claim) -> Generator[CompletionChunk]:
        dispatcher, lead = yield from self._begun(attempt, meter, claim)
        plan = attempt.plan
        jobs: list[Job] = [
            partial(self._follow, dispatcher, plan, number, attempt.context) for number in range(1, len(plan.calls))
        ]
        meter.variant = lead.stream.variant
        together = merged(plan.calls, lead, jobs, stop=dispatcher.stop, unheard=meter.heard_too_late)
        with lead.stream, closing(together) as chunks:
            claim.confirm()
            for chunk in plan.pipeline(chunks):
                meter.saw(chunk)
                if dispatcher.late and not meter.tally.finished:
                    raise BackendTimeoutError("The model did not finish in the time that was left.")
                yield chunk

    def _begun(
        self, attempt: _Attempt, meter: Meter, claim: Claim
    ) -> Generator[CompletionChunk, None, tuple[Dispatcher, Upstream]]:
        """The answer of the first plan that gets one. Raises what the first plan failed with, if none does."""
        failures: list[CompletionError] = []
        for plan in attempt.plans:
            try:
                return (yield from self._led(plan, attempt, meter, patient=False))
            except CompletionError as error:
                if error.recourse is Recourse.NONE:
                    raise
                failures.append(error)
        first, failure = attempt.plans[0], failures[0]
        if attempt.context.patient and first.route.wait_for_start and failure.recourse is Recourse.WHEN_STARTED:
            claim.confirm()  # from here on the caller hears from us
            return (yield from self._led(first, attempt, meter, patient=True))
        raise failure

    def _led(
        self, plan: Plan, attempt: _Attempt, meter: Meter, *, patient: bool
    ) -> Generator[CompletionChunk, None, tuple[Dispatcher, Upstream]]:
        attempt.plan = plan
        meter.ask(plan.route, plan.request)
        deadline = _earliest(attempt.context, attempt.request, plan.route)
        dispatcher = Dispatcher(self._backend, self._clock, self._retries, meter.dispatched, deadline)
        attempt.dispatcher = dispatcher
        call = UpstreamCall(attempt.context.request_id, attempt.context.principal.tenant)
        return dispatcher, (yield from dispatcher.open(plan.calls[0].request, plan.route, call, patient=patient))

    def _follow(
        self, dispatcher: Dispatcher, plan: Plan, number: int, context: CallContext
    ) -> Generator[CompletionChunk]:
        """A further call of a plan, from its dispatch to its end."""
        call = UpstreamCall(f"{context.request_id}-{number}", context.principal.tenant)
        upstream = yield from dispatcher.open(plan.calls[number].request, plan.route, call, patient=False)
        with upstream.stream:
            yield from upstream

    def _reservation(self, attempt: _Attempt, context: CallContext) -> Reservation:
        route = attempt.plan.route
        estimates = [most(plan.request, plan.route) for plan in attempt.plans]  # any of them may answer
        return Reservation(
            record_id=context.record_id or context.request_id,
            request_id=context.request_id,
            principal=context.principal,
            dialect=context.dialect,
            model=route.model_id,
            endpoint_name=route.endpoint_name,
            streamed=attempt.request.stream,
            created_at=self._clock.now(),
            estimate=Charge(max(one.tokens for one in estimates), max(one.nanos for one in estimates)),
            caller_named=context.record_id is not None,
            fingerprint=context.fingerprint,
        )


def _settle(claim: Claim, record: UsageRecord) -> None:
    """The answer is already the caller's, so a table that cannot be written must not take it away: the record goes to
    the log, whole, under an event name that can be searched and replayed."""
    try:
        claim.settle(record)
    except MeteringError as error:
        logger.error("usage_record_unwritten", record=plain_record(record), detail=error.detail)


@dataclass(slots=True)
class _Attempt:
    """One request on its way: ``plans`` in the order they are tried, ``plan`` the one that is being tried."""

    request: CompletionRequest
    context: CallContext
    plans: Sequence[Plan]
    plan: Plan
    limits: Sequence[LimitStatus] = ()
    dispatcher: Dispatcher | None = None
    aborted: bool = False
    before_settling: Callable[[UsageRecord], None] | None = None

    def abort(self) -> None:
        """The caller has gone; from any thread."""
        self.aborted = True
        if self.dispatcher is not None:
            self.dispatcher.stop()


def _earliest(context: CallContext, request: CompletionRequest, route: ModelRoute) -> float | None:
    limits = [] if context.deadline is None else [context.deadline]
    if request.deadline_ms is not None:
        limits.append(context.arrived + request.deadline_ms / 1000)
    if route.timeout_seconds is not None:
        limits.append(context.arrived + route.timeout_seconds)
    return min(limits, default=None)
