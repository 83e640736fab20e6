"""GET /healthz: the service's version as text. No framework, no clients: it starts in milliseconds."""

from __future__ import annotations

from typing import Any

from completions import __version__


def handler(event: dict[str, Any], context: object) -> dict[str, Any]:
    """An API Gateway proxy response."""
    return {"statusCode": 200, "headers": {"content-type": "text/plain; charset=utf-8"}, "body": __version__}
