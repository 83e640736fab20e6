"""An app called as Lambda calls a buffered function: a proxy event through Mangum."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
from fastapi import FastAPI
from mangum import Mangum

from completions_cli.local.events import HttpRequest, LambdaContext, proxy_event, proxy_reply


def proxied(
    app: FastAPI,
    method: str,
    address: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    identity: Mapping[str, Any] | None = None,
) -> httpx.Response:
    """The reply to an event whose request context has ``identity`` beside what is always in it."""
    parts = urlsplit(address)
    sent = list((headers or {}).items())
    event = proxy_event(HttpRequest(method, parts.path, parts.query, sent, body, "127.0.0.1", parts.path, {}))
    event["requestContext"]["identity"] |= identity or {}
    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())  # Mangum looks for its thread's
        try:
            handler: Any = Mangum(app, lifespan="off")
            reply = proxy_reply(handler(event, LambdaContext("function", 29)))
        finally:
            asyncio.set_event_loop(None)
    return httpx.Response(reply.status, headers=[*reply.headers], content=reply.body)
