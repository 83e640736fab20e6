"""Keys that stop and secrets that change: who is let in, and for how long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import httpx2 as httpx
import pytest
from botocore.config import Config
from typer.testing import CliRunner

from completions.dialects.dialect import WireRequest
from completions.dialects.openai import OpenAIDialect
from completions.domain.errors import AuthenticationError
from completions.dynamodb_json import deserialized
from completions.registry.dynamodb import DynamoRegistry, list_keys, put_key
from completions.registry.items import KeyEntry, RetiredSecret
from completions.registry.keys import KeyContendedError, change_key, create_key, delete_key, read_key
from completions.web.auth import KeyAuthenticator, secret_digest
from completions_cli.local.environment import published_environment
from completions_cli.local.stack import LocalStack
from completions_cli.main import app
from dynamodb_local import new_table
from fakes import ManualClock, principal
from speakers import SPEAKERS

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

TABLE = "RegistryTable"


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[DynamoDBClient]:
    with closing(boto3.client("dynamodb")) as tables:
        yield tables


@pytest.fixture
def local(stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder from which ``--local`` finds the stack."""
    monkeypatch.chdir(tmp_path)
    with published_environment(stack.environment):
        yield


def done(*arguments: str) -> str:
    """The standard output of a command that worked."""
    result = CliRunner().invoke(app, ["keys", *arguments, "--local"])
    assert result.exit_code == 0, result.output
    return result.stdout


def created(*options: str) -> tuple[str, str]:
    """A new key's secret and id."""
    values = json.loads(done("create", "--owner", "ada", *options, "--json"))
    return values["key"], values["key_id"]


def authenticated(secret: str, registry: DynamoRegistry, clock: ManualClock | None = None) -> str:
    """The id of the key that was let in."""
    wire = WireRequest("POST", "/v1/completions", {}, {"authorization": f"Bearer {secret}"}, b"")
    authenticator = KeyAuthenticator(registry, clock or ManualClock(datetime.now(UTC)))
    return authenticator.authenticate(OpenAIDialect(), wire).key_id


def digests(client: DynamoDBClient, table: str, key_id: str) -> set[str]:
    """Of all the secrets that the table holds for a key."""
    pages = client.get_paginator("scan").paginate(TableName=table)
    items = (deserialized(item) for page in pages for item in page["Items"])
    return {item["pk"].removeprefix("KEY#") for item in items if item.get("key_id") == key_id and item["sk"] == "KEY"}


def test_a_disabled_key_is_refused_until_it_is_enabled(local: None, client: DynamoDBClient) -> None:
    secret, key_id = created()
    assert done("disable", key_id).startswith(f"{key_id} is disabled; ")
    assert json.loads(done("show", key_id, "--json"))["state"] == "disabled"
    registry = DynamoRegistry(client, TABLE, ManualClock(), 0)
    with pytest.raises(AuthenticationError, match="disabled"):
        authenticated(secret, registry)
    assert done("enable", secret[:7]).startswith(f"{key_id} is active; ")
    assert authenticated(secret, registry) == key_id


def test_a_rotated_key_has_a_new_secret_and_the_old_one_ends_at_once(local: None, client: DynamoDBClient) -> None:
    old, key_id = created("--rpm", "60", "--team", "search")
    before = json.loads(done("show", key_id, "--json"))
    new = done("rotate", key_id).strip()
    assert json.loads(done("show", key_id, "--json")) == {**before, "prefix": new[:7]}
    registry = DynamoRegistry(client, TABLE, ManualClock(), 0)
    assert authenticated(new, registry) == key_id
    with pytest.raises(AuthenticationError, match="not known"):
        authenticated(old, registry)
    assert digests(client, TABLE, key_id) == {secret_digest(new)}


