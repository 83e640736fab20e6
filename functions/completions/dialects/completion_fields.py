"""The request fields that OpenAI's completions and the APIs modelled on them share: types, ranges, and what they mean.

Source: openai/openai-openapi, ``CreateCompletionRequest``. How strictly a value is read, and what becomes of an unknown
field, is each dialect's own ``model_config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, Field, ValidatorFunctionWrapHandler, field_validator

from completions.domain.completion import CompletionRequest, Prompt, SamplingParams
from completions.domain.errors import InvalidRequestError

_MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
# fail_fast: one fault of a long array is enough; a report of each would outgrow the body a thousandfold
Filled = Field(min_length=1, fail_fast=True)
TokenPrompt = Annotated[list[TokenId], Filled]
PromptValue = str | Annotated[list[str], Filled] | TokenPrompt | Annotated[list[TokenPrompt], Filled]
Penalty = Annotated[float, Field(ge=-2, le=2)]
PARAM_NAMES: Final[Mapping[str, str]] = {"prompts": "prompt", "token_prompt": "prompt", "prompt_batch": "prompt"}
"""What these APIs call a canonical field or parameter that has another name with them."""
StopText = Annotated[str, Field(min_length=1)]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def surrogate_field(body: bytes) -> str | None:
    """The field that holds a lone surrogate escape, half a character, which pydantic reports as malformed JSON without
    naming it; ``None`` when no field does."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    for name, value in fields.items() if isinstance(fields, dict) else ():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return str(name)[:64]
    return None


def _is_token_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_TOKEN_ID)) and int(text) <= _MAX_TOKEN_ID


class StreamOptions(BaseModel, defer_build=True):
    """Only with ``stream``. ``include_obfuscation`` pads chunks on the original; it is accepted, and there is none."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionFields(BaseModel, defer_build=True):
    """Null is the same as absent, but for ``model``."""

    model: Annotated[str, Field(min_length=1)]
    prompt: PromptValue | None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[int, Field(ge=-100, le=100)]] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[StopText], Field(min_length=1, max_length=4), BeforeValidator(_listed)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: str | None = None

    @field_validator("logit_bias", mode="wrap")
    @classmethod
    def _few_faults(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        """Entries are read in batches up to the first faulty one: a fault of each would outgrow the body."""
        if not isinstance(value, dict):
            return handler(value)
        entries = iter(value.items())
        biases: dict[str, int] = {}
        while batch := dict(islice(entries, 64)):
            biases |= handler(batch)
        return biases

    def check_interactions(self) -> None:
        """The rules that hold between fields. Raises ``InvalidRequestError`` naming the one at fault."""
        n = self.n or 1
        best_of = self.best_of or n
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.", param="stream_options"
            )
        if best_of < n:
            raise InvalidRequestError("'best_of' must be at least 'n'.", param="best_of")
        if not all(_is_token_id(key) for key in self.logit_bias or ()):
            raise InvalidRequestError("The keys of 'logit_bias' must be token ids.", param="logit_bias")

    def to_request(self, *, sampling: SamplingParams, **more: Any) -> CompletionRequest:
        """The canonical request; ``more`` sets what only the dialect knows.

        An absent ``best_of`` is ``n``: taking its documented default of 1 would refuse valid requests.
        """
        n = self.n or 1
        fields: dict[str, Any] = {
            "model": self.model,
            "prompts": self._prompts(),
            "max_tokens": 16 if self.max_tokens is None else self.max_tokens,
            "sampling": sampling,
            "stop": tuple(self.stop or ()),
            "n": n,
            "best_of": self.best_of or n,
            "echo": self.echo or False,
            "logprobs": self.logprobs,
            "suffix": self.suffix or None,
            "stream": self.stream or False,
            "include_usage": bool(self.stream_options and self.stream_options.include_usage),
            "end_user": self.user,
            "param_names": PARAM_NAMES,
        }
        return CompletionRequest(**{**fields, **more})

    def sampling_values(self) -> dict[str, Any]:
        """Arguments of ``SamplingParams``."""
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "seed": self.seed,
        }

    def _prompts(self) -> tuple[Prompt, ...]:
        """A list of integers is one prompt; null or an empty text is one empty prompt, the start of a document."""
        value = self.prompt
        if value is None or isinstance(value, str):
            return (value or "",)
        if isinstance(value[0], int):
            return (tuple(token for token in value if isinstance(token, int)),)
        return tuple(item if isinstance(item, str) else tuple(item) for item in value if not isinstance(item, int))
