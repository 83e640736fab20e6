"""Everything that can go wrong, named once.

::

    CompletionError
    ├── InvalidRequestError              the caller's request cannot be served as it stands
    │   ├── UnsupportedParameterError    valid, but this model's container cannot honour it
    │   ├── ContextLengthError           prompt and answer do not fit the model
    │   ├── RequestTooLargeError         more bytes than the platform carries
    │   ├── UnknownPathError             no such resource
    │   └── MethodNotAllowedError        the resource has no such method
    ├── AuthenticationError              no key, or one nobody knows
    ├── PermissionDeniedError            a known key that may not do this
    ├── ModelNotFoundError
    ├── RateLimitError                   too fast; the same request may pass later
    │   └── QuotaExceededError           used up; it will not pass before the reset
    ├── DuplicateRequestError            the logical request was already claimed
    └── ServiceError                     our side
        ├── BackendError                 the container failed or answered nonsense
        │   └── TruncatedStreamError     it stopped without saying it was finished
        ├── BackendTimeoutError          it did not answer in time
        ├── BackendUnavailableError      not ready, scaled to zero, or overloaded
        └── MeteringError                the usage table could not be reached

A dialect turns each class into its own status and body. Messages are shown to callers: they never hold prompt or
completion text, credentials or names of the operator's resources; ``detail`` is for the log alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal


class Recourse(StrEnum):
    """What may be done about a failed call without paying a GPU twice.

    All but ``NONE`` promise that the call was never dispatched, or that the container turned it away unread.
    """

    NONE = "none"
    ELSEWHERE = "elsewhere"
    """Another model may be asked."""
    AGAIN = "again"
    """So may this one, in a moment."""
    WHEN_STARTED = "when_started"
    """So may this one, once it has started: it is scaled to zero."""


class CompletionError(Exception):
    """``param`` names the caller's field in the dialect's own spelling; ``retry_after`` is seconds."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        recourse: Recourse = Recourse.NONE,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.recourse = recourse
        self.detail = detail


class InvalidRequestError(CompletionError):
    """The request breaks a rule of the dialect or of the model."""


class UnsupportedParameterError(InvalidRequestError):
    """The parameter is valid in the dialect, but the chosen model can neither honour nor emulate it."""


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested tokens exceed the model's context."""


class RequestTooLargeError(InvalidRequestError):
    """The body is larger than Lambda or SageMaker accept."""


class UnknownPathError(InvalidRequestError):
    """The path leads nowhere."""


class MethodNotAllowedError(InvalidRequestError):
    """The path is known, the method is not."""


class AuthenticationError(CompletionError):
    """No credential, a malformed one, or an unknown one."""


class PermissionDeniedError(CompletionError):
    """The credential is known, and not allowed to do this."""


class ModelNotFoundError(CompletionError):
    """No such model, or none that this key may see."""


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """One limit as a client may see it. ``kind`` is what it counts; ``reset_seconds`` is when it is full again.

    ``name`` is the limit's own, as ``tokens_per_day``; empty for one that is not a key's.
    """

    kind: Literal["requests", "tokens", "nano-dollars"]
    limit: int
    remaining: int
    reset_seconds: float
    name: str = ""


class RateLimitError(CompletionError):
    """Too many requests or tokens for now; ``status`` is the limit that was hit, when it is one of ours."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        recourse: Recourse = Recourse.NONE,
        detail: str | None = None,
        status: LimitStatus | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code, retry_after=retry_after, recourse=recourse, detail=detail)
        self.status = status


class QuotaExceededError(RateLimitError):
    """A budget is used up until it resets."""


class DuplicateRequestError(CompletionError):
    """The logical request id was claimed before; answering again would charge twice."""


class ServiceError(CompletionError):
    """Base of the failures that are not the caller's."""


class BackendError(ServiceError):
    """The container failed, or sent what its wire format does not allow."""


class TruncatedStreamError(BackendError):
    """The container's stream ended without its terminal record."""

    def __init__(self, message: str = "The model stopped before its answer was complete.", **details: Any) -> None:
        super().__init__(message, **details)


class BackendTimeoutError(ServiceError):
    """The container, or the caller's own deadline, ran out of time."""


class BackendUnavailableError(ServiceError):
    """The endpoint is not ready, has no capacity, or cannot be reached."""


class MeteringError(ServiceError):
    """The usage table refused or could not be reached."""
