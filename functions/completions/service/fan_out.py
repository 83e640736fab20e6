"""The answers of several calls as one: choices renumbered, usage added up.

The first call has begun when this is asked, so the model answers; the others follow side by side in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from queue import Queue
from threading import Lock
from typing import Final, TypeAlias

from completions.domain.completion import CompletionChunk, Usage
from completions.domain.errors import BackendError
from completions.service.plan import PlannedCall

SIDE_BY_SIDE: Final = 8
"""Calls of one request that are in progress at once."""
_HELD_CHUNKS: Final = 64

Job: TypeAlias = Callable[[], Generator[CompletionChunk]]
_Item: TypeAlias = tuple[int, CompletionChunk | BaseException | None]


def merged(
    calls: Sequence[PlannedCall],
    lead: Iterable[CompletionChunk],
    jobs: Sequence[Job],
    *,
    stop: Callable[[], None],
    unheard: Callable[[Usage], None],
) -> Generator[CompletionChunk]:
    """``lead`` answers ``calls[0]``; ``jobs`` begin the answers of the others.

    Raises what any of them raises, and then lets go of the rest, as it does when it is closed: ``stop`` is to end every
    wait, and ``unheard`` is told what all of them came to.
    """
    if jobs:
        yield from _side_by_side(calls, lead, jobs, stop, unheard)
    else:
        yield from lead


def _side_by_side(
    calls: Sequence[PlannedCall],
    lead: Iterable[CompletionChunk],
    jobs: Sequence[Job],
    stop: Callable[[], None],
    unheard: Callable[[Usage], None],
) -> Generator[CompletionChunk]:
    usage = _MergedUsage(calls)
    pullers = _Pullers((lambda: (chunk for chunk in lead), *jobs))
    try:
        while pullers.running:
            number, item = pullers.next()
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                yield usage.numbered(number, item)
    finally:
        for number, chunk in pullers.drained(stop):
            usage.note(number, chunk)
        if usage.known:
            unheard(usage.total)


class _Pullers:
    """Threads that pull an answer each. One that has not begun when all is let go is not waited for: it has nothing to
    tell, and hangs up as soon as it can."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._queue: Queue[_Item] = Queue(_HELD_CHUNKS)
        self._lock = Lock()
        self._begun: set[int] = set()
        self._ended = 0
        self._count = len(jobs)
        self._stopping = False
        self._pool = ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="fan-out")
        for number, job in enumerate(jobs):
            self._pool.submit(self._pull, number, job)

    @property
    def running(self) -> bool:
        """Whether there is anything left to come."""
        return self._ended < self._count

    def next(self) -> _Item:
        """The next chunk of any answer, or the end of one."""
        number, item = self._queue.get()
        if not isinstance(item, CompletionChunk):
            self._ended += 1
            self._begun.discard(number)
        return number, item

    def drained(self, stop: Callable[[], None]) -> Iterator[tuple[int, CompletionChunk]]:
        """Let go of all, and hear what those that have begun still have to say."""
        with self._lock:
            self._stopping = True
        if self.running:
            stop()
        while self._begun:
            number, item = self.next()
            if isinstance(item, CompletionChunk):
                yield number, item
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _pull(self, number: int, job: Job) -> None:
        end: BaseException | None = None
        try:
            with closing(job()) as chunks:
                for chunk in chunks:
                    if not self._may_tell(number):
                        return
                    self._queue.put((number, chunk))
                    if self._stopping:
                        break
        except BaseException as error:  # noqa: BLE001 - raised again in the reader's thread
            end = error
        if self._may_tell(number):
            self._queue.put((number, end))

    def _may_tell(self, number: int) -> bool:
        """Whether somebody listens to this one."""
        with self._lock:
            if not self._stopping:
                self._begun.add(number)
            return number in self._begun


class _MergedUsage:
    """The running sum. Calls that were sent the same prompts count them once; every generated token counts."""

    def __init__(self, calls: Sequence[PlannedCall]) -> None:
        self._calls = calls
        self._usage: dict[int, Usage] = {}

    def numbered(self, number: int, chunk: CompletionChunk) -> CompletionChunk:
        """A chunk of call ``number`` in the caller's numbers."""
        choices = self._calls[number].choices
        for delta in chunk.choices:
            if not 0 <= delta.index < len(choices):
                raise BackendError("The model's answer could not be read.", detail=f"choice index {delta.index}")
        self.note(number, chunk)
        return CompletionChunk(
            choices=tuple(replace(delta, index=choices[delta.index]) for delta in chunk.choices),
            usage=None if chunk.usage is None else self.total,
        )

    def note(self, number: int, chunk: CompletionChunk) -> None:
        """Count what a chunk of call ``number`` tells."""
        if chunk.usage is not None:
            self._usage[number] = chunk.usage

    @property
    def known(self) -> bool:
        """Whether any call has told its usage."""
        return bool(self._usage)

    @property
    def total(self) -> Usage:
        """All of it so far."""
        prompts: dict[tuple[int, ...], tuple[int, int]] = {}
        for number, usage in self._usage.items():
            sent = self._calls[number].prompts
            counted, cached = prompts.get(sent, (0, usage.cached_tokens))
            # what a later call found in the cache, the first one had put there
            prompts[sent] = max(counted, usage.prompt_tokens), min(cached, usage.cached_tokens)
        return Usage(
            prompt_tokens=sum(counted for counted, _ in prompts.values()),
            completion_tokens=sum(usage.completion_tokens for usage in self._usage.values()),
            cached_tokens=sum(cached for _, cached in prompts.values()),
            estimated=any(usage.estimated for usage in self._usage.values()),
        )
