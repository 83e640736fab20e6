"""The body of OpenAI's ``POST /v1/completions``, and its faults in OpenAI's words."""

from __future__ import annotations

from typing import Final

from pydantic import ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from completions.dialects.completion_fields import CompletionFields, StreamOptions
from completions.domain.errors import InvalidRequestError

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
_MOST_NAMED: Final = 16
_PROMPT_FORMS: Final = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"


class OpenAIStreamOptions(StreamOptions):
    """Unknown options are refused, too."""

    model_config = _STRICT


class CompletionBody(CompletionFields):
    """Strict: a digit string is no integer, and an unknown field is an error."""

    model_config = _STRICT

    stream_options: OpenAIStreamOptions | None = None


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


def _is_unknown_field(fault: ErrorDetails) -> bool:
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
