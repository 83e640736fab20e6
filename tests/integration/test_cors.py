"""Browsers on other origins: what a preflight is told, and that every answer can be read, in both server styles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import httpx2 as httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from completions import bootstrap
from completions.bootstrap import Parts
from completions.domain.completion import FinishReason, Usage
from completions.domain.errors import BackendUnavailableError
from completions.domain.metering import Principal
from completions.web.auth import secret_digest
from completions_cli.local.server import bind, serving
from fakes import (
    InMemoryLedger,
    InMemoryRegistry,
    InMemoryReports,
    ManualClock,
    ScriptedBackend,
    ScriptItem,
    delta,
    principal,
    route,
)
from proxied import proxied

KEY = "sk-cors"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
PAGE = "https://app.example.com"
STRANGER = "https://evil.example"
BODY = {"model": "demo", "prompt": "import "}
APPS: list[tuple[Callable[[Parts], FastAPI], str, str]] = [
    (bootstrap.openai_completions_app, "POST", "/v1/completions"),
    (bootstrap.openai_models_app, "GET", "/v1/models"),
    (bootstrap.openai_models_app, "DELETE", "/v1/models/demo"),
    (bootstrap.organization_app, "GET", "/v1/organization/usage/completions"),
    (bootstrap.scale_completions_app, "POST", "/v2/completions"),
    (bootstrap.scale_v1_completions_app, "POST", "/v1/llm/completions-sync"),
    (bootstrap.scale_models_app, "GET", "/v1/llm/model-endpoints"),
    (bootstrap.sourcegraph_completions_app, "POST", "/.api/completions/code"),
    (bootstrap.sourcegraph_site_app, "GET", "/.api/client-config"),
]
EVERY_APP = pytest.mark.parametrize(("build", "method", "path"), APPS, ids=[path for _, _, path in APPS])


class NoRegistry(InMemoryRegistry):
    """Fails the test that reaches it."""

    def principal(self, secret_sha256: str, *, next_model: str | None = None) -> Principal | None:
        raise AssertionError("the registry was read")


def parts(*origins: str, script: tuple[ScriptItem, ...] = (), refusal: Exception | None = None) -> Parts:
    registry = InMemoryRegistry({secret_digest(KEY): principal()}, [route(model_id="demo")])
    backend = ScriptedBackend(script, refusal=refusal)
    return Parts(registry, backend, InMemoryLedger(), InMemoryReports(), ManualClock(), cors_origins=origins)


def unreachable(*origins: str) -> Parts:
    """Parts that nothing may be asked of."""
    nothing: Any = None
    return Parts(NoRegistry({}, []), nothing, nothing, nothing, ManualClock(), cors_origins=origins)


@contextmanager
def browser(app: FastAPI, origin: str | None = PAGE) -> Iterator[TestClient]:
    headers = {} if origin is None else {"Origin": origin}
    with TestClient(app, headers=headers, raise_server_exceptions=False) as http:
        yield http


def preflight(method: str, *headers: str, origin: str = PAGE) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": ",".join(headers),
    }


@EVERY_APP
def test_a_preflight_needs_no_key_and_reaches_nothing(
    build: Callable[[Parts], FastAPI], method: str, path: str
) -> None:
    app = build(unreachable(PAGE))
    asked = preflight(method, "authorization", "content-type")
    with browser(app) as http:
        reply = http.options(path, headers=asked)
    event_reply = proxied(app, "OPTIONS", path, headers=asked)
    assert reply.status_code == event_reply.status_code == 200
    for told in (reply.headers, event_reply.headers):
        assert told["access-control-allow-origin"] == PAGE
        assert set(told["access-control-allow-methods"].split(", ")) == {"GET", "POST", "DELETE"}
        assert {"authorization", "content-type"} <= set(told["access-control-allow-headers"].split(","))
        assert told["access-control-max-age"] == "7200"
        assert "access-control-allow-credentials" not in told
        assert "Origin" in told["vary"].split(", ")


@EVERY_APP
def test_an_answer_and_a_refusal_can_be_read_by_the_page(
    build: Callable[[Parts], FastAPI], method: str, path: str
) -> None:
    with browser(build(parts(PAGE, "https://other.example"))) as http:
        reply = http.request(method, path)
    assert reply.status_code == 401
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "origin" in reply.headers["vary"].lower()
    exposed = reply.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed)


@pytest.mark.parametrize(
    ("path", "refusal", "status"),
    [
        ("/v1/completions", None, 200),
        ("/v1/nothing", None, 404),
        ("/v1/completions", BackendUnavailableError("The model starts.", retry_after=300), 503),
        ("/v1/completions", RuntimeError("a fault of ours"), 500),
    ],
)
def test_every_kind_of_answer_can_be_read_by_the_page(path: str, refusal: Exception | None, status: int) -> None:
    whole = (delta("os\n", FinishReason.STOP, usage=Usage(1, 1)),)
    with browser(bootstrap.openai_completions_app(parts(PAGE, script=whole, refusal=refusal))) as http:
        reply = http.post(path, json=BODY, headers=AUTHORIZED)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, PAGE)
    assert reply.headers["x-request-id"]


def test_a_wrong_method_can_be_read_by_the_page() -> None:
    with browser(bootstrap.openai_completions_app(parts(PAGE))) as http:
        reply = http.get("/v1/completions")
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (405, PAGE)


def test_what_an_sdk_sends_of_its_own_may_be_sent() -> None:
    """The official client's own headers, and what its sibling for browsers and Cody add to them."""
    client = openai.OpenAI(api_key=KEY, base_url="http://127.0.0.1:1/v1", organization="org", project="project")
    named = [name.lower() for name in client.default_headers] + [
        "x-stainless-retry-count", "x-stainless-timeout", "x-stainless-helper-method", "x-api-key", "idempotency-key",
        "x-requested-with", "x-timeout-ms", "x-sourcegraph-interaction-id", "x-amz-date", "x-amz-security-token",
    ]  # fmt: skip
    assert "x-stainless-runtime-version" in named
    with browser(bootstrap.openai_completions_app(unreachable("*"))) as http:
        reply = http.options("/v1/completions", headers=preflight("POST", *named))
    assert reply.status_code == 200
    assert set(named) <= set(reply.headers["access-control-allow-headers"].split(","))


