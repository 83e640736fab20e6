"""The body of OpenAI's ``POST /v1/completions``, and its faults in OpenAI's words."""

from __future__ import annotations

from typing import Final

from pydantic import ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from completions.dialects.completion_fields import PARAM_NAMES, CompletionFields, StreamOptions, surrogate_field
from completions.dialects.extra_fields import EXTRA_FIELDS
from completions.dialects.sampling_fields import SamplingFields
from completions.domain.completion import CompletionRequest, SamplingParams
from completions.domain.errors import InvalidRequestError

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
_MOST_NAMED: Final = 16
_PARAM_NAMES: Final = {**PARAM_NAMES, "include_stop": "include_stop_str_in_output"}
_PROMPT_FORMS: Final = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"


class OpenAIStreamOptions(StreamOptions, defer_build=True):
    """Unknown options are refused, too."""

    model_config = _STRICT


class CompletionBody(CompletionFields, SamplingFields, defer_build=False):
    """Strict: a digit string is no integer, and an unknown field is an error."""

    model_config = _STRICT

    stream_options: OpenAIStreamOptions | None = None

    def to_canonical(self) -> CompletionRequest:
        """The canonical request. Raises ``InvalidRequestError`` for fields that contradict each other."""
        self.check_interactions()
        sampling = SamplingParams(**self.sampling_values(), **self.more_sampling_values())
        return self.to_request(sampling=sampling, param_names=_PARAM_NAMES, **self.output_values())


def parse_body(body: bytes, extra_fields: frozenset[str] = frozenset()) -> CompletionBody:
    """``extra_fields`` are the names of ``EXTRA_FIELDS`` that are let through; the others are as unknown as any.

    Raises ``InvalidRequestError`` with the message, ``param`` and ``code`` a client of the original expects.
    """
    refused = EXTRA_FIELDS - extra_fields
    try:
        parsed = CompletionBody.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        if faults[0]["type"] == "json_invalid" and (field := surrogate_field(body)) is not None:
            raise InvalidRequestError(f"Invalid value for '{field}': it holds half a character.", param=field) from None
        raise _invalid(faults, refused) from None
    given = parsed.model_fields_set & refused
    if given:
        raise _unknown([name for name in CompletionBody.model_fields if name in given])
    return parsed


def _invalid(faults: list[ErrorDetails], refused: frozenset[str]) -> InvalidRequestError:
    unknown = [str(fault["loc"][0]) for fault in faults if _is_unknown_field(fault, refused)]
    if unknown:
        return _unknown(unknown)
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


def _unknown(names: list[str]) -> InvalidRequestError:
    argument = "argument" if len(names) == 1 else "arguments"
    listed = ", ".join(name[:64] for name in names[:_MOST_NAMED])
    return InvalidRequestError(f"Unrecognized request {argument} supplied: {listed}")


def _is_unknown_field(fault: ErrorDetails, refused: frozenset[str]) -> bool:
    location = fault["loc"]
    return bool(location) and (location[0] in refused or (fault["type"] == "extra_forbidden" and len(location) == 1))


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
