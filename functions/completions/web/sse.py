"""The streamed response: pulls a synchronous answer in a thread, and never leaves it unsettled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Iterator
from threading import Condition
from typing import Final, TypeVar

import anyio
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from completions.dialects.dialect import StreamEncoder
from completions.domain.errors import CompletionError, ServiceError
from completions.observability import log_unexpected, logger
from completions.service.complete import CompletionStream

_T = TypeVar("_T")
_MOST_AHEAD: Final = 65_536
"""Bytes that the model may be ahead of a client that reads slowly."""
_GATHERED_SECONDS: Final = 0.005
"""What comes so soon after the last write is written with what follows it. Nobody sees two such moments apart, and
hardly a model is faster; to wake the loop for each frame of one that is would cost more than the frame."""


class StreamedReply(Response):
    """Server-sent events. The status is sent at once: the answer's first chunk is already here.

    A client that hangs up ends the wait for the next chunk. However the response ends, the answer is closed, and so its
    claim settled, before it does. One that is not ``live`` is delivered at its end: nothing else wants the loop then.
    """

    def __init__(
        self,
        stream: CompletionStream,
        encoder: StreamEncoder,
        request_id: str,
        keepalive: bytes = b"",
        *,
        live: bool = True,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": encoder.media_type, **encoder.headers})
        self._stream = stream
        self._frames = _frames(stream, encoder, request_id, keepalive)
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._live:
                await self._send_as_it_comes(receive, send)
            else:
                await send({"type": "http.response.body", "body": b"".join(self._frames)})
        finally:
            with anyio.CancelScope(shield=True):
                await _in_thread(self._stream.close)

    async def _send_as_it_comes(self, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(_end_on_disconnect, receive, self._stream, group.cancel_scope)
            frames = await _in_thread(next, self._frames, None)  # alone: it waits for none of those behind it
            pump = _Pump(self._frames)
            try:
                group.start_soon(_in_thread, pump.run)
                while frames is not None:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                    frames = await pump.taken()
            finally:
                pump.give_up()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            group.cancel_scope.cancel()


class _Pump:
    """Frames from a thread to the loop, which takes all that are there at once."""

    def __init__(self, frames: Iterator[bytes]) -> None:
        self._frames = frames
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._room = Condition()
        self._ended = False
        self._given_up = False
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._taken_at = self._loop.time()

    def run(self) -> None:
        """Pull until the frames end, or nobody wants them any more; in a thread."""
        for frame in self._frames:
            with self._room:
                while self._bytes > _MOST_AHEAD and not self._given_up:
                    self._room.wait()
                if self._given_up:
                    return
                untold = not self._waiting
                self._waiting.append(frame)
                self._bytes += len(frame)
            if untold:
                self._loop.call_soon_threadsafe(self._news.set)
        self._ended = True
        self._loop.call_soon_threadsafe(self._news.set)

    async def taken(self) -> bytes | None:
        """Everything that is there, once something is; ``None`` after the last."""
        while not self._waiting:
            if self._ended:
                return None
            await self._news.wait()
            self._news.clear()
        if (early := self._taken_at + _GATHERED_SECONDS - self._loop.time()) > 0 and not self._ended:
            await asyncio.sleep(early)
        self._taken_at = self._loop.time()
        with self._room:
            frames, self._waiting, self._bytes = b"".join(self._waiting), [], 0
            self._room.notify()
        return frames

    def give_up(self) -> None:
        """Let the thread end."""
        with self._room:
            self._given_up = True
            self._room.notify()


async def _in_thread(function: Callable[..., _T], *arguments: object) -> _T:
    """One of its own: a stream must not wait for the threads that other requests wait in."""
    return await run_sync(function, *arguments, limiter=CapacityLimiter(math.inf))


async def _end_on_disconnect(receive: Receive, stream: CompletionStream, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.abort()
    scope.cancel()


def _frames(stream: CompletionStream, encoder: StreamEncoder, request_id: str, keepalive: bytes) -> Generator[bytes]:
    try:
        with stream:
            for chunk in stream:
                frames = encoder.chunk(chunk) if chunk.choices or chunk.usage is not None else keepalive
                if frames:
                    yield frames
        yield encoder.done()
    except CompletionError as error:
        logger.warning("stream_failed", request_id=request_id, error=type(error).__name__, detail=error.detail)
        yield encoder.error(error)
    except Exception as error:  # noqa: BLE001 - a cut connection would look like a finished answer to most clients
        log_unexpected(error, request_id=request_id)
        yield encoder.error(ServiceError("The server had an error processing your request."))
