"""What one logical request came to so far."""

from __future__ import annotations

from completions.domain.catalog import ModelRoute
from completions.domain.completion import CompletionChunk, CompletionRequest, Usage
from completions.domain.errors import CompletionError, InvalidRequestError, RateLimitError
from completions.domain.metering import Outcome, Reservation, Timings, UsageRecord
from completions.domain.ports import Clock
from completions.service.answer import Tally
from completions.service.pricing import charge


class Meter:
    """Filled while the answer passes; ``record`` is what is settled in the end. ``arrived`` is a monotonic reading.

    ``dispatched`` is told of every call that is made, from any thread; ``route`` is the one asked last.
    """

    def __init__(
        self, reservation: Reservation, route: ModelRoute, request: CompletionRequest, arrived: float, clock: Clock
    ) -> None:
        self.tally = Tally(request.choice_count, request.prompts)
        self.outcome = Outcome.FAILED
        self.variant: str | None = None
        self.route = route
        self._calls: list[float] = []
        self._reservation = reservation
        self._arrived = arrived
        self._clock = clock
        self._claimed = clock.monotonic()
        self._first: float | None = None
        self._error: str | None = None

    def ask(self, route: ModelRoute, request: CompletionRequest) -> None:
        """From here on it is ``route`` that is asked; nothing has been generated yet."""
        self.route = route
        self.tally = Tally(request.choice_count, request.prompts)

    def dispatched(self) -> None:
        """One more call goes out."""
        self._calls.append(self._clock.monotonic())

    def saw(self, chunk: CompletionChunk) -> None:
        """Note what has been generated."""
        if self._first is None:
            self._first = self._clock.monotonic()
        self.tally.add(chunk)

    def heard_too_late(self, usage: Usage) -> None:
        """Note what was used in the end, though nobody reads it any more."""
        self.tally.add(CompletionChunk(usage=usage))

    def fail(self, error: CompletionError) -> None:
        """Note how it ended."""
        refused = self._first is None and isinstance(error, InvalidRequestError | RateLimitError)
        self.outcome = Outcome.REFUSED if refused else Outcome.FAILED
        self._error = type(error).__name__

    def record(self) -> UsageRecord:
        """The whole of it."""
        price = self.route.price
        return UsageRecord(
            reservation=self._reservation,
            model=self.route.model_id,
            endpoint_name=self.route.endpoint_name,
            outcome=self.outcome,
            usage=self.tally.usage,
            timings=Timings(
                queue_ms=self._since_arrival(self._calls[0] if self._calls else self._claimed),
                first_token_ms=None if self._first is None else self._since_arrival(self._first),
                total_ms=self._since_arrival(self._clock.monotonic()),
            ),
            attempts=len(self._calls),
            variant=self.variant,
            error=self._error,
            charge=charge(self.tally.usage, price),
            price_version=None if price is None else price.version,
        )

    def _since_arrival(self, moment: float) -> int:
        return round((moment - self._arrived) * 1000)
