"""No secret is left anywhere: a service at its most talkative, in a process of its own, and all that it writes."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import boto3
import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from completions.web.auth import secret_digest
from completions_cli.main import app
from speakers import openai_body, sourcegraph_body

COMMAND = str(Path(sys.executable).with_name("completions"))
CACHE_SECONDS = 0.5
SERVER = f"""
import logging, pathlib, sys
logging.basicConfig(level=logging.DEBUG)
logging.getLogger("moto").setLevel(logging.WARNING)  # it stands in for DynamoDB, and is no part of the service
from completions_cli.local.environment import published_environment
from completions_cli.local.stack import StackOptions, running_stack
options = StackOptions(
    port=0, template=pathlib.Path(sys.argv[1]), settings={{"REGISTRY_CACHE_SECONDS": "{CACHE_SECONDS}"}}
)
with running_stack(options) as stack, published_environment(stack.environment):
    print("SERVING", stack.base_url, flush=True)
    sys.stdin.read()
"""


def done(*arguments: str) -> str:
    """The standard output of a command that worked."""
    result = CliRunner().invoke(app, ["keys", *arguments, "--local"])
    assert result.exit_code == 0, result.output
    return result.stdout


def created(*options: str) -> tuple[str, str]:
    """A new key's secret and id."""
    values = json.loads(done("create", "--owner", "ada", *options, "--json"))
    return values["key"], values["key_id"]


class Served(NamedTuple):
    """A stack in a process of its own, at its most talkative; ``folder`` is where ``--local`` finds it."""

    base_url: str
    folder: Path
    log: Path

    def keys_process(self, *arguments: str) -> str:
        """The standard output of a command in a process of its own; what else it writes goes to the log."""
        environment = {**os.environ, "POWERTOOLS_LOG_LEVEL": "DEBUG"}
        with self.log.open("a") as log:
            finished = subprocess.run(
                [COMMAND, "keys", *arguments, "--local"],
                cwd=self.folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=120,
                check=True,
            )
        return finished.stdout

    def items(self) -> list[dict[str, Any]]:
        """Every item of every table."""
        environment = json.loads((self.folder / ".local" / "env.json").read_text())["environment"]
        url = environment["AWS_ENDPOINT_URL_DYNAMODB"]
        with closing(boto3.client("dynamodb", endpoint_url=url)) as tables:
            return [
                item
                for name in tables.list_tables()["TableNames"]
                for page in tables.get_paginator("scan").paginate(TableName=name)
                for item in page["Items"]
            ]


@pytest.fixture(scope="module")
def server(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    log = folder / "log"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "POWERTOOLS_"))}
    with (
        log.open("a") as written,
        subprocess.Popen(
            [sys.executable, "-u", "-c", SERVER, str(project_root / "template.yaml")],
            cwd=folder,
            env={**clean, "POWERTOOLS_LOG_LEVEL": "DEBUG"},
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        while (ready := re.search(r"^SERVING (\S+)$", log.read_text(), re.MULTILINE)) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield Served(ready[1], folder, log)
        process.communicate(timeout=60)


@pytest.fixture
def served(server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """The same, for ``done`` and ``created``; the environment they take over is given back."""
    monkeypatch.chdir(server.folder)
    with patch.dict(os.environ):
        yield server


def test_a_running_service_refuses_a_revoked_key_once_it_has_forgotten_it(served: Served) -> None:
    secret, key_id = created()
    headers, body = {"Authorization": f"Bearer {secret}"}, {**openai_body(False), "max_tokens": 1}
    with httpx.Client(base_url=served.base_url, headers=headers, timeout=30) as http:

        def status() -> int:
            return http.post("/v1/completions", json=body).status_code

        assert status() == 200
        done("disable", key_id)
        time.sleep(CACHE_SECONDS)
        assert status() == 401
        done("enable", key_id)
        time.sleep(CACHE_SECONDS)
        assert status() == 200
        done("delete", key_id, "--yes")
        time.sleep(CACHE_SECONDS)
        assert status() == 401


def test_no_table_and_no_log_ever_holds_a_secret(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    values = json.loads(served.keys_process("create", "--owner", "ada", "--rpm", "1000", "--json"))
    key_id, first = values["key_id"], values["key"]
    with caplog.at_level(logging.DEBUG):
        secrets = [first, done("rotate", key_id, "--grace", "1h").strip()]
        shown = done("list") + done("list", "--json") + done("show", key_id) + done("disable", first[:7])
        shown += done("enable", key_id)
    written = caplog.text
    for secret in secrets:
        ask_in_every_form(served.base_url, secret)

    items, log = json.dumps(served.items()), served.log.read_text() + written
    assert f'"{key_id}"' in items
    assert "DEBUG" in log
    assert log.count('"message":"request"') >= 30
    for secret in secrets:
        assert secret_digest(secret) in items
        basic = base64.b64encode(f"{secret}:".encode()).decode()
        for hidden in (secret, secret.removeprefix("sk-"), basic.rstrip("=")):
            assert hidden not in items
            assert hidden not in log + shown
        assert secret_digest(secret) not in log + shown


def ask_in_every_form(base_url: str, secret: str) -> None:
    """Well and badly, wherever a key may stand."""
    bearer, token = {"Authorization": f"Bearer {secret}"}, {"Authorization": f"token {secret}"}
    with httpx.Client(base_url=base_url, timeout=30) as http:
        for stream in (False, True):
            body, sourcegraph = openai_body(stream), sourcegraph_body(stream)
            replies = [
                http.post("/v1/completions", json=body, headers=bearer),
                http.post("/v2/completions", json=body, auth=(secret, "")),
                http.post("/v2/completions", json=body, headers={"x-api-key": secret}),
                http.post("/.api/completions/code", json=sourcegraph, headers=token),
                http.post(f"/.api/completions/code?token={secret}", json=sourcegraph),
            ]
            assert [reply.status_code for reply in replies] == [200] * 5
            refused = [
                http.post("/v1/completions", content=b"{", headers=bearer),
                http.post("/v1/completions", json={**body, "model": "none"}, headers=bearer),
                http.post("/v1/completions", json=body, headers={"Authorization": secret}),
                http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {secret} {secret}"}),
                http.post(f"/.api/completions/code?token={secret}&api-version=x", json=sourcegraph),
                http.post("/.api/nothing?token=" + secret, json=body),
            ]
            assert all(400 <= reply.status_code < 500 for reply in refused)
            assert all(secret not in reply.text for reply in replies + refused)
