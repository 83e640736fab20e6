"""Amazon's own DynamoDB in this machine's memory, for what moto is known to get wrong: writes that meet, and capacity.

Tests that need it are skipped, and say so, where it cannot be started.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from completions_cli.local.template import load_template

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

ROOT = Path(__file__).parent.parent
STARTER = ROOT.parent / "shared" / "tools" / "dynamodb-local-here"
_PROPERTIES = ("BillingMode", "AttributeDefinitions", "KeySchema", "GlobalSecondaryIndexes")


class NoDynamoDBLocalError(Exception):
    """It cannot be started here; the message says why."""


@contextmanager
def running_dynamodb_local() -> Iterator[str]:
    """Its URL, shared by the processes of a test run: the first starts it, the last stops it.

    Raises ``NoDynamoDBLocalError``.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    shared = _folder() / f"dynamodb-local-{run}.json"
    with _locked():
        _reap()
        told = json.loads(shared.read_text()) if shared.exists() else {**_start(), "users": []}
        shared.write_text(json.dumps({**told, "users": [*told["users"], os.getpid()]}))
    try:
        yield told["DYNAMODB_LOCAL_URL"]
    finally:
        with _locked():
            told = json.loads(shared.read_text())
            told["users"].remove(os.getpid())
            shared.write_text(json.dumps(told))
            _reap()


def _reap() -> None:
    """Stop those that nobody uses any more, also what a killed test run left."""
    for shared in _folder().glob("dynamodb-local-*.json"):
        told = json.loads(shared.read_text())
        if not any(map(_is_running, told["users"])):
            if _is_running(int(told["DYNAMODB_LOCAL_PID"])):
                os.kill(int(told["DYNAMODB_LOCAL_PID"]), signal.SIGTERM)
            shared.unlink()


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _folder() -> Path:
    return Path(tempfile.gettempdir())


def _start() -> dict[str, Any]:
    if not STARTER.is_file():
        raise NoDynamoDBLocalError(f"DynamoDB Local: there is no {STARTER.name} in ../shared/tools")
    command = [str(STARTER), str(_free_port())]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except subprocess.TimeoutExpired:
        raise NoDynamoDBLocalError("DynamoDB Local did not start in time") from None
    if run.returncode != 0:
        raise NoDynamoDBLocalError(f"DynamoDB Local did not start: {run.stderr.strip()[-300:]}")
    return dict(word.split("=", 1) for word in run.stdout.split() if "=" in word)


@contextmanager
def _locked() -> Iterator[None]:
    with (_folder() / "dynamodb-local-here.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def dynamodb_local() -> Iterator[str]:
    """The URL of one that lives as long as this session."""
    try:
        with running_dynamodb_local() as url:
            yield url
    except NoDynamoDBLocalError as error:
        pytest.skip(str(error))


def new_table(client: DynamoDBClient, declared_as: str = "UsageTable") -> str:
    """An empty table as ``infra/tables.yaml`` declares it, under a name of its own."""
    properties = load_template(ROOT / "infra" / "tables.yaml")["Resources"][declared_as]["Properties"]
    arguments: Any = {key: properties[key] for key in _PROPERTIES if key in properties}
    name = f"{declared_as}-{uuid.uuid4()}"
    client.create_table(TableName=name, **arguments)
    return name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