def test_an_old_secret_serves_through_its_grace_under_the_keys_own_rules(local: None, client: DynamoDBClient) -> None:
    old, key_id = created()
    rotated_at = datetime.now(UTC)
    new = json.loads(done("rotate", key_id, "--grace", "24h", "--json"))
    assert new["key_id"] == key_id
    assert [one["prefix"] for one in new["retired"]] == [old[:7]]
    registry = DynamoRegistry(client, TABLE, ManualClock(), 0)
    within, after = (ManualClock(rotated_at + timedelta(hours=hours)) for hours in (23, 25))
    assert {authenticated(secret, registry, within) for secret in (old, new["key"])} == {key_id}
    with pytest.raises(AuthenticationError, match="expired"):
        authenticated(old, registry, after)
    assert authenticated(new["key"], registry, after) == key_id

    done("limits", old[:7], "--rpm", "7")
    done("disable", key_id)
    for secret in (old, new["key"]):
        found = registry.principal(secret_digest(secret))
        assert found is not None
        assert (found.limits.requests_per_minute, found.disabled) == (7, True)
    done("delete", key_id, "--yes")
    assert digests(client, TABLE, key_id) == set()


def test_an_old_secret_does_not_outlive_its_key(local: None, client: DynamoDBClient) -> None:
    old, key_id = created("--expires", "1h")
    done("rotate", key_id, "--grace", "7d")
    found = DynamoRegistry(client, TABLE, ManualClock(), 0).principal(secret_digest(old))
    assert found is not None
    assert found.expires_at is not None
    assert found.expires_at <= datetime.now(UTC) + timedelta(hours=1)


def test_a_rotation_shortens_the_grace_of_older_secrets_and_never_lengthens_it(
    local: None, client: DynamoDBClient
) -> None:
    first, key_id = created()
    second = done("rotate", key_id, "--grace", "1h").strip()
    third = done("rotate", key_id, "--grace", "7d").strip()
    now = datetime.now(UTC)
    entry = read_key(client, TABLE, key_id)
    assert entry is not None
    ends = {one.sha256: one.until for one in entry.retired}
    assert ends.keys() == {secret_digest(first), secret_digest(second)}
    assert ends[secret_digest(first)] <= now + timedelta(hours=1)
    assert ends[secret_digest(second)] > now + timedelta(days=6)
    fourth = done("rotate", key_id).strip()
    assert digests(client, TABLE, key_id) == {secret_digest(fourth)}
    assert len({first, second, third, fourth}) == 4


