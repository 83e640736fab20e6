"""The prompt in front of the answer, where the container does not put it there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from completions.domain.completion import ChoiceDelta, CompletionChunk, CompletionRequest


def with_echo(chunks: Iterable[CompletionChunk], request: CompletionRequest) -> Iterator[CompletionChunk]:
    """``chunks``, the first delta of each choice led by its prompt, every offset moved behind it.

    Prompts must be text.
    """
    begun: set[int] = set()
    for chunk in chunks:
        deltas = []
        for delta in chunk.choices:
            deltas.append(
                _echoed(delta, str(request.prompts[delta.index // request.n]), first=delta.index not in begun)
            )
            begun.add(delta.index)
        yield replace(chunk, choices=tuple(deltas))


def _echoed(delta: ChoiceDelta, prompt: str, *, first: bool) -> ChoiceDelta:
    logprobs = delta.logprobs
    if logprobs is not None:
        offsets = tuple(offset + len(prompt) for offset in logprobs.text_offset)
        logprobs = replace(logprobs, text_offset=offsets)
    return replace(delta, text=prompt + delta.text if first else delta.text, logprobs=logprobs)
