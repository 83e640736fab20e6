"""ASGI apps served on a loopback port from a thread of this process, started and stopped as a context."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from time import monotonic, sleep

import uvicorn
from starlette.types import ASGIApp


class PortTakenError(Exception):
    """Somebody else listens on the port."""


def bind(port: int) -> socket.socket:
    """A socket bound to a loopback port, 0 for a free one. Raises ``PortTakenError``."""
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it, each reply waits 40 ms for an ACK
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)  # from here on the port is ours: two that only bind would both succeed
    except OSError as error:
        listener.close()
        raise PortTakenError(f"port {port} on 127.0.0.1 cannot be used: {error.strerror}") from None
    return listener


@contextmanager
def serving(app: ASGIApp, listener: socket.socket) -> Iterator[str]:
    """Serve ``app`` on ``listener`` until the context ends; the base URL."""
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=2, server_header=False
    )
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = monotonic() + 10
    while not server.started:
        if not thread.is_alive() or monotonic() > deadline:
            raise RuntimeError("a local server did not start")
        sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
