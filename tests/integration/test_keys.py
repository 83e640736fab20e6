"""``completions keys`` on the running stack: keys made, shown, limited and deleted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import boto3
import httpx2 as httpx
import pytest
from typer.testing import CliRunner, Result

from completions.domain.limits import KeyLimits
from completions.dynamodb_json import deserialized
from completions.registry.dynamodb import DynamoRegistry, list_keys, put_key, put_model
from completions.registry.keys import change_key
from completions.web.auth import secret_digest
from completions_cli.local.environment import published_environment
from completions_cli.local.stack import LocalStack
from completions_cli.main import app
from fakes import ManualClock, principal, route
from speakers import openai_body

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

TABLE = "RegistryTable"
SECRET = re.compile(r"sk-[A-Za-z0-9_-]{43}")


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[DynamoDBClient]:
    with closing(boto3.client("dynamodb")) as tables:
        yield tables


@pytest.fixture
def local(stack: LocalStack, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder from which ``--local`` finds the stack."""
    monkeypatch.chdir(tmp_path)
    with published_environment(stack.environment):
        yield


@pytest.fixture
def http(stack: LocalStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.base_url, timeout=30) as one:
        yield one


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments, "--local"], input=answer)


def done(*arguments: str, answer: str | None = None) -> str:
    """The standard output of a command that worked."""
    result = run(*arguments, answer=answer)
    assert result.exit_code == 0, result.output
    return result.stdout


def created(*options: str) -> tuple[str, str]:
    """A new key's secret and id."""
    values = json.loads(done("create", "--owner", "ada", *options, "--json"))
    return values["key"], values["key_id"]


