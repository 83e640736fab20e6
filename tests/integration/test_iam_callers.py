"""Callers who sign with IAM: rows made by the command, requests in both server styles, in every dialect."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import boto3
import httpx2 as httpx
import pytest
from fastapi import FastAPI
from mangum import Mangum
from starlette.types import Receive, Scope, Send
from typer.testing import CliRunner, Result

from completions import bootstrap
from completions.bootstrap import build_parts
from completions.settings import read_settings
from completions.web.callers import caller_digest
from completions_cli.local.environment import published_environment
from completions_cli.local.gateway import Gateway
from completions_cli.local.server import bind, serving
from completions_cli.local.stack import LocalStack
from completions_cli.local.template import Function, GatewayTemplate, Route
from completions_cli.main import app
from ledger_reader import LedgerReader
from proxied import proxied
from speakers import SPEAKERS, Speaker, openai_body

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

TABLE = "RegistryTable"
ACCOUNT = "123456789012"
SESSION_NAME = "ada-on-her-laptop"
SIGNATURE = (
    "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261130/eu-central-1/execute-api/aws4_request, "
    "SignedHeaders=host;x-amz-date, Signature=5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"
)
BUILDERS: Mapping[str, Callable[[bootstrap.Parts], FastAPI]] = {
    "/v1/completions": bootstrap.openai_completions_app,
    "/v1/models": bootstrap.openai_models_app,
    "/v1/organization/usage/completions": bootstrap.organization_app,
    "/v2/completions": bootstrap.scale_completions_app,
    "/v1/llm/completions-sync": bootstrap.scale_v1_completions_app,
    "/v1/llm/completions-stream": bootstrap.scale_v1_completions_app,
    "/v1/llm/model-endpoints": bootstrap.scale_models_app,
    "/.api/completions/code": bootstrap.sourcegraph_completions_app,
    "/.api/client-config": bootstrap.sourcegraph_site_app,
}
RESOURCES = ["/v1/models", "/v1/organization/usage/completions", "/v1/llm/model-endpoints", "/.api/client-config"]
WHOLE_OR_STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def role(name: str) -> str:
    return f"arn:aws:iam::{ACCOUNT}:role/{name}"


def session(name: str, of: str = SESSION_NAME) -> dict[str, str]:
    """The identity of a request that a role's session signed, as API Gateway tells it."""
    arn = f"arn:aws:sts::{ACCOUNT}:assumed-role/{name}/{of}"
    return {"userArn": arn, "accountId": ACCOUNT, "caller": f"AROAEXAMPLE:{of}", "user": f"AROAEXAMPLE:{of}"}


@dataclass(frozen=True)
class Form:
    """One server style. ``ask`` takes method, address, identity, headers and JSON."""

    name: str
    ask: Callable[[str, str, Mapping[str, str] | None, Mapping[str, str], Any], httpx.Response]

    def speak(
        self, speaker: Speaker, stream: bool, identity: Mapping[str, str] | None, *, with_key: bool = False
    ) -> httpx.Response:
        headers = speaker.headers if with_key else {"authorization": SIGNATURE} if identity else {}
        sent = {name.lower(): text for name, text in headers.items()} | {"content-type": "application/json"}
        return self.ask("POST", speaker.address(stream=stream), identity, sent, speaker.body(stream, "demo"))


def forms(apps: Mapping[str, FastAPI], url: str) -> dict[str, Form]:
    """``url`` is where the apps are served as behind Lambda Web Adapter."""

    def as_event(
        method: str, address: str, identity: Mapping[str, str] | None, headers: Mapping[str, str], body: Any
    ) -> httpx.Response:
        sent = b"" if body is None else json.dumps(body).encode()
        target = apps[address.partition("?")[0]]
        return proxied(target, method, address, headers=headers, body=sent, identity=identity)

    def as_http(
        method: str, address: str, identity: Mapping[str, str] | None, headers: Mapping[str, str], body: Any
    ) -> httpx.Response:
        context = {"requestId": None, "identity": {"sourceIp": "127.0.0.1", "userArn": None, **(identity or {})}}
        told = {**headers, "x-amzn-request-context": json.dumps(context)}
        return httpx.request(method, url + address, headers=told, json=body, timeout=30)

    return {"buffered": Form("buffered", as_event), "streamed": Form("streamed", as_http)}


@contextmanager
def served(stack: LocalStack, mode: str) -> Iterator[dict[str, Form]]:
    """Both styles of a service that knows its callers by ``mode``."""
    parts = build_parts(read_settings({**stack.environment, "AUTH_MODE": mode, "REGISTRY_CACHE_SECONDS": "0"}))
    apps = {path: build(parts) for path, build in BUILDERS.items()}

    async def by_path(scope: Scope, receive: Receive, send: Send) -> None:
        await apps[scope["path"]](scope, receive, send)

    with serving(by_path, bind(0)) as url:
        yield forms(apps, url)


@pytest.fixture(scope="module")
def signed(stack: LocalStack) -> Iterator[dict[str, Form]]:
    with served(stack, "iam") as known:
        yield known


