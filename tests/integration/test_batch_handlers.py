"""The functions themselves on the events of ``events/``: their environment, Mangum's form, what they import."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from completions.domain.metering import Principal
from completions.registry.dynamodb import put_key
from completions.settings import SettingsError
from completions.web.auth import secret_digest
from completions_cli.local.events import LambdaContext
from completions_cli.local.tables import create_tables
from moto_services import moto_services

REGION = "mx-central-1"
BUCKET = f"pipeline-{REGION}"
Handler = Callable[[dict[str, Any], LambdaContext], dict[str, Any]]
CONTEXT = LambdaContext("batches", 30)


@pytest.fixture(scope="module")
def environment(project_root: Path) -> Iterator[dict[str, str]]:
    with moto_services(REGION) as make_client:
        dynamodb, s3, states = make_client("dynamodb"), make_client("s3"), make_client("stepfunctions")
        create_tables(dynamodb, project_root / "infra" / "tables.yaml")
        put_key(dynamodb, "RegistryTable", secret_digest("sk-local"), Principal("local", "local"))
        s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        definition = json.dumps({"StartAt": "Done", "States": {"Done": {"Type": "Succeed"}}})
        role = "arn:aws:iam::123456789012:role/batches"
        machine = states.create_state_machine(name="batches", definition=definition, roleArn=role)
        url = s3.meta.endpoint_url
        yield {
            "AWS_DEFAULT_REGION": REGION,
            **{f"AWS_ENDPOINT_URL_{service}": url for service in ("DYNAMODB", "S3", "SFN")},
            "REGISTRY_TABLE": "RegistryTable",
            "USAGE_TABLE": "UsageTable",
            "PIPELINE_TABLE": "PipelineTable",
            "PIPELINE_BUCKET": BUCKET,
            "BATCH_STATE_MACHINE": machine["stateMachineArn"],
        }


@pytest.fixture
def load(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Handler]]:
    """The handler of a module, made anew in the environment of a deployed function."""
    from completions import clients  # noqa: PLC0415 - its session is the process's

    before: dict[str, ModuleType | None] = {}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    clients.session.cache_clear()

    def handler(name: str) -> Handler:
        module = f"completions.handlers.{name}"
        before.setdefault(module, sys.modules.pop(module, None))
        made: Handler = import_module(module).handler
        return made

    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())  # Mangum makes one where its thread has none, and closes none
        try:
            yield handler
        finally:
            asyncio.set_event_loop(None)
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    clients.session.cache_clear()


def event(root: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((root / "events" / f"{name}.json").read_text()), **changes}


def test_a_file_becomes_a_batch_through_proxy_events(load: Callable[[str], Handler], project_root: Path) -> None:
    handler = load("batches")
    upload = event(project_root, "batches_upload")

    made = handler(upload, CONTEXT)
    file = json.loads(made["body"])
    assert (made["statusCode"], file["purpose"], file["filename"]) == (200, "batch", "prompts.jsonl")
    listed = handler(event(project_root, "batches_files"), CONTEXT)
    assert file["id"] in [one["id"] for one in json.loads(listed["body"])["data"]]

    no_query: dict[str, Any] = {"queryStringParameters": None, "multiValueQueryStringParameters": None}
    content = handler(
        event(project_root, "batches_files", path=f"/v1/files/{file['id']}/content", **no_query),
        CONTEXT,
    )
    assert content["isBase64Encoded"] is False  # API Gateway would hand out the base64 as it is
    assert content["body"].count("\n") == 2
    assert content["body"] in upload["body"]
    assert file["bytes"] == len(content["body"].encode())

    order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    headers = {"Content-Type": ["application/json"], "Authorization": ["Bearer sk-local"]}
    asked = event(project_root, "batches_upload", path="/v1/batches", body=json.dumps(order), multiValueHeaders=headers)
    batch = json.loads(handler(asked, CONTEXT)["body"])
    assert batch["status"] == "validating"
    batches = handler(event(project_root, "batches_list"), CONTEXT)
    assert batch["id"] in [one["id"] for one in json.loads(batches["body"])["data"]]


def test_an_object_of_the_bucket_becomes_a_batch(load: Callable[[str], Handler], project_root: Path) -> None:
    handler = load("batch_starter")
    appeared = event(project_root, "batch_starter")
    appeared["detail"]["bucket"]["name"] = BUCKET

    batch_id = handler(appeared, CONTEXT)["batch_id"]
    assert batch_id.startswith("batch_")
    assert handler(appeared, CONTEXT) == {"batch_id": batch_id}


@pytest.mark.parametrize("name", ["batches", "batch_starter"])
def test_a_function_without_a_state_machine_does_not_start(
    load: Callable[[str], Handler], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATCH_STATE_MACHINE")

    with pytest.raises(SettingsError, match="BATCH_STATE_MACHINE"):
        load(name)


def test_the_starter_needs_no_web_framework(environment: dict[str, str]) -> None:
    code = (
        "import sys, completions.handlers.batch_starter;"
        "print(sorted({'fastapi', 'starlette', 'mangum', 'uvicorn', 'anyio'} & set(sys.modules)))"
    )
    credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment | credentials, capture_output=True, text=True, check=True
    )

    assert result.stdout == "[]\n"
