"""The use case: resolve the model, check the parameters, claim, ask the backend, settle.

The claim is settled whatever happens: success, refusal, failure, or a caller who hangs up. It is settled in the
generator's own ``finally`` and not in a background task, which a cancelled response would skip.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from threading import Lock
from types import TracebackType
from typing import Final, Self

from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import Completion, CompletionChunk, CompletionRequest, Usage
from completions.domain.errors import (
    BackendTimeoutError,
    CompletionError,
    InvalidRequestError,
    MeteringError,
    ModelNotFoundError,
    RateLimitError,
)
from completions.domain.metering import Outcome, Principal, Reservation, Timings, UsageRecord
from completions.domain.ports import Backend, BackendStream, Clock, Registry, UsageLedger
from completions.observability import logger
from completions.service.answer import Tally, best_choices, collect_choices, known_choices
from completions.service.infill import infill_stops, with_infill
from completions.service.parameters import check_parameters
from completions.service.stops import cut_at_stops

_SHORTEST_WAIT: Final = 0.01
"""Seconds; a socket's timeout of zero would mean something else."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """Who asks, through what, and until when. ``arrived`` and ``deadline`` are readings of ``Clock.monotonic``."""

    request_id: str
    principal: Principal
    dialect: str
    arrived: float
    deadline: float | None = None


class CompletionStream:
    """An answer whose first chunk has arrived. Iterate it to the end or close it: either settles the claim.

    ``usage`` is the running count, and the final one at the end.
    """

    def __init__(self, model: str, first: CompletionChunk, rest: Generator[CompletionChunk]) -> None:
        self.model = model
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is sent where: ``request`` as the container gets it, and ``cut``, the stop texts it is not told."""

    route: ModelRoute
    request: CompletionRequest
    cut: tuple[str, ...]

    def pipeline(self, chunks: Iterable[CompletionChunk]) -> Iterable[CompletionChunk]:
        """The container's chunks as the caller gets them."""
        known = known_choices(chunks, self.request.choice_count)
        return cut_at_stops(known, self.cut, self.request) if self.cut else known


