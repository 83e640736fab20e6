"""A process of its own that speaks as much of S3 as the batch engine asks for, over a folder.

``input/<lines>x<bytes>`` is a file of so many requests of so many bytes each that exists as a formula: a gigabyte of it
takes neither disk nor memory. Prints its URL and runs until its input ends.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

_FORMULA: Final = re.compile(r"input/(\d+)x(\d+)")
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")
_BLOCK: Final = 1 << 20


class Formula:
    """The file of a name; every line has the same length."""

    def __init__(self, lines: int, size: int) -> None:
        body = {"model": "bench", "prompt": "", "max_tokens": 4}
        line = {"custom_id": "request-########", "method": "POST", "url": "/v1/completions", "body": body}
        empty = json.dumps(line)
        body["prompt"] = ("def f(x): " * size)[: size - len(empty) - 1]
        self._head, self._tail = (json.dumps(line) + "\n").encode().split(b"########")
        self.lines, self.line_bytes = lines, size

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.lines * self.line_bytes

    def content(self, start: int, end: int) -> Iterator[bytes]:
        """Those bytes, some lines at a time."""
        at_once = max(1, _BLOCK // self.line_bytes)
        for first in range(start // self.line_bytes, -(-end // self.line_bytes), at_once):
            last = min(first + at_once, -(-end // self.line_bytes))
            block = b"".join(b"%s%08d%s" % (self._head, number, self._tail) for number in range(first, last))
            offset = first * self.line_bytes
            yield block[max(0, start - offset) : end - offset]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def log_message(self, format: str, *args: Any) -> None: ...

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    @property
    def _query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    def do_GET(self) -> None:
        if (match := _FORMULA.fullmatch(self._key)) is not None:
            formula = Formula(int(match[1]), int(match[2]))
            start, end, status = self._wanted(formula.size)
            return self._send(status, end - start, formula.content(start, end))
        path = self._path(self._key)
        if not path.exists():
            return self._refuse(404, "NoSuchKey")
        start, end, status = self._wanted(path.stat().st_size)
        return self._send(status, end - start, _blocks(path, start, end))

    def do_PUT(self) -> None:
        path = self._path(self._key)
        if upload := self._query.get("uploadId"):
            path = path.with_name(f"{path.name}.{upload[0]}.{int(self._query['partNumber'][0]):05d}")
        elif self.headers.get("If-None-Match") == "*" and path.exists():
            self._receive(None)
            return self._refuse(412, "PreconditionFailed")
        self._receive(path)
        return self._send(200, 0, iter(()))

    def do_POST(self) -> None:
        self._receive(None)
        path = self._path(self._key)
        if "uploads" in self._query:
            return self._xml("<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>")
        parts = sorted(path.parent.glob(f"{path.name}.{self._query['uploadId'][0]}.*"))
        with path.open("wb") as whole:
            for part in parts:
                whole.writelines(_blocks(part, 0, part.stat().st_size))
                part.unlink()
        return self._xml("<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "__")

    def _wanted(self, size: int) -> tuple[int, int, int]:
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None:
            return 0, size, 200
        return int(match[1]), min(size, int(match[2]) + 1 if match[2] else size), 206

    def _receive(self, path: Path | None) -> None:
        left = int(self.headers.get("Content-Length") or 0)
        with (path or Path("/dev/null")).open("wb") as file:
            while left:
                block = self.rfile.read(min(left, _BLOCK))
                file.write(block)
                left -= len(block)

    def _send(self, status: int, size: int, content: Iterator[bytes], media_type: str = "binary/octet-stream") -> None:
        self.send_response(status)
        self.send_header("ETag", '"etag"')
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        for block in content:
            self.wfile.write(block)

    def _xml(self, text: str, status: int = 200) -> None:
        self._send(status, len(text), iter([text.encode()]), "application/xml")

    def _refuse(self, status: int, code: str) -> None:
        self._xml(f"<Error><Code>{code}</Code></Error>", status)


def _blocks(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            block = file.read(min(_BLOCK, end - start))
            start += len(block)
            yield block


def main() -> None:
    """Until the parent closes our standard input."""
    with tempfile.TemporaryDirectory() as folder:
        Handler.folder = Path(folder)
        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            Thread(target=server.serve_forever, daemon=True).start()
            print(f"http://127.0.0.1:{server.server_port}", flush=True)
            sys.stdin.read()
            server.shutdown()


if __name__ == "__main__":
    main()
