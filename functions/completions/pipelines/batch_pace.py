"""When a batch's worker may begin the next line, and whether it still should."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Final

from completions.domain.batches import Batch, BatchStatus, BatchStore
from completions.domain.errors import ServiceError
from completions.domain.ports import Clock
from completions.observability import logger
from completions.pipelines.batch_parts import CANCELLED, EXPIRED

LOOK_SECONDS: Final = 10.0
_GOING_ON: Final[Sequence[BatchStatus]] = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)


class TokenPace:
    """So many tokens a minute from its making on; they are known when a reply is here, so that the next one waits."""

    def __init__(self, tokens_per_minute: float | None, clock: Clock) -> None:
        self._seconds_per_token = 0.0 if tokens_per_minute is None else 60 / tokens_per_minute
        self._clock = clock
        self._lock = Lock()
        self._free_at = clock.monotonic()

    def spend(self, tokens: int) -> None:
        """They have been generated, or read."""
        with self._lock:
            self._free_at += tokens * self._seconds_per_token

    def seconds_ahead(self) -> float:
        """How long nothing may be begun."""
        with self._lock:
            return max(0.0, self._free_at - self._clock.monotonic())


class BatchWatch:
    """Whether a batch was cancelled, looked up now and then by one of the threads that ask, or its window is over."""

    def __init__(self, batch: Batch, store: BatchStore, clock: Clock) -> None:
        self._batch = batch
        self._store = store
        self._clock = clock
        self._lock = Lock()
        self._next_look = clock.monotonic() + LOOK_SECONDS

    def over(self) -> str | None:
        """Why no further line is to be begun, as a fault's code."""
        if self._clock.monotonic() >= self._next_look and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return why_over(self._batch, self._clock)

    def _look(self) -> None:
        self._next_look = self._clock.monotonic() + LOOK_SECONDS
        try:
            self._batch = self._store.batch(self._batch.tenant, self._batch.batch_id) or self._batch
        except ServiceError as error:
            logger.info("batch_not_seen", batch_id=self._batch.batch_id, detail=error.detail)


def why_over(batch: Batch, clock: Clock) -> str | None:
    """Why no line of it is to be begun; ``None`` while lines may be."""
    if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        return CANCELLED
    if clock.now() >= batch.expires_at or batch.status is BatchStatus.EXPIRED:
        return EXPIRED
    return None if batch.status in _GOING_ON else CANCELLED
