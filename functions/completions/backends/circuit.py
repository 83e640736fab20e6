"""A circuit breaker for each endpoint: after enough failures in a row it is left alone for a while.

What counts is a call that may have cost something and came to nothing: a container's 500, or a silence as long as the
client's own timeout. A caller's shorter patience says nothing about the endpoint.

Each environment finds out for itself: to tell the others would be one more read on the way to the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Final, TypeVar

from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    Recourse,
)

_T = TypeVar("_T")
_COUNTED: Final = (BackendError, BackendTimeoutError, BackendUnavailableError)


@dataclass(slots=True)
class _Circuit:
    """``failures`` in a row, and until when it is open; ``None`` while it is closed."""

    failures: int = 0
    open_until: float | None = None


class EndpointCircuits:
    """``failures`` in a row open an endpoint's circuit for ``seconds``; then one call finds out how things stand."""

    def __init__(self, failures: int, seconds: int) -> None:
        self._most_failures = failures
        self._seconds = seconds
        self._circuits: dict[str, _Circuit] = {}
        self._changing = Lock()

    def call(self, endpoint: str, ask: Callable[[], _T]) -> _T:
        """What ``ask`` returns or raises. Raises ``BackendUnavailableError`` at once while the circuit is open."""
        circuit, probing = self._entered(endpoint)
        try:
            result = ask()
        except CompletionError as error:
            # whoever turns a call away lives: busy, starting, or asked under a wrong name
            failed = isinstance(error, _COUNTED) and error.recourse is Recourse.NONE
            self._left(circuit, probing=probing, failed=failed)
            raise
        self._left(circuit, probing=probing, failed=False)
        return result

    def _entered(self, endpoint: str) -> tuple[_Circuit, bool]:
        """The circuit, and whether this call is the one that finds out; if it never tells, another does in time."""
        with self._changing:
            circuit = self._circuits.setdefault(endpoint, _Circuit())
            if circuit.open_until is None:
                return circuit, False
            now = time.monotonic()
            if now < circuit.open_until:
                raise BackendUnavailableError(
                    "The model keeps failing and is being left alone for a moment.",
                    retry_after=max(1, math.ceil(circuit.open_until - now)),
                    recourse=Recourse.ELSEWHERE,
                    detail="circuit open",
                )
            circuit.open_until = now + self._seconds
            return circuit, True

    def _left(self, circuit: _Circuit, *, probing: bool, failed: bool) -> None:
        with self._changing:
            circuit.failures = circuit.failures + 1 if failed else 0
            if failed and (probing or circuit.failures >= self._most_failures):
                circuit.failures = 0
                circuit.open_until = time.monotonic() + self._seconds
            elif probing:
                circuit.open_until = None
