"""A key's limits as a client meets them: in each dialect, in the headers of its answers, under a name that is repeated.

Also how often a request goes to DynamoDB.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import boto3
import httpx2 as httpx
import openai
import pytest
from openai import OpenAI

from completions.bootstrap import Parts, build_parts
from completions.domain.completion import CompletionRequest
from completions.domain.limits import KeyLimits
from completions.domain.metering import Principal
from completions.metering.dynamodb import DynamoUsageLedger
from completions.registry.dynamodb import DynamoRegistry, put_key
from completions.service.complete import CallContext
from completions.settings import read_settings
from completions.web.auth import secret_digest
from completions_cli.local.stack import LocalStack
from ledger_reader import LedgerReader
from speakers import SPEAKERS

BODY = {"model": "demo", "prompt": "import os\n", "max_tokens": 4, "temperature": 0}
Keys = Callable[..., str]


@pytest.fixture
def key(stack: LocalStack) -> Iterator[Keys]:
    """Makes keys with limits."""
    with closing(boto3.client("dynamodb")) as client:

        def make(**limits: int) -> str:
            secret = f"sk-{uuid.uuid4()}"
            owner = Principal(f"key-{secret[-6:]}", "ada", "compilers", limits=KeyLimits(**limits))
            put_key(client, stack.environment["REGISTRY_TABLE"], secret_digest(secret), owner)
            return secret

        yield make


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=30) as client:
        yield client


def ask(http: httpx.Client, secret: str, **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {secret}", **fields.pop("headers", {})}
    return http.post("/v1/completions", json={**BODY, **fields}, headers=headers)


def test_an_answer_tells_what_the_key_has_left(http: httpx.Client, key: Keys) -> None:
    secret = key(requests_per_minute=7, tokens_per_minute=900, tokens_per_day=5_000)
    for stream in (False, True):
        headers = ask(http, secret, stream=stream).headers
        assert headers["x-ratelimit-limit-requests"] == "7"
        assert headers["x-ratelimit-remaining-requests"] == ("5" if stream else "6")
        assert headers["x-ratelimit-limit-tokens"] == "900"
        assert 0 < int(headers["x-ratelimit-remaining-tokens"]) < 900
        assert headers["x-ratelimit-reset-requests"].endswith(("s", "ms"))


def test_a_key_without_limits_says_nothing_of_any(http: httpx.Client) -> None:
    assert not [name for name in ask(http, "sk-local").headers if name.startswith("x-ratelimit")]


def test_too_fast_is_a_429_with_the_time_to_wait(http: httpx.Client, key: Keys) -> None:
    secret = key(requests_per_minute=1)
    assert ask(http, secret).status_code == 200
    reply = ask(http, secret)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert "1 requests per minute" in error["message"]
    assert 0 < float(reply.headers["retry-after"]) <= 60
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-should-retry" not in reply.headers


def test_a_used_up_budget_is_a_quota_that_is_not_retried(base_url: str, http: httpx.Client, key: Keys) -> None:
    secret = key(tokens_per_day=40)
    assert ask(http, secret).status_code == 200
    with (
        OpenAI(base_url=f"{base_url}/v1", api_key=secret, max_retries=5) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.completions.create(model="demo", prompt="import os\n", max_tokens=18, temperature=0)
    assert caught.value.code == "insufficient_quota"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "resets in" in caught.value.message


@pytest.mark.parametrize("name", SPEAKERS)
def test_a_limit_is_told_in_the_dialects_own_form(http: httpx.Client, key: Keys, name: str) -> None:
    secret, speaker = key(requests_per_minute=1), SPEAKERS[name]
    speaker_headers = {
        "openai": {"Authorization": f"Bearer {secret}"},
        "scale": {"Authorization": f"Bearer {secret}"},
        "scale-v1": {"x-api-key": secret},
    }.get(name, {"Authorization": f"token {secret}"})
    replies = [
        http.post(speaker.address(stream=False), json=speaker.body(False, "demo"), headers=speaker_headers)
        for _ in range(2)
    ]
    assert [reply.status_code for reply in replies] == [200, 429]
    refused = replies[1]
    assert "requests per minute" in refused.text
    if name.startswith("sourcegraph"):
        assert parsedate_to_datetime(refused.headers["retry-after"]).tzinfo is not None
        assert (refused.headers["x-ratelimit-limit"], refused.headers["x-ratelimit-remaining"]) == ("1", "0")
    else:
        assert 0 < float(refused.headers["retry-after"]) <= 60
    assert secret not in refused.text


def test_what_is_refused_by_a_limit_costs_nothing_and_asks_no_model(
    stack: LocalStack, ledger: LedgerReader, http: httpx.Client, key: Keys
) -> None:
    secret = key(requests_per_minute=1)
    ask(http, secret)
    before = stack.sagemaker.call_count["demo"]
    reply = ask(http, secret)
    assert stack.sagemaker.call_count["demo"] == before
    assert ledger.raw(reply.headers["x-request-id"]) is None


# Idempotency-Key


def test_a_repeated_name_is_answered_and_charged_once(stack: LocalStack, http: httpx.Client, key: Keys) -> None:
    secret, name = key(requests_per_minute=9), str(uuid.uuid4())
    before = stack.sagemaker.call_count["demo"]
    first, second = (ask(http, secret, headers={"Idempotency-Key": name}) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 409)
    assert second.json()["error"]["code"] == "duplicate_request"
    assert "already answered and charged" in second.json()["error"]["message"]
    assert second.headers["x-should-retry"] == "false"
    assert stack.sagemaker.call_count["demo"] == before + 1


def test_a_name_is_not_for_another_request_but_is_for_another_key(http: httpx.Client, key: Keys) -> None:
    name = {"Idempotency-Key": str(uuid.uuid4())}
    one, other = key(requests_per_minute=9), key()
    assert ask(http, one, headers=name).status_code == 200
    reused = ask(http, one, headers=name, max_tokens=5)
    assert (reused.status_code, reused.json()["error"]["code"]) == (400, "idempotency_key_reused")
    assert ask(http, other, headers=name).status_code == 200


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_a_name_that_is_none_is_refused(http: httpx.Client, name: str) -> None:
    reply = ask(http, "sk-local", headers={"Idempotency-Key": name})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "Idempotency-Key")


# Round trips


@contextmanager
def counted(parts: Parts) -> Iterator[list[str]]:
    """The operations DynamoDB is asked for, while this lasts."""
    assert isinstance(parts.registry, DynamoRegistry)
    assert isinstance(parts.ledger, DynamoUsageLedger)
    client: Any = parts.registry._client
    asked: list[str] = []

    def note(model: Any, **_: Any) -> None:
        asked.append(model.name)

    client.meta.events.register("before-call.dynamodb", note, unique_id="counted")
    try:
        yield asked
    finally:
        client.meta.events.unregister("before-call.dynamodb", unique_id="counted")


@pytest.mark.parametrize(
    ("limits", "before", "beside", "after"),
    [
        # nothing stands between a warm key without limits and its model
        ({}, [], ["PutItem"], ["UpdateItem"]),
        ({"parallel_requests": 5}, ["UpdateItem"], ["PutItem"], ["UpdateItem", "UpdateItem"]),
    ],
    ids=["unlimited", "limited"],
)
def test_how_often_dynamodb_is_waited_for(
    stack: LocalStack, key: Keys, limits: dict[str, int], before: list[str], beside: list[str], after: list[str]
) -> None:
    secret = key(**limits)
    parts = build_parts(read_settings(stack.environment))
    canonical = CompletionRequest("demo", ("import os\n",), max_tokens=2)
    with counted(parts) as asked:
        for temperature in ("cold", "warm"):
            asked.clear()
            principal = parts.registry.principal(secret_digest(secret), next_model="demo")
            assert principal is not None
            assert asked == (["BatchGetItem"] if temperature == "cold" else [])
            context = CallContext(str(uuid.uuid4()), principal, "openai", parts.clock.monotonic())
            asked.clear()
            stream = parts.service.stream(canonical, context)
            assert sorted(asked) == sorted([*before, *beside])
            asked.clear()
            list(stream)
            assert asked == after
