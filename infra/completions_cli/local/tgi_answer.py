"""What TGI makes of one valid Generate request, a stream or one document, and how OpenAI bodies show it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from completions_cli.local.generation import GenerationEngine, TokenEvent
from completions_cli.local.tgi_wire import TgiError, ValidRequest, finish_name, token_body, top_tokens_body
from completions_cli.local.vllm_wire import JsonObject


@dataclass(frozen=True, slots=True)
class TgiAnswer:
    """One request on its way to the engine. ``prefill_logprobs`` is the launcher's ENABLE_PREFILL_LOGPROBS."""

    engine: GenerationEngine
    request: ValidRequest
    prefill_logprobs: bool

    def events(self) -> Generator[JsonObject, None, None]:
        """One event a token, special ones included; the last has the text. Raises ``TgiError`` where it fails."""
        produced: list[TokenEvent] = []
        for event in self._run():
            produced.append(event)
            body: JsonObject = {"index": len(produced), "token": self._token(event)}
            if self._tops:
                body["top_tokens"] = top_tokens_body(event.step, self.engine.model.tokenizer)
            body |= {"generated_text": None, "details": None}
            if event.finish is not None:
                body["generated_text"] = self._text(produced)
                if self.request.body.parameters.details:
                    ending = self._ending(produced, 0)
                    body["details"] = {**ending, "input_length": len(self.request.prompt)}
            yield body

    def whole(self) -> JsonObject:
        """The one document, of the best candidate. Raises ``TgiError`` where it fails."""
        candidates: list[list[TokenEvent]] = [[] for _ in range(self.request.generation.n)]
        for event in self._run():
            candidates[event.index].append(event)
        best = max(range(len(candidates)), key=lambda index: _mean_logprob(candidates[index]))
        parameters = self.request.body.parameters
        document: JsonObject = {"generated_text": self._text(candidates[best])}
        if parameters.details or parameters.decoder_input_details:
            document["details"] = self._details(candidates[best], best)
            if len(candidates) > 1:
                document["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(events), **self._details(events, index)}
                    for index, events in enumerate(candidates)
                    if index != best
                ]
        return document

    @property
    def _tops(self) -> bool:
        return bool(self.request.body.parameters.top_n_tokens)

    def _run(self) -> Generator[TokenEvent, None, None]:
        try:
            yield from self.engine.run(self.request.generation)
        except Exception as error:
            raise TgiError(f"Request failed during generation: {error}", "generation", 424) from error

    def _token(self, event: TokenEvent) -> JsonObject:
        return token_body(event.step, event.text, self.engine.model.tokenizer)

    def _text(self, events: Sequence[TokenEvent]) -> str:
        """The whole text has no special tokens; the prompt is before it with ``return_full_text``."""
        is_special = self.engine.model.tokenizer.is_special
        text = "".join(event.text for event in events if not is_special(event.step.token_id))
        return self.request.body.inputs + text if self.request.body.parameters.return_full_text else text

    def _ending(self, events: Sequence[TokenEvent], index: int) -> JsonObject:
        finish, seed = events[-1].finish, self.request.seed
        return {
            "finish_reason": None if finish is None else finish_name(finish),
            "generated_tokens": len(events),
            "seed": None if seed is None else (seed + index) % 2**64,
        }

    def _details(self, events: Sequence[TokenEvent], index: int) -> JsonObject:
        details = self._ending(events, index)
        details["prefill"] = self._prefill() if self.request.body.parameters.decoder_input_details else []
        details["tokens"] = [self._token(event) for event in events]
        if self._tops:
            details["top_tokens"] = [top_tokens_body(event.step, self.engine.model.tokenizer) for event in events]
        return details

    def _prefill(self) -> list[JsonObject]:
        if not self.prefill_logprobs:
            return []
        decode = self.engine.model.tokenizer.decode
        steps = self.engine.score(self.request.prompt, 0)
        return [{"id": step.token_id, "text": decode([step.token_id]), "logprob": step.logprob} for step in steps]


@dataclass(frozen=True, slots=True)
class OpenAiForm:
    """What the objects of one OpenAI answer share; ``created`` is in Unix seconds, ``id`` is always empty."""

    model: str
    created: int

    def chunk(self, index: int, event: JsonObject) -> JsonObject:
        """A chunk of choice ``index`` from an event. A special token's text shows; the last chunk has its usage."""
        details = event["details"]
        finish = "" if details is None else details["finish_reason"]
        body = self._body([_choice(index, event["token"]["text"], finish)])
        if details is not None:
            body["usage"] = _usage(details["input_length"], details["generated_tokens"])
        return body

    def whole(self, documents: Sequence[JsonObject]) -> JsonObject:
        """One answer of a document for each prompt. Its prompt tokens are the length of the prefills."""
        choices = []
        for index, document in enumerate(documents):
            finish = document["details"]["finish_reason"]
            choices.append(_choice(index, document["generated_text"], "stop" if finish == "eos_token" else finish))
        details = [document["details"] for document in documents]
        usage = _usage(sum(len(item["prefill"]) for item in details), sum(item["generated_tokens"] for item in details))
        # whoever is ready first comes first; here that is always the last
        return {**self._body(choices[::-1]), "usage": usage}

    def _body(self, choices: list[JsonObject]) -> JsonObject:
        shared = {"object": "text_completion", "id": "", "created": self.created, "model": self.model}
        return {**shared, "system_fingerprint": "3.3.6-native", "choices": choices}


def _choice(index: int, text: str, finish: str) -> JsonObject:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _usage(prompt_tokens: int, completion_tokens: int) -> JsonObject:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _mean_logprob(events: Sequence[TokenEvent]) -> float:
    return sum(event.step.logprob or 0.0 for event in events) / len(events)
