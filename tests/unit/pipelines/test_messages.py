"""What a message of the queue asks for, and what is wrong with one that asks for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openapi_schema_validator import OAS31Validator

from completions.domain.deliveries import PlaceKind, ReplyPlace
from completions.domain.events import EventRequest
from completions.pipelines.messages import MessageDefaults, MessageFault, MessageRequest, QueueMessage, read_message

BUS = ReplyPlace(PlaceKind.BUS, "completions")
DEFAULTS = MessageDefaults("key-1", BUS)
QUEUE_URL = "https://sqs.us-east-1.amazonaws.com/123456789012/replies"
DETAIL: dict[str, Any] = {"version": "1", "url": "/v1/completions", "body": {"model": "demo", "prompt": "x"}}


def message(body: Any, message_id: str = "m-1", **fields: Any) -> QueueMessage:
    text = body if isinstance(body, str) else json.dumps(body)
    return QueueMessage(message_id, "arn", "receipt", text, **fields)


def envelope(detail: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "event-1", "detail-type": "completion.requested", "source": "anybody", "detail": detail, **fields}


def asked(body: Any, defaults: MessageDefaults = DEFAULTS, **fields: Any) -> MessageRequest:
    found = read_message(message(body, **fields), defaults)
    assert isinstance(found, MessageRequest), found
    return found


def fault(body: Any, defaults: MessageDefaults = DEFAULTS, **fields: Any) -> MessageFault:
    found = read_message(message(body, **fields), defaults)
    assert isinstance(found, MessageFault), found
    return found


# Requests


def test_a_body_is_a_request_as_it_stands() -> None:
    found = asked({**DETAIL, "custom_id": "a", "method": "POST"})
    assert (found.event.key_id, found.event.url, found.custom_id, found.place) == ("key-1", "/v1/completions", "a", BUS)
    assert json.loads(found.event.body) == DETAIL["body"]
    assert found.delivery_name == found.event.name


def test_the_name_is_of_the_message_and_what_it_says() -> None:
    name = asked(DETAIL).event.name
    assert name.startswith("msg-")
    assert len(name) == 44
    assert asked(DETAIL).event.name == name
    assert asked(DETAIL, message_id="m-2").event.name != name
    assert asked({**DETAIL, "custom_id": "a"}).event.name != name


def test_an_events_name_is_of_the_event_in_whichever_message_it_comes() -> None:
    found = asked(envelope({**DETAIL, "custom_id": "a"}))
    assert (found.custom_id, json.loads(found.event.body)) == ("a", DETAIL["body"])
    again = envelope({**DETAIL, "custom_id": "a"}, **{"replay-name": "again"})
    assert asked(again, message_id="m-2").event.name == found.event.name
    assert asked(envelope(DETAIL, id="event-2")).event.name != found.event.name


def test_with_an_idempotency_key_messages_are_one_request() -> None:
    one, two = (asked({**DETAIL, "idempotency_key": "i-1"}, message_id=name) for name in ("m-1", "m-2"))
    assert one == two
    assert one.delivery_name.startswith(one.event.name + "-")


def test_a_key_has_names_of_its_own() -> None:
    names = {asked({**DETAIL, "idempotency_key": "i-1", "key_id": key}).event.name for key in ("a", "b")}
    assert len(names) == 2


@pytest.mark.parametrize(
    "change", [{"body": {"model": "demo"}}, {"url": "/v2/completions"}, {"reply": {"event_bus": "another"}}]
)
def test_another_request_or_another_place_under_one_name_has_a_reply_of_its_own(change: dict[str, Any]) -> None:
    one = asked({**DETAIL, "idempotency_key": "i-1"})
    two = asked({**DETAIL, "idempotency_key": "i-1", **change})
    assert one.event.name == two.event.name
    assert one.delivery_name != two.delivery_name


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        (PlaceKind.QUEUE, QUEUE_URL),
        (PlaceKind.QUEUE, "http://127.0.0.1:4566/123456789012/replies.fifo"),
        (PlaceKind.OBJECT, "s3://bucket/prefix/"),
        (PlaceKind.OBJECT, "s3://bucket/object.json"),
        (PlaceKind.BUS, "arn:aws:events:us-east-1:123456789012:event-bus/bus"),
    ],
)
def test_a_reply_goes_where_the_request_or_its_attribute_says(kind: PlaceKind, address: str) -> None:
    place = ReplyPlace(kind, address)
    assert asked({**DETAIL, "reply": {kind.value: address}}).place == place
    assert asked(DETAIL, attributes={f"reply_{kind.value}": address}).place == place
    over = {**DETAIL, "reply": {"event_bus": "another"}}
    assert asked(over, attributes={f"reply_{kind.value}": address}).place == place


def test_an_attribute_names_the_key() -> None:
    assert asked({**DETAIL, "key_id": "a"}, attributes={"key_id": "b", "other": "c"}).event.key_id == "b"
    assert asked({**DETAIL, "key_id": "a"}).event.key_id == "a"


def test_null_is_absent() -> None:
    fields = dict.fromkeys(("custom_id", "idempotency_key", "key_id", "reply"))
    found = asked({**DETAIL, **fields})
    assert (found.event.key_id, found.place, found.custom_id) == ("key-1", BUS, None)


def test_half_a_character_is_passed_on_as_it_was_spelled() -> None:
    found = asked('{"version":"1","url":"/v1/completions","idempotency_key":null,"body":{"prompt":"\\ud83d"}}')
    assert isinstance(found.event, EventRequest)
    assert found.event.body == b'{"prompt": "\\ud83d"}'


# Faults


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": ("", "not JSON"),
    "text": ("hello", "not JSON"),
    "a list": ("[]", "must be a JSON object"),
    "half": ('{"version": "1",\n "url', "line 2"),
    "no number": ('{"version": "1", "body": {"temperature": NaN}}', "NaN"),
    "too large a number": ('{"version": "1", "body": {"temperature": 1e999}}', "too large"),
    "too deep": ("[" * 100_000, "too deeply"),
    "no version": ({**DETAIL, "version": None}, "'version'"),
    "another version": ({**DETAIL, "version": "2"}, "'version'"),
    "no url": ({"version": "1", "body": {}}, "'url'"),
    "a url elsewhere": ({**DETAIL, "url": "https://example.com/v1/completions"}, "'url'"),
    "no body": ({"version": "1", "url": "/v1/completions"}, "'body'"),
    "a body of text": ({**DETAIL, "body": "{}"}, "'body'"),
    "another method": ({**DETAIL, "method": "GET"}, "'method'"),
    "an unknown field": ({**DETAIL, "boddy": {}}, "'boddy'"),
    "a name of another type": ({**DETAIL, "custom_id": 7}, "'custom_id'"),
    "a key of more lines": ({**DETAIL, "key_id": "a\nb"}, "'key_id'"),
    "an empty name": ({**DETAIL, "idempotency_key": ""}, "'idempotency_key'"),
    "no place": ({**DETAIL, "reply": {}}, "'reply'"),
    "two places": ({**DETAIL, "reply": {"event_bus": "a", "s3_uri": "s3://bucket/a"}}, "exactly one of"),
    "no queue": ({**DETAIL, "reply": {"queue_url": "replies"}}, "'reply.queue_url'"),
    "no object": ({**DETAIL, "reply": {"s3_uri": "s3://bucket"}}, "'reply.s3_uri'"),
    "half a character in a place": ({**DETAIL, "reply": {"s3_uri": "s3://bucket/\ud83d"}}, "'reply.s3_uri'"),
    "an event of another kind": (envelope(DETAIL) | {"detail-type": "completion.failed"}, "'detail-type'"),
    "an event without a detail": (envelope("x"), "'detail'"),
    "an event without an id": (envelope(DETAIL, id=None), "'id'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_message_that_is_no_request_is_told_what_is_wrong(case: str) -> None:
    body, words = WRONG[case]
    found = fault(body)
    assert words in found.message
    assert (found.status, found.code, found.place) == (400, "invalid_message", BUS)
    assert found.name.startswith("msg-")


def test_a_fault_quotes_no_value() -> None:
    secret = "the prompt itself"
    wrong = {"version": secret, "url": secret, "body": [secret], "custom_id": [secret], "reply": {"queue_url": secret}}
    assert secret not in fault(wrong).message
    assert secret not in fault('{"version": "1", "body": the prompt itself}').message


def test_of_many_faults_the_first_are_told() -> None:
    text = fault({**DETAIL, **{f"field{number}": 1 for number in range(2000)}}).message
    assert "and 1995 more" in text
    assert len(text) < 500


def test_what_could_be_read_of_a_wrong_message_finds_its_sender() -> None:
    found = fault({"version": "1", "custom_id": "a", "key_id": "k", "url": "/x", "reply": {"queue_url": QUEUE_URL}})
    assert (found.custom_id, found.key_id, found.url) == ("a", "k", "/x")
    assert found.place == ReplyPlace(PlaceKind.QUEUE, QUEUE_URL)
    assert fault("{", attributes={"reply_queue_url": QUEUE_URL}).place == found.place


def test_without_a_key_it_is_refused() -> None:
    found = fault(DETAIL, MessageDefaults(None, BUS))
    assert (found.status, found.code) == (401, "key_missing")
    assert "'key_id'" in found.message


def test_more_than_one_place_by_attribute_is_refused() -> None:
    found = fault(DETAIL, attributes={"reply_queue_url": QUEUE_URL, "reply_event_bus": "bus"})
    assert "exactly one of" in found.message
    assert found.place == BUS


@pytest.mark.parametrize("letter", ["é", "字", "😀"])
def test_a_place_is_as_long_as_s3_takes_it_in_bytes(letter: str) -> None:
    """1024 bytes with the name behind a prefix: nothing is to be paid for first, and then found not to fit."""
    fits = letter * (900 // len(letter.encode()))
    assert asked({**DETAIL, "reply": {"s3_uri": f"s3://bucket/{fits}"}}).place.address.endswith(fits)
    assert "'reply.s3_uri'" in fault({**DETAIL, "reply": {"s3_uri": f"s3://bucket/{fits}{letter}"}}).message


@pytest.mark.parametrize("key", ["replies/msg-1.json", "input/key-2/x.jsonl", "", "replied", "./replied/", "output/"])
def test_a_reply_may_not_be_put_over_what_the_pipeline_keeps(key: str) -> None:
    defaults = MessageDefaults("key-1", BUS, own_bucket="pipeline")
    found = fault({**DETAIL, "reply": {"s3_uri": f"s3://pipeline/{key}"}}, defaults)
    assert "'replied/'" in found.message
    assert found.place == BUS


@pytest.mark.parametrize("uri", ["s3://pipeline/replied/a/", "s3://pipeline-2/replies/", "s3://other/input/"])
def test_it_may_be_put_into_its_folder_and_into_other_buckets(uri: str) -> None:
    defaults = MessageDefaults("key-1", BUS, own_bucket="pipeline")
    assert asked({**DETAIL, "reply": {"s3_uri": uri}}, defaults).place == ReplyPlace(PlaceKind.OBJECT, uri)


def test_an_attribute_of_another_type_is_refused_not_ignored() -> None:
    assert "'key_id'" in fault(DETAIL, others=frozenset({"key_id"})).message
    assert asked(DETAIL, others=frozenset({"trace"})).event.key_id == "key-1"


# The schema


@pytest.fixture(scope="module")
def schema(project_root: Path) -> OAS31Validator:
    plain = json.loads((project_root / "infra" / "schemas" / "completion-requested.v1.json").read_text())
    OAS31Validator.check_schema(plain)
    return OAS31Validator(plain)


def test_the_schemas_examples_are_requests(schema: OAS31Validator) -> None:
    examples = schema.schema["examples"]
    assert len(examples) == 2
    for example in examples:
        assert schema.is_valid(example)
        asked(example)


@pytest.mark.parametrize(
    "case", [case for case, (body, _) in WRONG.items() if isinstance(body, dict) and "id" not in body]
)
def test_the_schema_refuses_what_the_service_refuses(schema: OAS31Validator, case: str) -> None:
    if "half" not in case:  # what a pattern says of half a character is each engine's own
        assert not schema.is_valid(WRONG[case][0])
