"""The HTTP glue over fakes: what the client sees when something inside goes wrong, and what the log may say."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO

import pytest
from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from starlette.testclient import TestClient

from completions.bootstrap import Parts, every_dialects_completions_app, openai_completions_app, openai_models_app
from completions.domain.completion import FinishReason, Usage
from completions.domain.errors import BackendError
from completions.web.auth import secret_digest
from fakes import (
    InMemoryLedger,
    InMemoryRegistry,
    InMemoryReports,
    ManualClock,
    ScriptedBackend,
    delta,
    principal,
    route,
)

KEY = "sk-the-credential"
PROMPT = "the-text-of-the-prompt"
ANSWER = "the-text-of-the-answer"
BODY = {"model": "demo", "prompt": PROMPT}
HEADERS = {"Authorization": f"Bearer {KEY}"}


def parts(*script: object, ledger: InMemoryLedger | None = None) -> Parts:
    registry = InMemoryRegistry({secret_digest(KEY): principal()}, [route(model_id="demo")])
    backend = ScriptedBackend(script)  # type: ignore[arg-type]
    return Parts(registry, backend, ledger or InMemoryLedger(), InMemoryReports(), ManualClock())


def client(app: FastAPI) -> TestClient:
    return TestClient(app, headers=HEADERS, raise_server_exceptions=False)


WHOLE = (delta(ANSWER, FinishReason.STOP, usage=Usage(3, 4)),)


@pytest.fixture
def log() -> Iterator[StringIO]:
    """Everything any logger writes, at the most talkative level."""
    written = StringIO()
    handler = logging.StreamHandler(written)
    loggers = [logging.getLogger(), logging.getLogger("completions")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.DEBUG)
    yield written
    for one, level in zip(loggers, levels, strict=True):
        one.removeHandler(handler)
        one.setLevel(level)


def test_a_wrong_method_and_an_unknown_path_wear_the_dialects_form() -> None:
    http = client(openai_completions_app(parts()))

    wrong_method, unknown = http.get("/v1/completions"), http.post("/v1/nothing")

    assert (wrong_method.status_code, wrong_method.json()["error"]["code"]) == (405, "method_not_supported")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")


def test_the_adapter_finds_the_app_healthy() -> None:
    assert client(openai_completions_app(parts())).get("/healthz").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_is_a_500_with_a_request_id_and_without_its_text(stream: bool) -> None:
    ledger = InMemoryLedger()
    http = client(openai_completions_app(parts(RuntimeError(PROMPT), ledger=ledger)))

    reply = http.post("/v1/completions", json={**BODY, "stream": stream})

    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert PROMPT not in reply.text
    assert reply.headers["x-request-id"]
    assert len(ledger.settled) == 1


def test_a_fault_of_ours_in_mid_stream_is_an_error_frame() -> None:
    ledger = InMemoryLedger()
    http = client(openai_completions_app(parts(delta("a"), RuntimeError(PROMPT), ledger=ledger)))

    reply = http.post("/v1/completions", json={**BODY, "stream": True})

    frames = [frame for frame in reply.text.split("\n\n") if frame]
    assert json.loads(frames[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "[DONE]" not in reply.text
    assert PROMPT not in reply.text
    assert len(ledger.settled) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [WHOLE, (delta(ANSWER), BackendError("The model failed.")), (delta(ANSWER), RuntimeError(PROMPT))],
    ids=["whole", "failed", "our-fault"],
)
def test_no_log_level_shows_prompt_answer_or_key(log: StringIO, stream: bool, script: tuple[object, ...]) -> None:
    http = client(openai_completions_app(parts(*script)))

    http.post("/v1/completions", json={**BODY, "stream": stream})
    http.post("/v1/completions", content=json.dumps({**BODY, "temperature": PROMPT}))
    http.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer sk-another-credential"})

    written = log.getvalue()
    assert "request" in written
    for secret in (PROMPT, ANSWER, KEY, "sk-another-credential", secret_digest(KEY)):
        assert secret not in written


def test_a_key_sees_only_the_models_it_may_use() -> None:
    routes = [route(model_id="acme/one"), route(model_id="two")]
    registry = InMemoryRegistry(
        {secret_digest(KEY): principal(allowed_models=frozenset({"acme/one"}))},
        routes,
    )
    known = Parts(registry, ScriptedBackend(()), InMemoryLedger(), InMemoryReports(), ManualClock())
    http = client(openai_models_app(known))

    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["acme/one"]
    assert http.get("/v1/models/acme/one").json()["id"] == "acme/one"
    assert http.get("/v1/models/two").status_code == 404


def test_the_platforms_request_id_is_the_answers() -> None:
    http = client(openai_completions_app(parts(*WHOLE)))
    context = json.dumps({"requestId": "gateway-1"})
    reply = http.post("/v1/completions", json=BODY, headers={"x-amzn-request-context": context})
    assert reply.headers["x-request-id"] == "gateway-1"


@pytest.mark.parametrize(
    ("address", "body", "scheme", "part"),
    [
        ("/v1/completions", BODY, "Bearer", '"type":"server_error"'),
        ("/completions", BODY, "Bearer", '"type":"server_error"'),
        ("/v2/completions", BODY, "Bearer", '"error":"Internal error occurred.'),
        (
            "/v1/llm/completions-sync?model_endpoint_name=demo",
            {"prompt": PROMPT, "max_new_tokens": 1, "temperature": 0},
            "Bearer",
            '"error":"Internal error occurred.',
        ),
        (
            "/.api/completions/code",
            {"model": "demo", "messages": [{"speaker": "human", "text": PROMPT}], "stream": False},
            "token",
            "The server had an error processing your request.\n",
        ),
    ],
)
def test_one_app_for_every_dialect_answers_each_in_its_own_form(
    address: str, body: object, scheme: str, part: str
) -> None:
    headers = {"Authorization": f"{scheme} {KEY}"}
    whole = client(every_dialects_completions_app(parts(*WHOLE))).post(address, json=body, headers=headers)
    assert (whole.status_code, ANSWER in whole.text) == (200, True)
    broken = client(every_dialects_completions_app(parts(RuntimeError(PROMPT)))).post(
        address, json=body, headers=headers
    )
    assert (broken.status_code, part in broken.text.replace('": "', '":"')) == (500, True)


@pytest.mark.parametrize(("at_once", "threads"), [(1, 40), (64, 128)])
async def test_every_request_that_is_served_side_by_side_has_a_thread_and_one_to_end_it(
    at_once: int, threads: int
) -> None:
    # anyio's own pool has 40: the forty-first stream of an environment would wait for another to speak
    app = every_dialects_completions_app(replace(parts(*WHOLE), requests_at_once=at_once))
    async with app.router.lifespan_context(app):
        assert current_default_thread_limiter().total_tokens == threads
