"""What the service needs from the outside. Adapters implement these; all of them are synchronous."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self

from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionChunk, CompletionRequest
from completions.domain.metering import Principal, Reservation, UsageRecord


class Clock(Protocol):
    """Time, so that tests can hold it still."""

    def now(self) -> datetime:
        """The current moment, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never steps back."""
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

    def __iter__(self) -> Self: ...

    def __next__(self) -> CompletionChunk: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Backend(Protocol):
    """Something that completes."""

    def capabilities(self, route: ModelRoute) -> Mapping[Parameter, Capability]:
        """How each canonical parameter fares on this route. Every ``Parameter`` has an entry."""
        ...

    def max_stops(self, route: ModelRoute) -> int | None:
        """How many stop texts one request may hold; ``None`` for any number."""
        ...

    def stream(self, request: CompletionRequest, route: ModelRoute, request_id: str) -> BackendStream:
        """Send the request and return once the container has accepted it.

        Raises ``InvalidRequestError`` for what the container refuses, ``RateLimitError`` when it is throttled,
        ``BackendUnavailableError`` when it is not there, ``BackendTimeoutError`` and ``BackendError`` otherwise.
        """
        ...


class Registry(Protocol):
    """Keys and models, cached briefly. Raises ``BackendUnavailableError`` when the table cannot be read."""

    def principal(self, secret_sha256: str, *, next_model: str | None = None) -> Principal | None:
        """Whose key this is; ``None`` for nobody's. ``next_model`` is read in the same round trip."""
        ...

    def route(self, model: str) -> ModelRoute | None:
        """The route of a model id or alias."""
        ...

    def routes(self) -> Sequence[ModelRoute]:
        """Every model once, sorted by id."""
        ...


class UsageLedger(Protocol):
    """Metering: claim before the GPU, settle after it, whatever happened in between."""

    def reserve(self, reservation: Reservation) -> None:
        """Claim the logical request.

        Raises ``DuplicateRequestError`` when the id was claimed before, ``RateLimitError`` or ``QuotaExceededError``
        when a limit has no room, ``MeteringError`` when the table cannot be written.
        """
        ...

    def settle(self, record: UsageRecord) -> None:
        """Write what the request came to. Settling twice changes nothing. Raises ``MeteringError``."""
        ...
