"""The answers of several calls as one: choices renumbered, usage added up.

The first call has begun when this is asked, so the model answers; the others follow side by side in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from queue import Queue
from threading import Event
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
    calls: Sequence[PlannedCall], lead: Iterable[CompletionChunk], jobs: Sequence[Job]
) -> Generator[CompletionChunk]:
    """``lead`` answers ``calls[0]``; ``jobs`` begin the answers of the others. Raises what any of them raises, and
    then lets go of the rest."""
    if jobs:
        yield from _side_by_side(calls, lead, jobs)
    else:
        yield from lead


def _side_by_side(
    calls: Sequence[PlannedCall], lead: Iterable[CompletionChunk], jobs: Sequence[Job]
) -> Generator[CompletionChunk]:
    usage = _MergedUsage(calls)
    queue: Queue[_Item] = Queue(_HELD_CHUNKS)
    stopping = Event()
    pool = ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="fan-out")
    all_jobs = (lambda: (chunk for chunk in lead), *jobs)
    for number, job in enumerate(all_jobs):
        pool.submit(_pull, number, job, queue, stopping)
    running = len(all_jobs)
    try:
        while running:
            number, item = queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                running -= 1
                raise item
            else:
                yield usage.numbered(number, item)
    finally:
        stopping.set()
        while running:  # a puller may be waiting for room; each of them ends with None or an error
            running -= not isinstance(queue.get()[1], CompletionChunk)
        pool.shutdown()


def _pull(number: int, job: Job, queue: Queue[_Item], stopping: Event) -> None:
    """Every chunk of one answer, until it ends or nobody listens any more."""
    end: BaseException | None = None
    try:
        if not stopping.is_set():
            with closing(job()) as chunks:
                for chunk in chunks:
                    queue.put((number, chunk))
                    if stopping.is_set():
                        break
    except BaseException as error:  # noqa: BLE001 - raised again in the reader's thread
        end = error
    queue.put((number, end))


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
        if chunk.usage is not None:
            self._usage[number] = chunk.usage
        return CompletionChunk(
            choices=tuple(replace(delta, index=choices[delta.index]) for delta in chunk.choices),
            usage=None if chunk.usage is None else self._total(),
        )

    def _total(self) -> Usage:
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