def test_every_origin_is_told_the_same_and_no_cookie_goes_along() -> None:
    with browser(bootstrap.openai_completions_app(unreachable("*")), STRANGER) as http:
        replies = [http.options("/v1/completions", headers=preflight("POST", origin=STRANGER)), http.get("/healthz")]
    for reply in replies:
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize("origin", [STRANGER, f"{PAGE}.evil.example", f"{PAGE}:8443", "http://app.example.com", "null"])
def test_a_page_of_another_origin_is_let_neither_ask_nor_read(origin: str) -> None:
    with browser(bootstrap.openai_completions_app(unreachable(PAGE)), origin) as http:
        asked = http.options("/v1/completions", headers=preflight("POST", origin=origin))
        read = http.get("/healthz")
    assert (asked.status_code, asked.text) == (400, "Disallowed CORS origin")
    for reply in (asked, read):
        assert "access-control-allow-origin" not in reply.headers


def test_a_method_that_no_route_has_is_not_allowed() -> None:
    with browser(bootstrap.openai_completions_app(unreachable(PAGE))) as http:
        reply = http.options("/v1/completions", headers=preflight("PUT"))
    assert (reply.status_code, reply.text) == (400, "Disallowed CORS method")


@EVERY_APP
def test_without_origins_no_page_is_told_anything(build: Callable[[Parts], FastAPI], method: str, path: str) -> None:
    with browser(build(parts())) as http:
        asked = http.options(path, headers=preflight(method))
        answered = http.request(method, path)
    assert (asked.status_code, answered.status_code) == (405, 401)
    assert not [name for name in (*asked.headers, *answered.headers) if name.startswith("access-control-")]


def test_a_stream_still_leaves_piece_by_piece() -> None:
    read = Event()

    def wait() -> None:
        assert read.wait(10), "the first piece was held back until the last was there"

    script = (delta("a"), wait, delta("b", FinishReason.STOP, usage=Usage(1, 2)))
    app = bootstrap.openai_completions_app(parts(PAGE, script=script))
    with (
        serving(app, bind(0)) as url,
        httpx.stream(
            "POST", f"{url}/v1/completions", json={**BODY, "stream": True}, headers={**AUTHORIZED, "Origin": PAGE}
        ) as reply,
    ):
        assert reply.headers["access-control-allow-origin"] == PAGE
        frames = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        assert json.loads(next(frames))["choices"][0]["text"] == "a"
        read.set()
        assert list(frames)[-1] == "[DONE]"
