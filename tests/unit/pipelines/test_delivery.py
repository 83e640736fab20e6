"""Replies: what they say, where their bodies are, and that each is sent once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
from openapi_schema_validator import OAS31Validator

from completions.domain.completion import Usage
from completions.domain.deliveries import Delivery, PlaceKind, ReplyPlace
from completions.domain.errors import BackendUnavailableError
from completions.domain.events import EventReply, EventRequest, RetryLaterError
from completions.observability import logger
from completions.pipelines.answering import Later
from completions.pipelines.delivery import Replying
from completions.pipelines.messages import MessageDefaults, MessageFault, MessageRequest
from completions.pipelines.queue_worker import QueueWorker
from event_fakes import MemoryDeliveries, MemoryOutlets, MemoryVisibility, sqs_record

BUS = ReplyPlace(PlaceKind.BUS, "completions")
NAME = "msg-" + "0" * 40
REQUEST = EventRequest(NAME, "key-1", "/v1/completions", b"{}")
ANSWER = EventReply(NAME, 200, b'{"text": "\xc3\xa9"}', "demo", Usage(3, 2, 1), 2550)
REFUSAL = EventReply(NAME, 404, b'{"error": {}}', error="ModelNotFoundError", message="no such model")


class Scripted:
    """Answers as told; ``asked`` are the requests and their deadlines."""

    def __init__(self, reply: Any = ANSWER) -> None:
        self.reply = reply
        self.asked: list[tuple[EventRequest, float | None]] = []

    def answer(self, event: EventRequest, deadline: float | None = None, later: Later | None = None) -> EventReply:
        self.asked.append((event, deadline))
        found: Any = self.reply(event) if callable(self.reply) else self.reply
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, EventReply)
        return found


class Bench:
    def __init__(self, reply: Any = ANSWER, failure: BackendUnavailableError | None = None) -> None:
        self.answering = Scripted(reply)
        self.log = MemoryDeliveries()
        self.outlets = MemoryOutlets(failure)
        self.replying = Replying(self.answering, self.log, self.outlets, "s3://pipeline/replies-large/")

    def reply(self, place: ReplyPlace = BUS, custom_id: str | None = "a", deadline: float | None = 5.0) -> None:
        self.replying.reply(MessageRequest(REQUEST, NAME, place, custom_id), deadline)

    @property
    def sent(self) -> tuple[Delivery, Any]:
        """The one delivery, and its detail."""
        (delivery,) = self.outlets.sent
        return delivery, json.loads(delivery.detail)


@pytest.fixture(scope="module")
def schemas(project_root: Path) -> dict[str, OAS31Validator]:
    found = {}
    for name in ("succeeded", "failed"):
        plain = json.loads((project_root / "infra" / "schemas" / f"completion-{name}.v1.json").read_text())
        OAS31Validator.check_schema(plain)
        found[name] = OAS31Validator(plain)
    return found


# What is sent


def test_an_answer_is_sent_with_usage_and_price(schemas: dict[str, OAS31Validator]) -> None:
    bench = Bench()
    bench.reply()
    delivery, detail = bench.sent
    assert (delivery.name, delivery.group, delivery.place, delivery.status) == (NAME, "key-1", BUS, 200)
    assert delivery.succeeded
    assert delivery.detail.isascii()
    assert detail == {
        "version": "1",
        "request_id": NAME,
        "custom_id": "a",
        "key_id": "key-1",
        "url": "/v1/completions",
        "status": 200,
        "model": "demo",
        "body": {"text": "é"},
        "body_s3_uri": None,
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "cached_tokens": 1,
            "estimated": False,
        },
        "cost_nanos": 2550,
    }
    schemas["succeeded"].validate(detail)
    assert bench.answering.asked == [(REQUEST, 5.0)]


def test_a_failure_is_sent_with_its_kind_and_words(schemas: dict[str, OAS31Validator]) -> None:
    bench = Bench(REFUSAL)
    bench.reply(custom_id=None)
    delivery, detail = bench.sent
    assert not delivery.succeeded
    assert detail["error"] == {"type": "ModelNotFoundError", "message": "no such model"}
    assert detail["body"] == {"error": {}}
    assert not {"custom_id", "usage", "model", "cost_nanos"} & detail.keys()
    schemas["failed"].validate(detail)


def test_a_message_that_is_no_request_is_sent_as_a_failure(schemas: dict[str, OAS31Validator]) -> None:
    bench = Bench()
    bench.replying.reply(MessageFault(NAME, BUS, 400, "invalid_message", "'url': Field required", custom_id="a"), None)
    delivery, detail = bench.sent
    assert (delivery.status, delivery.place) == (400, BUS)
    assert detail == {
        "version": "1",
        "request_id": NAME,
        "custom_id": "a",
        "key_id": None,
        "url": None,
        "status": 400,
        "body": None,
        "body_s3_uri": None,
        "error": {"type": "InvalidMessage", "code": "invalid_message", "message": "'url': Field required"},
    }
    schemas["failed"].validate(detail)
    assert bench.answering.asked == []


def test_a_large_body_is_put_into_the_bucket_first(schemas: dict[str, OAS31Validator]) -> None:
    body = json.dumps({"text": "x" * 200_000}).encode()
    bench = Bench(EventReply(NAME, 200, body, "demo", Usage(1, 1), 0))
    bench.reply()
    _, detail = bench.sent
    uri = f"s3://pipeline/replies-large/{NAME}.json"
    assert (detail["body"], detail["body_s3_uri"]) == (None, uri)
    assert bench.outlets.objects == {uri: body}
    schemas["succeeded"].validate(detail)


def test_a_body_of_200_000_bytes_stands_in_the_detail() -> None:
    body = json.dumps({"text": "x" * (200_000 - 12)}).encode()
    assert len(body) == 200_000
    bench = Bench(EventReply(NAME, 200, body, "demo", Usage(1, 1), 0))
    bench.reply()
    assert bench.sent[1]["body_s3_uri"] is None


def test_what_is_escaped_counts_as_it_is_sent() -> None:
    body = json.dumps({"text": "é" * 40_000}, ensure_ascii=False).encode()
    bench = Bench(EventReply(NAME, 200, body, "demo", Usage(1, 1), 0))
    bench.reply()
    assert bench.sent[1]["body"] is None


def test_an_object_holds_its_body_however_large() -> None:
    body = json.dumps({"text": "x" * 300_000}).encode()
    bench = Bench(EventReply(NAME, 200, body, "demo", Usage(1, 1), 0))
    bench.reply(ReplyPlace(PlaceKind.OBJECT, "s3://bucket/prefix/"))
    assert bench.sent[1]["body"] == {"text": "x" * 300_000}
    assert bench.outlets.objects == {}


def test_the_schemas_examples_are_valid(schemas: dict[str, OAS31Validator]) -> None:
    for schema in schemas.values():
        for example in schema.schema["examples"]:
            schema.validate(example)


# Once


def test_a_delivery_that_comes_again_is_dropped_without_asking() -> None:
    bench = Bench()
    bench.reply()
    bench.reply()
    assert len(bench.outlets.sent) == len(bench.answering.asked) == 1


def test_one_that_was_sent_meanwhile_is_dropped() -> None:
    bench = Bench()

    def answered_by_another(_: EventRequest) -> EventReply:
        bench.log.sent.add(NAME)
        return ANSWER

    bench.answering.reply = answered_by_another
    bench.reply()
    assert bench.outlets.sent == []


def test_while_somebody_else_sends_it_is_to_come_later() -> None:
    bench = Bench()
    bench.log.sending.add(NAME)
    with pytest.raises(RetryLaterError) as raised:
        bench.reply()
    assert raised.value.seconds == 40
    assert bench.outlets.sent == []


def test_what_could_not_be_sent_is_given_up_and_comes_later() -> None:
    bench = Bench(failure=BackendUnavailableError("no", retry_after=2, detail="queue_url: AccessDenied"))
    with pytest.raises(RetryLaterError) as raised:
        bench.reply()
    assert raised.value.seconds == 2
    assert raised.value.reason == "BackendUnavailableError: queue_url: AccessDenied"
    assert (bench.log.given_up, bench.log.sent) == ([NAME], set())
    bench.outlets.failure = None
    bench.reply()
    assert len(bench.outlets.sent) == 1


@pytest.fixture
def informed() -> Iterator[None]:
    """The level that functions log at."""
    level = logger.log_level
    logger.setLevel("INFO")
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("informed")
def test_what_became_of_a_reply_is_logged_and_stops_nothing() -> None:
    bench = Bench(failure=BackendUnavailableError("no", retry_after=2, detail="queue_url: AccessDenied"))
    with pytest.raises(RetryLaterError):
        bench.reply()
    bench.outlets.failure = None
    bench.reply()
    bench.reply()
    assert len(bench.outlets.sent) == 1


# A batch of messages


def worker(reply: Any, visibility: MemoryVisibility, seconds: int = 900) -> tuple[QueueWorker, Bench]:
    bench = Bench(reply)
    return QueueWorker(bench.replying, MessageDefaults("key-1", BUS), visibility, seconds), bench


def records(*names: str, received: int = 1) -> Sequence[Any]:
    body = json.dumps({"version": "1", "url": "/v1/completions", "body": {}})
    return [sqs_record(name, body, received=received) for name in names]


def test_a_batch_is_answered_side_by_side() -> None:
    together = Barrier(10, timeout=10)

    def wait(_: EventRequest) -> EventReply:
        together.wait()
        return ANSWER

    batch, bench = worker(wait, MemoryVisibility())
    assert batch.work(records(*map(str, range(10))), None) == []
    assert len(bench.outlets.sent) == 10


def test_those_that_must_come_again_are_named_and_the_others_are_done() -> None:
    bodies = {
        b'{"n": 1}': RetryLaterError("busy", 7),
        b'{"n": 2}': KeyError("the caller's own text"),
        b'{"n": 3}': ANSWER,
    }
    visibility = MemoryVisibility()
    batch, bench = worker(lambda event: bodies[event.body], visibility)
    found = [
        sqs_record(f"m-{number}", json.dumps({"version": "1", "url": "/v1/completions", "body": {"n": number}}))
        for number in (1, 2, 3)
    ]
    assert batch.work(found, None) == ["m-1", "m-2"]
    assert len(bench.outlets.sent) == 1
    assert sorted(visibility.changes) == [(("receipt of m-1",), 7), (("receipt of m-2",), 1)]


@pytest.mark.parametrize(
    ("wanted", "received", "seconds"),
    [
        (2, 1, 2),
        (2, 2, 4),
        (2, 9, 512),
        (2, 10, 900),
        (2, 1000, 900),
        (0.05, 1, 1),
        (300, 2, 600),
        (15, 1, 15),
        (1.5, 1, 2),
    ],
)
def test_the_pause_doubles_with_each_delivery(wanted: float, received: int, seconds: int) -> None:
    visibility = MemoryVisibility()
    batch, _ = worker(RetryLaterError("busy", wanted), visibility)
    assert batch.work(records("m-1", received=received), None) == ["m-1"]
    assert visibility.changes == [(("receipt of m-1",), seconds)]


def test_messages_in_work_are_kept_from_others_and_those_that_are_done_are_not() -> None:
    both, beats = Event(), []

    def beat() -> None:
        beats.append(len(visibility.changes))
        if len(beats) == 2:
            both.set()

    def slow(event: EventRequest) -> EventReply:
        if event.body == b'{"slow": true}':
            assert both.wait(30)
        return ANSWER

    visibility = MemoryVisibility(beat)
    batch, _ = worker(slow, visibility, seconds=1)  # a beat every third of a second
    body = {"version": "1", "url": "/v1/completions", "body": {"slow": True}}
    assert batch.work([*records("quick"), sqs_record("slow", json.dumps(body))], None) == []
    assert visibility.changes[:2] == [(("receipt of slow",), 1)] * 2


def test_visibility_that_cannot_be_changed_changes_nothing_else() -> None:
    def fail() -> None:
        raise BackendUnavailableError("no", detail="visibility: AccessDenied")

    batch, _ = worker(RetryLaterError("busy", 7), MemoryVisibility(fail))
    assert batch.work(records("m-1"), None) == ["m-1"]


def test_no_messages_are_no_work() -> None:
    assert worker(ANSWER, MemoryVisibility())[0].work([], None) == []


def test_attributes_are_read_where_they_are_text() -> None:
    batch, bench = worker(ANSWER, MemoryVisibility())
    (record,) = records("m-1")
    record["messageAttributes"] = {
        "reply_event_bus": {"stringValue": "mine", "dataType": "String"},
        "trace": {"binaryValue": "AA==", "dataType": "Binary"},
    }
    assert batch.work([record], None) == []
    assert bench.outlets.sent[0].place == ReplyPlace(PlaceKind.BUS, "mine")
