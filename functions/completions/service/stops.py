"""Stop texts cut on our side: what a container cannot be told, or would leave in.

A stop text may arrive in pieces, so text that could be the beginning of one is held back until it is decided. The stop
text that is complete first counts, however the text is cut into pieces; the answer ends before it, or behind it when it
is to be included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from completions.domain.completion import ChoiceDelta, CompletionChunk, CompletionRequest, FinishReason, Logprobs


def cut_at_stops(
    chunks: Iterable[CompletionChunk], stops: tuple[str, ...], request: CompletionRequest
) -> Iterator[CompletionChunk]:
    """``chunks`` with every choice cut at the first of ``stops``; deltas of a cut choice are dropped, usage is kept.

    Ends early, with the container still speaking, when the last open choice is cut here.
    """
    cutters = [
        StopCutter(stops, request.include_stop, _echoed_length(request, index)) for index in range(request.choice_count)
    ]
    for chunk in chunks:
        deltas = [released for delta in chunk.choices if (released := cutters[delta.index].cut(delta)) is not None]
        if deltas or chunk.usage is not None:
            yield CompletionChunk(tuple(deltas), chunk.usage)
        if all(cutter.closed for cutter in cutters) and any(cutter.was_cut for cutter in cutters):
            return


def _echoed_length(request: CompletionRequest, index: int) -> int:
    """Characters at the start of a choice that are the prompt's own, where no stop text counts."""
    prompt = request.prompts[index // request.n]
    return len(prompt) if request.echo and isinstance(prompt, str) else 0


@dataclass(slots=True)
class StopCutter:
    """One choice's scanner. Its first ``skipped`` characters are never searched."""

    stops: tuple[str, ...]
    include_stop: bool
    skipped: int = 0
    closed: bool = False
    was_cut: bool = False
    _held: str = ""
    _held_logprobs: list[Logprobs] = field(default_factory=list)
    _released: int = 0

    def cut(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """The part of ``delta``, and of what was held back before it, that no stop text can claim any more."""
        if self.closed:
            return None
        text = self._held + delta.text
        if delta.logprobs is not None:
            self._held_logprobs.append(delta.logprobs)
        end = self._first_stop(text)
        if end is not None:
            self.closed = self.was_cut = True
            return self._release(delta, text[:end], FinishReason.STOP)
        if delta.finish_reason is not None:
            self.closed = True
            return self._release(delta, text, delta.finish_reason)
        keep = self._possible_start(text)
        self._held = text[keep:]
        if keep == 0 and text:
            return None
        return self._release(delta, text[:keep], None)

    @property
    def _scanned_from(self) -> int:
        return max(0, self.skipped - self._released)

    def _first_stop(self, text: str) -> int | None:
        """Where the answer ends, when a stop text stands in ``text``."""
        found = [
            (start + len(stop), start) for stop in self.stops if (start := text.find(stop, self._scanned_from)) >= 0
        ]
        if not found:
            return None
        end, start = min(found)
        return end if self.include_stop else start

    def _possible_start(self, text: str) -> int:
        """Where the longest tail of ``text`` begins that some stop text begins with."""
        longest = max(len(stop) for stop in self.stops) - 1
        for start in range(max(self._scanned_from, len(text) - longest), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self.stops):
                return start
        return len(text)

    def _release(self, delta: ChoiceDelta, text: str, finish_reason: FinishReason | None) -> ChoiceDelta:
        self._released += len(text)
        parts, self._held_logprobs = self._held_logprobs, []
        logprobs = joined_logprobs(parts) if parts else None
        if logprobs is not None and (finish_reason is FinishReason.STOP or finish_reason is None):
            # a token whose text is held back, or cut, is not told
            logprobs, held = _split(logprobs, self._released)
            self._held_logprobs = [held] if held.tokens and finish_reason is None else []
        return replace(delta, text=text, logprobs=logprobs, finish_reason=finish_reason)


def joined_logprobs(parts: list[Logprobs]) -> Logprobs:
    """The arrays of consecutive deltas, one after the other."""
    return Logprobs(
        tokens=tuple(token for part in parts for token in part.tokens),
        token_logprobs=tuple(value for part in parts for value in part.token_logprobs),
        top_logprobs=tuple(top for part in parts for top in part.top_logprobs),
        text_offset=tuple(offset for part in parts for offset in part.text_offset),
    )


def _split(logprobs: Logprobs, end: int) -> tuple[Logprobs, Logprobs]:
    """The entries of tokens that begin before ``end``, in characters of the returned text, and the others."""
    early = [number for number, offset in enumerate(logprobs.text_offset) if offset < end]
    late = [number for number, offset in enumerate(logprobs.text_offset) if offset >= end]
    return _picked(logprobs, early), _picked(logprobs, late)


def _picked(logprobs: Logprobs, numbers: list[int]) -> Logprobs:
    return Logprobs(
        tokens=tuple(logprobs.tokens[number] for number in numbers),
        token_logprobs=tuple(logprobs.token_logprobs[number] for number in numbers),
        top_logprobs=tuple(logprobs.top_logprobs[number] for number in numbers),
        text_offset=tuple(logprobs.text_offset[number] for number in numbers),
    )
