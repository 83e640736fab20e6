"""What both bodies that TGI takes have in common: the ranges of its values, and how it tells of a failure.

Transcribes TGI 3.3: ``router/src/validation.rs`` and ``router/src/infer/mod.rs``.
"""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from completions.backends.completion_body import SMALLEST_TOP_P
from completions.domain.completion import SamplingParams
from completions.domain.errors import (
    BackendError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    InvalidRequestError,
    Recourse,
)

MAX_STOPS: Final = 4
"""``MAX_STOP_SEQUENCES``' default."""

_OVERLOADED: Final = "Model is overloaded"
_FAILED: Final = ("Request failed during generation", "Incomplete generation")
_BROKEN_RULE: Final = "Input validation error: "
_STATUS_OF_TYPE: Final = {
    "validation": 422,
    "template_error": 422,
    "missing_template_variable": 422,
    "tool_error": 422,
    "overloaded": 429,
    "generation": 424,
}
_FIELD: Final = re.compile(r"`(\w+)`")
_CANONICAL: Final = {"inputs": "prompt", "max_new_tokens": "max_tokens", "top_n_tokens": "logprobs"}
_TOO_MANY_TOKENS: Final = re.compile(r"must be <= (\d+)\. Given: (\d+) `inputs` tokens and (\d+) `max_new_tokens`")


class _NestedFailure(BaseModel, defer_build=True):
    message: str = ""
    http_status_code: int | None = None


class Failure(BaseModel, defer_build=True):
    """``{"error", "error_type"}``, or the nested form of a stream, whose status is always 422 whatever went wrong."""

    error: str | _NestedFailure
    error_type: str = ""

    @property
    def message(self) -> str:
        """TGI's own words; they may quote the caller."""
        return self.error if isinstance(self.error, str) else self.error.message

    @property
    def status(self) -> int:
        """The HTTP status that a failure inside a stream should have had."""
        nested = None if isinstance(self.error, str) else self.error.http_status_code
        return nested or _STATUS_OF_TYPE.get(self.error_type, 500)


def nucleus_values(sampling: SamplingParams) -> dict[str, Any]:
    """``top_p``, which TGI takes between 0 and 1 without either; nothing when it cuts nothing off."""
    return {} if sampling.top_p == 1 else {"top_p": sampling.top_p or SMALLEST_TOP_P}


def seed_values(sampling: SamplingParams) -> dict[str, Any]:
    """``seed``, which TGI reads as an unsigned number of 64 bits: a negative one keeps its bits, so that each of the
    caller's seeds stays a seed of its own."""
    return {} if sampling.seed is None else {"seed": sampling.seed % 2**64}


def failure_in_body(status: int, body: str) -> CompletionError:
    """The canonical error of an HTTP failure. A body that is no JSON is axum's report on a value that it could not
    read, which quotes it."""
    try:
        return tgi_error(status, Failure.model_validate_json(body).message)
    except ValidationError:
        return tgi_error(status, "")


def tgi_error(status: int, message: str) -> CompletionError:
    """What TGI means by ``message`` under the HTTP ``status`` it has or should have had. The words count first: a
    failure inside a stream has no status of its own."""
    if message.startswith(_BROKEN_RULE):
        return _rule_error(message.removeprefix(_BROKEN_RULE))
    if message.startswith(_OVERLOADED):
        status = 429
    elif message.startswith(_FAILED):
        status = 424
    detail = f"container status {status}"
    if status in (400, 413, 422):
        return InvalidRequestError("The model's container refused the request.", detail=detail)
    if status in (429, 503):
        return BackendUnavailableError(
            "The model is overloaded.", retry_after=1, recourse=Recourse.AGAIN, detail=detail
        )
    return BackendError("The model failed to answer.", detail=detail)


def _rule_error(rule: str) -> CompletionError:
    """Rules that begin with a field's name quote numbers at most; the others may quote a grammar or a text."""
    if found := _TOO_MANY_TOKENS.search(rule):
        most, prompt, completion = (int(number) for number in found.groups())
        return ContextLengthError(
            f"This model's maximum context length is {most} tokens. However, you requested {prompt + completion} "
            f"tokens ({prompt} in the prompt; {completion} for the completion).",
            param="prompt",
        )
    if rule.startswith("`inputs` must have less than"):
        return ContextLengthError(rule, param="prompt")
    if field := _FIELD.match(rule):
        return InvalidRequestError(rule, param=_CANONICAL.get(field[1], field[1]))
    if rule.startswith(("grammar", "cannot compile regex")):
        return InvalidRequestError("The model's container cannot follow the constraint.", param="constraint")
    return InvalidRequestError("The model's container refused the request.", detail="container status 422")
