"""A batch of a queue's messages: answered side by side, kept from others meanwhile, and those reported that must come
again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Any, Final

from completions.domain.deliveries import Visibility
from completions.domain.errors import ServiceError
from completions.domain.events import RetryLaterError
from completions.observability import log_unexpected, logger
from completions.pipelines.delivery import Replying
from completions.pipelines.messages import MessageDefaults, QueueMessage, read_message

MOST_SECONDS: Final = 900
"""The longest pause before a message comes again."""
_POISON_SECONDS: Final = 1.0


class QueueWorker:
    """``visibility_seconds`` is the queue's own: how long it gives a message to nobody else."""

    # Powertools' BatchProcessor has the records one after the other, or in an event loop, which this service has no
    # other use for; and its import takes a seventh of the function's start.

    def __init__(
        self, replying: Replying, defaults: MessageDefaults, visibility: Visibility, visibility_seconds: int
    ) -> None:
        self._replying = replying
        self._defaults = defaults
        self._visibility = visibility
        self._seconds = visibility_seconds

    def work(self, records: Sequence[Mapping[str, Any]], deadline: float | None) -> list[str]:
        """The ids of the messages that must come again. ``deadline`` is a reading of ``Clock.monotonic``."""
        if not records:
            return []
        messages = [_message(record) for record in records]
        held = _Held(self._visibility, messages, self._seconds)
        with held.beating(), ThreadPoolExecutor(len(messages), thread_name_prefix="message") as pool:
            done = list(pool.map(lambda message: self._done(message, held, deadline), messages))
        return [message.message_id for message, is_done in zip(messages, done, strict=True) if not is_done]

    def _done(self, message: QueueMessage, held: _Held, deadline: float | None) -> bool:
        try:
            self._replying.reply(read_message(message, self._defaults), deadline)
        except RetryLaterError as later:
            seconds = _pause(later.seconds, message.receive_count)
            logger.info("message_later", message_id=message.message_id, reason=later.reason, seconds=seconds)
        except Exception as error:  # noqa: BLE001 - a fault of ours with one message must not fail the others
            seconds = _pause(_POISON_SECONDS, message.receive_count)
            log_unexpected(error, message_id=message.message_id)
        else:
            held.let_go(message)
            return True
        held.let_go(message, seconds)
        return False


class _Held:
    """The messages that are still being worked on. The queue is told every third of its time that they are.

    Being told fails without harm: the message comes again, and finds its reply.
    """

    def __init__(self, visibility: Visibility, messages: Sequence[QueueMessage], seconds: int) -> None:
        self._visibility = visibility
        self._messages = list(messages)
        self._seconds = seconds
        self._lock = Lock()  # also around the calls: a late beat must not undo what ``let_go`` has said
        self._over = Event()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """In here, the messages stay the worker's own."""
        thread = Thread(target=self._beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def let_go(self, message: QueueMessage, seconds: int | None = None) -> None:
        """This one is done with, or is to come again after so many seconds."""
        with self._lock:
            self._messages.remove(message)
            if seconds is not None:
                self._tell([message], seconds)

    def _beat(self) -> None:
        while not self._over.wait(self._seconds / 3):
            with self._lock:
                if self._messages:
                    self._tell(self._messages, self._seconds)

    def _tell(self, messages: Sequence[QueueMessage], seconds: int) -> None:
        try:
            self._visibility.change(messages[0].queue_arn, [message.receipt for message in messages], seconds)
        except ServiceError as error:
            logger.warning("visibility_unchanged", seconds=seconds, detail=error.detail)


def _pause(seconds: float, receive_count: int) -> int:
    """Twice as long each time: a model that starts, or a worker that died, takes minutes, and each delivery counts
    towards the queue's last."""
    doublings = min(max(receive_count, 1) - 1, 10)
    return min(MOST_SECONDS, math.ceil(max(seconds, 1.0) * (1 << doublings)))


def _message(record: Mapping[str, Any]) -> QueueMessage:
    attributes: Mapping[str, Mapping[str, str]] = record.get("messageAttributes") or {}
    texts = {name: value["stringValue"] for name, value in attributes.items() if value.get("dataType") == "String"}
    return QueueMessage(
        record["messageId"],
        record["eventSourceARN"],
        record["receiptHandle"],
        record["body"],
        int(record.get("attributes", {}).get("ApproximateReceiveCount", 1)),
        texts,
        frozenset(attributes) - frozenset(texts),
    )
