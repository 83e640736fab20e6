"""The embedded language model: interpolated n-grams over Python's own standard library. It stands in for a GPU.

Probabilities are Witten-Bell estimates, interpolated recursively from the longest known context down to the uniform
distribution, so ``logprob`` is normalised over the whole vocabulary. Sampling looks at some hundred candidates only.
"""

from __future__ import annotations

import heapq
import math
import sysconfig
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Self, TypeAlias

from completions_cli.local.tokenizer import Special, Tokenizer

CONTEXT_LENGTHS = (1, 2, 4)
CANDIDATES_PER_CONTEXT = 32
# What vLLM raises a positive temperature to, so that dividing by it stays finite.
LOWEST_TEMPERATURE = 0.01
CORPUS = (
    "bisect.py", "calendar.py", "cmd.py", "contextlib.py", "copy.py", "csv.py", "email/parser.py", "fileinput.py",
    "fnmatch.py", "fractions.py", "getpass.py", "glob.py", "graphlib.py", "gzip.py", "heapq.py", "hmac.py",
    "http/cookies.py", "io.py", "json/__init__.py", "json/decoder.py", "json/encoder.py", "json/tool.py",
    "linecache.py", "numbers.py", "pathlib.py", "pprint.py", "queue.py", "reprlib.py", "sched.py", "secrets.py",
    "selectors.py", "shlex.py", "socketserver.py", "string.py", "tempfile.py", "textwrap.py", "timeit.py",
    "unittest/loader.py", "uuid.py", "zipapp.py",
)  # fmt: skip

