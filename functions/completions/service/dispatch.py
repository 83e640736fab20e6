"""One call, sent again where that is safe, until its first chunk is here.

SageMaker's SDK is told to try once, for it would repeat a call that timed out and pay the GPU twice. What may be
repeated is said by the error (``Recourse``); nothing is, once the container has begun to answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from threading import Event
from typing import Final

from completions.domain.catalog import ModelRoute
from completions.domain.completion import CompletionChunk, CompletionRequest
from completions.domain.errors import BackendTimeoutError, CompletionError, Recourse, TruncatedStreamError
from completions.domain.ports import Backend, BackendStream, Clock, UpstreamCall

WAITING: Final = CompletionChunk()
"""Nothing yet: the model is starting."""
_SHORTEST_WAIT: Final = 0.01
"""Seconds; a socket's timeout of zero would mean something else."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``attempts`` calls to one model at most; before the k-th retry a random part of ``base_seconds`` * 2**k passes,
    of ``most_seconds`` at the longest. A model that starts is asked again every ``start_poll_seconds``."""

    attempts: int = 3
    base_seconds: float = 0.2
    most_seconds: float = 2.0
    start_poll_seconds: float = 10.0

    def delay(self, retry: int) -> float:
        """Seconds before retry number ``retry``, counted from 0."""
        return random.uniform(0, min(self.most_seconds, self.base_seconds * 2.0**retry))  # noqa: S311 - jitter


@dataclass(frozen=True, slots=True)
class Upstream:
    """An answer that has begun."""

    first: CompletionChunk
    rest: Iterator[CompletionChunk]
    stream: BackendStream

    def __iter__(self) -> Iterator[CompletionChunk]:
        yield self.first
        yield from self.rest


class Dispatcher:
    """Opens calls of one logical request, from any thread. ``deadline`` is a reading of ``Clock.monotonic``;
    ``dispatched`` hears of every call that goes out."""

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        policy: RetryPolicy,
        dispatched: Callable[[], None],
        deadline: float | None,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._policy = policy
        self._dispatched = dispatched
        self._stopped = Event()
        self._streams: list[BackendStream] = []
        self._deadline = deadline

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and self._clock.monotonic() > self._deadline

    def stop(self) -> None:
        """Nobody listens any more: no further call goes out, and every answer in progress ends at once. From any
        thread."""
        self._stopped.set()
        for stream in tuple(self._streams):
            stream.abort()

    @property
    def stopped(self) -> bool:
        """Whether it was."""
        return self._stopped.is_set()

    def open(
        self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall, *, patient: bool
    ) -> Generator[CompletionChunk, None, Upstream]:
        """Yields ``WAITING`` before every wait for a model that starts, which only a ``patient`` caller does; returns
        the answer. Raises what the last attempt raised."""
        attempt = 1
        while True:
            try:
                return self._begun(request, route, call)
            except CompletionError as error:
                starting = patient and error.recourse is Recourse.WHEN_STARTED
                delay = self._delay(error, attempt, starting=starting)
                if delay is None:
                    raise
            if starting:
                yield WAITING
            else:
                attempt += 1
            self._clock.sleep(delay)

    def _begun(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall) -> Upstream:
        if self.late or self.stopped:
            raise BackendTimeoutError("There was no time left to ask the model.")
        call = replace(call, wait_seconds=self._wait(route), dispatched=self._dispatched)
        stream = self._backend.stream(request, route, call)
        self._streams.append(stream)
        try:
            if self.stopped:
                raise BackendTimeoutError("There was no time left to ask the model.")
            chunks = self._limited(stream, route)
            first = next(chunks, None)
            if first is None:
                raise TruncatedStreamError  # it ended in good order, without a word
            return Upstream(first, chunks, stream)
        except BaseException:
            stream.close()
            raise

    def _limited(self, stream: BackendStream, route: ModelRoute) -> Iterator[CompletionChunk]:
        """``stream``, each wait for it cut to the time that is left."""
        while True:
            wait = self._wait(route)
            if wait is not None:
                stream.limit_wait(wait)
            try:
                yield next(stream)
            except StopIteration:
                return

    def _delay(self, error: CompletionError, attempt: int, *, starting: bool) -> float | None:
        """Seconds until the next attempt; ``None`` when there is none."""
        if starting:
            delay = self._policy.start_poll_seconds
        elif error.recourse is Recourse.AGAIN and attempt < self._policy.attempts:
            delay = self._policy.delay(attempt - 1)
        else:
            return None
        if self._deadline is not None and self._clock.monotonic() + delay >= self._deadline:
            return None
        return delay

    def _wait(self, route: ModelRoute) -> float | None:
        own = route.read_timeout_seconds
        if self._deadline is None:
            return own
        left = max(self._deadline - self._clock.monotonic(), _SHORTEST_WAIT)
        return left if own is None else min(own, left)
