"""The canonical request and answer: what every dialect decodes into and every container codec is encoded from.

Defaults are OpenAI's; ranges are stated here and enforced by the dialects.
``None`` means unset; ``0`` and ``""`` are values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from completions.domain.errors import LimitStatus

TokenIds: TypeAlias = tuple[int, ...]
Prompt: TypeAlias = str | TokenIds


class FinishReason(StrEnum):
    """Why a choice ended. A failed or aborted choice has none: it raises instead."""

    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"


class ConstraintKind(StrEnum):
    """What the output must match."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """Guided decoding. ``value`` is JSON text, a pattern or a grammar; ``choices`` is set for ``CHOICE`` alone."""

    kind: ConstraintKind
    value: str | None = None
    choices: tuple[str, ...] = ()
    whitespace_pattern: str | None = None


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search instead of sampling; the width is ``best_of``."""

    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a choice ends.

    ``temperature`` 0..2 (0 is greedy), ``top_p`` 0..1, ``top_k`` >= 1 or ``None`` for off, ``min_p`` 0..1, penalties
    -2..2 (``repetition_penalty`` > 0), ``logit_bias`` -100..100 by token id, ``seed`` int64.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One logical request of any dialect.

    ``other_models`` are further readings of the caller's spelling, tried in order after ``model``. ``best_of`` is
    always resolved (absent means ``n``). ``logprobs`` is the number of alternatives, 0 for the chosen token alone.
    ``cumulative`` streams repeat all the text so far in each event. ``deadline_ms`` is the caller's own limit, counted
    from arrival. ``param_names`` maps a canonical parameter to the dialect's spelling where the two differ, so that a
    refusal names what the caller wrote.
    """

    model: str
    prompts: tuple[Prompt, ...]
    other_models: tuple[str, ...] = ()
    max_tokens: int = 16
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    n: int = 1
    best_of: int = 1
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    constraint: Constraint | None = None
    beam: BeamSearch | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    add_special_tokens: bool = True
    stream: bool = False
    cumulative: bool = False
    include_usage: bool = False
    end_user: str | None = None
    deadline_ms: int | None = None
    param_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def choice_count(self) -> int:
        """How many choices the answer has: every prompt's candidates, in prompt order."""
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Four parallel arrays, one entry a token. The first token of an echoed prompt has no probability (``None``).

    ``text_offset`` counts characters from the start of the returned text.
    """

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[Mapping[str, float] | None, ...]
    text_offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all prompts and every generated candidate, as the container reports them.

    ``estimated`` marks counts that had to be inferred because the container's own never came.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    estimated: bool = False

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one upstream record adds to one choice. ``finish_reason`` is set on the choice's last delta alone."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """One streamed event: deltas of zero or more choices, and the running usage when the container tells it."""

    choices: tuple[ChoiceDelta, ...] = ()
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished candidate."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; ``model`` is the id of the model that gave it, ``limits`` what the key has left."""

    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    limits: tuple[LimitStatus, ...] = ()
