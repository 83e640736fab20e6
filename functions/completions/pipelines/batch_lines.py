"""The lines of a batch's file, read in flat memory, and the lines of the files that answer it.

Source: OpenAI's ``BatchRequestInput`` and ``BatchRequestOutput`` (openai-openapi). The codes of faults are OpenAI's and
Azure's published ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeGuard
from urllib.parse import parse_qs, urlsplit

from pydantic_core import from_json, to_json

from completions.domain.batches import LineError
from completions.domain.events import EventReply

LONGEST_LINE: Final = 6_000_000
"""Bytes, without the line's end. SageMaker takes bodies of 6 MiB."""
LONGEST_ID: Final = 512
_BOM: Final = b"\xef\xbb\xbf"
_EDGES: Final = len(_BOM) + len(b"\r")
_FIELDS: Final = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class RawLine:
    """``number`` counts from 1; it stands in the file from ``start`` up to ``end``. A line that is too long has no
    ``content``."""

    number: int
    start: int
    end: int
    content: bytes | None

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing in it."""
        return self.content is not None and (not self.content or self.content.isspace())


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A line that is a request. ``model`` is what it names, as it names it."""

    number: int
    custom_id: str
    url: str
    path: str
    model: str | None
    body: bytes


class LineFaultError(Exception):
    """The line is no request; ``custom_id`` is its own where it could be read."""

    def __init__(self, fault: LineError, custom_id: str | None = None) -> None:
        super().__init__(fault.code)
        self.fault = fault
        self.custom_id = custom_id


def read_lines(
    pieces: Iterable[bytes], number: int = 1, start: int = 0, most_bytes: int = LONGEST_LINE
) -> Iterator[RawLine]:
    """Every line, blank ones too; LF and CRLF end one. ``number`` and ``start`` are the first one's."""
    held, length = bytearray(), 0
    for piece in pieces:
        *ended, begun = piece.split(b"\n")
        for text in ended:
            if length:
                length += len(text)
                whole = bytes(held) + text if length <= most_bytes + _EDGES else None
                held.clear()
            else:
                length, whole = len(text), text
            yield _line(number, start, start + length, whole, most_bytes)
            number, start, length = number + 1, start + length + 1, 0
        length += len(begun)
        if length <= most_bytes + _EDGES:
            held += begun
        else:
            held.clear()
    if length:
        whole = bytes(held) if length <= most_bytes + _EDGES else None
        yield _line(number, start, start + length, whole, most_bytes)


def _line(number: int, start: int, end: int, content: bytes | None, most_bytes: int) -> RawLine:
    if content is not None:
        if start == 0 and content.startswith(_BOM):
            content, start = content.removeprefix(_BOM), len(_BOM)
        content = content.removesuffix(b"\r")
        if len(content) > most_bytes:
            content = None
    return RawLine(number, start, end, content)


def parse_line(raw: RawLine) -> RequestLine:
    """Raises ``LineFaultError`` for what is wrong with this line alone."""
    if raw.content is None:
        raise _fault(raw, "invalid_request", f"The line is longer than {LONGEST_LINE} bytes.")
    try:
        fields = from_json(raw.content, allow_inf_nan=False)
    except ValueError as error:
        raise _fault(raw, "invalid_json_line", f"The line is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise _fault(raw, "invalid_json_line", "The line is not a JSON object.")
    custom_id = fields.get("custom_id")
    try:
        return _request(raw, fields)
    except LineFaultError as error:
        error.custom_id = custom_id if _is_id(custom_id) else None
        raise


def _request(raw: RawLine, fields: dict[str, Any]) -> RequestLine:
    for name in _FIELDS:
        if name not in fields:
            raise _fault(raw, "invalid_request", f"Missing required field: '{name}'.", name)
    unknown = next((name for name in fields if name not in _FIELDS), None)
    if unknown is not None:
        raise _fault(raw, "invalid_request", f"Unknown field: '{unknown[:100]}'.", unknown[:100])
    custom_id, url, body = fields["custom_id"], fields["url"], fields["body"]
    if not _is_id(custom_id):
        raise _fault(
            raw, "invalid_request", f"'custom_id' must be a string of 1 to {LONGEST_ID} characters.", "custom_id"
        )
    if fields["method"] != "POST":
        raise _fault(raw, "invalid_request", "'method' must be 'POST'.", "method")
    if not isinstance(url, str) or not url.startswith("/") or url.startswith("//") or "#" in url:
        message = "'url' must be a path of this service, as '/v1/completions'."
        raise _fault(raw, "invalid_request", message, "url")
    if not isinstance(body, dict):
        raise _fault(raw, "invalid_request", "'body' must be an object.", "body")
    parts = urlsplit(url)
    return RequestLine(raw.number, custom_id, url, parts.path, _model(body, parts.query), to_json(body))


def _is_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 1 <= len(value) <= LONGEST_ID


def _model(body: dict[str, Any], query: str) -> str | None:
    """What a line names in its body, or where its dialect has it in the URL."""
    named = body.get("model")
    if named is None and query:
        named = parse_qs(query).get("model_endpoint_name", [None])[-1]
    return named if isinstance(named, str) and named else None


def _fault(raw: RawLine, code: str, message: str, param: str | None = None) -> LineFaultError:
    return LineFaultError(LineError(code, message, param, raw.number))


def line_name(batch_id: str, number: int) -> str:
    """The name under which a line is answered once."""
    return f"{batch_id}-{number}"


def fault_line(batch_id: str, fault: LineError, custom_id: str | None) -> bytes:
    """A line of the error file, for one that was not run."""
    error: dict[str, object] = {"code": fault.code, "message": fault.message}
    if fault.param is not None:
        error["param"] = fault.param
    error["line"] = fault.line
    fields = {"id": _line_id(batch_id, fault.line), "custom_id": custom_id, "response": None, "error": error}
    return to_json(fields) + b"\n"


def reply_line(batch_id: str, line: RequestLine, reply: EventReply) -> bytes:
    """A line of the output file, or of the error file, for one that has a reply."""
    head = to_json({"id": _line_id(batch_id, line.number), "custom_id": line.custom_id})[:-1]
    response = to_json({"status_code": reply.status, "request_id": reply.request_id})[:-1]
    return b'%s,"response":%s,"body":%s},"error":null}\n' % (head, response, _json(reply.body))


def _json(body: bytes) -> bytes:
    """As it came, unless that would end the line; what is no JSON is a string."""
    try:
        parsed = from_json(body)
    except ValueError:
        return to_json(body.decode(errors="replace"))
    return to_json(parsed) if b"\n" in body or b"\r" in body else body


def _line_id(batch_id: str, number: int | None) -> str:
    digest = hashlib.blake2b(f"{batch_id}-{number}".encode(), digest_size=12)
    return f"batch_req_{digest.hexdigest()}"
