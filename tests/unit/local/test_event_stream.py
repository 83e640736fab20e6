"""Frames of the SageMaker stand-in, read by botocore."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from botocore.eventstream import ChecksumMismatch, EventStreamBuffer, EventStreamMessage
from hypothesis import given
from hypothesis import strategies as st

from completions_cli.local import event_stream

_VALUES = st.text(max_size=50)
_NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


def read(*parts: bytes) -> list[EventStreamMessage]:
    """What botocore makes of the bytes, part by part."""
    buffer = EventStreamBuffer()
    messages: list[EventStreamMessage] = []
    for part in parts:
        buffer.add_data(part)
        messages += list(buffer)
    return messages


@given(st.binary(max_size=2000))
def test_any_payload_comes_back_whole(data: bytes) -> None:
    (message,) = read(event_stream.payload_part(data))
    assert message.payload == data


@given(st.dictionaries(_NAMES, _VALUES, max_size=5), st.binary(max_size=200))
def test_any_headers_come_back_whole(headers: dict[str, str], payload: bytes) -> None:
    (message,) = read(event_stream.message(headers, payload))
    found: Any = message.headers
    assert (found, message.payload) == (headers, payload)


@given(st.lists(st.binary(max_size=50), max_size=4), st.data())
def test_frames_cut_anywhere_come_back_in_order(payloads: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(map(event_stream.payload_part, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    parts = [whole[start:end] for start, end in pairwise([0, *cuts, len(whole)])]
    assert [message.payload for message in read(*parts)] == payloads


def test_a_payload_part_is_an_event_of_bytes() -> None:
    (message,) = read(event_stream.payload_part(b"data"))
    assert message.to_response_dict() == {
        "status_code": 200,
        "headers": {
            ":event-type": "PayloadPart",
            ":content-type": "application/octet-stream",
            ":message-type": "event",
        },
        "body": b"data",
    }


@pytest.mark.parametrize("kind", ["ModelStreamError", "InternalStreamFailure"])
def test_an_exception_is_an_error_with_its_members(kind: str) -> None:
    (message,) = read(event_stream.exception(kind, {"Message": "gone", "ErrorCode": "StreamBroken"}))
    reply = message.to_response_dict()
    assert (reply["status_code"], reply["headers"][":exception-type"]) == (400, kind)
    assert json.loads(reply["body"]) == {"Message": "gone", "ErrorCode": "StreamBroken"}


@pytest.mark.parametrize("position", [9, -1], ids=["prelude checksum", "message checksum"])
def test_a_flipped_bit_does_not_pass(position: int) -> None:
    frame = bytearray(event_stream.payload_part(b"data"))
    frame[position] ^= 1
    with pytest.raises(ChecksumMismatch):
        read(bytes(frame))
