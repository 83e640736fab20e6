"""``completions batch`` against a running app whose engine is played by the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from batch_app import KEY, STRANGERS_KEY, BatchApp, registry, running_batch_app
from completions.domain.batches import Batch, BatchStatus, LineCounts, LineError, StoredFile, timed_id
from completions.domain.completion import Usage
from completions.pipelines.object_events import ObjectStarter
from completions.service.batch_inputs import BatchInputs
from completions_cli.main import app as cli
from served import COMMAND

REGION = "il-central-1"
OUTPUT = b'{"custom_id": "a"}\n'
ERRORS = b'{"custom_id": "b"}\n'


@pytest.fixture(scope="module")
def app(project_root: Path) -> Iterator[BatchApp]:
    with running_batch_app(REGION, project_root) as running:
        yield running


@pytest.fixture(autouse=True)
def _environment(app: BatchApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app.clock.advance(3600)
    app.starter.started.clear()
    app.starter.then = lambda _: None
    monkeypatch.setenv("COMPLETIONS_BASE_URL", app.url)
    monkeypatch.setenv("COMPLETIONS_API_KEY", KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", app.aws_url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.delenv("PIPELINE_BUCKET", raising=False)
    monkeypatch.delenv("PIPELINE_KEY_ID", raising=False)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file that no other test has."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"custom_id": str(tmp_path), "method": "POST", "url": "/v1/completions", "body": {}}))
    return file


def run(*arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["batch", *map(str, arguments)], input=given)


def store(app: BatchApp, batch: Batch, name: str, content: bytes) -> str:
    file_id = timed_id("file-", batch.created_at, name + batch.batch_id)
    key = f"output/{batch.key_id}/{batch.batch_id}/{name}"
    app.objects.put(key, content)
    app.table.add_file(StoredFile(file_id, batch.tenant, name, "batch_output", key, len(content), batch.created_at))
    return file_id


def finish(app: BatchApp, batch: Batch, status: BatchStatus = BatchStatus.COMPLETED) -> None:
    """What the engine does, in a moment."""
    fault = LineError("invalid_json_line", "It is no JSON.", None, 2)
    files = {
        "output_file_id": store(app, batch, "output.jsonl", OUTPUT),
        "error_file_id": store(app, batch, "errors.jsonl", ERRORS),
        "errors": (fault,),
    }
    minute = timedelta(minutes=1)
    app.table.move(
        batch,
        BatchStatus.IN_PROGRESS,
        batch.created_at + minute,
        only_from=[BatchStatus.VALIDATING],
        changes={"total": 2},
    )
    app.table.count_part(batch, "0", LineCounts(1, 1, Usage(1000, 234), 12_300_000))
    app.table.move(batch, status, batch.created_at + 2 * minute, only_from=[BatchStatus.IN_PROGRESS], changes=files)


def test_a_file_is_submitted_watched_and_fetched(app: BatchApp, prompts: Path, tmp_path: Path) -> None:
    app.starter.then = lambda batch: finish(app, batch)

    submitted = run("submit", prompts, "--wait", "--interval", "0.1")
    assert submitted.exit_code == 0, submitted.output
    (started,) = app.starter.started
    batch_id = started.batch_id
    assert f"{batch_id} completed: 1 of 2 lines, 1 failed, 1,000 + 234 tokens, $0.0123" in submitted.output
    assert "line 2: It is no JSON. (invalid_json_line)" in submitted.output
    assert f"completions batch fetch {batch_id}" in submitted.output
    assert app.objects.get(started.input_key) == prompts.read_bytes()
    assert started.endpoint is None

    fetched = run("fetch", batch_id, "--output-dir", tmp_path / "out")
    assert fetched.exit_code == 0, fetched.output
    assert (tmp_path / "out" / f"{batch_id}.output.jsonl").read_bytes() == OUTPUT
    assert (tmp_path / "out" / f"{batch_id}.errors.jsonl").read_bytes() == ERRORS
    assert json.loads((tmp_path / "out" / f"{batch_id}.json").read_text())["status"] == "completed"
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_the_same_file_under_the_same_name_is_submitted_once(app: BatchApp, prompts: Path) -> None:
    first = run("submit", prompts)
    again = run("submit", prompts)
    renamed = run("submit", prompts, "--name", "again")

    assert [result.exit_code for result in (first, again, renamed)] == [0, 0, 0]
    assert "was submitted as 'prompts' before, and nothing was done again" in again.output
    assert "before" not in first.output + renamed.output
    one, other = {batch.batch_id: batch for batch in app.starter.started}
    assert one in first.output
    assert one in again.output
    assert other in renamed.output


def test_lines_can_come_from_the_standard_input(app: BatchApp, prompts: Path) -> None:
    result = run("submit", "-", "--endpoint", "/v2/completions", given=prompts.read_bytes())

    assert result.exit_code == 0, result.output
    (started,) = app.starter.started
    assert app.objects.get(started.input_key) == prompts.read_bytes()
    assert started.endpoint == "/v2/completions"


def test_a_batch_is_looked_at_listed_and_cancelled(app: BatchApp, prompts: Path) -> None:
    run("submit", prompts)
    batch_id = app.starter.started[0].batch_id

    assert f"{batch_id} validating: 0 of 0 lines" in run("status", batch_id).output
    assert json.loads(run("status", batch_id, "--json").output)["id"] == batch_id
    assert batch_id in run("list").output
    assert json.loads(run("list", "--limit", "1", "--json").output)[0]["id"] == batch_id
    assert f"{batch_id} cancelling" in run("cancel", batch_id).output
    not_yet = run("fetch", batch_id)
    assert not_yet.exit_code == 1
    assert f"{batch_id} is cancelling; wait for it" in not_yet.output


def test_waiting_for_one_that_fails_is_a_failure(app: BatchApp, prompts: Path) -> None:
    app.starter.then = lambda batch: finish(app, batch, BatchStatus.EXPIRED)
    run("submit", prompts)

    waited = run("wait", app.starter.started[0].batch_id)
    assert waited.exit_code == 1
    assert " expired: 1 of 2 lines" in waited.output


def test_ctrl_c_leaves_it_running(app: BatchApp, prompts: Path) -> None:
    run("submit", prompts)
    batch_id = app.starter.started[0].batch_id
    process = subprocess.Popen(
        [COMMAND, "batch", "wait", batch_id, "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert batch_id in process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)

    assert process.returncode == 130
    assert said == f"{batch_id} goes on; wait again: completions batch wait {batch_id}\n"
    found = app.table.batch("team:search", batch_id)
    assert found is not None
    assert found.status is BatchStatus.VALIDATING


def test_what_http_does_not_carry_goes_through_the_bucket(app: BatchApp, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_bytes(str(tmp_path).encode() + b"\n" + b"x" * (9 << 20))

    nowhere = run("submit", file)
    assert nowhere.exit_code == 2
    assert "9.4 MB" in nowhere.output
    assert "PIPELINE_BUCKET" in nowhere.output
    assert "--key-id" in nowhere.output

    inputs = ObjectStarter(BatchInputs(app.table, app.table, app.starter, registry(), app.clock), app.bucket)
    bucket = ("--bucket", app.bucket, "--key-id", "key-alice")
    environment = {name: value for name, value in os.environ.items() if name != "COMPLETIONS_BASE_URL"}
    alone = subprocess.run(
        [COMMAND, "batch", "submit", str(file), *bucket], env=environment, capture_output=True, text=True, check=True
    )
    assert "put there" in alone.stdout
    assert "COMPLETIONS_BASE_URL" in alone.stdout
    (key,) = app.objects.keys("input/key-alice/many-")
    assert app.objects.size(key) == file.stat().st_size
    created = {"key": key, "size": file.stat().st_size, "etag": "one"}
    inputs.start({"detail-type": "Object Created", "detail": {"bucket": {"name": app.bucket}, "object": created}})

    again = run("submit", file, *bucket)
    assert again.exit_code == 0, again.output
    assert "was there already; nothing was sent" in again.output
    assert app.starter.started[0].batch_id in again.output
    assert len(app.starter.started) == 1


def test_a_bucket_that_is_not_there_is_named(prompts: Path) -> None:
    result = run("submit", prompts, "--s3", "--bucket", "no-such-bucket", "--key-id", "key-alice")

    assert result.exit_code == 1
    assert "s3://no-such-bucket/input/key-alice/prompts-" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("status", "batch_none"), 1, "No batch found with id 'batch_none'. (HTTP 404, request "),
        (("submit", "no-such-file.jsonl"), 1, "no-such-file.jsonl: No such file"),
        (("submit", "/dev/null"), 1, "/dev/null: is empty"),
        (("list", "--base-url", "http://127.0.0.1:9"), 1, "127.0.0.1:9 cannot be reached: "),
        (("list", "--base-url", "ftp://x"), 2, "--base-url ftp://x"),
        (("list", "--api-key", "sk-nobody"), 1, "The API key is not known here."),
        (("list", "--api-key", ""), 2, "set COMPLETIONS_BASE_URL and COMPLETIONS_API_KEY"),
        (("submit", "/dev/null", "--name", "///"), 1, "is empty"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(arguments: tuple[str, ...], code: int, said: str) -> None:
    result = run(*arguments)

    assert result.exit_code == code
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("completions batch: ")


def test_another_teams_batch_is_not_found(app: BatchApp, prompts: Path) -> None:
    run("submit", prompts)

    assert run("status", app.starter.started[0].batch_id, "--api-key", STRANGERS_KEY).exit_code == 1
    assert app.starter.started[0].batch_id not in run("list", "--api-key", STRANGERS_KEY).output


def test_help_loads_neither_boto3_nor_an_http_client() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from completions_cli.main import app;"
        "CliRunner().invoke(app, ['batch', 'submit', '--help']);"
        "print(sorted({'boto3', 'botocore', 'urllib3', 'rich.progress', 'fastapi'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout == "[]\n"
