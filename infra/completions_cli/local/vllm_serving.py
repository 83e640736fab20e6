"""vLLM's completion endpoint without HTTP: a valid request to its whole answer or its chunks.

The vLLM container serves it as server-sent events; LMI embeds the same and writes its own lines.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import NoReturn

from completions_cli.local.generation import GenerationEngine, GenerationRequest, TokenEvent
from completions_cli.local.ngram import Step
from completions_cli.local.tokenizer import MAX_PIECE_CHARS
from completions_cli.local.vllm_wire import (
    ChoiceWriter,
    CompletionRequest,
    Envelope,
    JsonObject,
    RequestRefusedError,
    UnknownModelError,
    check_sampling,
    settings_of,
    usage_body,
)


@dataclass(frozen=True, slots=True)
class StreamQuirks:
    """What a stream may be other than a token a chunk, made to happen regularly.

    A chunk carries ``tokens_per_chunk`` tokens of its choice; after every ``empty_chunk_every`` chunks comes one
    without a token; after every ``keep_alive_every`` frames, a comment line. 0 turns either off.
    """

    tokens_per_chunk: int = 1
    empty_chunk_every: int = 0
    keep_alive_every: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One valid request on its way to the engine, and the two forms its answer can take."""

    engine: GenerationEngine
    request: CompletionRequest
    generation: GenerationRequest
    envelope: Envelope
    quirks: StreamQuirks

    def whole(self) -> JsonObject:
        """Generate everything, answer once."""
        writers = self._writers()
        events: list[list[TokenEvent]] = [[] for _ in writers]
        for event in self.engine.run(self.generation):
            events[event.index].append(event)
        choices = [
            {**writer.write(produced), "prompt_logprobs": None}
            for writer, produced in zip(writers, events, strict=True)
        ]
        usage = {**self._usage(writers), "prompt_tokens_details": None}
        return self.envelope.body(
            choices, service_tier=None, system_fingerprint=None, usage=usage, kv_transfer_params=None
        )

    def chunks(self) -> Generator[JsonObject, None, None]:
        """The chunks of a stream, the one with the usage included. Close it to end the generation."""
        writers = self._writers()
        for number, batch in enumerate(self._batches(), start=1):
            writer = writers[batch[0].index]
            yield self._chunk(writer, writer.write(batch))
            every = self.quirks.empty_chunk_every
            if every and number % every == 0 and batch[-1].finish is None:
                yield self._chunk(writer, writer.write_nothing(batch[0].index))
        if self.request.usage_wanted:
            yield self.envelope.body([], usage=self._usage(writers))

    def _batches(self) -> Generator[list[TokenEvent], None, None]:
        """The tokens of one chunk each."""
        waiting: dict[int, list[TokenEvent]] = {}
        for event in self.engine.run(self.generation):
            batch = waiting.setdefault(event.index, [])
            batch.append(event)
            if len(batch) >= self.quirks.tokens_per_chunk or event.finish is not None:
                yield waiting.pop(event.index)

    def _chunk(self, writer: ChoiceWriter, choice: JsonObject) -> JsonObject:
        chunk = self.envelope.body([choice])
        if self.request.usage_on_each_chunk:
            chunk["usage"] = usage_body(len(writer.prompt), writer.tokens)
        return chunk

    def _writers(self) -> list[ChoiceWriter]:
        """One a choice, in index order; the candidates of a prompt share its scores."""
        writers = []
        for prompt in self.generation.prompts:
            if self.request.echo and self.request.logprobs is not None:
                steps = self.engine.score(prompt, self.request.logprobs)
            else:
                steps = [Step(token, None) for token in prompt]
            tokenizer = self.engine.model.tokenizer
            writers += [ChoiceWriter(self.request, tokenizer, steps) for _ in range(self.request.n)]
        return writers

    def _usage(self, writers: list[ChoiceWriter]) -> JsonObject:
        """Each prompt once, every candidate's tokens."""
        return usage_body(sum(map(len, self.generation.prompts)), sum(writer.tokens for writer in writers))


class CompletionServing:
    """Checks requests against one engine and its served model."""

    def __init__(self, engine: GenerationEngine, served_model: str, quirks: StreamQuirks) -> None:
        self.engine = engine
        self.served_model = served_model
        self.quirks = quirks
        self._tokenizer = engine.model.tokenizer

    def answer(self, request: CompletionRequest, request_id: str) -> Answer:
        """The answer to come. Raises ``RequestRefusedError`` or ``UnknownModelError``."""
        if request.model and request.model != self.served_model:
            raise UnknownModelError(f"The model `{request.model}` does not exist.")
        envelope = Envelope.now(request_id, self.served_model)
        return Answer(self.engine, request, self._generation(request), envelope, self.quirks)

    def _generation(self, request: CompletionRequest) -> GenerationRequest:
        prompts = self._prompts(request)
        check_sampling(request, self._tokenizer.size)
        return GenerationRequest(
            prompts=prompts,
            settings=settings_of(request),
            max_tokens=max(1, request.token_limit),
            n=request.n,
            seed=None if request.seed == -1 else request.seed,
            stop=request.stops,
            include_stop=request.include_stop_str_in_output,
            ignore_eos=request.ignore_eos,
            skip_special_tokens=request.skip_special_tokens,
        )

    def _prompts(self, request: CompletionRequest) -> tuple[tuple[int, ...], ...]:
        """Token ids of every prompt, each of which fits into the context with room for a token."""
        for item in request.prompt_items:
            if len(item) > self.engine.max_model_len * MAX_PIECE_CHARS:  # cannot fit, and would take long to count
                self._refuse_length(f"at least {len(item) // MAX_PIECE_CHARS}")
        prompts = tuple(
            tuple(self._tokenizer.encode(item) if isinstance(item, str) else item) for item in request.prompt_items
        )
        if not all(prompts) or not prompts:
            raise RequestRefusedError("The decoder prompt cannot be empty", "prompt")
        for ids in prompts:
            self._check_ids(ids)
        return prompts

    def _check_ids(self, ids: tuple[int, ...]) -> None:
        if max(ids) >= self._tokenizer.size:
            raise RequestRefusedError(f"Token id {max(ids)} is out of vocabulary")
        if self.engine.room(ids) < 1:
            self._refuse_length(str(len(ids)))

    def _refuse_length(self, tokens: str) -> NoReturn:
        limit = f"This model's maximum context length is {self.engine.max_model_len} tokens."
        message = f"{limit} However, your prompt contains {tokens} input tokens. Please reduce its length."
        raise RequestRefusedError(message, "input_tokens", tokens)
