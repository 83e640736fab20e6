"""Requests to asynchronous endpoints whose answers come by another event.

They are claimed and handed in by one function, fetched and settled by another, maybe an hour later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from completions.domain.completion import Completion, CompletionChunk, CompletionRequest, Usage
from completions.domain.errors import BackendUnavailableError, CompletionError, ServiceError
from completions.domain.events import RetryLaterError
from completions.domain.metering import Outcome, Principal, Reservation, plain_reservation
from completions.domain.ports import AsynchronousBackend, Backend, Clock, Registry, UpstreamCall, UsageLedger
from completions.domain.submissions import Submission, UnansweredError
from completions.service.answer import Drafts, Tally, best_choices
from completions.service.complete import CallContext
from completions.service.meter import Meter
from completions.service.plan import Plan, chosen_route, planned
from completions.service.pricing import charge, most

_AGAIN_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Collected:
    """The answer of a submission, and its usage record in plain attributes. ``nanos`` is what it cost."""

    completion: Completion
    record: Mapping[str, object]
    total_ms: int
    nanos: int = 0


class SubmittedCompletions:
    """``takes`` says which requests; every other one is answered by ``CompletionService``."""

    def __init__(
        self, registry: Registry, abilities: Backend, backend: AsynchronousBackend, ledger: UsageLedger, clock: Clock
    ) -> None:
        self._registry = registry
        self._abilities = abilities
        self._backend = backend
        self._ledger = ledger
        self._clock = clock

    def takes(self, request: CompletionRequest, principal: Principal) -> bool:
        """Whether its model answers later, and in one call. Raises ``CompletionError`` as the service would."""
        route = chosen_route(self._registry, request, principal)
        return route.asynchronous and len(self._plan(request, route.model_id).calls) == 1

    def submit(self, request: CompletionRequest, context: CallContext, lasts_until: datetime) -> Submission:
        """Claim and hand in. What fails before the model has it is settled here, and raised."""
        route = chosen_route(self._registry, request, context.principal)
        plan = self._plan(request, route.model_id)
        estimate = most(plan.request, route)
        reservation = Reservation(
            record_id=context.record_id or context.request_id,
            request_id=context.request_id,
            principal=context.principal,
            dialect=context.dialect,
            model=route.model_id,
            endpoint_name=route.endpoint_name,
            streamed=False,
            created_at=self._clock.now(),
            estimate=estimate,
            caller_named=context.record_id is not None,
            fingerprint=context.fingerprint,
            lasts_until=lasts_until,
        )
        claim = self._ledger.reserve(reservation)
        meter = Meter(reservation, route, plan.request, context.arrived, self._clock)
        stay = (lasts_until - self._clock.now()).total_seconds()
        call = UpstreamCall(reservation.record_id, context.principal.tenant, stay, meter.dispatched)
        try:
            claim.confirm()
            ticket = self._backend.submit(plan.calls[0].request, route, call)
        except CompletionError as error:
            meter.fail(error)
            claim.settle(meter.record())
            raise
        return Submission(ticket, route.model_id, plain_reservation(reservation))

    def collect(self, request: CompletionRequest, submission: Submission) -> Collected:
        """The answer that is there. Raises ``UnansweredError`` while there is none, ``RetryLaterError`` where that
        cannot be told now, and any other ``CompletionError`` for a failure."""
        try:
            route = self._registry.route(submission.model)
        except ServiceError as error:
            raise RetryLaterError(f"the registry: {error.detail}", _AGAIN_SECONDS) from error
        if route is None:
            raise UnansweredError("The model is not available right now.", detail=f"no route {submission.model!r}")
        plan = planned(request, route, self._abilities.abilities(route))
        tally, drafts = Tally(plan.request.choice_count, plan.request.prompts), Drafts()
        for chunk in plan.pipeline(self._chunks(submission, plan)):
            tally.add(chunk)
            drafts.add(chunk)
        tally.require_finished()
        choices = best_choices(drafts.choices(), request) if plan.ranked else drafts.choices()
        price = plan.route.price
        cost = charge(tally.usage, price)
        record = self._record(submission, tally.usage) | {
            "nanos": cost.nanos,
            "price_version": None if price is None else price.version,
        }
        completion = Completion(submission.model, choices, tally.usage)
        return Collected(completion, record, self._since(submission), cost.nanos)

    def _chunks(self, submission: Submission, plan: Plan) -> Sequence[CompletionChunk]:
        return self._backend.collect(submission.ticket, plan.calls[0].request, plan.route)

    def _plan(self, request: CompletionRequest, model: str) -> Plan:
        route = self._registry.route(model)
        if route is None:
            raise BackendUnavailableError("The model is not available right now.", detail=f"no route {model!r}")
        return planned(request, route, self._abilities.abilities(route))

    def _since(self, submission: Submission) -> int:
        began = datetime.fromisoformat(str(submission.reservation["created_at"]))
        return round((self._clock.now() - began).total_seconds() * 1000)

    def _record(self, submission: Submission, usage: Usage) -> dict[str, object]:
        return {
            **submission.reservation,
            "outcome": Outcome.SUCCEEDED.value,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "estimated": usage.estimated,
            "queue_ms": 0,
            "first_token_ms": None,
            "total_ms": self._since(submission),
            "attempts": 1,
            "variant": None,
            "error": None,
        }