def shown(key: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(done("show", key, "--json"))
    return values


def asked(http: httpx.Client, secret: str, model: str = "demo") -> httpx.Response:
    headers = {"Authorization": f"Bearer {secret}"}
    return http.post("/v1/completions", json={**openai_body(False, model), "max_tokens": 1}, headers=headers)


def items(client: DynamoDBClient, key_id: str) -> dict[str, dict[str, Any]]:
    """Every item of a key in the registry, by its partition."""
    pages = client.get_paginator("scan").paginate(TableName=TABLE)
    found = (deserialized(item) for page in pages for item in page["Items"])
    return {item["pk"]: item for item in found if item.get("key_id") == key_id}


def test_a_key_is_printed_alone_and_asks_at_once(local: None, http: httpx.Client) -> None:
    result = run("create", "--owner", "ada")
    assert result.exit_code == 0
    assert SECRET.fullmatch(result.stdout.removesuffix("\n"))
    assert re.fullmatch(
        r"key_[0-9a-f]{12} for ada\. This is the only time the secret is shown:\n", result.stderr.replace("\r", "")
    )
    assert asked(http, result.stdout.strip()).status_code == 200


def test_all_that_is_said_of_a_key_is_kept(local: None, client: DynamoDBClient) -> None:
    before = datetime.now(UTC)
    secret, key_id = created(
        "--team", "compilers", "--admin", "--model", "demo-tgi", "--model", "demo", "--expires", "2099-01-31",
        "--rpm", "60", "--tpm", "100000", "--parallel", "4", "--tokens-per-day", "1000000",
        "--tokens-per-month", "20000000", "--budget-per-day", "$5", "--budget-per-month", "99.000000001",
    )  # fmt: skip
    values = shown(key_id)
    made = datetime.fromisoformat(values.pop("created_at"))
    assert before.replace(microsecond=0) <= made <= datetime.now(UTC)
    assert values == {
        "key_id": key_id,
        "prefix": secret[:7],
        "arn": None,
        "owner": "ada",
        "team": "compilers",
        "admin": True,
        "allowed_models": ["demo", "demo-tgi"],
        "state": "active",
        "disabled": False,
        "expires_at": "2099-01-31T00:00:00Z",
        "limits": {
            "requests_per_minute": 60,
            "tokens_per_minute": 100_000,
            "parallel_requests": 4,
            "tokens_per_day": 1_000_000,
            "tokens_per_month": 20_000_000,
            "nanos_per_day": 5_000_000_000,
            "nanos_per_month": 99_000_000_001,
        },
        "retired": [],
    }
    found = DynamoRegistry(client, TABLE, ManualClock(), 0).principal(secret_digest(secret))
    assert found is not None
    assert (found.key_id, found.owner, found.team, found.admin) == (key_id, "ada", "compilers", True)
    assert found.allowed_models == frozenset({"demo", "demo-tgi"})
    assert found.expires_at == datetime(2099, 1, 31, tzinfo=UTC)
    assert found.limits == KeyLimits(60, 100_000, 4, 1_000_000, 20_000_000, 5_000_000_000, 99_000_000_001)


def test_a_key_is_two_items_of_one_transaction(local: None, client: DynamoDBClient) -> None:
    secret, key_id = created()
    found = items(client, key_id)
    assert found.keys() == {f"KEY#{secret_digest(secret)}", "KEYS"}
    assert found["KEYS"]["sha256"] == secret_digest(secret)
    assert found["KEYS"]["sk"] == key_id

    calls: list[str] = []
    client.meta.events.register("before-call.dynamodb", lambda model, **_: calls.append(model.name), unique_id="writes")
    try:
        change_key(client, TABLE, key_id, lambda entry: replace(entry, principal=replace(entry.principal, owner="bo")))
    finally:
        client.meta.events.unregister("before-call.dynamodb", unique_id="writes")
    assert calls == ["GetItem", "TransactWriteItems"]
    assert {item["owner"] for item in items(client, key_id).values()} == {"bo"}


def test_the_keys_are_listed_without_their_secrets(local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    secret, key_id = created("--team", "search", "--model", "demo", "--rpm", "60", "--budget-per-day", "$0.25")
    (row,) = [line for line in done("list").splitlines() if key_id in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [key_id, secret[:7], "ada", "search", "demo", "60 requests a minute", "", "active"]
    assert [one for one in json.loads(done("list", "--json")) if one["key_id"] == key_id] == [shown(key_id)]


def test_the_local_key_is_among_them(local: None) -> None:
    assert shown("local")["admin"] is True
    assert shown("local")["limits"] == dict.fromkeys(shown("local")["limits"])


def test_a_key_is_found_by_how_it_begins_where_that_is_unique(local: None, client: DynamoDBClient) -> None:
    for number in (1, 2):
        put_key(client, TABLE, f"twin-{number}", principal(key_id=f"twin-{number}"), prefix="sk-tw/n")
    put_key(client, TABLE, "single", principal(key_id="single"), prefix="sk-si/g")
    assert shown("sk-si/g")["key_id"] == "single"
    twins = run("show", "sk-tw/n")
    assert (twins.exit_code, twins.stderr) == (
        1,
        "completions keys: more than one key begins with sk-tw/n: twin-1, twin-2\n",
    )


def test_people_read_a_key_line_by_line(local: None) -> None:
    secret, key_id = created("--rpm", "60", "--budget-per-month", "$1234.5", "--expires", "2099-01-31")
    lines = dict(line.split(maxsplit=1) for line in done("show", key_id).splitlines() if "begins" not in line)
    assert lines == {
        "id": key_id,
        "owner": "ada",
        "team": "none",
        "admin": "no",
        "models": "all",
        "state": "active",
        "created": shown(key_id)["created_at"],
        "expires": "2099-01-31T00:00:00Z",
        "limits": "60 requests a minute, $1,234.50 a month",
    }
    assert f"begins with  {secret[:7]}" in done("show", secret[:7]).splitlines()


@pytest.mark.parametrize("command", ["show", "disable", "enable", "rotate", "delete"])
def test_a_key_that_is_not_there_is_told(local: None, command: str) -> None:
    result = run(command, "key_000000000000")
    assert (result.exit_code, result.stderr) == (1, f"completions keys: {TABLE} has no key 'key_000000000000'\n")


@pytest.mark.parametrize("command", ["show", "disable", "enable", "rotate", "delete"])
def test_a_secret_in_the_place_of_an_id_is_not_told_back(local: None, command: str) -> None:
    secret, _ = created()
    for named in (secret, secret.removeprefix("sk-"), secret[:20]):
        # behind "--", for what is random may begin as an option does
        result = CliRunner().invoke(app, ["keys", command, "--local", "--", named])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == "completions keys: give the key's id or its first 7 characters, not the key itself\n"


BAD_OPTIONS = [
    (["--owner", ""], "--owner: must be 1 to 128 printable characters"),
    (["--team", "a\nb"], "--team: must be 1 to 128 printable characters"),
    (["--expires", "2020-01-01"], "--expires: must lie in the future"),
    (["--expires", "soon"], "--expires: must be a day such as 2027-01-31"),
    (["--rpm", "0"], "--rpm: must be a whole number from 1"),
    (["--tpm", "1.5"], "--tpm: must be a whole number from 1"),
    (["--parallel", "-1"], "--parallel: must be a whole number from 1"),
    (["--tokens-per-day", "1e6"], "--tokens-per-day: must be a whole number from 1"),
    (["--tokens-per-month", "10000000000000000"], "--tokens-per-month: must be a whole number from 1"),
    (["--budget-per-day", "-5"], "--budget-per-day: must not be negative"),
    (["--budget-per-day", "0"], "--budget-per-day: must be more than 0"),
    (["--budget-per-day", "0.0000000001"], "--budget-per-day: has more than 9 decimals"),
    (["--budget-per-month", "1000001"], "--budget-per-month: must not exceed 1000000 dollars"),
    (["--budget-per-month", "free"], "--budget-per-month: must be US dollars"),
    (["--model", "nothing"], f"--model: {TABLE} has no model 'nothing'"),
]


@pytest.mark.parametrize(("options", "told"), BAD_OPTIONS, ids=lambda value: " ".join(value)[:40])
def test_a_wrong_option_makes_no_key_and_is_named(
    local: None, client: DynamoDBClient, options: list[str], told: str
) -> None:
    before = {entry.principal.key_id for entry in list_keys(client, TABLE)}
    result = run("create", *(["--owner", "ada"] if "--owner" not in options else []), *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"completions keys: {told}")
    assert {entry.principal.key_id for entry in list_keys(client, TABLE)} == before


def test_an_owner_is_asked_for(local: None) -> None:
    assert run("create").exit_code == 2


def test_without_a_table_or_a_stack_nothing_is_made(
    stack: LocalStack, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REGISTRY_TABLE")
    without = CliRunner().invoke(app, ["keys", "create", "--owner", "ada"])
    assert (without.exit_code, without.stdout, without.stderr) == (
        2,
        "",
        "completions keys: no table: set REGISTRY_TABLE or --table, or use --local\n",
    )
    stackless = run("list")
    assert (stackless.exit_code, stackless.stderr) == (
        1,
        "completions keys: no local stack runs from this folder; start one with `make serve`\n",
    )
    nowhere = CliRunner().invoke(app, ["keys", "create", "--owner", "ada", "--table", "Nowhere"])
    assert (nowhere.exit_code, nowhere.stdout) == (1, "")
    assert "table Nowhere: " in nowhere.stderr


def test_a_key_asks_the_models_it_may_and_finds_no_others(
    local: None, http: httpx.Client, client: DynamoDBClient
) -> None:
    put_model(client, TABLE, replace(route(model_id="keyed", endpoint_name="demo"), aliases=("keyed-latest",)))
    try:
        secret, key_id = created("--model", "keyed-latest")
        assert shown(key_id)["allowed_models"] == ["keyed"]
        assert [asked(http, secret, model).status_code for model in ("keyed", "keyed-latest")] == [200, 200]
        refused = asked(http, secret, "demo")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    finally:
        for name in ("keyed", "keyed-latest"):
            client.delete_item(TableName=TABLE, Key={"pk": {"S": "MODEL"}, "sk": {"S": name}})


def test_limits_are_set_and_taken_away_one_by_one(local: None, client: DynamoDBClient) -> None:
    secret, key_id = created("--rpm", "10", "--tpm", "500", "--budget-per-day", "$5")
    assert done("limits", key_id, "--rpm", "60", "--budget-per-day", "none", "--budget-per-month", "12.5") == (
        "requests per minute: 10 → 60\ndollars per day: $5.00 → none\ndollars per month: none → $12.50\n"
    )
    found = DynamoRegistry(client, TABLE, ManualClock(), 0).principal(secret_digest(secret))
    assert found is not None
    assert found.limits == KeyLimits(requests_per_minute=60, tokens_per_minute=500, nanos_per_month=12_500_000_000)
    assert done("limits", key_id, "--rpm", "60") == "no changes\n"


def test_limits_that_name_nothing_or_nonsense_change_nothing(local: None, client: DynamoDBClient) -> None:
    _, key_id = created("--rpm", "10")
    before = items(client, key_id)
    nothing, nonsense = run("limits", key_id), run("limits", key_id, "--rpm", "60", "--tpm", "0")
    assert nothing.exit_code == nonsense.exit_code == 2
    assert "name a limit to change: --rpm, " in nothing.stderr
    assert "--tpm: must be a whole number" in nonsense.stderr
    assert items(client, key_id) == before


def test_a_keys_limits_hold_for_its_requests(local: None, http: httpx.Client) -> None:
    secret, key_id = created("--tokens-per-month", "1")
    refused = asked(http, secret)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "insufficient_quota")
    assert key_id in refused.json()["error"]["message"]
    free, _ = created("--tokens-per-month", "1000000")
    assert asked(http, free).status_code == 200


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_a_key_is_not_deleted_without_consent(local: None, client: DynamoDBClient, answer: str) -> None:
    _, key_id = created()
    result = run("delete", key_id, answer=answer)
    assert result.exit_code == 1
    assert f"Delete {key_id}? Its usage records stay. [y/N]" in result.output
    assert items(client, key_id).keys() >= {"KEYS"}


def test_a_deleted_key_is_gone_and_its_usage_stays(
    local: None, client: DynamoDBClient, http: httpx.Client, stack: LocalStack
) -> None:
    secret, key_id = created()
    request_id = asked(http, secret).headers["x-request-id"]
    assert f"{key_id} deleted" in done("delete", key_id, answer="y\n")
    assert items(client, key_id) == {}
    assert run("show", key_id).exit_code == 1
    name: Any = {"pk": {"S": f"REQ#{request_id}"}, "sk": {"S": "RECORD"}}
    assert client.get_item(TableName=stack.environment["USAGE_TABLE"], Key=name)["Item"]["key_id"] == {"S": key_id}


def test_an_entry_that_cannot_be_read_is_told_and_can_be_deleted(
    local: None, client: DynamoDBClient, caplog: pytest.LogCaptureFixture
) -> None:
    put_key(client, TABLE, "digest-of-the-broken", principal(key_id="broken"))
    name: Any = {"pk": {"S": "KEYS"}, "sk": {"S": "broken"}}
    client.update_item(
        TableName=TABLE,
        Key=name,
        UpdateExpression="SET #owner = :odd",
        ExpressionAttributeNames={"#owner": "owner"},
        ExpressionAttributeValues={":odd": {"L": []}},
    )
    try:
        listed = run("list", "--json")
        assert (listed.exit_code, listed.stderr) == (
            1,
            "completions keys: the table holds keys that cannot be read: broken\n",
        )
        assert json.loads(listed.stdout)
        told = "completions keys: the table's entry of the key broken cannot be read\n"
        assert run("show", "broken").stderr == run("disable", "broken").stderr == told
        assert "broken" not in {entry.principal.key_id for entry in list_keys(client, TABLE)}
    finally:
        done("delete", "broken", "--yes")
    assert items(client, "broken") == {}
    assert DynamoRegistry(client, TABLE, ManualClock(), 0).principal("digest-of-the-broken") is None


def test_a_key_that_is_put_again_under_its_id_leaves_no_other_secret(local: None, client: DynamoDBClient) -> None:
    for digest in ("put-1", "put-2"):
        put_key(client, TABLE, digest, principal(key_id="put-twice"))
    assert items(client, "put-twice").keys() == {"KEY#put-2", "KEYS"}
