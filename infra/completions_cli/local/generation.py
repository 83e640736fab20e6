"""Completions from the embedded model as neutral events; the wire formats of the container families stand on this.

What belongs to generating is here once: limits, stop rules, detokenisation, hold-back and the order of choices. The
rules are those of vLLM's ``v1/engine``, which the other families follow where they have the feature at all; TGI's rule
for stop strings stands beside them.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from completions_cli.local.ngram import NGramModel, SamplingSettings, Step
from completions_cli.local.tokenizer import Special, Tokenizer


class StopRule(StrEnum):
    """Where a stop string ends a choice.

    ``ANYWHERE`` is vLLM's: wherever it stands in the text, which is cut there. ``TAIL`` is TGI's: only where the
    text ends with it after a token (a line break may follow), the text keeps it, and the limit is looked at first.
    """

    ANYWHERE = "anywhere"
    TAIL = "tail"


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice. ``stop_reason`` is the matched string or token id; ``None`` for end of text and length."""

    reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """``n`` candidates for each prompt, at most ``max_tokens`` (>= 1) each. A seed gives candidate i ``seed + i``."""

    prompts: tuple[tuple[int, ...], ...]
    settings: SamplingSettings
    max_tokens: int
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop_rule: StopRule = StopRule.ANYWHERE

    @property
    def keeps_stop(self) -> bool:
        """Whether what ended a choice stays in its text."""
        return self.include_stop or self.stop_rule is StopRule.TAIL


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token of one choice and the text it releases, which may be empty while text is held back."""

    index: int
    step: Step
    text: str
    finish: Finish | None


class OutputText:
    """Text of one choice: decodes token by token, looks for stop strings, holds back what one might still cut.

    An incomplete UTF-8 sequence waits for its last byte, and is dropped if that never comes. While stop strings are
    excluded, the last ``longest stop - 1`` characters wait until the choice ends.
    """

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._released = 0
        cuts = bool(request.stop) and not request.keeps_stop
        self._held_back = max(map(len, request.stop)) - 1 if cuts else 0

    def append(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token's text; return the stop string it completes. Text added before ``may_stop`` never stops."""
        if self._request.skip_special_tokens and self._tokenizer.is_special(token_id):
            return None
        new = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._text += new
        if not (may_stop and new):
            return None
        return self._last_stop() if self._request.stop_rule is StopRule.TAIL else self._cut_at_stop(len(new))

    def release(self, *, finished: bool) -> str:
        """The text that can go out now and has not gone out yet."""
        end = len(self._text) if finished else max(self._released, len(self._text) - self._held_back)
        released, self._released = self._text[self._released : end], end
        return released

    def _last_stop(self) -> str | None:
        """The first of the request's stops that the text ends with; the pattern TGI uses lets a line break follow."""
        return next((stop for stop in self._request.stop if self._text.endswith((stop, f"{stop}\n"))), None)

    def _cut_at_stop(self, new_chars: int) -> str | None:
        """The first of the request's stops (in its order) that ends in the new text; the text is cut there."""
        for stop in self._request.stop:
            start = self._text.find(stop, max(0, len(self._text) - new_chars - len(stop) + 1))
            if start >= 0:
                self._text = self._text[: start + len(stop) if self._request.include_stop else start]
                return stop
        return None


@dataclass(frozen=True, slots=True)
class GenerationEngine:
    """Generates with one model. ``tokens_per_second`` paces each choice (0: no pause); choices advance in step."""

    model: NGramModel
    max_model_len: int = 8192
    tokens_per_second: float = 0.0
    sleep: Callable[[float], object] = time.sleep

    def run(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Events of all choices, a token of each in turn. Choice index = prompt * n + candidate. Close it to stop."""
        running = [
            self._choice(request, prompt, position * request.n + candidate, candidate)
            for position, prompt in enumerate(request.prompts)
            for candidate in range(request.n)
        ]
        while running:
            if self.tokens_per_second > 0:
                self.sleep(1 / self.tokens_per_second)
            events = [(choice, next(choice)) for choice in running]
            yield from (event for _, event in events)
            running = [choice for choice, event in events if event.finish is None]

    def score(self, prompt: tuple[int, ...], top_logprobs: int) -> list[Step]:
        """A prompt's own log-probabilities, for ``echo`` with ``logprobs``."""
        return self.model.score(prompt, top_logprobs)

    def room(self, prompt: tuple[int, ...]) -> int:
        """How many tokens the context window leaves after the prompt; zero or less when there is none."""
        return self.max_model_len - len(prompt)

    def _choice(
        self, request: GenerationRequest, prompt: tuple[int, ...], index: int, candidate: int
    ) -> Iterator[TokenEvent]:
        text = OutputText(self.model.tokenizer, request)
        limit = min(request.max_tokens, self.room(prompt))
        seed = None if request.seed is None else request.seed + candidate
        for produced, step in enumerate(self.model.generate(prompt, request.settings, seed), start=1):
            finish = _finish(request, step.token_id, text, produced, limit)
            yield TokenEvent(index, step, text.release(finished=finish is not None), finish)
            if finish is not None:
                return


def _finish(request: GenerationRequest, token: int, text: OutputText, produced: int, limit: int) -> Finish | None:
    """Whether this token ends the choice. A stop token is counted, but adds text only where stops are kept."""
    may_stop = produced > request.settings.min_tokens
    stop = _stop_token(request, token) if may_stop else None
    matched = text.append(token, may_stop=may_stop) if stop is None or request.keeps_stop else None
    if request.stop_rule is StopRule.TAIL and produced >= limit:
        return Finish(FinishReason.LENGTH)
    if stop is None and matched is not None:
        return Finish(FinishReason.STOP, matched)
    if stop is None and produced >= limit:
        return Finish(FinishReason.LENGTH)
    return stop


def _stop_token(request: GenerationRequest, token: int) -> Finish | None:
    if token == Special.END_OF_TEXT and not request.ignore_eos:
        return Finish(FinishReason.STOP)
    return Finish(FinishReason.STOP, token) if token in request.settings.stop_token_ids else None
