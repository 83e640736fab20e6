"""OpenAI's administration routes as far as they are about usage, and two of this gateway's own beside them.

``GET /v1/organization/usage/completions`` and ``/v1/organization/costs`` have OpenAI's published shapes: a team is its
project, an owner its user, a model its line item. ``/v1/organization/limits`` and ``/v1/organization/latency`` are what
a dashboard needs beside those. All of them are for admin keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, TypeAlias

from completions.dialects.dialect import Resource, WireReply, WireRequest
from completions.dialects.organization_query import (
    COSTS,
    LATENCY,
    USAGE,
    Route,
    UsageQuery,
    page_token,
    parse_buckets,
    parse_span,
    result_fields,
)
from completions.dialects.text_completion import to_json
from completions.domain.catalog import ModelRoute
from completions.domain.errors import InvalidRequestError
from completions.domain.metering import Outcome, Principal
from completions.domain.ports import Clock
from completions.domain.usage import KeyUse, Totals, UsageReports, UsageRow, percentile

NANOS_PER_DOLLAR: Final = 10**9
PERCENTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

_Group: TypeAlias = tuple[str | bool | None, ...]
_Result: TypeAlias = Callable[[dict[str, Any], Totals], dict[str, Any]]


def organization_resources(reports: UsageReports, clock: Clock) -> tuple[Resource, ...]:
    """All four."""

    def buckets(route: Route, result: _Result) -> Callable[[WireRequest, Principal, Sequence[ModelRoute]], WireReply]:
        def reply(wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
            return _reply(_page(reports, parse_buckets(wire, route, clock.now()), result))

        return reply

    def latency(wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
        return _reply(_latency(reports, parse_span(wire, LATENCY, clock.now())))

    def limits(wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
        for name, _ in wire.query_items:
            raise InvalidRequestError(f"'{name[:100]}' is not known here; there are no parameters.", param=name[:100])
        return _reply({"object": "list", "data": [_key_use(use) for use in reports.limits(clock.now())]})

    return (
        Resource("GET", "/v1/organization/usage/completions", buckets(USAGE, _usage_result), admins=True),
        Resource("GET", "/v1/organization/costs", buckets(COSTS, _costs_result), admins=True),
        Resource("GET", "/v1/organization/latency", latency, admins=True),
        Resource("GET", "/v1/organization/limits", limits, admins=True),
    )


def _page(reports: UsageReports, query: UsageQuery, result: _Result) -> dict[str, Any]:
    """The buckets of one page, empty ones too."""
    sums: defaultdict[datetime, dict[_Group, Totals]] = defaultdict(dict)
    for row in reports.rows(query.granularity, query.first, query.page_end):
        if query.wants(row.dimensions):
            _add(sums[row.start], query, row)
    data = []
    start = query.first
    while start < query.page_end:
        end = start + query.granularity.length
        results = [result(_named(query, group), totals) for group, totals in _ordered(sums.get(start, {}))]
        data.append({"object": "bucket", "start_time": _seconds(start), "end_time": _seconds(end), "results": results})
        start = end
    more = start < query.end
    token = page_token(query.granularity, start) if more else None
    return {"object": "page", "data": data, "has_more": more, "next_page": token}


def _latency(reports: UsageReports, query: UsageQuery) -> dict[str, Any]:
    """How long answers took. What failed or was hung up on says nothing about that."""
    sums: dict[_Group, Totals] = {}
    for row in reports.rows(query.granularity, query.start, query.end, latencies=True):
        if row.dimensions.outcome is Outcome.SUCCEEDED and query.wants(row.dimensions):
            _add(sums, query, row)
    data = [
        {
            "object": "organization.latency.result",
            "model": _named(query, group).get("model"),
            "requests": totals.requests,
            "first_token_ms": _percentiles(totals.first_token_ms),
            "total_ms": _percentiles(totals.total_ms),
        }
        for group, totals in _ordered(sums)
    ]
    return {
        "object": "page",
        "start_time": _seconds(query.start),
        "end_time": _seconds(query.end),
        "data": data,
        "has_more": False,
        "next_page": None,
    }


def _add(sums: dict[_Group, Totals], query: UsageQuery, row: UsageRow) -> None:
    fields = result_fields(row.dimensions)
    group = tuple(fields[name] for name in query.groups)
    sums[group] = sums.get(group, Totals()) + row.totals


def _ordered(sums: dict[_Group, Totals]) -> Iterable[tuple[_Group, Totals]]:
    """By the groups' names, those without one first; none of which nothing is left."""
    kept = [(group, totals) for group, totals in sums.items() if totals.any]
    return sorted(kept, key=lambda entry: [("" if name is None else str(name)) for name in entry[0]])


def _named(query: UsageQuery, group: _Group) -> dict[str, Any]:
    return dict(zip(query.groups, group, strict=True))


def _usage_result(group: dict[str, Any], totals: Totals) -> dict[str, Any]:
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": totals.prompt_tokens,
        "output_tokens": totals.completion_tokens,
        "input_cached_tokens": totals.cached_tokens,
        "num_model_requests": totals.requests,
        **{name: group.get(name) for name in USAGE.groups},
    }


def _costs_result(group: dict[str, Any], totals: Totals) -> dict[str, Any]:
    # a JSON number, as OpenAI's: exact to a nano-dollar below a million dollars, the nearest there is above
    return {
        "object": "organization.costs.result",
        "amount": {"value": float(Decimal(totals.nanos) / NANOS_PER_DOLLAR), "currency": "usd"},
        **{name: group.get(name) for name in COSTS.groups},
    }


def _percentiles(histogram: Any) -> dict[str, float | None]:
    values = {name: percentile(histogram, share) for name, share in PERCENTILES.items()}
    return {name: None if value is None else round(value, 1) for name, value in values.items()}


def _key_use(use: KeyUse) -> dict[str, Any]:
    return {
        "api_key_id": use.key_id,
        "owner": use.owner,
        "team": use.team,
        "limits": [
            {
                "name": limit.kind.value,
                "limit": limit.limit,
                "used": limit.used,
                "remaining": limit.remaining,
                "resets_at": None if limit.resets_at is None else _seconds(limit.resets_at),
            }
            for limit in use.limits
        ],
    }


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())


def _reply(body: object) -> WireReply:
    return WireReply(200, to_json(body).encode(), "application/json", {})
