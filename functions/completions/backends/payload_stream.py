"""Payload parts to records: the one stream decoder for every container family.

SageMaker cuts a container's body into ``PayloadPart`` events anywhere, inside a line and inside a UTF-8 sequence, and
packs several lines into one part. So parts are joined as bytes and only whole lines are looked at. Server-sent events
(``data: {...}``, with or without the space) and JSON lines come out alike: one record a line, prefix stripped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from completions.domain.errors import BackendError

DONE = b"[DONE]"
MAX_LINE_BYTES = 8 * 1024 * 1024
"""Far above any real record; an endless line is a wrong content type or an attack on memory."""

_DATA = b"data:"
_SSE_FIELDS = (b":", b"event:", b"id:", b"retry:")


class RecordDecoder:
    """Incremental: ``decode`` each part, then ``flush`` once for a last line without its line end."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._pending = bytearray()
        self._max_line_bytes = max_line_bytes

    def decode(self, part: bytes) -> list[bytes]:
        """The records that ``part`` completes. Raises ``BackendError`` when a line outgrows the limit."""
        if not self._pending and part.endswith(b"\n") and len(part) <= self._max_line_bytes:  # as most parts are
            return [record for line in part.split(b"\n") if line and (record := _record(line)) is not None]
        if b"\n" not in part:
            self._hold(part)
            return []
        *lines, rest = part.split(b"\n")
        found = []
        for line in lines:
            self._hold(line)
            found += self.flush()
        self._hold(rest)
        return found

    def flush(self) -> list[bytes]:
        """The record in an unterminated last line, if there is one; some containers omit the final line end."""
        record = _record(bytes(self._pending))
        self._pending.clear()
        return [] if record is None else [record]

    def _hold(self, piece: bytes) -> None:
        if len(self._pending) + len(piece) > self._max_line_bytes:
            raise BackendError("The model's answer could not be read.", detail="a record exceeds the line limit")
        self._pending += piece


def records(parts: Iterable[bytes]) -> Iterator[bytes]:
    """All records of a stream of payload parts, in order."""
    decoder = RecordDecoder()
    for part in parts:
        yield from decoder.decode(part)
    yield from decoder.flush()


def document(parts: Iterable[bytes], max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The parts of an answer that is one document, as its only record. Raises ``BackendError`` when it is too long."""
    joined = bytearray()
    for part in parts:
        if len(joined) + len(part) > max_bytes:
            raise BackendError("The model's answer could not be read.", detail="a document exceeds the size limit")
        joined += part
    if joined.strip():
        yield bytes(joined)


def _record(line: bytes) -> bytes | None:
    line = line.strip()
    if line.startswith(_DATA):
        return line[len(_DATA) :].lstrip() or None
    if not line or line.startswith(_SSE_FIELDS):
        return None
    return line