@pytest.fixture(params=["buffered", "streamed"])
def form(request: pytest.FixtureRequest, signed: dict[str, Form]) -> Form:
    return signed[request.param]


@pytest.fixture(params=SPEAKERS)
def speaker(request: pytest.FixtureRequest) -> Speaker:
    return SPEAKERS[request.param]


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[DynamoDBClient]:
    with closing(boto3.client("dynamodb")) as tables:
        yield tables


@pytest.fixture(autouse=True)
def local(stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder from which ``--local`` finds the stack."""
    monkeypatch.chdir(tmp_path)
    with published_environment(stack.environment):
        yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments, "--local"])


def done(*arguments: str) -> str:
    """The standard output of a command that worked."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def caller(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A role's name and its key's id, for the time of one test."""
    name = re.sub(r"\W", "-", request.node.name)[-64:].strip("-")
    key_id = done("create", "--owner", "ada", "--arn", role(name)).strip()
    yield name, key_id
    run("delete", key_id, "--yes")


# Requests


@WHOLE_OR_STREAM
def test_a_caller_is_served_and_charged_by_its_row_in_every_dialect(
    form: Form, ledger: LedgerReader, speaker: Speaker, caller: tuple[str, str], stream: bool
) -> None:
    name, key_id = caller
    reply = form.speak(speaker, stream, session(name))
    assert reply.status_code == 200
    assert speaker.joined(reply) if stream else speaker.text(reply)
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.key_id, record.owner, record.outcome) == (key_id, "ada", "succeeded")
    raw = ledger.raw(reply.headers["x-request-id"])
    assert SESSION_NAME not in str(raw)
    assert "arn:aws" not in str(raw)


@WHOLE_OR_STREAM
def test_a_caller_without_a_row_is_a_403_that_says_what_to_do(
    stack: LocalStack, form: Form, speaker: Speaker, stream: bool
) -> None:
    asked = stack.sagemaker.call_count["demo"]
    reply = form.speak(speaker, stream, session("nobody"), with_key=True)
    assert reply.status_code == 403
    assert f"{role('nobody')} is not known here" in reply.text
    assert f"completions keys create --arn {role('nobody')}" in reply.text
    assert SESSION_NAME not in reply.text
    assert stack.sagemaker.call_count["demo"] == asked


@WHOLE_OR_STREAM
def test_without_a_signature_a_good_key_is_a_401_that_says_why(
    stack: LocalStack, form: Form, speaker: Speaker, stream: bool
) -> None:
    asked = stack.sagemaker.call_count["demo"]
    reply = form.speak(speaker, stream, None, with_key=True)
    assert reply.status_code == 401
    assert "this method is not behind AWS_IAM authorization. API keys are not accepted." in reply.text
    assert stack.sagemaker.call_count["demo"] == asked


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", lambda text: text["error"]["message"]),
        ("/v2/completions", lambda text: text["detail"]),
        ("/v1/llm/completions-sync", lambda text: text["detail"]),
    ],
)
def test_a_refusal_is_in_the_dialects_form(form: Form, path: str, body: Callable[[Any], str]) -> None:
    speaker = next(one for one in SPEAKERS.values() if one.path.partition("?")[0] == path)
    assert body(form.speak(speaker, False, session("nobody")).json()).startswith(role("nobody"))


def test_what_cannot_be_decoded_is_told_to_callers_alone(form: Form, caller: tuple[str, str]) -> None:
    for identity, status in ((None, 401), (session("nobody"), 403), (session(caller[0]), 400)):
        reply = form.ask("POST", "/v1/completions", identity, {"content-type": "application/json"}, {"prompt": 1})
        assert reply.status_code == status


@pytest.mark.parametrize("path", RESOURCES)
def test_every_other_route_knows_its_callers_alike(form: Form, path: str, request: pytest.FixtureRequest) -> None:
    arn = f"arn:aws:iam::{ACCOUNT}:user/division/{form.name}{RESOURCES.index(path)}"
    key_id = done("create", "--owner", "ada", "--admin", "--arn", arn).strip()
    try:
        address = path + ("?start_time=1" if "usage" in path else "")
        statuses = [
            form.ask("GET", address, identity, {"authorization": "Bearer sk-local"}, None).status_code
            for identity in (None, session("nobody"), {"userArn": arn})
        ]
        assert statuses == [401, 403, 200]
    finally:
        done("delete", key_id, "--yes")


def test_a_caller_sees_the_models_of_its_row(form: Form) -> None:
    key_id = done("create", "--owner", "ada", "--model", "demo-tgi", "--arn", role("narrow")).strip()
    try:
        models = form.ask("GET", "/v1/models", session("narrow"), {}, None).json()["data"]
        assert [model["id"] for model in models] == ["demo-tgi"]
        assert form.speak(SPEAKERS["openai"], False, session("narrow")).status_code == 404
    finally:
        done("delete", key_id, "--yes")


def test_a_rows_limits_hold_for_all_the_sessions_of_its_role(form: Form, caller: tuple[str, str]) -> None:
    name, key_id = caller
    done("limits", key_id, "--tokens-per-month", "1")
    for of in ("one", "two"):
        refused = form.speak(SPEAKERS["openai"], False, session(name, of))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "insufficient_quota")
        assert key_id in refused.json()["error"]["message"]
    done("limits", key_id, "--tokens-per-month", "none")
    assert form.speak(SPEAKERS["openai"], False, session(name)).status_code == 200


