"""What the service needs from the outside. Adapters implement these; all of them are synchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:  # who needs a clock alone need not wait for all the rest
    from completions.domain.catalog import Abilities, ModelRoute
    from completions.domain.completion import CompletionChunk, CompletionRequest
    from completions.domain.errors import LimitStatus
    from completions.domain.metering import Principal, Reservation, UsageRecord


class Clock(Protocol):
    """Time, so that tests can hold it still."""

    def now(self) -> datetime:
        """The current moment, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never steps back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        ...


class BackendStream(Protocol):
    """An answer being generated: iterate for chunks, close to stop paying attention (and, best effort, the GPU).

    Iteration ends only after the container's terminal record; anything else raises a ``ServiceError``.
    """

    @property
    def variant(self) -> str | None:
        """The production variant that is answering."""
        ...

    def limit_wait(self, seconds: float) -> None:
        """From here on, a wait for the container longer than this raises ``BackendTimeoutError``."""
        ...

    def abort(self) -> None:
        """End a wait that another thread is in, and every later one, with an error; at best the GPU's work, too."""
        ...

    def __iter__(self) -> Self: ...

    def __next__(self) -> CompletionChunk: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class UpstreamCall:
    """One call's own facts. ``inference_id`` is its name on SageMaker's side, ``tenant`` whom the caller belongs to;
    ``wait_seconds`` bounds the wait for the container's acceptance, ``None`` leaves it to the transport. ``dispatched``
    is called, from any thread, when the call really goes out."""

    inference_id: str
    tenant: str
    wait_seconds: float | None = None
    dispatched: Callable[[], None] = lambda: None


class Backend(Protocol):
    """Something that completes."""

    def abilities(self, route: ModelRoute) -> Abilities:
        """How each canonical parameter fares on this route."""
        ...

    def stream(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall) -> BackendStream:
        """Send the request once, and return when the container has accepted it.

        Raises ``InvalidRequestError`` for what the container refuses, ``RateLimitError`` when it is throttled,
        ``BackendUnavailableError`` when it is not there, ``BackendTimeoutError`` and ``BackendError`` otherwise; their
        ``recourse`` tells whether it may be sent again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where the end of a submitted call will appear, as ``s3://`` addresses; not every endpoint has one of failures."""

    answer: str
    failure: str | None = None


class AsynchronousBackend(Protocol):
    """Something that completes later."""

    def submit(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall) -> Ticket:
        """Send the request once, and return when it is in the queue, in which and in whose container it may be for
        ``call.wait_seconds``. Raises as ``Backend.stream``."""
        ...

    def collect(self, ticket: Ticket, request: CompletionRequest, route: ModelRoute) -> Sequence[CompletionChunk]:
        """The whole answer. Raises the failure that came instead, ``UnansweredError`` while there is neither, and
        ``RetryLaterError`` where that cannot be told now."""
        ...


class Registry(Protocol):
    """Keys and models, cached briefly. Raises ``BackendUnavailableError`` when the table cannot be read."""

    def principal(self, secret_sha256: str, *, next_model: str | None = None) -> Principal | None:
        """Whose key this is; ``None`` for nobody's. ``next_model`` is read in the same round trip."""
        ...

    def principal_of(self, key_id: str) -> Principal | None:
        """Who a key's public id stands for; ``None`` for no key."""
        ...

    def route(self, model: str) -> ModelRoute | None:
        """The route of a model id or alias."""
        ...

    def routes(self) -> Sequence[ModelRoute]:
        """Every model once, sorted by id."""
        ...


class Claim(Protocol):
    """A logical request's place in the books, from before the GPU is asked until it is settled.

    ``limits`` is what the key has left, this request's estimate taken off.
    """

    limits: Sequence[LimitStatus]

    def confirm(self) -> None:
        """Return when the claim is written, for that may go on while the model is asked. To be called before anything
        of an answer is given away.

        Raises ``DuplicateRequestError`` when the id was claimed before, ``MeteringError`` when it cannot be written.
        """
        ...

    def settle(self, record: UsageRecord) -> None:
        """Write what the request came to, and give back what it did not use. Settling twice changes nothing, nor does
        settling a claim that was another's. Raises ``MeteringError``."""
        ...


class UsageLedger(Protocol):
    """Metering: claim before the GPU, settle after it, whatever happened in between."""

    def reserve(self, reservation: Reservation) -> Claim:
        """Claim the logical request, and take its estimate off every limit of its key.

        Raises ``RateLimitError`` or ``QuotaExceededError`` when a limit has no room, and what ``Claim.confirm`` raises
        when that is known at once.
        """
        ...
