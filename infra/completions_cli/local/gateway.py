"""API Gateway and Lambda on a loopback port: routes from the template, real handlers, real events.

A buffered function is called with a proxy event, one call at a time in each of its worker threads. A streamed
function's ASGI app is served in place, with the two headers that Lambda Web Adapter adds.
"""

from __future__ import annotations

import asyncio
import json
import pkgutil
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

from starlette.types import Message, Receive, Scope, Send

from completions_cli.local.events import (
    HttpReply,
    HttpRequest,
    LambdaContext,
    proxy_event,
    proxy_reply,
    request_context,
)
from completions_cli.local.template import Function, GatewayReply, GatewayTemplate, Route

MAX_GATEWAY_BYTES: Final = 10 * 1024 * 1024
MAX_LAMBDA_BYTES: Final = 6 * 1024 * 1024
MAX_BUFFERED_SECONDS: Final = 29

Handler = Callable[[Mapping[str, Any], LambdaContext], Mapping[str, Any]]


class Gateway:
    """An ASGI app. ``close`` ends its worker threads."""

    def __init__(self, template: GatewayTemplate, workers: int = 16) -> None:
        with _thread_event_loop():
            self._routes = [
                (_pattern(route.path), route, pkgutil.resolve_name(route.entry_point)) for route in template.routes
            ]
        self._routes.sort(key=lambda entry: "{" in entry[1].path)  # a literal path wins over a parameter
        self._replies = template.replies
        self._binary = template.binary_media_types
        self._executor = ThreadPoolExecutor(workers, "lambda")

    def close(self) -> None:
        """Wait for the calls in progress; what they wait for should be stopped before."""
        self._executor.shutdown(cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        found = self._match(scope["method"], scope["path"])
        body = await _read(receive)
        if found is None:
            await self._own_reply(scope, send, "MISSING_AUTHENTICATION_TOKEN", 403, "Missing Authentication Token")
            return
        if body is None or len(body) > MAX_LAMBDA_BYTES:
            await self._own_reply(scope, send, "REQUEST_TOO_LARGE", 413, "Request Too Long")
            return
        route, target, parameters = found
        request = HttpRequest(
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"].decode("latin-1"),
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
            body=body,
            source_ip=(scope.get("client") or ("127.0.0.1",))[0],
            resource=route.path,
            path_parameters=parameters,
        )
        if request.media_type in self._binary and 4 * len(body) > 3 * MAX_LAMBDA_BYTES:  # as base64
            await self._own_reply(scope, send, "REQUEST_TOO_LARGE", 413, "Request Too Long")
        elif route.streamed:
            await target(_adapted(scope, route.function, request), _replaying(body, receive), send)
        else:
            await self._invoke(route, target, request, scope, send)

    def _match(self, method: str, path: str) -> tuple[Route, Any, Mapping[str, str]] | None:
        for pattern, route, target in self._routes:
            if route.method in (method, "ANY") and (match := pattern.fullmatch(path)):
                return route, target, match.groupdict()
        return None

    async def _invoke(self, route: Route, handler: Handler, request: HttpRequest, scope: Scope, send: Send) -> None:
        context = LambdaContext(route.function.name, route.function.timeout)
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._executor, _call, handler, proxy_event(request, self._binary), context)
        try:
            reply = proxy_reply(await asyncio.wait_for(call, MAX_BUFFERED_SECONDS))
        except TimeoutError:
            await self._own_reply(scope, send, "INTEGRATION_TIMEOUT", 504, "Endpoint request timed out")
        except Exception:  # noqa: BLE001 - whatever a function raises, or returns askew, is a 502 to the client
            await self._own_reply(scope, send, "DEFAULT_5XX", 502, "Internal server error")
        else:
            await _send(reply, send)

    async def _own_reply(self, scope: Scope, send: Send, kind: str, status: int, message: str) -> None:
        """An answer the gateway makes itself, by the template's words for it."""
        family = "DEFAULT_4XX" if status < 500 else "DEFAULT_5XX"
        reply = self._replies.get(kind) or self._replies.get(family) or GatewayReply()
        values = {
            "$context.error.messageString": json.dumps(message),
            "$context.requestId": str(uuid.uuid4()),
            "$context.httpMethod": scope["method"],
            "$context.path": json.dumps(scope["path"])[1:-1],
        }
        text = reply.body or '{"message":$context.error.messageString}'
        for name, value in values.items():
            text = text.replace(name, value)
        headers = [("content-type", "application/json")]
        headers += [(name, values[f"${expression}"]) for name, expression in reply.headers.items()]
        await _send(HttpReply(reply.status or status, headers, text.encode()), send)


def _call(handler: Handler, event: Mapping[str, Any], context: LambdaContext) -> Mapping[str, Any]:
    with _thread_event_loop():
        return handler(event, context)


@contextmanager
def _thread_event_loop() -> Iterator[None]:
    """Mangum looks for its thread's event loop, which the main thread of a Lambda environment has."""
    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())
        try:
            yield
        finally:
            asyncio.set_event_loop(None)


def _adapted(scope: Scope, function: Function, request: HttpRequest) -> Scope:
    """``scope`` with the headers of Lambda Web Adapter, which overwrite a client's own."""
    added = {
        b"x-amzn-request-context": json.dumps(request_context(request)).encode(),
        b"x-amzn-lambda-context": LambdaContext(function.name, function.timeout).to_header().encode(),
    }
    headers = [(name, value) for name, value in scope["headers"] if name not in added]
    return {**scope, "headers": [*headers, *added.items()], "state": {}}


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that tells the body, which was read already, once more."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


async def _read(receive: Receive) -> bytes | None:
    """The whole body, ``None`` when it passes API Gateway's limit; what is too much is read and dropped."""
    body = bytearray()
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        piece = message.get("body", b"")
        size += len(piece)
        if size <= MAX_GATEWAY_BYTES:
            body += piece
        if not message.get("more_body"):
            break
    return bytes(body) if size <= MAX_GATEWAY_BYTES else None


async def _send(reply: HttpReply, send: Send) -> None:
    headers: Sequence[tuple[str, str]] = [
        (name, value) for name, value in reply.headers if name.lower() != "content-length"
    ]
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    raw.append((b"content-length", str(len(reply.body)).encode()))
    await send({"type": "http.response.start", "status": reply.status, "headers": raw})
    await send({"type": "http.response.body", "body": reply.body})


def _pattern(path: str) -> re.Pattern[str]:
    """API Gateway's path as a regular expression: ``{name}`` is one segment, ``{name+}`` the rest."""
    expression = re.sub(r"\\{(\w+)\\\+\\}", r"(?P<\1>.+)", re.escape(path))
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", expression), re.DOTALL)
