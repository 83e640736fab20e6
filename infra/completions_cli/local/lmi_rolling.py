"""LMI's older mode, the rolling batch: one schema, tokens under ``log_prob``, stop strings that stay in the text,
and TGI's words for how an answer ended.

Transcribes djl-serving (``output_formatter.py``, ``rolling_batch/``).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from completions_cli.local.generation import Finish, GenerationEngine, TokenEvent
from completions_cli.local.lmi_wire import DEFAULT_NEW_TOKENS, InputParsingError
from completions_cli.local.tgi_wire import finish_name
from completions_cli.local.vllm_serving import Answer
from completions_cli.local.vllm_wire import JsonObject

_RENAMED = {"max_new_tokens": "max_tokens", "stop_sequences": "stop", "ignore_eos_token": "ignore_eos"}
_OF_THE_ANSWER = ("details", "decoder_input_details", "do_sample", "return_full_text", "top_n_tokens")


@dataclass(frozen=True, slots=True)
class RollingForm:
    """A request: what vLLM is asked, and what shapes the answer only. ``stream`` chooses lines or one document."""

    inputs: str
    body: JsonObject
    stream: bool
    details: bool
    prefill: bool
    include_prompt: bool

    @classmethod
    def parse(cls, payload: Mapping[str, Any]) -> RollingForm:
        """Translate. Sampling is off unless asked for. Raises ``InputParsingError``."""
        inputs, parameters = payload.get("inputs"), payload.get("parameters") or {}
        if not isinstance(inputs, str) or not isinstance(parameters, Mapping):
            raise InputParsingError("inputs must be a string and parameters an object")
        if parameters.get("n", 1) != 1 or parameters.get("best_of", 1) != 1:
            raise InputParsingError("several sequences are not currently supported")
        body: JsonObject = {"max_tokens": DEFAULT_NEW_TOKENS}
        body |= {
            _RENAMED.get(str(name), str(name)): value
            for name, value in parameters.items()
            if name not in _OF_THE_ANSWER
        }
        do_sample = parameters.get("do_sample")
        if do_sample is False or (do_sample is None and parameters.get("temperature") is None):
            body["temperature"] = 0.0
        body |= {"prompt": inputs, "include_stop_str_in_output": True, "stream": False}
        return cls(
            inputs,
            body,
            bool(payload.get("stream", False)),
            bool(parameters.get("details", False)),
            bool(parameters.get("decoder_input_details", False)),
            bool(parameters.get("return_full_text", False)),
        )


@dataclass(slots=True)
class RollingWriter:
    """The events of one answer to its lines, or to its one document."""

    form: RollingForm
    answer: Answer
    _tokens: list[JsonObject] = field(default_factory=list)

    def lines(self) -> Generator[JsonObject, None, None]:
        """One line a token; the last one has the text, and the details if asked for. A failure is a last line too."""
        try:
            for event in self._engine.run(self.answer.generation):
                line: JsonObject = {"token": self._token(event)}
                if event.finish is not None:
                    line |= self._ending(event.finish, with_tokens=False)
                yield line
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is the stream's last line
            token = {"id": -1, "text": "", "log_prob": None, "error_msg": str(error)}
            yield {"token": token, "generated_text": self._text(), "details": {"finish_reason": "error"}}

    def whole(self) -> JsonObject:
        """The one document."""
        try:
            finish = [self._add(event) for event in self._engine.run(self.answer.generation)][-1]
        except Exception:  # noqa: BLE001 - the document keeps its status; the reason says what happened
            return {"generated_text": self._text(), "details": {"finish_reason": "error"}}
        return self._ending(finish, with_tokens=True)

    @property
    def _engine(self) -> GenerationEngine:
        return self.answer.engine

    def _add(self, event: TokenEvent) -> Finish | None:
        self._token(event)
        return event.finish

    def _token(self, event: TokenEvent) -> JsonObject:
        token = {"id": event.step.token_id, "text": event.text, "log_prob": event.step.logprob}
        self._tokens.append(token)
        return token

    def _text(self) -> str:
        return (self.form.inputs if self.form.include_prompt else "") + "".join(item["text"] for item in self._tokens)

    def _ending(self, finish: Finish | None, *, with_tokens: bool) -> JsonObject:
        ending: JsonObject = {"generated_text": self._text()}
        if self.form.details:
            ending["details"] = {
                "finish_reason": None if finish is None else finish_name(finish),
                "generated_tokens": len(self._tokens),
                "inputs": self.form.inputs,
            }
            if with_tokens:
                ending["details"]["tokens"] = list(self._tokens)
            if self.form.prefill:
                ending["details"]["prefill"] = self._prefill()
        return ending

    def _prefill(self) -> list[JsonObject]:
        tokenizer = self._engine.model.tokenizer
        steps = self._engine.score(self.answer.generation.prompts[0], 0)
        return [
            {"id": step.token_id, "text": tokenizer.decode([step.token_id]), "log_prob": step.logprob} for step in steps
        ]
