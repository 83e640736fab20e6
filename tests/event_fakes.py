"""In-memory stand-ins for what events' requests are kept in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from completions.domain.deliveries import Delivery, DeliveryLog, Outlets, Visibility
from completions.domain.errors import CompletionError, DuplicateRequestError, InvalidRequestError
from completions.domain.events import KeptReply, RecordBook, ReplyStore, RetryLaterError
from completions.domain.metering import Outcome, Reservation, UsageRecord
from completions.domain.ports import Claim, UsageLedger


class MemoryReplies(ReplyStore):
    """``failure`` is what every put raises."""

    def __init__(self, failure: CompletionError | None = None) -> None:
        self.kept: dict[str, KeptReply] = {}
        self.failure = failure

    def get(self, name: str) -> KeptReply | None:
        return self.kept.get(name)

    def put(self, name: str, kept: KeptReply) -> None:
        if self.failure is not None:
            raise self.failure
        self.kept[name] = kept


class MemoryBooks(UsageLedger, RecordBook):
    """Claims, and how they ended: ``None`` while open. ``records`` are what was settled, by its own function or for it.

    With ``dies`` the functions do not live to settle.
    """

    def __init__(self, *, dies: bool = False, refusal: CompletionError | None = None) -> None:
        self.claims: dict[str, Reservation] = {}
        self.ends: dict[str, Outcome | None] = {}
        self.records: dict[str, UsageRecord | Mapping[str, object]] = {}
        self.dies = dies
        self.refusal = refusal

    def reserve(self, reservation: Reservation) -> Claim:
        if self.refusal is not None:
            raise self.refusal
        known = self.claims.get(reservation.record_id)
        if known is not None:
            if known.fingerprint != reservation.fingerprint:
                raise InvalidRequestError("used for another request", code="idempotency_key_reused")
            raise DuplicateRequestError("claimed before")
        self.claims[reservation.record_id] = reservation
        self.ends[reservation.record_id] = None
        return _MemoryClaim(self)

    def ended(self, record_id: str) -> Outcome | None:
        return self.ends.get(record_id)

    def known(self, record_id: str) -> bool:
        return record_id in self.claims

    def give_up(self, record_id: str, error: str | None = None) -> None:
        raise AssertionError("nothing is given up here")

    def settle(self, record: Mapping[str, object]) -> None:
        name = str(record["record_id"])
        if self.ends[name] in (None, Outcome.LOST):
            self.ends[name] = Outcome(str(record["outcome"]))
            self.records[name] = record


class _MemoryClaim(Claim):
    limits = ()

    def __init__(self, books: MemoryBooks) -> None:
        self._books = books

    def confirm(self) -> None:
        """It is written."""

    def settle(self, record: UsageRecord) -> None:
        if not self._books.dies:
            self._books.ends[record.reservation.record_id] = record.outcome
            self._books.records[record.reservation.record_id] = record


class MemoryDeliveries(DeliveryLog):
    """``sending`` are the names that somebody else is at."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.sending: set[str] = set()
        self.given_up: list[str] = []

    def delivered(self, name: str) -> bool:
        return name in self.sent

    def begin(self, name: str) -> str | None:
        if name in self.sending:
            raise RetryLaterError("on its way", 40)
        return None if name in self.sent else f"token of {name}"

    def finish(self, name: str) -> None:
        self.sent.add(name)

    def give_up(self, name: str, token: str) -> None:
        assert token == f"token of {name}"
        self.given_up.append(name)


class MemoryOutlets(Outlets):
    """``failure`` is what every send raises."""

    def __init__(self, failure: CompletionError | None = None) -> None:
        self.sent: list[Delivery] = []
        self.objects: dict[str, bytes] = {}
        self.failure = failure

    def send(self, delivery: Delivery) -> None:
        if self.failure is not None:
            raise self.failure
        self.sent.append(delivery)

    def put(self, s3_uri: str, content: bytes) -> None:
        self.objects[s3_uri] = content


class MemoryVisibility(Visibility):
    """``changes`` are receipts and seconds, in order; ``then`` runs at each."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.changes: list[tuple[tuple[str, ...], int]] = []
        self._then = then

    def change(self, queue_arn: str, receipts: Sequence[str], seconds: int) -> None:
        self.changes.append((tuple(receipts), seconds))
        self._then()


def sqs_record(message_id: str, body: str, attributes: Mapping[str, str] | None = None, received: int = 1) -> Any:
    """A message as Lambda hands it over."""
    return {
        "messageId": message_id,
        "receiptHandle": f"receipt of {message_id}",
        "body": body,
        "attributes": {"ApproximateReceiveCount": str(received)},
        "messageAttributes": {
            name: {"stringValue": value, "dataType": "String"} for name, value in (attributes or {}).items()
        },
        "eventSource": "aws:sqs",
        "eventSourceARN": "arn:aws:sqs:us-east-1:123456789012:requests",
        "awsRegion": "us-east-1",
    }
