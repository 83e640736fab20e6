"""The hooks that Lambda's runtime runs around a snapshot, run here by the runtime's own client."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import boto3.session
import pytest
import snapshot_restore_py  # type: ignore[import-untyped]
from awslambdaric.lambda_runtime_hooks_runner import (  # type: ignore[import-untyped]
    run_after_restore,
    run_before_snapshot,
)
from starlette.testclient import TestClient

from completions import clients
from completions.bootstrap import build_parts, openai_completions_app, openai_models_app
from completions.clients import build_dynamodb_client
from completions.settings import Settings
from completions.snapstart import refresh_after_restore

SETTINGS = Settings(registry_table="registry", usage_table="usage", registry_cache_seconds=60)


@dataclass
class Endpoint:
    """A server that keeps its connections open, and counts them; ``requests`` holds each one's headers."""

    url: str = ""
    connections: int = 0
    requests: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def endpoint(reply: Callable[[], object]) -> Iterator[Endpoint]:
    """Answers everything with the JSON of ``reply``."""
    kept = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            kept.connections += 1
            super().setup()

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            kept.requests.append({name.lower(): value for name, value in self.headers.items()})
            body = json.dumps(reply()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        kept.url = f"http://127.0.0.1:{http.server_port}"
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield kept
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No hooks but the test's own; those to run after a restore."""
    after: list[Any] = []
    monkeypatch.setattr(snapshot_restore_py, "_before_snapshot_registry", [])
    monkeypatch.setattr(snapshot_restore_py, "_after_restore_registry", after)
    return after


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """What the clients of this test take for DynamoDB, and for everything else of AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_ENDPOINT_URL_")]:  # of the stack other tests run
        monkeypatch.delenv(name)
    with endpoint(lambda: {"Responses": {}}) as known:
        monkeypatch.setenv("AWS_ENDPOINT_URL", known.url)
        yield known


def test_nothing_is_connected_and_nothing_remembered_before_the_first_request(tables: Endpoint) -> None:
    parts = build_parts(SETTINGS)
    for app in (openai_completions_app(parts), openai_models_app(parts)):
        with TestClient(app) as http:
            assert http.get("/healthz").status_code == 200  # what Lambda Web Adapter waits for
    run_before_snapshot()
    assert tables.connections == 0
    run_after_restore()
    assert parts.registry.principal("digest") is None
    assert tables.connections == len(tables.requests) == 1


def test_the_clients_connect_anew_after_a_restore(tables: Endpoint, hooks: list[Any]) -> None:
    parts = build_parts(SETTINGS)
    assert len(hooks) == 1
    for digest in ("one", "two"):
        assert parts.registry.principal(digest) is None
    assert (tables.connections, len(tables.requests)) == (1, 2)
    run_before_snapshot()
    run_after_restore()
    assert parts.registry.principal("three") is None
    assert (tables.connections, len(tables.requests)) == (2, 3)


def test_environments_that_come_from_one_snapshot_do_not_draw_the_same_numbers() -> None:
    refresh_after_restore([])
    state = random.getstate()
    drawn = set()
    for _ in range(3):
        random.setstate(state)
        run_after_restore()
        drawn.add(random.getstate())
    assert len(drawn | {state}) == 4


def test_where_there_is_no_such_runtime_nothing_is_hooked(monkeypatch: pytest.MonkeyPatch, hooks: list[Any]) -> None:
    monkeypatch.setitem(sys.modules, "snapshot_restore_py", None)  # as if it were not installed
    refresh_after_restore([])
    assert hooks == []


def test_credentials_of_before_the_snapshot_are_replaced_once_they_have_aged(
    tables: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SnapStart's are the container provider's: their end is compared with the clock on the wall."""
    lives = [timedelta(minutes=1), timedelta(hours=6)]  # the first ones are what the snapshot holds, hours later
    served: list[dict[str, str]] = []

    def credentials() -> dict[str, str]:
        number = len(served)
        ends = datetime.now(UTC) + lives[number]
        served.append(
            {
                "AccessKeyId": f"AKIDNUMBER{number}",
                "SecretAccessKey": "secret",
                "Token": "session",
                "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        )
        return served[-1]

    with endpoint(credentials) as source:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{source.url}/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "of-the-snapshot")
        monkeypatch.setattr(clients, "session", boto3.session.Session)  # one that knows no credentials yet
        with closing(build_dynamodb_client()) as client:
            assert len(served) == 1
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "of-the-environment")
            refresh_after_restore([client])
            run_after_restore()
            client.batch_get_item(RequestItems={"registry": {"Keys": [{"pk": {"S": "a"}, "sk": {"S": "b"}}]}})
    assert len(served) == 2
    assert "Credential=AKIDNUMBER1/" in tables.requests[0]["authorization"]
    tokens = [request["authorization"] for request in source.requests]
    assert tokens == ["of-the-snapshot", "of-the-environment"]
