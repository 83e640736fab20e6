"""Replies on their way to queues, buses and objects. Each is sent once, as far as these services let anybody say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class PlaceKind(StrEnum):
    """What a reply can be sent to, by the name it has in a request."""

    QUEUE = "queue_url"
    OBJECT = "s3_uri"
    BUS = "event_bus"


@dataclass(frozen=True, slots=True)
class ReplyPlace:
    """Where a reply goes: a queue's URL, an object's URI or the prefix of one (``…/``), a bus's name or ARN."""

    kind: PlaceKind
    address: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """``name`` is the same whenever this reply is sent. ``group`` orders those of one key in a FIFO queue.

    ``detail`` is JSON in ASCII: queues refuse some characters, and a bus counts bytes.
    """

    name: str
    group: str
    place: ReplyPlace
    status: int
    detail: str

    @property
    def succeeded(self) -> bool:
        """Whether it is an answer."""
        return self.status < 400


class Outlets(Protocol):
    """The ways out. All raise ``ServiceError`` when the other side cannot be reached, or does not take it."""

    def send(self, delivery: Delivery) -> None:
        """To its place."""
        ...

    def put(self, s3_uri: str, content: bytes) -> None:
        """An object of JSON."""
        ...


class DeliveryLog(Protocol):
    """Which replies were sent. Raises ``ServiceError`` when it cannot be reached."""

    def delivered(self, name: str) -> bool:
        """Whether it was sent."""
        ...

    def begin(self, name: str) -> str | None:
        """Note that it is being sent, by the one who is given this token; ``None`` when it was sent before.

        Raises ``RetryLaterError`` while somebody else sends it, who may have died at it.
        """
        ...

    def finish(self, name: str) -> None:
        """Note that it was sent."""
        ...

    def give_up(self, name: str, token: str) -> None:
        """Note that it was not."""
        ...


class Visibility(Protocol):
    """How long a queue keeps messages to itself. Raises ``ServiceError``."""

    def change(self, queue_arn: str, receipts: Sequence[str], seconds: int) -> None:
        """The queue gives up to ten messages to nobody else for so long from now."""
        ...
