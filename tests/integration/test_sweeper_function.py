"""The sweeper as it is run: by the schedule, and by hand."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.config import Config
from typer.testing import CliRunner

from completions.domain.metering import Principal, Reservation
from completions.metering.sweep import SweepError, SweepPolicy
from completions.registry.dynamodb import put_key
from completions_cli.local.tables import moto_dynamodb
from completions_cli.local.template import load_template
from completions_cli.main import app
from dynamodb_local import new_table
from metered import AMPLE, LONG_AGO, Books, key, left_behind, reservation

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

REGION = "ap-northeast-3"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_dynamodb() as url:
        yield url


@pytest.fixture(scope="module")
def client(moto: str) -> Iterator[DynamoDBClient]:
    settings = Config(region_name=REGION, retries={"total_max_attempts": 1})
    with closing(boto3.client("dynamodb", endpoint_url=moto, config=settings)) as opened:
        yield opened


@pytest.fixture
def environment(moto: str, client: DynamoDBClient, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a deployed function, over tables of its own."""
    variables = {
        "AWS_ENDPOINT_URL_DYNAMODB": moto,
        "AWS_DEFAULT_REGION": REGION,
        "REGISTRY_TABLE": new_table(client, "RegistryTable"),
        "USAGE_TABLE": new_table(client),
        "POWERTOOLS_LOG_LEVEL": "INFO",
        "POWERTOOLS_SERVICE_NAME": "gateway",
        "COLUMNS": "120",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("POWERTOOLS_METRICS_DISABLED", raising=False)
    return variables


def old(principal: Principal) -> Reservation:
    """A request that began long ago by this machine's clock."""
    return reservation(principal, datetime.now(UTC) - LONG_AGO)


PROGRAM = """
import json, pathlib, sys
from completions.handlers.usage_sweeper import handler
event = json.loads(pathlib.Path(sys.argv[1]).read_text())
print(json.dumps({"swept": handler(event, None)}))
print(json.dumps({"loaded": sorted({"fastapi", "starlette", "mangum", "uvicorn"} & set(sys.modules))}))
"""


def test_the_function_sweeps_keys_with_limits_and_imports_no_web_framework(
    environment: dict[str, str], client: DynamoDBClient, project_root: Path
) -> None:
    books, principal = Books(client, environment["USAGE_TABLE"]), key(**AMPLE)
    put_key(client, environment["REGISTRY_TABLE"], "digest", principal)
    put_key(client, environment["REGISTRY_TABLE"], "other", key())
    left_behind(books, old(principal), "settle_record", "close_hold")
    event = project_root / "events" / "usage_sweeper.json"

    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(event)], env=os.environ, capture_output=True, text=True, check=True
    )

    lines = [json.loads(line) for line in run.stdout.splitlines()]
    swept, loaded = (next(line[name] for line in lines if name in line) for name in ("swept", "loaded"))
    assert (swept["released"], swept["lost"], swept["failed"], swept["complete"]) == (1, 1, 0, True)
    assert loaded == []
    (line,) = [line for line in lines if line.get("message") == "usage_swept"]
    assert (line["released"], line["lost"]) == (1, 1)
    (metrics,) = [line for line in lines if "_aws" in line]
    assert (metrics["SweepReleased"], metrics["SweepLost"]) == ([1.0], [1.0])
    (told,) = metrics["_aws"]["CloudWatchMetrics"]
    assert (told["Namespace"], told["Dimensions"], metrics["service"]) == ("completions", [["service"]], "gateway")
    books.require_balance(principal)


def test_a_run_that_fails_is_measured_and_told_to_lambda(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("USAGE_TABLE", "nowhere")
    monkeypatch.setenv("POWERTOOLS_LOG_LEVEL", "CRITICAL")
    name = "completions.handlers.usage_sweeper"
    monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        module = importlib.import_module(name)
        with pytest.raises(SweepError):
            module.handler({}, None)
    finally:
        del sys.modules[name]
    (metrics,) = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"_aws"' in line]
    assert metrics["SweepFailed"] == [1.0]


def test_the_template_gives_the_sweeper_what_it_needs_and_no_more(project_root: Path) -> None:
    resources = load_template(project_root / "template.yaml")["Resources"]
    function = resources["UsageSweeperFunction"]["Properties"]
    assert function["Events"]["EveryMinute"]["Type"] == "ScheduleV2"
    assert function["Events"]["EveryMinute"]["Properties"]["ScheduleExpression"] == "rate(1 minute)"
    actions = [statement["Action"] for statement in function["Policies"][0]["Statement"]]
    assert actions == [
        "dynamodb:Query",
        ["dynamodb:BatchGetItem", "dynamodb:GetItem", "dynamodb:PutItem", "dynamodb:UpdateItem"],
    ]
    assert function["Timeout"] > SweepPolicy().seconds


def test_the_command_sweeps_by_hand(environment: dict[str, str], client: DynamoDBClient) -> None:
    books, principal = Books(client, environment["USAGE_TABLE"]), key(**AMPLE)
    put_key(client, environment["REGISTRY_TABLE"], "digest", principal)
    left_behind(books, old(principal), "settle_record")
    result = CliRunner().invoke(app, ["usage", "sweep"])
    assert result.exit_code == 0, result.output
    assert "1 records settled from what was left" in result.output
    books.require_balance(principal)


def test_the_command_names_what_is_missing_of_its_environment(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REGISTRY_TABLE")
    result = CliRunner().invoke(app, ["usage", "sweep"])
    assert (result.exit_code, "REGISTRY_TABLE" in result.output) == (1, True)


def test_the_command_fails_when_a_table_is_not_there(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USAGE_TABLE", "nowhere")
    result = CliRunner().invoke(app, ["usage", "sweep"])
    assert (result.exit_code, "failed" in result.output) == (1, True)


@pytest.mark.parametrize("command", [["sweep", "--local"], ["replay", "-", "--local"]])
def test_without_a_local_stack_the_commands_say_so(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["usage", *command])
    assert (result.exit_code, "make serve" in result.output) == (1, True)