Context: TypeAlias = tuple[int, ...]
Counts: TypeAlias = dict[int, int]
Ranked: TypeAlias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the next token is chosen; vLLM's names and ranges. ``temperature`` 0 is greedy, ``top_k`` 0 or -1 is off.

    ``stop_token_ids`` matter here for ``min_tokens`` alone: until then they, and the end of text, cannot be drawn.
    ``top_logprobs`` is how many alternatives each step reports.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One token with the model's own log-probability (before penalties and temperature) and the likeliest tokens.

    ``logprob`` is ``None`` for the first token of a scored prompt, which has no context.
    """

    token_id: int
    logprob: float | None
    top: Ranked = ()


@dataclass(frozen=True, slots=True)
class ContextTable:
    """What followed each context of one length. ``common`` holds the likeliest followers of contexts with very many."""

    length: int
    followers: Mapping[Context, Counts]
    common: Mapping[Context, tuple[int, ...]]

    @classmethod
    def count(cls, ids: Sequence[int], length: int) -> ContextTable:
        """Count the followers of every run of ``length`` ids."""
        followers: dict[Context, Counts] = {}
        contexts = zip(*(ids[start:] for start in range(length)), strict=False)
        for context, token in zip(contexts, ids[length:], strict=False):
            counts = followers.get(context)
            if counts is None:
                followers[context] = {token: 1}
            else:
                counts[token] = counts.get(token, 0) + 1
        busy = ((context, counts) for context, counts in followers.items() if len(counts) > CANDIDATES_PER_CONTEXT)
        return cls(length, followers, {context: _likeliest(counts) for context, counts in busy})


class NGramModel:
    """A trained model with its tokenizer. Immutable, so any number of threads may generate from it."""

    def __init__(self, tokenizer: Tokenizer, unigrams: Counts, tables: Sequence[ContextTable]) -> None:
        """``tables`` go from the shortest context to the longest."""
        self.tokenizer = tokenizer
        self._unigrams = unigrams
        self._unigram_total = sum(unigrams.values())
        self._common = _likeliest(unigrams)
        self._tables = tuple(tables)
        self._memory = max(table.length for table in tables)

    @classmethod
    def train(cls, paths: Iterable[Path]) -> Self:
        """Learn from text files; the same files give the same ids and probabilities."""
        documents = [path.read_text(encoding="utf-8") for path in paths]
        if not documents:
            raise ValueError("the embedded model needs at least one file to learn from")
        tokenizer = Tokenizer.train(documents)
        ids = tokenizer.encode_documents(documents)
        return cls(tokenizer, dict(Counter(ids)), [ContextTable.count(ids, length) for length in CONTEXT_LENGTHS])

    def logprob(self, context: Sequence[int], token_id: int) -> float:
        """Natural log-probability of ``token_id`` after ``context``; finite for every id of the vocabulary."""
        return math.log(self._probabilities(self._known(context), [token_id])[token_id])

    def top(self, context: Sequence[int], count: int) -> Ranked:
        """The ``count`` likeliest tokens after ``context`` as (id, log-probability), likeliest first."""
        return _rank(self._candidates(context), count)

    def score(self, ids: Sequence[int], top_logprobs: int) -> list[Step]:
        """Each token of a prompt given those before it."""
        steps = [Step(ids[0], None)]
        for position in range(1, len(ids)):
            context = ids[max(0, position - self._memory) : position]
            top = self.top(context, top_logprobs) if top_logprobs else ()
            steps.append(Step(ids[position], self.logprob(context, ids[position]), top))
        return steps

    def generate(
        self, prompt_ids: Sequence[int], settings: SamplingSettings, seed: int | None = None
    ) -> Iterator[Step]:
        """Tokens without end: the caller stops at the end of text, at a stop or at its limit. No seed: a random one."""
        infill = self._infill(prompt_ids)
        sampler = Sampler(settings, frozenset(prompt_ids), seed)
        context = deque(prompt_ids if infill is None else infill.context, maxlen=self._memory)
        while True:
            candidates = self._candidates(context, settings.logit_bias)
            token = sampler.draw(candidates)
            drawn = Step(token, math.log(candidates[token]), _rank(candidates, settings.top_logprobs))
            steps = [drawn]
            if infill is not None and sampler.may_stop and b"\n" in self.tokenizer.token_bytes(token):
                steps = infill.close_line(drawn)
                infill = None
            for step in steps:
                sampler.record(step.token_id)
                context.append(step.token_id)
                yield step

    def _infill(self, ids: Sequence[int]) -> Infill | None:
        """Read the last ``prefix, suffix, middle`` markers of a prompt, if it has them in this order."""
        middle = _last_index(ids, Special.FIM_MIDDLE, len(ids))
        suffix = _last_index(ids, Special.FIM_SUFFIX, middle)
        prefix = _last_index(ids, Special.FIM_PREFIX, suffix)
        if prefix < 0:
            return None
        after = self.tokenizer.decode(ids[suffix + 1 : middle])
        return Infill([*ids[prefix + 1 : suffix], *ids[middle + 1 :]], after.startswith(("\n", "\r\n")))

    def _known(self, context: Sequence[int]) -> list[tuple[ContextTable, Context]]:
        """The tables that know the end of ``context``, shortest first. One unknown length makes the longer unknown."""
        recent = tuple(context)[-self._memory :]
        known = []
        for table in self._tables:
            ending = recent[-table.length :]
            if len(recent) < table.length or ending not in table.followers:
                break
            known.append((table, ending))
        return known

    def _candidates(self, context: Sequence[int], also: Iterable[int] = ()) -> dict[int, float]:
        """Probabilities of the tokens worth drawing: the followers of every known context, and those in ``also``."""
        known = self._known(context)
        ids = set(also)
        for table, ending in known:
            ids.update(table.common.get(ending, table.followers[ending]))
        if len(ids) < CANDIDATES_PER_CONTEXT:
            ids.update(self._common)
        return self._probabilities(known, ids)

    def _probabilities(self, known: Iterable[tuple[ContextTable, Context]], ids: Iterable[int]) -> dict[int, float]:
        """Witten-Bell: a context seen N times with D distinct followers gives (count + D * shorter) / (N + D)."""
        distinct = len(self._unigrams)
        norm = self._unigram_total + distinct
        uniform = distinct / self.tokenizer.size
        result = {token: (self._unigrams.get(token, 0) + uniform) / norm for token in ids}
        for table, ending in known:
            counts = table.followers[ending]
            distinct = len(counts)
            norm = sum(counts.values()) + distinct
            result = {token: (counts.get(token, 0) + distinct * shorter) / norm for token, shorter in result.items()}
        return result


@dataclass(frozen=True, slots=True)
class Infill:
    """A fill-in-the-middle prompt: what to continue, and whether the text after the gap begins with a line break."""

    context: Sequence[int]
    line_break_follows: bool

    def close_line(self, newline: Step) -> list[Step]:
        """End the infill where its line ends: the end of text follows the newline, or stands in its place."""
        if self.line_break_follows:
            return [Step(Special.END_OF_TEXT, newline.logprob, newline.top)]
        certain = ((int(Special.END_OF_TEXT), 0.0),) if newline.top else ()
        return [Step(ord("\n"), newline.logprob, newline.top), Step(Special.END_OF_TEXT, 0.0, certain)]


class Sampler:
    """Draws tokens of one sequence in vLLM's order: bias, masks and penalties, temperature, min_p, top_k, top_p."""

    def __init__(self, settings: SamplingSettings, prompt: frozenset[int], seed: int | None) -> None:
        self._settings = settings
        self._prompt = prompt
        self._random = Random(seed)
        self._produced: Counter[int] = Counter()
        self._length = 0

    @property
    def may_stop(self) -> bool:
        """Whether ``min_tokens`` is reached."""
        return self._length >= self._settings.min_tokens

    def record(self, token: int) -> None:
        """Take a token into account for penalties and ``min_tokens``."""
        self._produced[token] += 1
        self._length += 1

    def draw(self, probabilities: Mapping[int, float]) -> int:
        """The next token; ties of greedy sampling go to the lowest id."""
        logits = self._logits(probabilities)
        if self._settings.temperature == 0:
            return min(logits, key=lambda token: (-logits[token], token))
        weights = self._weights(logits)
        point = self._random.random() * sum(weight for _, weight in weights)
        for token, weight in weights:
            point -= weight
            if point < 0:
                return token
        return weights[-1][0]

    def _logits(self, probabilities: Mapping[int, float]) -> dict[int, float]:
        logits = {token: math.log(probability) for token, probability in probabilities.items()}
        for token, bias in self._settings.logit_bias.items():
            logits[token] += bias
        if not self.may_stop:
            banned = self._settings.stop_token_ids | {Special.END_OF_TEXT}
            logits = {token: logit for token, logit in logits.items() if token not in banned} or logits
        return self._penalised(logits)

    def _penalised(self, logits: dict[int, float]) -> dict[int, float]:
        """Repetition looks at prompt and output, the other two at the output alone."""
        settings = self._settings
        if settings.repetition_penalty != 1:
            for token in logits.keys() & (self._prompt | self._produced.keys()):
                factor = settings.repetition_penalty
                logits[token] *= factor if logits[token] < 0 else 1 / factor
        if settings.presence_penalty or settings.frequency_penalty:
            for token in logits.keys() & self._produced.keys():
                logits[token] -= settings.presence_penalty + settings.frequency_penalty * self._produced[token]
        return logits

    def _weights(self, logits: Mapping[int, float]) -> list[tuple[int, float]]:
        """Unnormalised probabilities of the tokens that min_p, top_k and top_p leave."""
        settings = self._settings
        temperature = max(settings.temperature, LOWEST_TEMPERATURE)
        highest = max(logits.values())
        weights = [(token, math.exp((logit - highest) / temperature)) for token, logit in logits.items()]
        weights = [(token, weight) for token, weight in weights if weight >= settings.min_p]
        if settings.top_k > 0 or settings.top_p < 1:
            weights.sort(key=lambda item: (-item[1], item[0]))
        if settings.top_k > 0:
            weights = weights[: settings.top_k]
        return _nucleus(weights, settings.top_p) if settings.top_p < 1 else weights


def standard_library() -> list[Path]:
    """The files the embedded model learns from; those this Python does not have are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    return [root / name for name in CORPUS if (root / name).is_file()]


def _nucleus(weights: Sequence[tuple[int, float]], top_p: float) -> list[tuple[int, float]]:
    """The fewest likeliest tokens (``weights`` is sorted) that hold ``top_p`` of the mass."""
    limit = top_p * sum(weight for _, weight in weights)
    kept = []
    for item in weights:
        kept.append(item)
        limit -= item[1]
        if limit <= 0:
            break
    return kept


def _rank(probabilities: Mapping[int, float], count: int) -> Ranked:
    best = heapq.nsmallest(count, probabilities.items(), key=lambda item: (-item[1], item[0]))
    return tuple((token, math.log(probability)) for token, probability in best)


def _likeliest(counts: Counts) -> tuple[int, ...]:
    best = heapq.nsmallest(CANDIDATES_PER_CONTEXT, counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(token for token, _ in best)


def _last_index(ids: Sequence[int], token: int, end: int) -> int:
    """Position of the last ``token`` before ``end``, or -1."""
    return next((position for position in range(end - 1, -1, -1) if ids[position] == token), -1)
