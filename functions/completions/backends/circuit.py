"""A circuit breaker for each endpoint: after enough failures in a row it is left alone for a while.

What counts is a call that may have cost something and came to nothing: a container's 500, or a silence as long as the
client's own timeout. A caller's shorter patience says nothing about the endpoint.

Powertools' state machine over a store in this process. Its DynamoDB store would tell all environments at once, for one
more read on the way to the model whenever the cached state has aged; each environment finds out for itself instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from aws_lambda_powertools.utilities.circuit_breaker import (
    CircuitBreakerConfig,
    CircuitBreakerOpenError,
    circuit_breaker,
)
from aws_lambda_powertools.utilities.circuit_breaker.persistence.base import (
    CircuitBreakerExistingLockError,
    CircuitBreakerPersistenceLayer,
)
from aws_lambda_powertools.utilities.circuit_breaker.persistence.record import CircuitStateRecord
from aws_lambda_powertools.utilities.circuit_breaker.states import CircuitState

from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    Recourse,
)

_T = TypeVar("_T")
_COUNTED: Final = (BackendError, BackendTimeoutError, BackendUnavailableError)


class EndpointCircuits:
    """``failures`` in a row open an endpoint's circuit for ``seconds``; then one call finds out how things stand."""

    def __init__(self, failures: int, seconds: int) -> None:
        self._store = _ProcessStore()
        self._config = CircuitBreakerConfig(
            failure_threshold=failures,
            recovery_timeout=seconds,
            success_threshold=1,
            handled_exceptions=_EndpointFailedError,
            local_cache_max_age=1,
        )

    def call(self, endpoint: str, ask: Callable[[], _T]) -> _T:
        """What ``ask`` returns or raises. Raises ``BackendUnavailableError`` at once while the circuit is open."""

        def counted() -> _T | CompletionError:
            try:
                return ask()
            except CompletionError as error:
                if isinstance(error, _COUNTED) and error.recourse is Recourse.NONE:
                    raise _EndpointFailedError(error) from error
                return error  # whoever turns a call away lives: busy, starting, or asked under a wrong name

        protected = circuit_breaker(name=endpoint, persistence_store=self._store, config=self._config)(counted)
        try:
            result: _T | CompletionError = protected()
        except _EndpointFailedError as failed:
            raise failed.error from failed.error.__cause__
        except CircuitBreakerOpenError as refusal:
            raise self._open_error(refusal) from None
        if isinstance(result, CompletionError):
            raise result from result.__cause__
        return result

    def _open_error(self, refusal: CircuitBreakerOpenError) -> BackendUnavailableError:
        opened = refusal.circuit.opened_at if refusal.circuit is not None else None
        left = self._config.recovery_timeout - (0 if opened is None else int(time.time()) - opened)
        return BackendUnavailableError(
            "The model keeps failing and is being left alone for a moment.",
            retry_after=max(1, left),
            recourse=Recourse.ELSEWHERE,
            detail="circuit open",
        )


class _EndpointFailedError(Exception):
    """Wraps what counts against an endpoint."""

    def __init__(self, error: CompletionError) -> None:
        super().__init__(type(error).__name__)
        self.error = error


class _ProcessStore(CircuitBreakerPersistenceLayer):
    """The states of this process's circuits."""

    def __init__(self) -> None:
        super().__init__()
        self._records: dict[str, CircuitStateRecord] = {}

    def _get_record(self, name: str) -> CircuitStateRecord | None:
        return self._records.get(name)

    def _put_record(
        self, record: CircuitStateRecord, condition: str | None = None, expected_opened_at: int | None = None
    ) -> None:
        known = self._records.get(record.name)
        if condition == "half_open" and not _may_probe(known):
            raise CircuitBreakerExistingLockError
        self._records[record.name] = record

    def _update_record(self, record: CircuitStateRecord) -> None:
        self._records[record.name] = record


def _may_probe(known: CircuitStateRecord | None) -> bool:
    """Whether nobody else is finding out, or that one has been gone for too long."""
    if known is None:
        return False
    if known.state is CircuitState.OPEN:
        return known.half_open_owner is None
    return known.probe_lease_expiry is not None and known.probe_lease_expiry <= time.time()
