"""``completions keys`` for callers who sign with IAM: keys without a secret."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from typer.testing import CliRunner, Result

from completions.dynamodb_json import deserialized
from completions.registry.dynamodb import DynamoRegistry
from completions.web.callers import caller_digest
from completions_cli.local.environment import published_environment
from completions_cli.local.stack import LocalStack
from completions_cli.main import app
from fakes import ManualClock

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

TABLE = "RegistryTable"
ACCOUNT = "123456789012"


def role(name: str) -> str:
    return f"arn:aws:iam::{ACCOUNT}:role/{name}"


def session(name: str) -> str:
    return f"arn:aws:sts::{ACCOUNT}:assumed-role/{name}/ada"


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


def test_a_callers_key_is_made_without_a_secret(client: DynamoDBClient) -> None:
    result = run("create", "--owner", "ada", "--arn", role("build"))
    key_id = result.stdout.strip()
    try:
        assert re.fullmatch(r"key_[0-9a-f]{12}\n", result.stdout)
        assert result.stderr.splitlines() == [
            f"{key_id} for ada. {role('build')} signs its requests: there is no secret.",
            "It counts where functions run with AUTH_MODE iam, as the template's AuthMode sets it.",
        ]
        assert "sk-" not in result.output
        pages = client.get_paginator("scan").paginate(TableName=TABLE)
        items = [deserialized(item) for page in pages for item in page["Items"]]
        found = {item["pk"]: item for item in items if item.get("key_id") == key_id}
        assert found.keys() == {f"KEY#{caller_digest(role('build'))}", "KEYS"}
        assert {item["arn"] for item in found.values()} == {role("build")}
    finally:
        done("delete", key_id, "--yes")


def test_all_that_is_said_of_a_callers_key_is_kept_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    made = json.loads(
        done(
            "create", "--owner", "ada", "--team", "search", "--arn", role("shown"), "--rpm", "60", "--model", "demo",
            "--expires", "2099-01-31", "--json",
        )
    )  # fmt: skip
    key_id = made["key_id"]
    try:
        assert "key" not in made
        assert (made["arn"], made["prefix"]) == (role("shown"), None)
        assert (made["team"], made["allowed_models"], made["expires_at"]) == (
            "search",
            ["demo"],
            "2099-01-31T00:00:00Z",
        )
        for named in (key_id, role("shown"), session("shown"), f"arn:aws:iam::{ACCOUNT}:role/path/shown"):
            assert json.loads(done("show", named, "--json")) == made
        assert [one for one in json.loads(done("list", "--json")) if one["key_id"] == key_id] == [made]
        assert f"caller       {role('shown')}" in done("show", key_id).splitlines()
        (row,) = [line for line in done("list").splitlines() if key_id in line]
        assert [cell.strip() for cell in row.strip("│").split("│")][:4] == [key_id, role("shown"), "ada", "search"]
    finally:
        done("delete", key_id, "--yes")


@pytest.mark.parametrize(
    "named", [f"arn:aws:iam::{ACCOUNT}:role/division/ci/pathed", f"arn:aws:sts::{ACCOUNT}:assumed-role/pathed/ada"]
)
def test_a_role_with_a_path_or_a_session_of_it_is_kept_as_the_role(client: DynamoDBClient, named: str) -> None:
    result = run("create", "--owner", "ada", "--arn", named)
    key_id = result.stdout.strip()
    try:
        assert f"{named} is kept as its role without a path" in result.stderr
        assert json.loads(done("show", key_id, "--json"))["arn"] == role("pathed")
        found = DynamoRegistry(client, TABLE, ManualClock(), 0).principal(caller_digest(role("pathed")))
        assert found is not None
        assert found.key_id == key_id
    finally:
        done("delete", key_id, "--yes")


def test_root_is_told_to_be_one_user() -> None:
    result = run("create", "--owner", "ada", "--arn", f"arn:aws:iam::{ACCOUNT}:root")
    done("delete", result.stdout.strip(), "--yes")
    assert "Meant is the account's root user alone, not everybody in the account." in result.stderr


@pytest.mark.parametrize("second", [role("twice"), f"arn:aws:iam::{ACCOUNT}:role/path/twice"])
def test_a_caller_has_one_key(second: str, client: DynamoDBClient) -> None:
    key_id = done("create", "--owner", "ada", "--arn", role("twice")).strip()
    try:
        before = done("list", "--json")
        result = run("create", "--owner", "bo", "--arn", second)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"completions keys: there is a key of {role('twice')} already\n"
        assert done("list", "--json") == before
    finally:
        done("delete", key_id, "--yes")


def test_a_callers_key_has_nothing_to_rotate() -> None:
    key_id = done("create", "--owner", "ada", "--arn", role("fixed")).strip()
    try:
        before = done("show", key_id, "--json")
        result = run("rotate", key_id)
        assert (result.exit_code, result.stdout) == (1, "")
        assert (
            result.stderr == f"completions keys: {key_id} has no secret to rotate: {role('fixed')} signs its requests\n"
        )
        assert done("show", key_id, "--json") == before
    finally:
        done("delete", key_id, "--yes")


@pytest.mark.parametrize("arn", ["", "build", f"arn:aws:iam::{ACCOUNT}:role/*", f"arn:aws:iam::{ACCOUNT}:group/all"])
def test_what_is_no_callers_arn_makes_no_key(arn: str) -> None:
    before = done("list", "--json")
    result = run("create", "--owner", "ada", "--arn", arn)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("completions keys: --arn: must be the ARN of an IAM role, user, root, ")
    assert done("list", "--json") == before


def test_a_caller_without_a_key_is_told_by_its_arn() -> None:
    result = run("show", session("nobody"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"completions keys: {TABLE} has no key of {role('nobody')}\n"
