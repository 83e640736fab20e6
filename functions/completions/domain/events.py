"""Requests that come by an event instead of HTTP: a message of a queue, a line of a batch. Each has a name of its own,
under which it is answered once and paid once, however often it is delivered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from completions.domain.completion import Usage
from completions.domain.metering import Outcome


@dataclass(frozen=True, slots=True)
class EventRequest:
    """``name`` derives from what was delivered; ``url`` is one of the dialects' paths, ``body`` what it takes.

    ``key_id`` is the public id of the key that pays: whoever may write into the pipeline is trusted to name it.
    """

    name: str
    key_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class EventReply:
    """What a client of the URL would have got: an HTTP status, and the dialect's body, JSON.

    ``model`` and ``usage`` are an answer's; ``nanos`` is what it cost, in nano-dollars. ``error`` is a failure's class,
    ``message`` its words.
    """

    request_id: str
    status: int
    body: bytes
    model: str | None = None
    usage: Usage | None = None
    nanos: int = 0
    error: str | None = None
    message: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it is an answer."""
        return self.status < 400


@dataclass(frozen=True, slots=True)
class KeptReply:
    """A reply, and the usage record (``plain_record``) that says the same; none where nothing was claimed."""

    reply: EventReply
    record: Mapping[str, object] | None


class RetryLaterError(Exception):
    """There is no reply yet: the model is busy, or another delivery is being answered.

    There may be one in so many ``seconds``; ``reason`` is for the log.
    """

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.seconds = seconds


class StillRunningError(RetryLaterError):
    """Another delivery is being answered, or its function died at it."""


class SubmittedError(Exception):
    """There is no reply yet: the model has the request, and its end will come by another event."""

    def __init__(self, record_id: str) -> None:
        super().__init__(record_id)
        self.record_id = record_id


class ReplyStore(Protocol):
    """Replies by the request's name, kept for those who ask again. Raises ``ServiceError``."""

    def get(self, name: str) -> KeptReply | None:
        """The reply of this request, if it has one."""
        ...

    def put(self, name: str, kept: KeptReply) -> None:
        """Keep a reply."""
        ...


class RecordBook(Protocol):
    """Usage records as one who comes later finds them. Raises ``MeteringError``."""

    def ended(self, record_id: str) -> Outcome | None:
        """How a request ended; ``None`` while it is open, or when there is none.

        One that failed because the model was not there counts as ``REFUSED``, too: nothing was generated.
        """
        ...

    def known(self, record_id: str) -> bool:
        """Whether the request was claimed, however it ended."""
        ...

    def settle(self, record: Mapping[str, object]) -> None:
        """Settle a record whose own function did not; one that is settled stays as it is."""
        ...

    def give_up(self, record_id: str, error: str | None = None) -> None:
        """Settle a record that is open as failed, at no cost. There may be none."""
        ...
