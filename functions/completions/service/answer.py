"""From streamed chunks to a whole answer: the tally every request keeps, the choices a buffered one returns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from completions.domain.completion import (
    Choice,
    ChoiceDelta,
    CompletionChunk,
    CompletionRequest,
    FinishReason,
    Logprobs,
    Prompt,
    Usage,
)
from completions.domain.errors import BackendError, TruncatedStreamError
from completions.domain.estimates import estimated_prompt_tokens
from completions.service.stops import joined_logprobs


class Tally:
    """Counts while chunks pass: what was used so far, and which choices are finished."""

    def __init__(self, choice_count: int, prompts: Sequence[Prompt] = ()) -> None:
        self._open = set(range(choice_count))
        self._prompts = prompts
        self._reported: Usage | None = None
        self._deltas = 0

    def add(self, chunk: CompletionChunk) -> None:
        """Take note of one chunk."""
        if chunk.usage is not None:
            self._reported = chunk.usage
        for delta in chunk.choices:
            self._deltas += bool(delta.text)
            if delta.finish_reason is not None:
                self._open.discard(delta.index)

    @property
    def usage(self) -> Usage:
        """The container's last count; without one an estimate, once there is something: each delta a token."""
        if self._reported is not None or self._deltas == 0:
            return self._reported or Usage(0, 0)
        return Usage(estimated_prompt_tokens(self._prompts), self._deltas, estimated=True)

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return not self._open

    def require_finished(self) -> None:
        """Raises ``TruncatedStreamError`` when a choice never got its finish reason."""
        if not self.finished:
            raise TruncatedStreamError


def known_choices(chunks: Iterable[CompletionChunk], choice_count: int) -> Iterator[CompletionChunk]:
    """``chunks`` as they are. Raises ``BackendError`` for a choice that was never asked for."""
    for chunk in chunks:
        for delta in chunk.choices:
            if not 0 <= delta.index < choice_count:
                raise BackendError("The model's answer could not be read.", detail=f"choice index {delta.index}")
        yield chunk


@dataclass(slots=True)
class _Draft:
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        if delta.logprobs is not None:
            self.logprobs.append(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason


class Drafts:
    """Choices that grow with each chunk."""

    def __init__(self) -> None:
        self._drafts: dict[int, _Draft] = {}

    def add(self, chunk: CompletionChunk) -> None:
        """Take in one chunk."""
        for delta in chunk.choices:
            self._drafts.setdefault(delta.index, _Draft()).add(delta)

    def choices(self) -> tuple[Choice, ...]:
        """Every choice, in index order. Raises ``TruncatedStreamError`` for one without a finish reason."""
        return tuple(_choice(index, draft) for index, draft in sorted(self._drafts.items()))


def best_choices(choices: tuple[Choice, ...], request: CompletionRequest) -> tuple[Choice, ...]:
    """The ``n`` of each prompt's ``best_of`` candidates with the highest mean log-probability a token, renumbered.

    The candidates must carry log-probabilities; they are dropped again unless the caller asked for some.
    """
    kept: list[Choice] = []
    for start in range(0, len(choices), request.best_of):
        prompt = request.prompts[start // request.best_of] if request.echo else ""
        candidates = choices[start : start + request.best_of]
        kept += sorted(candidates, key=partial(_mean_logprob, echoed=prompt), reverse=True)[: request.n]
    return tuple(
        replace(choice, index=index, logprobs=choice.logprobs if request.logprobs is not None else None)
        for index, choice in enumerate(kept)
    )


def _mean_logprob(choice: Choice, echoed: Prompt) -> float:
    """Over the generated tokens alone: the echoed prompt is the same for every candidate, but not its share."""
    if choice.logprobs is None:
        return float("-inf")
    first = bisect_left(choice.logprobs.text_offset, len(echoed)) if isinstance(echoed, str) else len(echoed)
    values = [value for value in choice.logprobs.token_logprobs[first:] if value is not None]
    return sum(values) / len(values) if values else float("-inf")


def _choice(index: int, draft: _Draft) -> Choice:
    if draft.finish_reason is None:
        raise TruncatedStreamError
    logprobs = joined_logprobs(draft.logprobs) if draft.logprobs else None
    return Choice(index, "".join(draft.texts), draft.finish_reason, logprobs)
