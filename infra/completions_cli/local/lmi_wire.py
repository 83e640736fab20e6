"""LMI's own ``inputs`` schema as the async vLLM handler reads and answers it: a translation to and from vLLM's format.

Transcribes djl-serving (``lmi_vllm/request_response_utils.py``) with what it gets wrong, since a client has to live
with it: ``top_n_tokens`` asks for choices, ``stop_sequences`` means nothing, streams count one token too many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from completions_cli.local.ngram import Step
from completions_cli.local.tokenizer import Tokenizer
from completions_cli.local.vllm_wire import JsonObject

DEFAULT_NEW_TOKENS = 30


class InputParsingError(Exception):
    """The handler cannot make a request of the body: 424, ``Input parsing failed: <this>``."""


@dataclass(frozen=True, slots=True)
class InputsForm:
    """An ``inputs`` body: what vLLM is asked, and what of the request shapes the answer only."""

    body: JsonObject
    details: bool = False
    prefill: bool = False
    include_prompt: bool = False

    @classmethod
    def parse(cls, payload: Mapping[str, Any]) -> InputsForm:
        """Translate. Raises ``InputParsingError``."""
        given = payload.get("parameters") or {}
        if not isinstance(given, Mapping):
            raise InputParsingError("parameters is not an object")
        parameters = dict(given)
        stream = payload.get("stream", False)
        body: JsonObject = {
            "prompt": payload["inputs"],
            "model": payload.get("model"),
            "max_tokens": parameters.pop("max_new_tokens", DEFAULT_NEW_TOKENS),
            "echo": parameters.pop("return_full_text", False),
            "truncate_prompt_tokens": parameters.pop("truncate", None),
            "n": parameters.pop("top_n_tokens", 1),
            "ignore_eos": parameters.pop("ignore_eos_token", False),
            "stream": stream,
        }
        include_prompt = False
        if stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            include_prompt = bool(body.pop("echo"))
        details = bool(parameters.pop("details", False))
        if stream or details:
            body |= {"logprobs": 1, "return_tokens_as_token_ids": True}
        prefill = details and bool(parameters.pop("decoder_input_details", False))
        if prefill and stream:
            raise InputParsingError("`prompt_logprobs` are not available when `stream=True`.")
        if parameters.pop("do_sample", None) is False:
            parameters["temperature"] = 0.0
        return cls(body | parameters, details, prefill, include_prompt)


def whole_body(answer: JsonObject, form: InputsForm, tokenizer: Tokenizer, prompt: list[Step]) -> JsonObject:
    """An unstreamed answer: the first choice alone, and no count of the prompt's tokens except the prefill's length,
    which lacks the first. ``prompt`` is the scored prompt, empty unless the prefill is wanted."""
    choice = answer["choices"][0]
    if not form.details:
        return {"generated_text": choice["text"]}
    details = {
        "finish_reason": choice["stop_reason"],  # sic: null for the limit and for the end of text
        "generated_tokens": answer["usage"]["completion_tokens"],
        "seed": form.body.get("seed"),
        "prefill": [
            {"id": step.token_id, "text": tokenizer.token_text(step.token_id), "logprob": step.logprob}
            for step in prompt[1:]
        ],
        "tokens": [
            {"id": token_id, "text": tokenizer.decode([token_id]), "logprob": logprob}
            for token_id, logprob in _tokens(choice)
        ],
    }
    return {"generated_text": choice["text"], "details": details}


@dataclass(slots=True)
class LineFormatter:
    """vLLM's chunks to the lines of an ``inputs`` stream. The texts of several choices run together."""

    form: InputsForm
    _texts: list[str] = field(default_factory=list)

    def line(self, chunk: JsonObject) -> JsonObject | None:
        """One line, ``None`` for the blank one that stands for the usage chunk.

        Only the first token of a chunk is told. Raises ``IndexError`` for a chunk without a token.
        """
        if not chunk["choices"]:
            return None
        choice = chunk["choices"][0]
        self._texts.append(choice["text"])
        token_id, logprob = _tokens(choice)[0]
        token = {"id": token_id, "text": choice["text"], "logprob": logprob}
        line: JsonObject = {"index": choice["index"], "token": token, "generated_text": None, "details": None}
        if choice["finish_reason"] is not None:
            line["generated_text"] = (self.form.body["prompt"] if self.form.include_prompt else "") + "".join(
                self._texts
            )
            line["details"] = self._details(choice, chunk["usage"]) if self.form.details else None
        return line

    def _details(self, choice: JsonObject, usage: JsonObject) -> JsonObject:
        return {
            "finish_reason": choice["finish_reason"],
            "seed": self.form.body.get("seed"),
            "generated_tokens": usage["completion_tokens"] + 1,  # sic
            "input_length": usage["prompt_tokens"],
        }


def _tokens(choice: JsonObject) -> list[tuple[int, float | None]]:
    """Ids and log-probabilities of a choice whose tokens are shown as ``token_id:123``."""
    logprobs = choice["logprobs"]
    ids = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
    return list(zip(ids, logprobs["token_logprobs"], strict=True))
