"""Requests that an asynchronous endpoint has, and whose answers come by another event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from completions.domain.errors import BackendUnavailableError
from completions.domain.ports import Ticket


class UnansweredError(BackendUnavailableError):
    """The end of what was submitted has not come yet."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A claim that waits for its answer: where that will be, and the claim's facts, ``plain_reservation``."""

    ticket: Ticket
    model: str
    reservation: Mapping[str, str | int | bool | None]


@dataclass(frozen=True, slots=True)
class Pending:
    """What is expected until ``until``, by the id of its usage record, which is SageMaker's inference id as well.

    ``message`` is what asked for it, with the place its reply goes to; it holds the prompt, and is empty where it is
    gone. Without a ``submission`` nobody knows whether the endpoint has it.
    """

    record_id: str
    until: datetime
    message: bytes
    submission: Submission | None = None


class PendingStore(Protocol):
    """What is expected. Raises ``ServiceError`` when it cannot be reached."""

    def expect(self, pending: Pending) -> None:
        """Note it before it is submitted. What is expected already is expected anew, unless it is submitted."""
        ...

    def submitted(self, pending: Pending, submission: Submission) -> None:
        """Note that the endpoint has it, and that it was this ``pending`` that had the claim."""
        ...

    def is_submitted(self, record_id: str) -> bool:
        """Whether the endpoint has it, and its end has not come."""
        ...

    def by_record(self, record_id: str) -> Pending | None:
        """What is expected under this id."""
        ...

    def by_place(self, uri: str) -> Pending | None:
        """What is expected to end in this object."""
        ...

    def overdue(self, now: datetime) -> Iterator[Pending]:
        """What should have come before ``now``, the oldest first, read as it is asked for."""
        ...

    def postpone(self, pending: Pending, until: datetime) -> None:
        """It is overdue, and to be looked at again then."""
        ...

    def done(self, pending: Pending) -> None:
        """Forget it."""
        ...
