"""An HTTP server on a loopback port that answers as a test says, and keeps what it was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer; ``headers`` beside its length."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Received:
    """One request; header names are lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    """``url`` is where it listens, ``received`` everything it was asked so far."""

    url: str
    received: list[Received]


@contextmanager
def scripted_server(reply: Callable[[Received], Reply]) -> Iterator[ScriptedServer]:
    """Answer every GET, PUT and POST with what ``reply`` says to it."""
    received: list[Received] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # S3's clients wait for a "100 Continue" that 1.0 never sends

        def _answer(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length") or 0))
            request = Received(self.command, self.path, headers, body)
            received.append(request)
            answer = reply(request)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        do_GET = do_PUT = do_POST = _answer

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield ScriptedServer(f"http://127.0.0.1:{http.server_port}", received)
        finally:
            http.shutdown()
            thread.join()
