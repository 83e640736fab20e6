"""The organization's routes: pages of usage and costs as OpenAI publishes them, and who may read them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import httpx2 as httpx
import pytest
from openai import BadRequestError, OpenAI
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

from completions.bootstrap import Parts, organization_app
from completions.domain.limits import LimitKind
from completions.domain.metering import Outcome
from completions.domain.usage import (
    Dimensions,
    Granularity,
    KeyUse,
    LimitUse,
    Totals,
    UsageRow,
    latency_bucket,
)
from completions.web.auth import secret_digest
from completions_cli.main import app
from fakes import InMemoryLedger, InMemoryRegistry, InMemoryReports, ManualClock, ScriptedBackend, principal, route
from served import Served

ADMIN, MEMBER = "sk-admin", "sk-member"
NOW = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC)
MIDNIGHT = datetime(2026, 11, 30, tzinfo=UTC)
USAGE, COSTS = "/v1/organization/usage/completions", "/v1/organization/costs"
LATENCY, LIMITS = "/v1/organization/latency", "/v1/organization/limits"


def seconds(moment: datetime) -> int:
    return int(moment.timestamp())


def row(start: datetime, totals: Totals, **fields: Any) -> UsageRow:
    known = {"key_id": "key-1", "team": "search", "owner": "ada", "model": "demo", "outcome": Outcome.SUCCEEDED}
    return UsageRow(start, Dimensions(**{**known, **fields}), totals)


DAYS = [
    row(MIDNIGHT - timedelta(days=2), Totals(3, 30, 10, 60, 1_500_000_001)),
    row(MIDNIGHT - timedelta(days=2), Totals(1, 5, 0, 7, 9), model="coder", outcome=Outcome.FAILED),
    row(MIDNIGHT, Totals(2, 20, 0, 40, 250_000_000), key_id="key-2", team=None, owner="grace"),
    row(MIDNIGHT, Totals(1, 1, 1, 1, 1)),  # the same in another shard
    row(MIDNIGHT, Totals(1, 2, 0, 2, 2)),
]


class Http:
    """The app over fakes, asked as an admin unless told otherwise."""

    def __init__(self, reports: InMemoryReports) -> None:
        keys = {
            secret_digest(ADMIN): principal(key_id="admin", admin=True),
            secret_digest(MEMBER): principal(key_id="member"),
        }
        registry = InMemoryRegistry(keys, [route()])
        parts = Parts(registry, ScriptedBackend(), InMemoryLedger(), reports, ManualClock(now=NOW))
        self._client = TestClient(organization_app(parts), raise_server_exceptions=False)

    def get(self, path: str, *query: tuple[str, object], key: str | None = ADMIN) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        reply = self._client.get(path, params=[(name, str(value)) for name, value in query], headers=headers)
        return httpx.Response(reply.status_code, headers=dict(reply.headers), content=reply.content)

    def page(self, path: str, *query: tuple[str, object]) -> dict[str, Any]:
        reply = self.get(path, *query)
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body


@pytest.fixture
def reports() -> InMemoryReports:
    return InMemoryReports({Granularity.DAY: DAYS})


@pytest.fixture
def http(reports: InMemoryReports) -> Http:
    return Http(reports)


FROM = ("start_time", seconds(MIDNIGHT - timedelta(days=2)))


def test_buckets_come_in_order_with_the_empty_ones(http: Http) -> None:
    page = http.page(USAGE, FROM)
    days = [seconds(MIDNIGHT + timedelta(days=day)) for day in (-2, -1, 0)]
    assert page == {
        "object": "page",
        "data": [
            {"object": "bucket", "start_time": days[0], "end_time": days[1], "results": [usage(35, 67, 10, 4)]},
            {"object": "bucket", "start_time": days[1], "end_time": days[2], "results": []},
            {"object": "bucket", "start_time": days[2], "end_time": days[2] + 86_400, "results": [usage(23, 43, 1, 4)]},
        ],
        "has_more": False,
        "next_page": None,
    }


def usage(entered: int, left: int, cached: int, requests: int, **group: Any) -> dict[str, Any]:
    """A result as it is published."""
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": entered,
        "output_tokens": left,
        "input_cached_tokens": cached,
        "num_model_requests": requests,
        "project_id": None,
        "user_id": None,
        "api_key_id": None,
        "model": None,
        "batch": None,
        **group,
    }


@pytest.mark.parametrize("brackets", ["", "[]"])
def test_groups_are_named_and_no_others(http: Http, brackets: str) -> None:
    query = [FROM, *((f"group_by{brackets}", name) for name in ("project_id", "user_id", "model", "batch"))]
    first, _, last = http.page(USAGE, *query)["data"]
    assert first["results"] == [
        usage(5, 7, 0, 1, project_id="search", user_id="ada", model="coder", batch=False),
        usage(30, 60, 10, 3, project_id="search", user_id="ada", model="demo", batch=False),
    ]
    assert last["results"] == [
        usage(20, 40, 0, 2, project_id=None, user_id="grace", model="demo", batch=False),
        usage(3, 3, 1, 2, project_id="search", user_id="ada", model="demo", batch=False),
    ]


@pytest.mark.parametrize(
    ("query", "requests"),
    [
        ([("models[]", "coder")], 1),
        ([("models", "coder"), ("models", "demo")], 8),
        ([("api_key_ids[]", "key-2")], 2),
        ([("project_ids[]", "search")], 6),
        ([("user_ids[]", "ada"), ("models[]", "demo")], 5),
        ([("models[]", "none such")], 0),
        ([("batch", "false")], 8),
        ([("batch", "true")], 0),
    ],
)
def test_filters_keep_some_of_it(http: Http, query: list[tuple[str, str]], requests: int) -> None:
    buckets = http.page(USAGE, FROM, *query)["data"]
    assert sum(one["num_model_requests"] for bucket in buckets for one in bucket["results"]) == requests


def test_pages_follow_each_other_to_the_end(http: Http) -> None:
    whole = http.page(USAGE, FROM, ("group_by", "model"))["data"]
    query: list[tuple[str, object]] = [FROM, ("group_by", "model"), ("limit", 1)]
    found: list[Any] = []
    page = http.page(USAGE, *query)
    while True:
        assert len(page["data"]) == 1
        found += page["data"]
        if not page["has_more"]:
            break
        page = http.page(USAGE, *query, ("page", page["next_page"]))
    assert found == whole
    assert page["next_page"] is None


@pytest.mark.parametrize(
    ("width", "default", "most", "step"), [("1m", 60, 1440, 60), ("1h", 24, 168, 3600), ("1d", 7, 31, 86_400)]
)
def test_a_page_has_as_many_buckets_as_published(http: Http, width: str, default: int, most: int, step: int) -> None:
    start = ("start_time", seconds(NOW - timedelta(days=100)))
    page = http.page(USAGE, start, ("bucket_width", width))
    assert (len(page["data"]), page["has_more"]) == (default, True)
    assert {one["end_time"] - one["start_time"] for one in page["data"]} == {step}
    assert len(http.page(USAGE, start, ("bucket_width", width), ("limit", most))["data"]) == most
    refused = http.get(USAGE, start, ("bucket_width", width), ("limit", most + 1))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


def test_costs_have_pages_of_up_to_180_days(http: Http) -> None:
    start = ("start_time", seconds(NOW - timedelta(days=400)))
    assert len(http.page(COSTS, start, ("limit", 180))["data"]) == 180
    assert http.get(COSTS, start, ("limit", 181)).status_code == 400


def test_buckets_are_whole_whatever_the_times(http: Http, reports: InMemoryReports) -> None:
    start, end = MIDNIGHT - timedelta(days=2, hours=-5), MIDNIGHT - timedelta(hours=7)
    page = http.page(USAGE, ("start_time", seconds(start)), ("end_time", seconds(end)))
    assert [one["start_time"] for one in page["data"]] == [
        seconds(MIDNIGHT - timedelta(days=2)),
        seconds(MIDNIGHT - timedelta(days=1)),
    ]
    assert reports.asked == [(Granularity.DAY, MIDNIGHT - timedelta(days=2), MIDNIGHT)]


def test_an_end_is_exclusive(http: Http) -> None:
    page = http.page(USAGE, FROM, ("end_time", seconds(MIDNIGHT - timedelta(days=1))))
    assert len(page["data"]) == 1


def test_from_the_beginning_of_time_is_a_first_page_as_any_other(http: Http) -> None:
    page = http.page(USAGE, ("start_time", 0))
    assert [one["start_time"] for one in page["data"]] == [day * 86_400 for day in range(7)]
    assert page["has_more"] is True


def test_what_is_yet_to_come_is_not_there(http: Http) -> None:
    far = seconds(NOW + timedelta(days=300))
    assert [one["start_time"] for one in http.page(USAGE, FROM, ("end_time", far))["data"]][-1] == seconds(MIDNIGHT)
    page = http.page(USAGE, ("start_time", far))
    assert [one["results"] for one in page["data"]] in ([], [[]])
    assert page["has_more"] is False


def test_costs_are_exact_and_split_by_what_was_asked(http: Http) -> None:
    page = http.page(COSTS, FROM, ("group_by[]", "line_item"), ("group_by[]", "project_id"))
    first, _, last = page["data"]
    cost = {"object": "organization.costs.result", "user_id": None, "api_key_id": None}
    assert first["results"] == [
        {**cost, "amount": {"value": 0.000000009, "currency": "usd"}, "line_item": "coder", "project_id": "search"},
        {**cost, "amount": {"value": 1.500000001, "currency": "usd"}, "line_item": "demo", "project_id": "search"},
    ]
    assert [one["amount"]["value"] for one in last["results"]] == [0.25, 0.000000003]


@pytest.mark.parametrize("path", [USAGE, COSTS])
@pytest.mark.parametrize(
    ("query", "param"),
    [
        ([], "start_time"),
        ([("start_time", "")], "start_time"),
        ([("start_time", "yesterday")], "start_time"),
        ([("start_time", "-1")], "start_time"),
        ([("start_time", "1.5")], "start_time"),
        ([("start_time", "\u0661\u0662")], "start_time"),
        ([("start_time", "1796040030000")], "start_time"),
        ([("start_time", "9" * 400)], "start_time"),
        ([("start_time", "1"), ("start_time", "2")], "start_time"),
        ([FROM, ("end_time", FROM[1])], "end_time"),
        ([FROM, ("end_time", "0")], "end_time"),
        ([FROM, ("end_time", "soon")], "end_time"),
        ([FROM, ("bucket_width", "2h")], "bucket_width"),
        ([FROM, ("limit", "0")], "limit"),
        ([FROM, ("limit", "many")], "limit"),
        ([FROM, ("group_by[]", "colour")], "group_by"),
        ([FROM, ("group_by", "project_id,user_id")], "group_by"),
        ([FROM, ("group_by[]", "service_tier")], "group_by"),
        ([FROM, ("page", "page_junk")], "page"),
        ([FROM, ("page", "")], "page"),
        ([FROM, ("page", "page_WyJkYXkiLCAxXQ")], "page"),  # ["day", 1]: no bucket begins there
        ([FROM, ("page", "page_WyJob3VyIiwgMV0")], "page"),  # ["hour", 1]
        ([FROM, ("page", "page_" + "W" * 3000)], "page"),
        ([FROM, ("color", "red")], "color"),
        ([FROM, ("start_time[]", "1")], "start_time[]"),
        ([FROM, ("", "")], ""),
    ],
)
def test_what_is_wrong_is_a_400_that_names_it(
    http: Http, path: str, query: list[tuple[str, object]], param: str
) -> None:
    reply = http.get(path, *query)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert f"'{param}'" in error["message"]
    assert reply.headers["x-request-id"]


def test_a_batch_that_is_neither_is_refused(http: Http) -> None:
    assert http.get(USAGE, FROM, ("batch", "maybe")).json()["error"]["param"] == "batch"


@pytest.mark.parametrize("path", [USAGE, COSTS, LATENCY, LIMITS])
def test_only_admins_may_read(http: Http, path: str) -> None:
    assert http.get(path, FROM, key=None).status_code == 401
    assert http.get(path, FROM, key="sk-nobody").status_code == 401
    refused = http.get(path, FROM, key=MEMBER)
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "invalid_request_error")


def test_limits_tell_what_is_used_of_each_key() -> None:
    uses = [
        KeyUse(
            "key-1",
            "ada",
            None,
            [
                LimitUse(LimitKind.TOKENS_PER_DAY, 100, 130, MIDNIGHT + timedelta(days=1)),
                LimitUse(LimitKind.PARALLEL_REQUESTS, 4, 1, None),
            ],
        ),
        KeyUse("key-2", "grace", "search", []),
    ]
    http = Http(InMemoryReports(uses=uses))
    assert http.page(LIMITS) == {
        "object": "list",
        "data": [
            {
                "api_key_id": "key-1",
                "owner": "ada",
                "team": None,
                "limits": [
                    {
                        "name": "tokens_per_day",
                        "limit": 100,
                        "used": 130,
                        "remaining": 0,
                        "resets_at": seconds(MIDNIGHT + timedelta(days=1)),
                    },
                    {"name": "parallel_requests", "limit": 4, "used": 1, "remaining": 3, "resets_at": None},
                ],
            },
            {"api_key_id": "key-2", "owner": "grace", "team": "search", "limits": []},
        ],
    }
    assert http.get(LIMITS, ("start_time", 1)).status_code == 400


def test_latency_is_that_of_answers_alone_by_model() -> None:
    answered = {latency_bucket(100): 90, latency_bucket(1000): 10}
    rows = [
        row(NOW.replace(second=0), Totals(100, total_ms=answered, first_token_ms={latency_bucket(50): 100})),
        row(NOW.replace(second=0), Totals(50, total_ms={latency_bucket(1): 50}), outcome=Outcome.REFUSED),
        row(NOW.replace(second=0), Totals(1, total_ms={latency_bucket(7): 1}), model="coder"),
    ]
    http = Http(InMemoryReports({Granularity.MINUTE: rows}))
    page = http.page(LATENCY, ("start_time", seconds(NOW) - 600), ("group_by[]", "model"))
    coder, demo = page["data"]
    assert (coder["model"], coder["requests"], coder["first_token_ms"]) == (
        "coder",
        1,
        {"p50": None, "p95": None, "p99": None},
    )
    assert (demo["model"], demo["requests"]) == ("demo", 100)
    assert 80 <= demo["total_ms"]["p50"] <= 120
    assert 800 <= demo["total_ms"]["p95"] <= demo["total_ms"]["p99"] <= 1200
    assert 40 <= demo["first_token_ms"]["p50"] <= 60


@pytest.mark.parametrize(
    ("since", "until", "granularity"),
    [
        (timedelta(hours=1), timedelta(0), Granularity.MINUTE),
        (timedelta(days=5), timedelta(days=4, hours=23), Granularity.HOUR),  # minutes are gone by then
        (timedelta(days=7), timedelta(0), Granularity.HOUR),
        (timedelta(days=90), timedelta(0), Granularity.DAY),
        (timedelta(days=101), timedelta(days=100, hours=23), Granularity.DAY),
    ],
)
def test_latency_reads_the_finest_buckets_there_are(
    http: Http, reports: InMemoryReports, since: timedelta, until: timedelta, granularity: Granularity
) -> None:
    http.page(LATENCY, ("start_time", seconds(NOW - since)), ("end_time", seconds(NOW - until)))
    assert [asked[0] for asked in reports.asked] == [granularity]


# Against the whole service


@pytest.fixture(scope="module")
def spent(served_stack: Served) -> dict[str, int]:
    """What one minute's requests to one model came to, by the answers themselves."""
    total = {"requests": 0, "prompt": 0, "completion": 0}
    headers = {"Authorization": f"Bearer {served_stack.key}"}
    for number in range(5):
        body = {"model": "demo-tgi", "prompt": "import os\n", "max_tokens": 3 + number, "user": "usage-api"}
        answer = httpx.post(f"{served_stack.base_url}/v1/completions", json=body, headers=headers, timeout=30).json()
        total["requests"] += 1
        total["prompt"] += answer["usage"]["prompt_tokens"]
        total["completion"] += answer["usage"]["completion_tokens"]
    return total


