"""Lambda's Runtime API and Extensions API on a loopback port, as a function's processes see them.

It hands out invocations and keeps what comes back: each chunk with the moment of its arrival, and the trailers.
Sources: Lambda developer guide, "Using the Lambda runtime API for custom runtimes", "Building a custom runtime"
(response streaming) and "Using the Lambda Extensions API".
"""

from __future__ import annotations

import json
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from threading import Condition, Event, Thread
from typing import Any, Final

FUNCTION_ARN: Final = "arn:aws:lambda:us-east-1:123456789012:function:function"
PATIENCE: Final = 30
DELIMITER: Final = bytes(8)
_OUTCOME: Final = re.compile(r"/2018-06-01/runtime/invocation/([^/]+)/(response|error)")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of the transfer encoding, and when it was here whole (``time.monotonic``)."""

    at: float
    data: bytes


@dataclass(slots=True)
class Invocation:
    """One invocation, and what the function made of it so far. Header and trailer names are lower case.

    ``hang_up_after`` bytes of the answer the connection is closed."""

    event: Mapping[str, Any]
    deadline_ms: int
    hang_up_after: int | None = None
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    trailers: dict[str, str] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    complete: bool = False
    changed: Condition = field(default_factory=Condition)

    def wait(self, what: Callable[[Invocation], object], seconds: float = PATIENCE) -> None:
        """Until ``what`` is true of this invocation."""
        with self.changed:
            assert self.changed.wait_for(lambda: what(self), seconds), f"in vain; so far: {self.received[-2000:]!r}"

    def finished(self) -> Invocation:
        """This invocation, when its answer or error is here whole."""
        self.wait(lambda invocation: invocation.complete)
        return self

    @property
    def received(self) -> bytes:
        return b"".join(chunk.data for chunk in self.chunks)

    @property
    def prelude(self) -> dict[str, Any]:
        """Status and headers, which stand before the delimiter."""
        prelude: dict[str, Any] = json.loads(self.received.partition(DELIMITER)[0])
        return prelude

    @property
    def body(self) -> bytes:
        """What the client gets: all after the delimiter."""
        return self.received.partition(DELIMITER)[2]


class RuntimeAPI:
    """``registered``: an extension is. ``polled``: the function has initialised, and asks for its first event."""

    def __init__(self) -> None:
        self.registered = Event()
        self.polled = Event()
        self.init_errors: list[bytes] = []
        self.waiting: SimpleQueue[Invocation] = SimpleQueue()
        self.invocations: dict[str, Invocation] = {}
        self.stopping = Event()
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self))
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def address(self) -> str:
        """What ``AWS_LAMBDA_RUNTIME_API`` is set to."""
        return f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> RuntimeAPI:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def invoke(self, event: Mapping[str, Any], seconds: float = 600, hang_up_after: int | None = None) -> Invocation:
        """Give the function ``event``, and ``seconds`` to answer it."""
        invocation = Invocation(event, int((time.time() + seconds) * 1000), hang_up_after)
        self.invocations[invocation.request_id] = invocation
        self.waiting.put(invocation)
        return invocation


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A function that is stopped hangs up; that is nothing to report."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, api: RuntimeAPI, *arguments: Any) -> None:
        self._api = api
        super().__init__(*arguments)

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/2018-06-01/runtime/invocation/next":
            self._api.polled.set()
            self._next()
        elif self.path == "/2020-01-01/extension/event/next":
            self._api.stopping.wait()  # the adapter registers for no event
            self.close_connection = True
        else:
            self._reply(404, b"{}")

    def do_POST(self) -> None:
        if outcome := _OUTCOME.fullmatch(self.path):
            self._outcome(self._api.invocations[outcome[1]], outcome[2])
        elif self.path == "/2020-01-01/extension/register":
            self._whole_body()
            self._api.registered.set()
            registered = {"functionName": "function", "functionVersion": "$LATEST", "handler": "run.sh"}
            self._reply(200, json.dumps(registered).encode(), {"Lambda-Extension-Identifier": str(uuid.uuid4())})
        elif self.path == "/2018-06-01/runtime/init/error":
            self._api.init_errors.append(self._whole_body())
            self._reply(202, b'{"status":"OK"}')
        else:
            self._whole_body()
            self._reply(404, b"{}")

    def _next(self) -> None:
        while not self._api.stopping.is_set():
            try:
                invocation = self._api.waiting.get(timeout=0.05)
            except Empty:
                continue
            headers = {
                "Lambda-Runtime-Aws-Request-Id": invocation.request_id,
                "Lambda-Runtime-Deadline-Ms": str(invocation.deadline_ms),
                "Lambda-Runtime-Invoked-Function-Arn": FUNCTION_ARN,
                "Lambda-Runtime-Trace-Id": "Root=1-692b5f2a-1d0b5c6a7f3e4d5c6b7a8091;Sampled=0",
            }
            self._reply(200, json.dumps(invocation.event).encode(), headers)
            return
        self.close_connection = True

    def _outcome(self, invocation: Invocation, kind: str) -> None:
        invocation.headers = {
            name.lower(): ", ".join(self.headers.get_all(name, [])) for name in dict.fromkeys(self.headers)
        }
        if kind == "error":
            invocation.error = json.loads(self._whole_body())
        elif self.headers.get("Transfer-Encoding") != "chunked":
            self._keep(invocation, self._whole_body())
        elif not self._chunks(invocation):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._reply(202, b'{"status":"OK"}')
        with invocation.changed:
            invocation.complete = True
            invocation.changed.notify_all()

    def _chunks(self, invocation: Invocation) -> bool:
        """Read the chunks and the trailers; ``False`` where they broke off, or were to be."""
        while line := self.rfile.readline():
            size = int(line.split(b";")[0], 16)
            if size == 0:
                break
            data = self.rfile.read(size)
            self.rfile.readline()
            self._keep(invocation, data)
            if invocation.hang_up_after is not None and len(invocation.received) >= invocation.hang_up_after:
                return False
        else:
            return False
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            invocation.trailers[name.lower()] = value.strip()
        return True

    def _keep(self, invocation: Invocation, data: bytes) -> None:
        with invocation.changed:
            invocation.chunks.append(Chunk(time.monotonic(), data))
            invocation.changed.notify_all()

    def _whole_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _reply(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
