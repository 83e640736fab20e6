"""A process of its own that asks: so many requests, so many at a time, each line of its input one plan in JSON.

Says how long each answer took, and fails a plan in which any answer was not a 200 with exactly the tokens asked for.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Any

from standin import WORD

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
LAST_CHUNK = b"0\r\n\r\n"
ANSWER_SECONDS = 60


class Caller(asyncio.Protocol):
    """One connection; ``ask`` is one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._started = 0.0
        self._first: float | None = None
        self._need: int | None = None
        """Bytes of the answer, where its head says so; 0 for one that comes in chunks."""
        self._have = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError(f"cut off: {b''.join(self._parts)[-300:]!r}"))

    async def ask(self, request: bytes) -> tuple[float, float, bytes]:
        """Seconds until the first event or body, and until the end; the answer's bytes."""
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self._parts, self._first, self._need, self._have = [], None, None, 0
        self._started = time.perf_counter()
        self._transport.write(request)
        await self._answered
        total = time.perf_counter() - self._started
        return self._first or total, total, b"".join(self._parts)

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._first is None and (b"data:" in data or b'"choices"' in data):
            self._first = time.perf_counter() - self._started
        self._parts.append(data)
        self._have += len(data)
        if self._need is None:
            self._parts = [b"".join(self._parts)]
            end = self._parts[0].find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._parts[0], 0, end)
            self._need = end + 4 + int(length[1]) if length else 0
        if self._answered is not None and not self._answered.done() and self._whole():
            self._answered.set_result(None)

    def _whole(self) -> bool:
        if self._need:
            return self._have >= self._need
        tail = self._parts[-1] if len(self._parts[-1]) >= len(LAST_CHUNK) else b"".join(self._parts[-3:])
        return tail.endswith(LAST_CHUNK)


def request_bytes(plan: dict[str, Any]) -> bytes:
    """The same for every call of a plan."""
    body = json.dumps(plan["body"]).encode()
    head = {
        "host": f"127.0.0.1:{plan['port']}",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **plan["headers"],
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"POST {plan['path']} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def carry_out(plan: dict[str, Any]) -> dict[str, Any]:
    """``requests`` in all, ``at_once`` at a time; ``tokens`` is what each answer must hold."""
    loop = asyncio.get_running_loop()
    request, left = request_bytes(plan), plan["requests"]
    firsts: list[float] = []
    totals: list[float] = []

    async def ask_on() -> None:
        nonlocal left
        _, caller = await loop.create_connection(Caller, "127.0.0.1", plan["port"])
        try:
            while left > 0:
                left -= 1
                first, total, answer = await asyncio.wait_for(caller.ask(request), ANSWER_SECONDS)
                if not answer.startswith(b"HTTP/1.1 200") or answer.count(WORD) != plan["tokens"]:
                    count = answer.count(WORD)
                    raise ValueError(f"{count} tokens instead of {plan['tokens']}: {answer[:700]!r}")
                firsts.append(first * 1000)
                totals.append(total * 1000)
        finally:
            caller.close()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(plan["at_once"]):
            group.create_task(ask_on())
    return {"first_ms": firsts, "total_ms": totals, "seconds": time.perf_counter() - started}


def main() -> None:
    """Carry out plans until the parent closes our standard input."""
    for line in sys.stdin:
        try:
            told = asyncio.run(carry_out(json.loads(line)))
        except* (OSError, ValueError, TimeoutError) as errors:
            told = {"error": f"{type(errors.exceptions[0]).__name__}: {errors.exceptions[0]}"}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