class CompletionService:
    """See the module. ``stream`` and ``complete`` raise any ``CompletionError``."""

    def __init__(self, registry: Registry, backend: Backend, ledger: UsageLedger, clock: Clock) -> None:
        self._registry = registry
        self._backend = backend
        self._ledger = ledger
        self._clock = clock

    def stream(self, request: CompletionRequest, context: CallContext) -> CompletionStream:
        """Return once the first chunk is here, so that every earlier failure can still be a status.

        Candidates are ranked when all are whole, so a ``best_of`` above ``n`` cannot be streamed.
        """
        if request.best_of > request.n:
            raise InvalidRequestError("Results of 'best_of' greater than 'n' cannot be streamed.", param="best_of")
        return self._open(self._plan(request, context.principal), context)

    def complete(self, request: CompletionRequest, context: CallContext) -> Completion:
        """The whole answer. Upstream is streamed all the same."""
        plan = self._plan(request, context.principal)
        best_of = self._backend.capabilities(plan.route)[Parameter.BEST_OF]
        ranked = request.best_of > request.n and best_of is Capability.EMULATED
        if ranked:
            plan = replace(plan, request=replace(plan.request, n=request.best_of, logprobs=request.logprobs or 0))
        with self._open(plan, context) as stream:
            choices = collect_choices(stream)
        return Completion(stream.model, best_choices(choices, request) if ranked else choices, stream.usage)

    def _plan(self, request: CompletionRequest, principal: Principal) -> _Plan:
        route = self._route(request, principal)
        capabilities = self._backend.capabilities(route)
        check_parameters(request, route, capabilities)
        told = 0 if capabilities[Parameter.STOP] is Capability.EMULATED else self._backend.max_stops(route)
        untold = () if told is None else request.stop[told:]
        sent = replace(with_infill(request, route), stop=request.stop[:told])
        return _Plan(route, sent, (*untold, *infill_stops(request, route)))

    def _route(self, request: CompletionRequest, principal: Principal) -> ModelRoute:
        for name in (request.model, *request.other_models):
            route = self._registry.route(name)
            if route is not None and principal.may_use(route.model_id):
                return route
        raise ModelNotFoundError(
            f"The model '{request.model[:200]}' does not exist or this key has no access to it.",
            param=request.param_names.get("model", "model"),
            code="model_not_found",
        )

    def _open(self, plan: _Plan, context: CallContext) -> CompletionStream:
        chunks = self._run(plan, context)
        return CompletionStream(plan.route.model_id, next(chunks), chunks)

    def _run(self, plan: _Plan, context: CallContext) -> Generator[CompletionChunk]:
        request, route = plan.request, plan.route
        deadline = _earliest(context, request)
        reservation = self._reservation(request, route, context)
        self._ledger.reserve(reservation)
        meter = _Meter(reservation, request.choice_count, context.arrived, self._clock)
        try:
            with self._backend.stream(request, route, context.request_id) as upstream:
                meter.variant = upstream.variant
                for chunk in plan.pipeline(self._until(deadline, upstream)):
                    meter.saw(chunk)
                    late = deadline is not None and self._clock.monotonic() > deadline
                    if late and not meter.tally.finished:
                        raise BackendTimeoutError("The model did not finish in the time that was left.")
                    yield chunk
            meter.tally.require_finished()
            meter.outcome = Outcome.SUCCEEDED
            if meter.tally.usage.estimated:
                yield CompletionChunk(usage=meter.tally.usage)
        except GeneratorExit:
            meter.outcome = Outcome.SUCCEEDED if meter.tally.finished else Outcome.ABORTED
            raise
        except CompletionError as error:
            meter.fail(error)
            if error.param is not None:  # a codec knows the canonical name alone
                error.param = request.param_names.get(error.param, error.param)
            raise
        finally:
            self._settle(meter.record())

    def _until(self, deadline: float | None, upstream: BackendStream) -> Iterator[CompletionChunk]:
        """``upstream``, each wait for it cut to the time that is left."""
        while True:
            if deadline is not None:
                upstream.limit_wait(max(deadline - self._clock.monotonic(), _SHORTEST_WAIT))
            try:
                yield next(upstream)
            except StopIteration:
                return

    def _reservation(self, request: CompletionRequest, route: ModelRoute, context: CallContext) -> Reservation:
        return Reservation(
            record_id=context.request_id,
            request_id=context.request_id,
            principal=context.principal,
            dialect=context.dialect,
            model=route.model_id,
            endpoint_name=route.endpoint_name,
            streamed=request.stream,
            created_at=self._clock.now(),
        )

    def _settle(self, record: UsageRecord) -> None:
        """The answer is already the caller's, so a table that cannot be written must not take it away: the counts go
        to the log, whole, under an event name that can be searched and replayed."""
        try:
            self._ledger.settle(record)
        except MeteringError as error:
            logger.error(
                "usage_record_unwritten",
                record_id=record.reservation.record_id,
                key_id=record.reservation.principal.key_id,
                model=record.reservation.model,
                outcome=record.outcome,
                prompt_tokens=record.usage.prompt_tokens,
                completion_tokens=record.usage.completion_tokens,
                cached_tokens=record.usage.cached_tokens,
                estimated=record.usage.estimated,
                detail=error.detail,
            )


class _Meter:
    """What one call came to so far."""

    def __init__(self, reservation: Reservation, choice_count: int, arrived: float, clock: Clock) -> None:
        self.tally = Tally(choice_count)
        self.outcome = Outcome.FAILED
        self.variant: str | None = None
        self._reservation = reservation
        self._arrived = arrived
        self._clock = clock
        self._dispatched = clock.monotonic()
        self._first: float | None = None
        self._error: str | None = None

    def saw(self, chunk: CompletionChunk) -> None:
        if self._first is None:
            self._first = self._clock.monotonic()
        self.tally.add(chunk)

    def fail(self, error: CompletionError) -> None:
        refused = self._first is None and isinstance(error, InvalidRequestError | RateLimitError)
        self.outcome = Outcome.REFUSED if refused else Outcome.FAILED
        self._error = type(error).__name__

    def record(self) -> UsageRecord:
        return UsageRecord(
            reservation=self._reservation,
            outcome=self.outcome,
            usage=self.tally.usage,
            timings=Timings(
                queue_ms=self._since_arrival(self._dispatched),
                first_token_ms=None if self._first is None else self._since_arrival(self._first),
                total_ms=self._since_arrival(self._clock.monotonic()),
            ),
            attempts=1,
            variant=self.variant,
            error=self._error,
        )

    def _since_arrival(self, moment: float) -> int:
        return round((moment - self._arrived) * 1000)


def _earliest(context: CallContext, request: CompletionRequest) -> float | None:
    limits = [] if context.deadline is None else [context.deadline]
    if request.deadline_ms is not None:
        limits.append(context.arrived + request.deadline_ms / 1000)
    return min(limits, default=None)
