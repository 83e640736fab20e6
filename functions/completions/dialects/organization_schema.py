"""The organization's routes as they are published: OpenAI's own shapes, and this gateway's beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from completions.dialects.documentation import (
    COUNT,
    INTEGER,
    NULL,
    NUMBER,
    RESOURCE_ERRORS,
    STRING,
    Content,
    Documentation,
    JsonObject,
    Operation,
    Reply,
    array,
    error_replies,
    json_content,
    nullable,
    parameter,
    record,
    ref,
)
from completions.dialects.openai import OpenAIDialect
from completions.dialects.organization import PERCENTILES
from completions.dialects.organization_query import COSTS, LATENCY, LATEST, USAGE, Route
from completions.domain.errors import InvalidRequestError, MeteringError, PermissionDeniedError
from completions.domain.limits import LimitKind

_NAME: Final = nullable(STRING)
_ERRORS: Final = (
    (InvalidRequestError(""), "a parameter is wrong"),
    *RESOURCE_ERRORS,
    (PermissionDeniedError(""), "the key is not an admin's"),
    (MeteringError(""), "usage cannot be read"),
)


def _failure(status: int) -> Content:
    return json_content("OpenAIError")


def _page(bucket: str) -> JsonObject:
    return record(
        {
            "object": {"const": "page"},
            "data": array(ref(bucket)),
            "has_more": {"type": "boolean"},
            "next_page": nullable(STRING),
        }
    )


def _bucket(result: str) -> JsonObject:
    return record(
        {
            "object": {"const": "bucket"},
            "start_time": INTEGER,
            "end_time": INTEGER,
            "results": array(ref(result)),
        }
    )


def _times() -> JsonObject:
    return record({name: nullable(NUMBER) for name in PERCENTILES})


_SCHEMAS: Final[Mapping[str, JsonObject]] = {
    "OrganizationUsagePage": _page("OrganizationUsageBucket"),
    "OrganizationUsageBucket": _bucket("OrganizationUsageResult"),
    "OrganizationUsageResult": record(
        {
            "object": {"const": "organization.usage.completions.result"},
            "input_tokens": COUNT,
            "output_tokens": COUNT,
            "input_cached_tokens": COUNT,
            "num_model_requests": COUNT,
            "project_id": _NAME,
            "user_id": _NAME,
            "api_key_id": _NAME,
            "model": _NAME,
            "batch": nullable({"type": "boolean"}),
        }
    ),
    "OrganizationCostsPage": _page("OrganizationCostsBucket"),
    "OrganizationCostsBucket": _bucket("OrganizationCostsResult"),
    "OrganizationCostsResult": record(
        {
            "object": {"const": "organization.costs.result"},
            "amount": record({"value": NUMBER, "currency": {"const": "usd"}}),
            **dict.fromkeys(COSTS.groups, _NAME),
        }
    ),
    "OrganizationLatencyPage": record(
        {
            "object": {"const": "page"},
            "start_time": INTEGER,
            "end_time": INTEGER,
            "data": array(ref("OrganizationLatencyResult")),
            "has_more": {"const": False},
            "next_page": NULL,
        }
    ),
    "OrganizationLatencyResult": record(
        {
            "object": {"const": "organization.latency.result"},
            "model": _NAME,
            "requests": COUNT,
            "first_token_ms": _times(),
            "total_ms": _times(),
        }
    ),
    "OrganizationLimitsList": record({"object": {"const": "list"}, "data": array(ref("OrganizationKeyLimits"))}),
    "OrganizationKeyLimits": record(
        {"api_key_id": STRING, "owner": STRING, "team": _NAME, "limits": array(ref("OrganizationLimit"))}
    ),
    "OrganizationLimit": record(
        {
            "name": {"enum": [str(kind) for kind in LimitKind]},
            "limit": COUNT,
            "used": INTEGER,
            "remaining": COUNT,
            "resets_at": nullable(INTEGER),
        }
    ),
}

_TIME: Final[JsonObject] = {"type": "integer", "minimum": 0, "maximum": LATEST}
_SPAN: Final = (
    parameter("query", "start_time", _TIME, "Unix seconds, inclusive.") | {"required": True},
    parameter("query", "end_time", _TIME | {"minimum": 1}, "Unix seconds, exclusive; now by default."),
)


def _lists(route: Route) -> tuple[JsonObject, ...]:
    groups = array({"enum": list(route.groups)})
    return (
        parameter("query", "group_by[]", groups, "What to tell apart; `group_by` is the same."),
        *(
            parameter("query", f"{name}[]", array(STRING), f"Only usage of these; `{name}` is the same.")
            for name in route.filters
        ),
    )


def _paged(route: Route) -> tuple[JsonObject, ...]:
    most = max(highest for _, highest in route.limits.values())
    each = "; ".join(f"`{width}`: default {default}, at most {high}" for width, (default, high) in route.limits.items())
    width: JsonObject = {"enum": list(route.limits), "default": "1d"}
    limit: JsonObject = {"type": "integer", "minimum": 1, "maximum": most}
    batch = parameter("query", "batch", {"type": "boolean"}, "Only what is a batch's, or only what is not.")
    return (
        *_SPAN,
        parameter("query", "bucket_width", width, "How long a bucket is. Buckets are UTC's own, and whole."),
        parameter("query", "limit", limit, f"Buckets a page. {each}."),
        parameter("query", "page", STRING, "The `next_page` of the page before."),
        *([batch] if route.takes_batch else []),
        *_lists(route),
    )


def _operation(name: str, summary: str, schema: str, parameters: tuple[JsonObject, ...]) -> Operation:
    replies = {200: Reply("What was asked for.", json_content(schema))}
    return Operation(name, summary, replies | error_replies(OpenAIDialect(), _ERRORS, _failure), parameters=parameters)


DOCUMENTATION: Final = Documentation(
    title="Organization",
    endpoints={},
    schemas=_SCHEMAS,
    security={"bearer": {"type": "http", "scheme": "bearer"}},
    operations={
        ("GET", "/v1/organization/usage/completions"): _operation(
            "usageCompletions", "Requests and tokens over time; for admin keys", "OrganizationUsagePage", _paged(USAGE)
        ),
        ("GET", "/v1/organization/costs"): _operation(
            "usageCosts", "Costs over time; for admin keys", "OrganizationCostsPage", _paged(COSTS)
        ),
        ("GET", "/v1/organization/latency"): _operation(
            "usageLatency",
            "How long answers took; for admin keys",
            "OrganizationLatencyPage",
            (*_SPAN, *_lists(LATENCY)),
        ),
        ("GET", "/v1/organization/limits"): _operation(
            "usageLimits", "What every key has used of its limits; for admin keys", "OrganizationLimitsList", ()
        ),
    },
)
