"""``application/vnd.amazon.eventstream``, the writing side: what SageMaker answers a response stream with.

A message is: total length, headers length, CRC-32 of those two, headers, payload, CRC-32 of all before. A header is:
name length, name, type 7 (string), value length, value.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Final

MEDIA_TYPE: Final = "application/vnd.amazon.eventstream"
_STRING: Final = 7


def payload_part(data: bytes) -> bytes:
    """A ``PayloadPart`` event that carries ``data``."""
    headers = {":event-type": "PayloadPart", ":content-type": "application/octet-stream", ":message-type": "event"}
    return message(headers, data)


def exception(kind: str, fields: Mapping[str, str]) -> bytes:
    """An exception frame such as ``ModelStreamError``; ``fields`` are its members."""
    headers = {":exception-type": kind, ":content-type": "application/json", ":message-type": "exception"}
    return message(headers, json.dumps(fields).encode())


def message(headers: Mapping[str, str], payload: bytes) -> bytes:
    """One framed message."""
    block = b"".join(_header(name, value) for name, value in headers.items())
    prelude = struct.pack(">II", 16 + len(block) + len(payload), len(block))
    body = prelude + struct.pack(">I", zlib.crc32(prelude)) + block + payload
    return body + struct.pack(">I", zlib.crc32(body))


def _header(name: str, value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">B", len(name)) + name.encode() + struct.pack(">BH", _STRING, len(encoded)) + encoded
