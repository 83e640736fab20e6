"""The streamed response: pulls a synchronous answer in the thread pool, and never leaves it unsettled."""

from __future__ import annotations

from collections.abc import Generator

import anyio
from anyio.to_thread import run_sync
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from completions.dialects.dialect import StreamEncoder
from completions.domain.errors import CompletionError, ServiceError
from completions.observability import logger
from completions.service.complete import CompletionStream
from completions.web.middleware import log_unexpected


class StreamedReply(Response):
    """Server-sent events. The status is sent at once: the answer's first chunk is already here.

    A client that hangs up ends the wait for the next chunk. However the response ends, the answer is closed, and so its
    claim settled, before it does.
    """

    def __init__(
        self, stream: CompletionStream, encoder: StreamEncoder, request_id: str, keepalive: bytes = b""
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": encoder.media_type, **encoder.headers})
        self._stream = stream
        self._frames = _frames(stream, encoder, request_id, keepalive)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with anyio.create_task_group() as group:
                group.start_soon(_end_on_disconnect, receive, self._stream, group.cancel_scope)
                while (frames := await run_sync(next, self._frames, None)) is not None:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await run_sync(self._stream.close)


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
        log_unexpected(error, request_id)
        yield encoder.error(ServiceError("The server had an error processing your request."))
