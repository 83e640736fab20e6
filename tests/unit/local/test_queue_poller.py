"""Batches of a queue: what is gathered, what is deleted, and what Lambda's rules say has failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Event, Lock
from typing import Any

import pytest
from botocore.exceptions import ClientError

from completions_cli.local.pipeline_template import Queue
from completions_cli.local.queue_poller import QueuePoller
from completions_cli.local.triggers import QueueTrigger, Target


class Sqs:
    """A queue whose messages come one receive after another."""

    def __init__(self, receives: Sequence[Sequence[int]] = (), refusals: int = 0) -> None:
        self.deleted: list[list[str]] = []
        self.asked: list[int] = []
        self._receives = iter(receives)
        self._refusals = refusals
        self._lock = Lock()

    def receive_message(self, **request: Any) -> Any:
        with self._lock:
            self.asked.append(request["MaxNumberOfMessages"])
            if self._refusals:
                self._refusals -= 1
                raise ClientError({"Error": {"Code": "Unavailable"}}, "ReceiveMessage")
            numbers = next(self._receives, None)
        if numbers is None:
            time.sleep(0.01)
        return {"Messages": [message(number) for number in numbers or ()]}

    def delete_message_batch(self, QueueUrl: str, Entries: Any) -> None:
        self.deleted.append([entry["ReceiptHandle"] for entry in Entries])

    @property
    def all_deleted(self) -> list[str]:
        return sorted(handle for handles in self.deleted for handle in handles)


def message(number: int, receives: int = 1) -> dict[str, Any]:
    attributes = {"ApproximateReceiveCount": str(receives)}
    name = str(number)
    return {"MessageId": name, "ReceiptHandle": f"r{name}", "Body": name, "MD5OfBody": "", "Attributes": attributes}


def poller(sqs: Any, call: Any, stop: Event | None = None, **settings: Any) -> QueuePoller:
    given: dict[str, Any] = {"batch_size": 10, "window_seconds": 0, "partial": True, "most_at_once": 2} | settings
    trigger = QueueTrigger(Target("Worker", "module.handler", 3), Queue("Work", {}), **given)
    return QueuePoller(sqs, trigger, "http://queue", call, stop or Event())


@pytest.mark.parametrize("reply", [None, {}, {"batchItemFailures": []}, {"batchItemFailures": None}])
def test_all_is_deleted_when_nothing_is_said_to_have_failed(reply: Any) -> None:
    sqs = Sqs()
    poller(sqs, lambda _: reply).deliver([message(1), message(2)])
    assert sqs.deleted == [["r1", "r2"]]


def test_what_is_said_to_have_failed_stays() -> None:
    sqs = Sqs()
    poller(sqs, lambda _: {"batchItemFailures": [{"itemIdentifier": "2"}]}).deliver([message(n) for n in (1, 2, 3)])
    assert sqs.deleted == [["r1", "r3"]]


@pytest.mark.parametrize(
    "reply",
    [
        {"batchItemFailures": [{"itemIdentifier": "99"}]},
        {"batchItemFailures": [{"itemIdentifier": ""}]},
        {"batchItemFailures": [{"itemIdentifier": None}]},
        {"batchItemFailures": [{"wrong": "1"}]},
        {"batchItemFailures": "1"},
        "text",
    ],
)
def test_a_reply_that_names_no_message_of_the_batch_fails_all_of_it(reply: Any) -> None:
    sqs = Sqs()
    poller(sqs, lambda _: reply).deliver([message(1)])
    assert sqs.deleted == []


def test_without_partial_responses_the_reply_says_nothing() -> None:
    sqs = Sqs()
    reply = {"batchItemFailures": [{"itemIdentifier": "1"}]}
    poller(sqs, lambda _: reply, partial=False).deliver([message(1)])
    assert sqs.deleted == [["r1"]]


def test_a_function_that_raises_leaves_all_of_it() -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("broken")

    sqs = Sqs()
    poller(sqs, fail).deliver([message(1), message(2)])
    assert sqs.deleted == []


def test_a_batch_is_what_comes_within_the_window_and_no_more_than_its_size() -> None:
    batches: list[list[str]] = []
    stop = Event()

    def call(event: Any) -> None:
        batches.append([record["messageId"] for record in event["Records"]])
        if len(batches) == 2:
            stop.set()

    sqs = Sqs([[1, 2], [], [3], [4, 5]])
    poller(sqs, call, stop, batch_size=3, window_seconds=1, most_at_once=1).run()
    assert batches == [["1", "2", "3"], ["4", "5"]]
    assert sqs.asked[:3] == [3, 1, 1]


def test_batches_run_side_by_side_up_to_the_most() -> None:
    stop, lock, release = Event(), Lock(), Event()
    running, most = [0], [0]

    def call(_: Any) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        if running[0] == 2:
            release.set()
        assert release.wait(5)
        time.sleep(0.05)
        with lock:
            running[0] -= 1

    sqs = Sqs([[1], [2], [3], [4]])
    polled = poller(sqs, call, stop)
    polled.start()
    deadline = time.monotonic() + 10
    while len(sqs.all_deleted) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stop.set()
    polled.join(time.monotonic() + 5)
    assert most[0] == 2


def test_a_queue_that_cannot_be_read_is_asked_again() -> None:
    stop = Event()
    sqs = Sqs([[1]], refusals=1)
    poller(sqs, lambda _: stop.set(), stop, most_at_once=1).run()
    assert len(sqs.asked) >= 2


def test_nobody_waits_for_a_batch_in_progress_longer_than_asked() -> None:
    stop, began, release = Event(), Event(), Event()

    def call(_: Any) -> None:
        began.set()
        release.wait(10)

    polled = poller(Sqs([[1]]), call, stop)
    polled.start()
    assert began.wait(5)
    stop.set()
    since = time.monotonic()
    polled.join(since + 0.1)
    release.set()
    assert time.monotonic() - since < 1
