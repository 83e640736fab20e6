"""Around every request: its id in and out, one access line (sizes and timings, never text), and the last resort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from completions.dialects.dialect import Dialect, ErrorHead, WireReply
from completions.domain.errors import CompletionError, ServiceError
from completions.domain.ports import Clock
from completions.observability import log_unexpected, logger
from completions.web.arrival import arrival

EncodeError = Callable[[CompletionError, ErrorHead], WireReply]


class RequestMiddleware:
    """Pure ASGI. Puts an ``Arrival`` into ``request.state.arrival`` and ``x-request-id`` on every response."""

    def __init__(self, app: ASGIApp, clock: Clock, encode_error: EncodeError) -> None:
        self._app = app
        self._clock = clock
        self._encode_error = encode_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived = arrival(scope, Headers(scope=scope), self._clock)
        scope.setdefault("state", {})["arrival"] = arrived
        sent: dict[str, Any] = {"status": None, "bytes": 0}

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = arrived.request_id
            else:
                sent["bytes"] += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except Exception as error:  # noqa: BLE001 - the last resort: every fault of ours becomes a reply
            log_unexpected(error, request_id=arrived.request_id)
            if sent["status"] is not None:  # too late for a reply: let the server cut the connection
                raise ConnectionAbortedError("the response broke off; see unexpected_error") from None
            head = ErrorHead(arrived.request_id, self._clock.now().timestamp())
            spoken: Dialect | None = scope["state"].get("dialect")  # the route's own, once it is known
            encode_error = self._encode_error if spoken is None else spoken.encode_error
            reply = encode_error(ServiceError("The server had an error processing your request."), head)
            await send_reply(reply, observed)
        finally:
            logger.info(
                "request",
                request_id=arrived.request_id,
                method=scope["method"],
                route=getattr(scope.get("route"), "path", None),
                status=sent["status"],
                response_bytes=sent["bytes"],
                total_ms=round((self._clock.monotonic() - arrived.at) * 1000),
            )


async def send_reply(reply: WireReply, send: Send) -> None:
    """A ``WireReply`` as ASGI messages."""
    headers = {"content-type": reply.media_type, "content-length": str(len(reply.body)), **reply.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": raw})
    await send({"type": "http.response.body", "body": reply.body})
