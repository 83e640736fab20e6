"""Lambda's event source mapping of a queue: receive, gather a batch, call, delete what was done.

What failed is left to its visibility, and to the queue's own count of receives, which ends in the dead letters.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from threading import BoundedSemaphore, Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from completions.observability import logger
from completions_cli.local.pipeline_template import REGION
from completions_cli.local.triggers import QueueTrigger

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

Call = Callable[[Mapping[str, Any]], Any]

_WAIT_SECONDS: Final = 1
"""How long one poll waits: it also is how long a poller may outlive its stack, which nobody waits for."""
_MOST_WINDOW: Final = 1.0
"""Shorter than the template's may be: here somebody waits for the answers."""
_UNREADABLE_SECONDS: Final = 1.0
_MOST_RECEIVED: Final = 10


class QueuePoller:
    """One mapping. ``stop`` ends it; a batch that is being worked on then is nobody's to wait for."""

    def __init__(self, sqs: SQSClient, trigger: QueueTrigger, queue_url: str, call: Call, stop: Event) -> None:
        self._sqs = sqs
        self._trigger = trigger
        self._url = queue_url
        self._call = call
        self._stop = stop
        self._places = BoundedSemaphore(trigger.most_at_once)
        self._working: set[Thread] = set()
        self._lock = Lock()

    def start(self) -> None:
        """Begin to poll, in a thread that ends with the process at the latest."""
        Thread(target=self.run, name=f"poll-{self._trigger.queue.name}", daemon=True).start()

    def run(self) -> None:
        """Until it is stopped."""
        while not self._stop.is_set():
            if not self._places.acquire(timeout=_WAIT_SECONDS):
                continue
            messages = self._gathered()
            if not messages or self._stop.is_set():
                self._places.release()
                continue
            thread = Thread(target=self._work, args=(messages,), name=self._trigger.target.name, daemon=True)
            with self._lock:
                self._working.add(thread)
            thread.start()

    def join(self, until: float) -> None:
        """Give batches in progress until this reading of ``time.monotonic``."""
        with self._lock:
            working = list(self._working)
        for thread in working:
            thread.join(max(0.0, until - time.monotonic()))

    def deliver(self, messages: Sequence[Any]) -> None:
        """Call the function with one batch, and delete what it did."""
        failed = self._failed(messages)
        done = [message for message in messages if message["MessageId"] not in failed]
        for first in range(0, len(done), _MOST_RECEIVED):
            entries: Any = [
                {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]}
                for number, message in enumerate(done[first : first + _MOST_RECEIVED])
            ]
            self._sqs.delete_message_batch(QueueUrl=self._url, Entries=entries)
        most = self._trigger.queue.most_receives
        given_up = [
            message["MessageId"]
            for message in messages
            if message["MessageId"] in failed
            and most is not None
            and int(message["Attributes"]["ApproximateReceiveCount"]) >= most
        ]
        if given_up:  # said at any level: nobody else will
            logger.critical("messages_given_up", queue=self._trigger.queue.name, messages=given_up)

    def _work(self, messages: Sequence[Any]) -> None:
        try:
            self.deliver(messages)
        except (BotoCoreError, ClientError) as error:
            self._say_unreadable(error)
        finally:
            self._places.release()
            with self._lock:
                self._working = {thread for thread in self._working if thread.is_alive()}

    def _gathered(self) -> Sequence[Any]:
        """A batch, once the first message of it is there: as many as fit, or as come within the window."""
        messages: list[Any] = []
        until = None
        while not self._stop.is_set():
            wait = _WAIT_SECONDS if until is None else 0
            try:
                messages += self._receive(self._trigger.batch_size - len(messages), wait)
            except (BotoCoreError, ClientError) as error:
                self._say_unreadable(error)
                self._stop.wait(_UNREADABLE_SECONDS)
            if not messages or len(messages) >= self._trigger.batch_size:
                break
            if until is None:
                until = time.monotonic() + min(_MOST_WINDOW, self._trigger.window_seconds)
            if time.monotonic() >= until or self._stop.wait(0.05):
                break
        return messages

    def _receive(self, most: int, wait: int) -> Sequence[Any]:
        reply = self._sqs.receive_message(
            QueueUrl=self._url,
            MaxNumberOfMessages=min(_MOST_RECEIVED, most),
            WaitTimeSeconds=wait,
            MessageSystemAttributeNames=["All"],
            MessageAttributeNames=["All"],
        )
        return reply.get("Messages", [])

    def _failed(self, messages: Sequence[Any]) -> set[str]:
        """The ids of what is to come again."""
        everything = {message["MessageId"] for message in messages}
        records = [sqs_record(message, self._trigger.queue.arn) for message in messages]
        try:
            reply = self._call({"Records": records})
        except Exception as error:  # noqa: BLE001 - whatever a function raises fails the whole batch
            logger.warning("function_failed", function=self._trigger.target.name, error=type(error).__name__)
            return everything
        if not self._trigger.partial:
            return set()
        try:
            failed = {failure["itemIdentifier"] for failure in (reply or {}).get("batchItemFailures") or ()}
        except (AttributeError, KeyError, TypeError):
            failed = {""}
        if not failed <= everything:  # as with Lambda: who names nobody names all
            logger.warning("function_failed", function=self._trigger.target.name, error="batchItemFailures")
            return everything
        return failed

    def _say_unreadable(self, error: Exception) -> None:
        if not self._stop.is_set():  # else it is the stack that ended meanwhile
            logger.warning("queue_unreadable", queue=self._trigger.queue.name, error=type(error).__name__)


def sqs_record(message: Mapping[str, Any], queue_arn: str) -> dict[str, Any]:
    """A received message as Lambda sends it. Source: Lambda's developer guide, "Using Lambda with Amazon SQS"."""
    record = {
        "messageId": message["MessageId"],
        "receiptHandle": message["ReceiptHandle"],
        "body": message["Body"],
        "attributes": dict(message["Attributes"]),
        "messageAttributes": {name: _attribute(value) for name, value in message.get("MessageAttributes", {}).items()},
        "md5OfBody": message["MD5OfBody"],
        "eventSource": "aws:sqs",
        "eventSourceARN": queue_arn,
        "awsRegion": REGION,
    }
    if "MD5OfMessageAttributes" in message:
        record["md5OfMessageAttributes"] = message["MD5OfMessageAttributes"]
    return record


def _attribute(value: Mapping[str, Any]) -> dict[str, Any]:
    attribute: dict[str, Any] = {"stringListValues": [], "binaryListValues": [], "dataType": value["DataType"]}
    if "StringValue" in value:
        attribute["stringValue"] = value["StringValue"]
    if "BinaryValue" in value:
        attribute["binaryValue"] = base64.b64encode(value["BinaryValue"]).decode()
    return attribute