@pytest.fixture
def admin(served_stack: Served) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{served_stack.base_url}/v1", api_key=served_stack.key, admin_api_key=served_stack.key
    ) as client:
        yield client


def eventually(check: Callable[[], bool], patience: float = 20) -> None:
    """The stream takes a moment."""
    deadline = time.monotonic() + patience
    while not check():
        assert time.monotonic() < deadline, "the roll-ups did not come"
        time.sleep(0.2)


def test_the_official_client_reads_what_the_answers_said(admin: OpenAI, spent: dict[str, int]) -> None:
    def found() -> dict[str, int]:
        page = admin.admin.organization.usage.completions(
            start_time=int(time.time()) - 86_400,
            group_by=["model", "api_key_id"],
            models=["demo-tgi"],
            bucket_width="1d",
        )
        total = dict.fromkeys(spent, 0)
        for bucket in page.data:
            for one in bucket.results:
                assert one.object == "organization.usage.completions.result"
                assert (one.model, one.project_id) == ("demo-tgi", None)
                total["requests"] += one.num_model_requests
                total["prompt"] += one.input_tokens
                total["completion"] += one.output_tokens
        return total

    # other tests of the session may ask the model, too
    eventually(lambda: all(found()[name] >= count for name, count in spent.items()))


def test_the_official_client_reads_costs_and_errors(admin: OpenAI, spent: dict[str, int]) -> None:
    page = admin.admin.organization.usage.costs(start_time=int(time.time()) - 86_400, group_by=["line_item"])
    assert page.object == "page"
    with pytest.raises(BadRequestError) as caught:
        admin.admin.organization.usage.completions(start_time=1, end_time=1)
    assert caught.value.param == "end_time"


