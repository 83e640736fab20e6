"""A file as ``POST /v1/files`` takes it: multipart/form-data, read strictly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from completions.dialects.dialect import WireRequest
from completions.domain.batches import Upload
from completions.domain.errors import InvalidRequestError, RequestTooLargeError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MOST_BYTES: Final = 6 * 1024 * 1024
"""Of a body, as Lambda takes it; what is base64 on the way takes a third more of that."""
PURPOSE: Final = "batch"
_FIELDS: Final = ("purpose", "file")
_MOST_NAME: Final = 255
_PLAIN: Final = (b"", b"7bit", b"8bit", b"binary")


def parse_upload(wire: WireRequest) -> Upload:
    """Raises ``InvalidRequestError`` naming the field at fault."""
    kind, options = parse_options_header(wire.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequestError("A file is sent as multipart/form-data with the fields 'purpose' and 'file'.")
    if len(wire.body) > MOST_BYTES:
        raise RequestTooLargeError(
            f"The upload is larger than {MOST_BYTES // 1024 // 1024} MB, which is all that fits through this API; "
            "'completions batch submit' puts a file of any size into the bucket itself.",
            param="file",
        )
    parts = _parts(wire.body, boundary)
    names = [part.name for part in parts]
    for name in names:
        if name not in _FIELDS:
            _refuse(name[:100], "is not supported here; there are 'purpose' and 'file'", "unknown_parameter")
        if names.count(name) > 1:
            _refuse(name, "was sent more than once")
    found = {part.name: part for part in parts}
    for name in _FIELDS:
        if name not in found:
            raise InvalidRequestError(f"You must provide a {name} parameter.", param=name)
    return _upload(found["purpose"], found["file"])


def _upload(purpose: _Part, file: _Part) -> Upload:
    if bytes(purpose.content) != PURPOSE.encode():
        _refuse("purpose", f"must be '{PURPOSE}': files are the inputs of batches here")
    name = "" if file.filename is None else file.filename.replace("\\", "/").rpartition("/")[2]
    if not name or len(name) > _MOST_NAME or not name.isprintable():
        _refuse("file", f"must have a file name of 1 to {_MOST_NAME} printable characters")
    if not file.content:
        _refuse("file", "is empty; a batch has a line for each request", "empty_file")
    return Upload(name, bytes(file.content), PURPOSE)


class _Part:
    """One part of a form, as it is read."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.content = bytearray()
        self.name = ""
        self.filename: str | None = None

    def understand(self) -> None:
        """Read the headers. Raises ``InvalidRequestError``."""
        kind, options = parse_options_header(self.headers.get(b"content-disposition"))
        if kind != b"form-data" or b"name" not in options:
            raise InvalidRequestError("A part of the form has no name.")
        if self.headers.get(b"content-transfer-encoding", b"").strip().lower() not in _PLAIN:
            raise InvalidRequestError("Parts of the form must be sent as they are, in no transfer encoding.")
        self.name = options[b"name"].decode(errors="replace")
        if b"filename" in options:
            self.filename = options[b"filename"].decode(errors="replace")


class _Reader:
    """What the parser tells, collected."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.ended = False
        self._field = bytearray()
        self._value = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        """By the parser's names."""
        return {
            "on_part_begin": lambda: self.parts.append(_Part()),
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_headers_finished": self._headers,
            "on_part_data": lambda data, start, end: self.parts[-1].content.extend(data[start:end]),
            "on_end": self._end,
        }

    def _header(self) -> None:
        self.parts[-1].headers[bytes(self._field).lower()] = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _headers(self) -> None:
        self.parts[-1].understand()

    def _end(self) -> None:
        self.ended = True


def _parts(body: bytes, boundary: bytes) -> list[_Part]:
    reader = _Reader()
    try:
        MultipartParser(boundary, reader.callbacks()).write(body)
    except FormParserError as error:
        raise InvalidRequestError(f"We could not parse the form of your request: {error}.") from None
    if not reader.ended:  # the parser itself is content with what was cut off
        raise InvalidRequestError("The form of your request is cut off: its last boundary is missing.")
    return reader.parts


def _refuse(param: str, what: str, code: str = "invalid_value") -> NoReturn:
    raise InvalidRequestError(f"'{param}' {what}.", param=param, code=code)
