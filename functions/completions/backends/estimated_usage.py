"""Running counts for servers that tell their usage at the end of an answer alone, or not at all."""

from __future__ import annotations

from dataclasses import replace

from completions.backends.codec import StreamDecoder
from completions.domain.completion import ChoiceDelta, CompletionChunk, CompletionRequest, Usage
from completions.domain.estimates import estimated_prompt_tokens


class EstimatingDecoder(StreamDecoder):
    """``decoder``'s chunks, each with a usage: the server's own, or an estimate of the tokens so far.

    A broken stream is settled by the last estimate. ``usage_ends`` takes an answer for whole, though its terminal
    record never came, once every choice has its finish reason and the server has told its usage since.
    """

    def __init__(
        self, decoder: StreamDecoder, request: CompletionRequest, *, whole: bool = False, usage_ends: bool = False
    ) -> None:
        self._decoder = decoder
        self._prompt_tokens = estimated_prompt_tokens(request.prompts)
        self._told = Usage(self._prompt_tokens, 0, estimated=True)
        self._whole = whole
        self._usage_ends = usage_ends
        self._open = set(range(request.choice_count))
        self._since = 0
        self._ended = False

    def decode(self, record: bytes) -> CompletionChunk | None:
        chunk = self._decoder.decode(record)
        if chunk is None:
            return None
        self._since += sum(self._tokens(delta) for delta in chunk.choices)
        self._open -= {delta.index for delta in chunk.choices if delta.finish_reason is not None}
        if chunk.usage is not None:
            self._ended = not self._open
            self._told, self._since = self._counted(chunk.usage), 0
            return replace(chunk, usage=self._told)
        return replace(chunk, usage=self._estimate())

    def finish(self) -> None:
        if not (self._usage_ends and self._ended):
            self._decoder.finish()

    def _counted(self, usage: Usage) -> Usage:
        """TGI's documents count the prompt by its log-probabilities, which are off by default; no prompt is empty."""
        return usage if usage.prompt_tokens else replace(usage, prompt_tokens=self._prompt_tokens, estimated=True)

    def _estimate(self) -> Usage:
        """What was told last, and what has come since."""
        told = self._told
        estimated = told.estimated or self._since > 0
        return replace(told, completion_tokens=told.completion_tokens + self._since, estimated=estimated)

    def _tokens(self, delta: ChoiceDelta) -> int:
        if delta.logprobs is not None:
            return len(delta.logprobs.tokens)
        if self._whole:
            return estimated_prompt_tokens((delta.text,))
        return bool(delta.text)  # a streamed record is taken for a token