def test_a_wrong_grace_changes_nothing(local: None, client: DynamoDBClient) -> None:
    secret, key_id = created()
    result = CliRunner().invoke(app, ["keys", "rotate", key_id, "--grace", "1w", "--local"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "completions keys: --grace: must be 0, or a time such as 30m, 24h or 7d\n"
    assert digests(client, TABLE, key_id) == {secret_digest(secret)}


def test_old_secrets_do_not_pile_up_without_end(local: None, client: DynamoDBClient) -> None:
    put_key(client, TABLE, "piled", principal(key_id="piled"))
    later = datetime.now(UTC) + timedelta(days=9)
    old = tuple(RetiredSecret(f"piled-{number}", None, later) for number in range(20))
    change_key(client, TABLE, "piled", lambda entry: replace(entry, retired=old))
    result = CliRunner().invoke(app, ["keys", "rotate", "piled", "--grace", "7d", "--local"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "21 old secrets would still serve; rotate without --grace to end them" in result.stderr
    done("rotate", "piled")
    assert len(digests(client, TABLE, "piled")) == 1


def test_a_revoked_key_lives_as_long_as_the_registry_remembers_it(local: None, client: DynamoDBClient) -> None:
    secret, key_id = created()
    clock = ManualClock(datetime.now(UTC))
    registry = DynamoRegistry(client, TABLE, clock, cache_seconds=30)
    assert authenticated(secret, registry, clock) == key_id
    done("disable", key_id)
    clock.advance(29.9)
    assert authenticated(secret, registry, clock) == key_id
    clock.advance(0.2)
    with pytest.raises(AuthenticationError, match="disabled"):
        authenticated(secret, registry, clock)


def test_an_expired_key_is_not_remembered_beyond_its_end(local: None, client: DynamoDBClient) -> None:
    secret, key_id = created("--expires", "1h")
    clock = ManualClock(datetime.now(UTC))
    registry = DynamoRegistry(client, TABLE, clock, cache_seconds=7_200)
    assert authenticated(secret, registry, clock) == key_id
    clock.advance(3_601)
    with pytest.raises(AuthenticationError, match="expired"):
        authenticated(secret, registry, clock)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("name", "of_no_use", "told"),
    [
        ("openai", {"expires_at": datetime(2020, 1, 1, tzinfo=UTC)}, '"message":"The API key has expired."'),
        ("openai", {"disabled": True}, '"message":"The API key is disabled."'),
        ("scale", {"disabled": True}, '{"detail":"Could not authenticate user"}'),
        ("scale-v1", {"disabled": True}, '{"detail":"Could not authenticate user"}'),
        ("sourcegraph-delta", {"disabled": True}, "Invalid access token.\n"),
    ],
)
def test_a_key_of_no_use_wears_the_dialects_body(
    stack: LocalStack, client: DynamoDBClient, stream: bool, name: str, of_no_use: dict[str, Any], told: str
) -> None:
    secret = f"sk-of-no-use-{len(of_no_use['expires_at'].isoformat()) if 'expires_at' in of_no_use else 0}"
    put_key(client, TABLE, secret_digest(secret), principal(key_id=secret, **of_no_use))
    speaker = SPEAKERS[name]
    scheme = "token" if name.startswith("sourcegraph") else "Bearer"
    reply = httpx.post(
        stack.base_url + speaker.address(stream=stream),
        json=speaker.body(stream, "demo"),
        headers={"Authorization": f"{scheme} {secret}"},
    )
    assert reply.status_code == 401
    assert told in reply.text.replace('": "', '":"')


@pytest.fixture(scope="module")
def atomic(dynamodb_local: str) -> Iterator[tuple[DynamoDBClient, str]]:
    """A registry table where writes that meet are told apart."""
    settings = Config(max_pool_connections=16)
    with closing(boto3.client("dynamodb", endpoint_url=dynamodb_local, config=settings)) as tables:
        yield tables, new_table(tables, "RegistryTable")


def test_rivals_changes_all_count_and_leave_one_secret(atomic: tuple[DynamoDBClient, str]) -> None:
    tables, table = atomic
    entry = KeyEntry(principal(key_id="contended"), "secret-0", "sk-0000", datetime.now(UTC))
    create_key(tables, table, entry)

    def rotate_and_count(number: int) -> None:
        def change(entry: KeyEntry) -> KeyEntry:
            limits = entry.principal.limits
            counted = replace(limits, requests_per_minute=(limits.requests_per_minute or 0) + 1)
            return replace(entry, sha256=f"secret-{number}", principal=replace(entry.principal, limits=counted))

        while True:
            try:
                change_key(tables, table, "contended", change)
                return
            except KeyContendedError:
                continue

    with ThreadPoolExecutor(8) as rivals:
        list(rivals.map(rotate_and_count, range(1, 33)))
    last = read_key(tables, table, "contended")
    assert last is not None
    assert (last.principal.limits.requests_per_minute, last.version) == (32, 33)
    assert digests(tables, table, "contended") == {last.sha256}
    assert [entry.principal.key_id for entry in list_keys(tables, table)] == ["contended"]
    delete_key(tables, table, "contended")
    assert digests(tables, table, "contended") == set()


def test_an_id_is_given_once(atomic: tuple[DynamoDBClient, str]) -> None:
    tables, table = atomic
    first = KeyEntry(principal(key_id="once"), "once-1", "sk-0001", datetime.now(UTC))
    create_key(tables, table, first)
    create_key(tables, table, first)  # as the SDK repeats it after a reply that was lost
    with pytest.raises(KeyContendedError, match="there is a key once already"):
        create_key(tables, table, replace(first, sha256="once-2"))
    assert digests(tables, table, "once") == {"once-1"}
    delete_key(tables, table, "once")


def test_a_key_is_read_as_it_stands_and_not_as_it_stood(client: DynamoDBClient) -> None:
    """A read that lags behind a revocation would keep the key alive for one more round of the cache."""
    bodies: list[dict[str, Any]] = []
    client.meta.events.register(
        "before-call.dynamodb.BatchGetItem",
        lambda params, **_: bodies.append(json.loads(params["body"])),
        unique_id="read",
    )
    try:
        DynamoRegistry(client, TABLE, ManualClock(), 0).principal("nobody", next_model="demo")
    finally:
        client.meta.events.unregister("before-call.dynamodb.BatchGetItem", unique_id="read")
    (body,) = bodies
    assert body["RequestItems"][TABLE]["ConsistentRead"] is True
    assert [name["sk"]["S"] for name in body["RequestItems"][TABLE]["Keys"]] == ["KEY", "demo"]
