"""What every LMI container (djl-serving) shares, whichever of its handlers answers: its versions and its failures.

Read from djl-serving: ``lmi_vllm/request_response_utils.py``, ``rolling_batch/rolling_batch.py``, ``input_parser.py``,
``engine/{Request,AsyncRequestManager}.java``, ``http/InferenceRequestHandler.java``, ``docs/lmi/release_notes.md``.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Final

from pydantic import BaseModel, ValidationError

from completions.backends.codec import RouteFault
from completions.backends.completion_body import version_numbers
from completions.backends.completion_records import WireError, failure_error
from completions.domain.catalog import ModelRoute
from completions.domain.errors import BackendUnavailableError, CompletionError, InvalidRequestError, Recourse

_ASYNC_HANDLER_SINCE: Final = (15,)
"""LMI 15 brought the asynchronous vLLM handler, the first that reads ``prompt``; it is the default from 17 on."""
_ADAPTERS_SINCE: Final = (16,)
"""LMI 15's asynchronous handler hands ``adapters`` to vLLM as an unknown key: the base model would answer."""
_STRUCTURED_OUTPUTS_SINCE: Final = (18,)
"""LMI 15 to 17 carry vLLM 0.8.4, 0.10.2 and 0.11.1; LMI 18 is the first with 0.12, which dropped ``guided_*``."""

# pydantic's report: a count, then the place of each fault on a line of its own, then what is wrong with the value
_REPORT: Final = re.compile(r"\d+ validation errors? for \w+\n(?:(?P<field>[a-z_]+)(?:[.\[][^\n]*)?\n)?")
_REFUSED_INPUT: Final = re.compile(
    r"input parsing failed[:.]\s*(?:ensure that the request payload is valid\.\s*)?", re.IGNORECASE
)
_UNKNOWN_ADAPTER: Final = re.compile(r"(?:LoRA )?adapter [^\n]{0,400}?\bnot (?:found|registered)", re.IGNORECASE)
_NO_MODEL: Final = "Parameter model_name is required"
_PAYLOAD: Final = " Received payload"
_QUOTED: Final = r"'(?:[^'\\]|\\.)*'" + "|" + r'"(?:[^"\\]|\\.)*"'
_ERROR_REPR: Final = re.compile(
    rf"(?:error=)?(?:\w+\()?(?:object='error'[, ]+)?message=(?P<message>{_QUOTED})[, ]+type='\w+'[, ]+"
    rf"param=(?P<param>None|{_QUOTED})[, ]+code=(?P<code>\d{{3}})\b",
    re.DOTALL,
)
_ERROR_REPR_CODE: Final = re.compile(r"\btype='\w+'.*\bcode=(?P<code>\d{3})\b", re.DOTALL)
_CUT_TEXT: Final = re.compile(r'"(?:error|message)"\s*:\s*("(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*)')


class _Failure(BaseModel, defer_build=True):
    """A failure of any sender: handler ``{code, error}``, Python process ``{code, message, error}``, frontend
    ``{code, type, message}``; in a stream also vLLM's own, ``{error: {...}}`` or ``{object: "error", ...}``."""

    object: str | None = None
    code: int | str | None = None
    type: str | None = None
    message: str | None = None
    error: WireError | str | None = None


def structured_outputs(route: ModelRoute) -> bool:
    """Whether constraints go by vLLM's newer name; an undeclared version is taken for a new one.

    Raises ``BackendUnavailableError`` for a version that is none.
    """
    if route.family_version is None:
        return True
    numbers = _numbers(route.family_version)
    if numbers is None:
        raise _misconfigured("family_version is not a version")
    return numbers >= _STRUCTURED_OUTPUTS_SINCE


def version_faults(route: ModelRoute, *, rolling: bool = False) -> list[RouteFault]:
    """What the declared version, which is LMI's own and not djl-serving's, rules out; for the asynchronous handler
    unless it is the ``rolling`` batch that is asked."""
    if route.family_version is None:
        return []
    numbers = _numbers(route.family_version)
    if numbers is None:
        return [RouteFault("family_version", "not a version of LMI, such as '18.0'")]
    if rolling:
        return []
    if numbers < _ASYNC_HANDLER_SINCE:
        return [RouteFault("family_version", "the asynchronous handler exists since LMI 15")]
    if route.adapter is not None and numbers < _ADAPTERS_SINCE:
        return [RouteFault("adapter", "the asynchronous handler ignores 'adapters' before LMI 16")]
    return []


def failure_in_record(record: bytes) -> CompletionError | None:
    """The error that a line of a stream, or a document, stands for; ``None`` when it is no failure."""
    try:
        failure = _Failure.model_validate_json(record)
    except ValidationError:
        return None
    if failure.error is None and failure.code is None:
        return None
    return _canonical(failure.code if isinstance(failure.code, int) else 500, failure)


def container_failure(status: int, body: str) -> CompletionError:
    """The error of an HTTP failure. A ``body`` that was cut off is read as far as it goes."""
    try:
        failure = _Failure.model_validate_json(body)
    except ValidationError:
        failure = _Failure(error=_cut_text(body))
    return _canonical(status, failure)


def _canonical(status: int, failure: _Failure) -> CompletionError:
    if isinstance(failure.error, WireError):
        code = failure.error.code
        return failure_error(code if isinstance(code, int) else status, failure.error)
    text = failure.error or failure.message or ""
    refused = _REFUSED_INPUT.match(text)
    if refused is not None:
        return _refused_input(text[refused.end() :])
    if text.startswith(_NO_MODEL):
        return _misconfigured("no model is loaded")
    recovered = _from_repr(text)
    if recovered is not None:
        status, told = recovered
    elif failure.type is not None and failure.object != "error":
        told = WireError()  # the frontend's words are about its own models and workers
    else:
        told = WireError(message=text)
    return failure_error(status, told)


def _refused_input(reason: str) -> CompletionError:
    """Status 424, but the request was never run: a bad parameter, or an adapter the container does not have."""
    if _UNKNOWN_ADAPTER.match(reason):
        return _misconfigured("the container knows no such adapter")
    report = _REPORT.match(reason)
    if report is not None and report["field"] is not None:
        field = report["field"]
        return InvalidRequestError(f"The model's container refused the value of '{field}'.", param=field)
    # what the rolling batch appends is the caller's whole request
    return failure_error(400, WireError(message="" if report else reason.partition(_PAYLOAD)[0]))


def _from_repr(text: str) -> tuple[int, WireError] | None:
    """The status and words of a vLLM error that the handler printed as a Python object under HTTP 500."""
    full = _ERROR_REPR.match(text)
    if full is not None:
        return int(full["code"]), WireError(message=_unquoted(full["message"]), param=_unquoted(full["param"]) or None)
    code = _ERROR_REPR_CODE.search(text)
    return None if code is None else (int(code["code"]), WireError())


def _unquoted(literal: str) -> str:
    try:
        return _whole_characters(str(ast.literal_eval(literal) or ""))
    except (ValueError, SyntaxError):
        return ""


def _cut_text(body: str) -> str | None:
    found = _CUT_TEXT.search(body)
    if found is None:
        return None
    return _whole_characters(str(json.loads(found[1] + '"', strict=False)))


def _whole_characters(text: str) -> str:
    """Without the half of a surrogate pair that a cut leaves, which no reply could be encoded with."""
    return text.encode(errors="ignore").decode()


def _numbers(version: str) -> tuple[int, ...] | None:
    try:
        return version_numbers(version)
    except ValueError:
        return None


def _misconfigured(detail: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        "The model is not available right now.", recourse=Recourse.ELSEWHERE, detail=f"configuration: {detail}"
    )
