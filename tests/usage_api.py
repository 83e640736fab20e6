"""A usage API that answers as OpenAI publishes it, from figures that depend on a bucket's place alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from completions.handlers import dashboard

ADMIN: Final = "sk-admin"
MEMBER: Final = "sk-member"
WIDTHS: Final = {"1m": 60, "1h": 3600, "1d": 86400}
_CLOSED: Final = {"connection": "close"}
"""The server's end need not wait for a browser that keeps its connections."""
DIMENSIONS: Final = ("model", "api_key_id", "user_id", "project_id")


@dataclass(frozen=True, slots=True)
class Caller:
    """One combination of what usage is split by, and how much of it there is."""

    model: str
    api_key_id: str
    user_id: str
    project_id: str | None
    weight: int
    price: Decimal
    """Dollars a token."""

    def requests(self, place: int) -> int:
        """None in every third bucket, else more the later."""
        return 0 if place % 3 == 2 else self.weight * (place + 1)


@dataclass
class FakeUsageApi:
    """``page_size`` buckets a page, whatever is asked; ``overrides`` are the statuses of paths that fail."""

    callers: Sequence[Caller]
    limits: Sequence[Mapping[str, Any]] = ()
    latency: Sequence[Mapping[str, Any]] = ()
    page_size: int = 10
    overrides: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def app(self, stage: str = "") -> Starlette:
        """The routes below an API's ``stage``, the dashboard among them."""
        base = f"{stage}/v1/organization"
        return Starlette(
            routes=[
                Route(f"{stage}/dashboard", page),
                Route(f"{base}/usage/completions", self._guarded(self._usage)),
                Route(f"{base}/costs", self._guarded(self._costs)),
                Route(f"{base}/latency", self._guarded(lambda _: {"object": "page", "data": list(self.latency)})),
                Route(f"{base}/limits", self._guarded(lambda _: {"object": "list", "data": list(self.limits)})),
            ]
        )

    def _guarded(self, answer: Any) -> Any:
        def reply(request: Request) -> Response:
            query = dict(parse_qsl(request.url.query))
            name = request.url.path.rpartition("/")[2]
            self.asked.append((name, query))
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
            if name in self.overrides:
                return _refusal(self.overrides[name], "It broke.")
            if key == MEMBER:
                return _refusal(403, "Ask an administrator.")
            return _reply(200, answer(query)) if key == ADMIN else _refusal(401, "The API key is not known here.")

        return reply

    def _usage(self, query: dict[str, str]) -> dict[str, Any]:
        def result(group: str, name: str | None, callers: Sequence[Caller], place: int) -> dict[str, Any]:
            requests = sum(caller.requests(place) for caller in callers)
            return {
                "object": "organization.usage.completions.result",
                "input_tokens": requests * 11,
                "output_tokens": requests * 5,
                "input_cached_tokens": requests * 2,
                "num_model_requests": requests,
                **dict.fromkeys(DIMENSIONS),
                "batch": None,
                group: name,
            }

        return self._page(query, result)

    def _costs(self, query: dict[str, str]) -> dict[str, Any]:
        def result(group: str, name: str | None, callers: Sequence[Caller], place: int) -> dict[str, Any]:
            dollars = sum((caller.requests(place) * 16 * caller.price for caller in callers), Decimal(0))
            return {
                "object": "organization.costs.result",
                "amount": {"value": float(dollars), "currency": "usd"},
                "line_item": None,
                "project_id": None,
                "api_key_id": None,
                "user_id": None,
                group: name,
            }

        return self._page(query, result)

    def _page(self, query: dict[str, str], result: Any) -> dict[str, Any]:
        start, end, step = int(query["start_time"]), int(query["end_time"]), WIDTHS[query["bucket_width"]]
        group = query["group_by[]"]
        dimension = "model" if group == "line_item" else group
        names = sorted({getattr(caller, dimension) for caller in self.callers}, key=str)
        first = int(query.get("page", "0"))
        places = range(first, min(first + self.page_size, (end - start) // step))
        more = (end - start) // step > places.stop
        return {
            "object": "page",
            "data": [
                {
                    "object": "bucket",
                    "start_time": start + place * step,
                    "end_time": start + (place + 1) * step,
                    "results": [
                        result(group, name, [one for one in self.callers if getattr(one, dimension) == name], place)
                        for name in names
                    ],
                }
                for place in places
            ],
            "has_more": more,
            "next_page": str(places.stop) if more else None,
        }


def page(request: Request) -> Response:
    """The dashboard as its function answers."""
    reply = dashboard.handler({"requestContext": {"requestId": "page"}}, None)
    return Response(reply["body"], reply["statusCode"], {**reply["headers"], **_CLOSED})


def _refusal(status: int, message: str) -> Response:
    return _reply(status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}})


def _reply(status: int, body: object) -> Response:
    return JSONResponse(body, status, {"x-request-id": "request-17", **_CLOSED})
