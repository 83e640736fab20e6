"""SageMaker Runtime's failures, as data: error code to canonical error.

Source: the runtime's service model and the observed behaviour of boto3 (a throttled endpoint is an HTTP 400 whose
message may be null; a broken stream raises ``EventStreamError`` or a raw urllib3 exception).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from botocore.eventstream import ParserError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    EventStreamError,
    ReadTimeoutError,
)
from urllib3.exceptions import HTTPError
from urllib3.exceptions import ReadTimeoutError as StreamReadTimeoutError

from completions.backends.codec import Codec
from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    RateLimitError,
    Recourse,
    RequestTooLargeError,
)

CALL_FAILURES: Final = (ClientError, BotoCoreError)
STREAM_FAILURES: Final = (EventStreamError, BotoCoreError, HTTPError, ParserError)

_BUSY = "The model is busy; try again shortly."
_ABSENT = "The model is not available right now."
_SLOW = "The model did not answer in time."
_FAILED = "The model failed to answer."


@dataclass(frozen=True, slots=True)
class _Row:
    error: type[CompletionError]
    message: str
    retry_after: float | None = None
    recourse: Recourse = Recourse.NONE


_BY_CODE: Final[Mapping[str, _Row]] = {
    "ThrottlingException": _Row(RateLimitError, _BUSY, 1, Recourse.AGAIN),
    "Throttling": _Row(RateLimitError, _BUSY, 1, Recourse.AGAIN),
    "ModelNotReadyException": _Row(BackendUnavailableError, _ABSENT, 10, Recourse.AGAIN),
    "ServiceUnavailable": _Row(BackendUnavailableError, _ABSENT, 1, Recourse.AGAIN),
    # the endpoint is not there, or its registry entry is wrong: refused before it was dispatched
    "ValidationError": _Row(BackendUnavailableError, _ABSENT, None, Recourse.ELSEWHERE),
    "InternalFailure": _Row(BackendError, _FAILED),
    "InternalDependencyException": _Row(BackendError, _FAILED),
    "ModelStreamError": _Row(BackendError, _FAILED),
    "InternalStreamFailure": _Row(BackendError, _FAILED),
    # credentials and permissions: nothing the caller can mend
    "AccessDeniedException": _Row(BackendUnavailableError, _ABSENT, None, Recourse.ELSEWHERE),
    "AccessDenied": _Row(BackendUnavailableError, _ABSENT, None, Recourse.ELSEWHERE),
    "ExpiredTokenException": _Row(BackendUnavailableError, _ABSENT, None, Recourse.ELSEWHERE),
    "ExpiredToken": _Row(BackendUnavailableError, _ABSENT, None, Recourse.ELSEWHERE),
    "UnrecognizedClientException": _Row(BackendUnavailableError, _ABSENT, None, Recourse.ELSEWHERE),
}
_NO_CAPACITY = _Row(
    BackendUnavailableError, "The model is starting; try again in a few minutes.", None, Recourse.WHEN_STARTED
)
_TIMED_OUT = _Row(BackendTimeoutError, _SLOW)


def call_error(error: ClientError | BotoCoreError, codec: Codec) -> CompletionError:
    """The canonical error of a call that was refused or never answered."""
    if isinstance(error, ClientError):
        return _from_response(error.response, codec)
    if isinstance(error, ConnectionError):  # botocore's own: never connected, so never dispatched
        return BackendUnavailableError(_ABSENT, retry_after=1, recourse=Recourse.AGAIN, detail=type(error).__name__)
    if isinstance(error, ReadTimeoutError):
        return BackendTimeoutError(_SLOW, detail=type(error).__name__)
    return BackendError(_FAILED, detail=type(error).__name__)


def stream_error(error: Exception, codec: Codec) -> CompletionError:
    """The canonical error of an answer that broke off."""
    if isinstance(error, EventStreamError):
        return _from_response(error.response, codec)
    if isinstance(error, StreamReadTimeoutError | ReadTimeoutError):
        return BackendTimeoutError(_SLOW, detail=type(error).__name__)
    return BackendError(_FAILED, detail=type(error).__name__)


def _from_response(response: Mapping[str, Any], codec: Codec) -> CompletionError:
    fault: Mapping[str, Any] = response.get("Error", {})
    code = str(fault.get("Code") or "")
    message = str(fault.get("Message") or "")
    if code == "ModelError":
        status = int(response.get("OriginalStatusCode") or 0)
        original = str(response.get("OriginalMessage") or "")
        if status == 0 or (status >= 500 and "timed out" in message):
            return _error(_TIMED_OUT, code)
        return codec.decode_error(status, original)
    if response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 413:
        return RequestTooLargeError("The request is larger than the model's endpoint accepts.", detail=code)
    if "no capacity" in message:
        return _error(_NO_CAPACITY, code)
    return _error(_BY_CODE.get(code, _Row(BackendError, _FAILED)), code)


def _error(row: _Row, code: str) -> CompletionError:
    return row.error(row.message, retry_after=row.retry_after, recourse=row.recourse, detail=code[:80])
