"""GET /dashboard: a page for administrators, the same for everybody; what it shows, it asks for with a key."""

from __future__ import annotations

from typing import Any

from completions.dashboard.page import load_page

_PAGE = load_page()


def handler(event: dict[str, Any], context: object) -> dict[str, Any]:
    """An API Gateway proxy response."""
    headers = {**_PAGE.headers, "x-request-id": event["requestContext"]["requestId"]}
    return {"statusCode": 200, "headers": headers, "body": _PAGE.body}
