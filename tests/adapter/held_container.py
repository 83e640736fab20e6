"""A model container that keeps the end of its answer until it is told to let go."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

TEXTS = ("def", " main", "():", " pass")


@dataclass
class HeldContainer:
    """vLLM's completions, streamed: one record for each of ``TEXTS``, of which the last waits for ``release``.

    ``ended`` is when the last record was sent (``time.monotonic``), ``hung_up`` that the caller left before.
    """

    url: str = ""
    release: Event = field(default_factory=Event)
    hung_up: Event = field(default_factory=Event)
    ended: float | None = None


@contextmanager
def held_container() -> Iterator[HeldContainer]:
    """Serve one until this ends."""
    container = HeldContainer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                self._answer()
            except ConnectionError:
                container.hung_up.set()

        def _answer(self) -> None:
            for text in TEXTS[:-1]:
                self._send(record(text))
            assert container.release.wait(30), "never let go"
            self._send(record(TEXTS[-1], "length"))
            usage = {"prompt_tokens": 3, "completion_tokens": len(TEXTS), "total_tokens": 3 + len(TEXTS)}
            self._send(json.dumps({"object": "text_completion", "choices": [], "usage": usage}))
            container.ended = time.monotonic()
            self._send("[DONE]")
            self.wfile.write(b"0\r\n\r\n")

        def _send(self, data: str) -> None:
            frame = f"data: {data}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(frame), frame))

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    with Server(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        container.url = f"http://127.0.0.1:{server.server_port}/invocations"
        try:
            yield container
        finally:
            container.release.set()
            server.shutdown()


def record(text: str, finish_reason: str | None = None) -> str:
    """One record of the stream, as vLLM's OpenAI server writes it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    return json.dumps({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": None})