def test_a_row_is_disabled_enabled_and_deleted(form: Form, caller: tuple[str, str]) -> None:
    name, key_id = caller

    def asked() -> tuple[int, str]:
        reply = form.speak(SPEAKERS["scale"], False, session(name))
        return reply.status_code, reply.json().get("detail", "")

    done("disable", role(name))
    assert asked() == (403, f"The key of {role(name)} is disabled.")
    done("enable", key_id)
    assert asked() == (200, "")
    done("delete", key_id, "--yes")
    status, told = asked()
    assert (status, told.startswith(f"{role(name)} is not known here")) == (403, True)


def test_a_request_of_a_name_is_one_whichever_session_repeats_it(form: Form, caller: tuple[str, str]) -> None:
    name, _ = caller
    headers = {"content-type": "application/json", "idempotency-key": f"once-{form.name}"}
    replies = [
        form.ask("POST", "/v1/completions", session(name, of), headers, openai_body(False)) for of in ("one", "two")
    ]
    assert [reply.status_code for reply in replies] == [200, 409]


def test_the_log_tells_no_session_and_no_arn(form: Form, caller: tuple[str, str]) -> None:
    written = StringIO()
    handler = logging.StreamHandler(written)
    loggers = [logging.getLogger(), logging.getLogger("completions")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.DEBUG)
    # the HTTP client of this test, and the stand-ins, are no part of the service
    others = [logging.getLogger(name) for name in ("httpcore2", "httpx2", "moto", "werkzeug")]
    for one in others:
        one.setLevel(logging.WARNING)
    try:
        for identity in (session(caller[0]), session("nobody"), None):
            form.speak(SPEAKERS["openai"], False, identity)
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.removeHandler(handler)
            one.setLevel(level)
        for one in others:
            one.setLevel(logging.NOTSET)
    assert "request" in written.getvalue()
    assert SESSION_NAME not in written.getvalue()
    assert "arn:aws" not in written.getvalue()


# What a client could try


def test_a_buffered_requests_own_header_changes_nothing(signed: dict[str, Form], caller: tuple[str, str]) -> None:
    forged = json.dumps({"identity": session(caller[0])})
    headers = {"content-type": "application/json", "x-amzn-request-context": forged, "X-Amzn-Request-Context": forged}
    for identity, status in ((None, 401), (session("nobody"), 403)):
        reply = signed["buffered"].ask("POST", "/v1/completions", identity, headers, openai_body(False))
        assert reply.status_code == status


@pytest.mark.parametrize("streamed", [False, True], ids=["buffered", "streamed"])
def test_the_gateway_tells_who_signed_whatever_a_client_says(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch, caller: tuple[str, str], streamed: bool
) -> None:
    parts = build_parts(read_settings({**stack.environment, "AUTH_MODE": "iam"}))
    module: Any = ModuleType("functions_behind_iam")
    module.app = bootstrap.openai_completions_app(parts)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def handler(event: Any, context: Any) -> dict[str, Any]:
        return Mangum(module.app, lifespan="off")(event, context)

    module.handler = handler
    variables = {"APP_MODULE": f"{module.__name__}:app"}
    function = Function("OpenAICompletionsFunction", f"{module.__name__}.handler", 29, variables)
    gateway = Gateway(GatewayTemplate((Route("POST", "/v1/completions", function, streamed),), {}))
    forged = {"identity": session(caller[0]), "requestId": "forged"}
    with serving(gateway, bind(0)) as url:
        reply = httpx.post(
            f"{url}/v1/completions",
            json=openai_body(False),
            headers=[("x-amzn-request-context", json.dumps(forged)), ("X-Amzn-Request-Context", json.dumps(forged))],
        )
    gateway.close()
    assert reply.status_code == 401
    assert reply.headers["x-request-id"] != "forged"


@pytest.mark.parametrize("name", ["buffered", "streamed"])
def test_signatures_count_for_nothing_where_keys_do(
    stack: LocalStack, ledger: LedgerReader, caller: tuple[str, str], speaker: Speaker, name: str
) -> None:
    with served(stack, "keys") as known:
        assert known[name].speak(speaker, False, session(caller[0])).status_code == 401
        reply = known[name].speak(speaker, False, session(caller[0]), with_key=True)
        assert reply.status_code == 200
        assert ledger.settled(reply.headers["x-request-id"]).key_id == "local"


@pytest.mark.parametrize("name", ["buffered", "streamed"])
def test_no_key_leads_to_a_callers_row(stack: LocalStack, caller: tuple[str, str], name: str) -> None:
    arn = role(caller[0])
    with served(stack, "keys") as known:
        for secret in (f"iam {arn}", arn, caller_digest(arn)):
            headers = {"content-type": "application/json", "authorization": f"Bearer {secret}"}
            reply = known[name].ask("POST", "/v1/completions", None, headers, openai_body(False))
            assert reply.status_code == 401
