"""The body of OpenAI's ``POST /v1/completions``, field by field, and its faults in OpenAI's words.

Source: openai/openai-openapi, ``CreateCompletionRequest``. Unknown fields are refused, as the original refuses them.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from completions.domain.errors import InvalidRequestError

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
_MOST_NAMED: Final = 16
_PROMPT_FORMS: Final = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"

_TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
# fail_fast: one fault of a long array is enough; a report of each would outgrow the body a thousandfold
_Filled = Field(min_length=1, fail_fast=True)
_Tokens = Annotated[list[_TokenId], _Filled]
_PromptValue = str | Annotated[list[str], _Filled] | _Tokens | Annotated[list[_Tokens], _Filled]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_StopText = Annotated[str, Field(min_length=1)]


def _known_stop(value: object) -> object:
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    """Only with ``stream``. ``include_obfuscation`` pads chunks on the original; it is accepted, and there is none."""

    model_config = _STRICT

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionBody(BaseModel):
    """Null is the same as absent, but for ``model``."""

    model_config = _STRICT

    model: Annotated[str, Field(min_length=1)]
    prompt: _PromptValue | None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[int, Field(ge=-100, le=100)]] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    presence_penalty: _Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[_StopText], Field(min_length=1, max_length=4), BeforeValidator(_known_stop)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: str | None = None


def parse_body(body: bytes) -> CompletionBody:
    """Raises ``InvalidRequestError`` with the message, ``param`` and ``code`` a client of the original expects."""
    try:
        return CompletionBody.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False)) from None


def _invalid(faults: list[ErrorDetails]) -> InvalidRequestError:
    unknown = [str(fault["loc"][0]) for fault in faults if _is_unknown_field(fault)]
    if unknown:
        argument = "argument" if len(unknown) == 1 else "arguments"
        names = ", ".join(name[:64] for name in unknown[:_MOST_NAMED])
        return InvalidRequestError(f"Unrecognized request {argument} supplied: {names}")
    first = faults[0]
    if not first["loc"]:
        return InvalidRequestError(_body_message(first))
    param = str(first["loc"][0])
    if param == "prompt" and first["type"] != "missing":
        return InvalidRequestError(
            f"Invalid value for 'prompt': expected {_PROMPT_FORMS}, none of them empty.", param="prompt"
        )
    path = ".".join(str(part)[:64] for part in first["loc"])
    return InvalidRequestError(_field_message(first, path), param=param, code=_code(first))


def _is_unknown_field(fault: ErrorDetails) -> Literal[True] | bool:
    return fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1


def _body_message(fault: ErrorDetails) -> str:
    if fault["type"] == "json_invalid":
        return f"We could not parse the JSON body of your request: {fault.get('ctx', {}).get('error', 'invalid JSON')}."
    return "The body of your request must be a JSON object."


def _field_message(fault: ErrorDetails, path: str) -> str:
    if fault["type"] == "missing":
        return f"You must provide a {path} parameter."
    if fault["type"] == "extra_forbidden":
        return f"Unrecognized request argument supplied: {path}"
    detail = fault["msg"].removeprefix("Input ")
    return f"Invalid value for '{path}': it {detail}."


def _code(fault: ErrorDetails) -> str | None:
    if fault["type"] == "too_long" and fault["loc"][0] == "stop":
        return "array_above_max_length"
    return None