def test_every_width_adds_up_to_the_same(served_stack: Served, spent: dict[str, int]) -> None:
    def sums() -> list[int]:
        """Over this hour and the one before: an hour may turn at any time."""
        hour = int(time.time()) // 3600 * 3600
        found = []
        for width in ("1m", "1h"):
            times = {"start_time": hour - 3600, "end_time": hour + 3600, "limit": 120}
            query = {**times, "bucket_width": width, "models[]": "demo-tgi"}
            headers = {"Authorization": f"Bearer {served_stack.key}"}
            page = httpx.get(f"{served_stack.base_url}{USAGE}", params=query, headers=headers).json()
            found.append(sum(one["num_model_requests"] for bucket in page["data"] for one in bucket["results"]))
        return found

    eventually(lambda: len(set(sums())) == 1 and sums()[0] >= 5)


@pytest.fixture
def local(served_stack: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--local`` finds the running service; what it takes over of its environment is undone."""
    monkeypatch.chdir(served_stack.folder)
    for name, value in served_stack.environment.items():
        monkeypatch.setenv(name, value)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["usage", *arguments], env={"COLUMNS": "200"})


@pytest.mark.usefixtures("local")
def test_the_command_prints_the_same_in_every_form(spent: dict[str, int]) -> None:
    def rows() -> list[dict[str, Any]]:
        result = command("--local", "--json", "--from", str(datetime.now(UTC).date() - timedelta(days=1)))
        assert (result.exit_code, result.stderr) == (0, "")
        return [entry for entry in json.loads(result.stdout) if entry["model"] == "demo-tgi"]

    eventually(lambda: bool(rows()) and rows()[0]["requests"] >= spent["requests"])
    (entry,) = rows()
    assert list(entry) == [
        "model",
        "key",
        "requests",
        "succeeded",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "cost_dollars",
    ]
    assert entry["cost_dollars"] == "0.00"
    text = command("--local", "--csv").stdout.splitlines()
    assert text[0] == "model,key,requests,succeeded,prompt_tokens,cached_tokens,completion_tokens,cost_dollars"
    table = command("--local").stdout
    assert "Usage on" in table
    assert re.search(r"│ demo-tgi +│ local +│", table)
    grouped = command("--local", "--json", "--group-by", "hour,outcome").stdout
    assert {"hour", "outcome"} <= json.loads(grouped)[0].keys()


@pytest.mark.usefixtures("local", "spent")
def test_the_day_s_audit_agrees_once_everything_is_in() -> None:
    def agrees() -> bool:
        result = command("audit", str(datetime.now(UTC).date()), "--local")
        return result.exit_code == 0 and "DIFFER" not in result.stdout

    eventually(agrees, 40)


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--group-by", "colour"], "--group-by colour: there are model, key, team, owner, day, hour, outcome"),
        (["--from", "yesterday"], "--from yesterday: not a day, as 2026-11-30"),
        (["--to", "2026-13-01"], "--to 2026-13-01: not a day"),
        (["--from", "2026-11-30", "--to", "2026-11-29"], "--from 2026-11-30 is after --to 2026-11-29"),
        (["--from", "1970-01-01"], "usage by the day is kept for 800 days"),
        (["--from", str(datetime.now(UTC).date() - timedelta(days=102)), "--group-by", "hour"], "kept for 100 days"),
        (["--csv", "--json"], "--csv and --json exclude each other"),
        (["audit", "soon"], "DAY soon: not a day"),
        (["audit", "9999-12-31"], "DAY 9999-12-31 is yet to come"),
    ],
)
def test_what_the_command_does_not_understand_it_says(arguments: list[str], text: str) -> None:
    result = command(*arguments, "--local")
    assert result.exit_code == 2
    assert text in result.stderr


def test_the_audit_ends_with_an_error_when_figures_differ(
    served_stack: Served, local: None, spent: dict[str, int]
) -> None:
    """On a day of its own: others read the table, too."""
    day = (datetime.now(UTC) - timedelta(days=1)).date()
    with closing(boto3.client("dynamodb")) as client:
        item: Any = {
            "pk": {"S": f"ROLLUP#day#{day.year}#0"},
            "sk": {"S": f"{day:%Y%m%d}T0000#tampered"},
            "start": {"S": f"{day}T00:00:00+00:00"},
            "key_id": {"S": "key-x"},
            "owner": {"S": "mallory"},
            "model": {"S": "demo"},
            "outcome": {"S": "succeeded"},
            "requests": {"N": "3"},
        }
        client.put_item(TableName=served_stack.environment["USAGE_TABLE"], Item=item)
        try:
            result = command("audit", str(day), "--local")
        finally:
            key: Any = {"pk": item["pk"], "sk": item["sk"]}
            client.delete_item(TableName=served_stack.environment["USAGE_TABLE"], Key=key)
    assert result.exit_code == 1
    assert (
        "DIFFER: by the day, key key-x, model demo, owner mallory, succeeded: requests 0 in the records, 3 added up"
        in (result.stdout)
    )
    assert result.stderr == f"completions usage: {day}: the figures differ\n"
