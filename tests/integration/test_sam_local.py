"""The real `sam local` on what `sam build` made, against the local stack. It needs a Docker engine and the base image.

`sam local invoke` runs one function on one event; `sam local start-api` serves the API's definition over HTTP. Neither
streams, so both run the buffered form.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import boto3
import httpx2 as httpx
import pytest

from completions.clients import SystemClock
from completions.domain.batch_places import file_key
from completions.domain.batches import Batch, BatchStatus, StoredFile
from completions.stores.batch_table import BatchTable
from completions_cli.local.environment import sam_env_vars
from completions_cli.local.server import bind
from completions_cli.local.stack import LocalStack
from completions_cli.local.template import load_template, read_gateway
from ledger_reader import LedgerReader

pytestmark = pytest.mark.skipif(
    "SAM_LOCAL_READY" not in os.environ,
    reason="needs a Docker engine with the Lambda base image; `make sam-local` runs it where both are there",
)
# a prepared engine has the image, and names the address under which containers reach this machine
GATEWAY: Final = os.environ.get("SAM_LOCAL_GATEWAY")
PREPARED: Final = ("--skip-pull-image", "--add-host", f"host.docker.internal:{GATEWAY}") if GATEWAY else ()
# boto3 asks for a bucket under a host name of its own
BUCKET: Final = "pipeline-bucket"
BUCKET_HOST: Final = ("--add-host", f"{BUCKET}.host.docker.internal:{GATEWAY or 'host-gateway'}")
SAM: Final = str(Path(sys.executable).with_name("sam"))
ARCHITECTURE: Final = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())
PARAMETERS: Final = {"ResponseMode": "buffered", "Architecture": ARCHITECTURE}
# With credentials `sam` asks AWS whose they are, and waits for the answer. The functions have theirs from the stack.
OUTER: Final = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
ENVIRONMENT: Final = {
    **OUTER,
    "SAM_CLI_TELEMETRY": "0",
    "ARCHITECTURE": ARCHITECTURE,
    "AWS_DEFAULT_REGION": "us-east-1",
}

COMPLETIONS: Final = {
    "openai_completions.json": "OpenAICompletionsFunction",
    "openai_completions_stream.json": "OpenAICompletionsFunction",
    "scale_completions.json": "ScaleCompletionsFunction",
    "scale_completions_stream.json": "ScaleCompletionsFunction",
    "scale_v1_completions_sync.json": "ScaleV1CompletionsFunction",
    "scale_v1_completions_stream.json": "ScaleV1CompletionsFunction",
    "sourcegraph_code.json": "SourcegraphCompletionsFunction",
    "sourcegraph_stream.json": "SourcegraphCompletionsFunction",
}
OTHERS: Final = {
    "batches_upload.json": "BatchesFunction",
    "dashboard.json": "DashboardFunction",
    "health.json": "HealthFunction",
    "openai_models.json": "OpenAIModelsFunction",
    "organization_usage.json": "OrganizationUsageFunction",
    "scale_models.json": "ScaleModelsFunction",
    "sourcegraph_graphql.json": "SourcegraphSiteFunction",
}
WORKERS: Final = {
    "usage_rollup.json": ("UsageRollupFunction", {"batchItemFailures": []}),
    "async_results.json": ("AsyncResultsFunction", {"replies": 0}),
    "usage_sweeper.json": (
        "UsageSweeperFunction",
        {"released": 0, "lost": 0, "repaired": 0, "forgotten": 0, "dropped": 0, "failed": 0, "complete": True},
    ),
}
BATCH_TASKS: Final = {
    "batch_splitter.json": "BatchSplitterFunction",
    "batch_worker.json": "BatchWorkerFunction",
    "batch_assembler.json": "BatchAssemblerFunction",
}
PIPELINES: Final = {
    "batch_starter.json": "BatchStarterFunction",
    "queued_completions.json": "QueuedCompletionsFunction",
}
TENANT: Final = "owner:local"
KEY_ID: Final = "local"
# It has the streamed form alone, and that has a layer: `sam local` would fetch it from AWS.
NOT_LOCAL: Final = {"ManagedCompletionsFunction"}
# OpenAI's answer to who may not delete: the models belong to the operator
REFUSED: Final = {"openai_models_delete.json": 403}
HTTP_EVENTS: Final = sorted(
    path.name
    for path in (Path(__file__).parents[2] / "events").glob("*.json")
    if "httpMethod" in json.loads(path.read_text())
)


def given() -> tuple[str, str]:
    return "--parameter-overrides", " ".join(f"{name}={value}" for name, value in PARAMETERS.items())


@pytest.fixture(scope="module")
def built(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built template."""
    folder = tmp_path_factory.mktemp("build")
    command = [SAM, "build", "--build-dir", str(folder), *given()]
    done = subprocess.run(
        command, cwd=project_root, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "template.yaml"


@pytest.fixture(scope="module")
def common(built: Path, stack: LocalStack) -> tuple[str, ...]:
    """The options of every command of `sam local`."""
    variables = built.with_name("env.json")
    variables.write_text(json.dumps(sam_env_vars(stack.environment)))
    assert stack.environment["PIPELINE_BUCKET"] == BUCKET
    return ("--template", str(built), "--env-vars", str(variables), *given(), *PREPARED, *BUCKET_HOST)


@pytest.fixture(scope="module")
def s3(stack: LocalStack) -> Iterator[Any]:
    """Where the stack has its bucket."""
    with closing(boto3.client("s3", endpoint_url=stack.environment["AWS_ENDPOINT_URL_S3"])) as client:
        yield client


@pytest.fixture(scope="module")
def batches(project_root: Path, stack: LocalStack, s3: Any) -> BatchTable:
    """The files and batches that the events name, with what lies in the bucket for them."""
    content = read_event(project_root, "batches_upload.json")["body"].split("\r\n\r\n")[2].split("\r\n--")[0].encode()
    now = datetime.now(UTC)
    client = boto3.client("dynamodb", endpoint_url=stack.environment["AWS_ENDPOINT_URL_DYNAMODB"])
    table = BatchTable(client, stack.environment["PIPELINE_TABLE"], 30, SystemClock())
    for name in ("batches_file.json", "batches_file_delete.json"):
        file_id = read_event(project_root, name)["pathParameters"]["file_id"]
        s3.put_object(Bucket=BUCKET, Key=file_key(file_id), Body=content)
        table.add_file(StoredFile(file_id, TENANT, "prompts.jsonl", "batch", file_key(file_id), len(content), now))
    read = read_event(project_root, "batches_file.json")["pathParameters"]["file_id"]
    named = [
        read_event(project_root, "batch_splitter.json")["batch_id"],
        *(
            read_event(project_root, f"batches_{verb}.json")["pathParameters"]["batch_id"]
            for verb in ("retrieve", "cancel")
        ),
    ]
    for batch_id in named:
        ends = now + timedelta(hours=24)
        moments = {BatchStatus.VALIDATING: now}
        assert table.add(
            Batch(
                batch_id, TENANT, KEY_ID, read, file_key(read), now, ends, endpoint="/v1/completions", moments=moments
            )
        )
    return table


def invoke(common: tuple[str, ...], function: str, event: Path) -> Any:
    """What the function answers."""
    command = [SAM, "local", "invoke", function, "--event", str(event), *common]
    done = subprocess.run(
        command, cwd=event.parent, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


class StartedApi:
    """`sam local start-api` on ``url``; ``log`` is what it says."""

    def __init__(self, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def send(self, event: dict[str, Any], **changed: str) -> httpx.Response:
        """The request that API Gateway made the event of, with headers ``changed``; an empty one is not sent."""
        query = event["multiValueQueryStringParameters"] or {}
        headers = {name: value for name, value in {**event["headers"], **changed}.items() if value and name != "Host"}
        return httpx.request(
            event["httpMethod"],
            self.url + event["path"],
            params=[(name, value) for name, values in query.items() for value in values],
            headers=headers,
            content=event["body"],
            timeout=60,
        )


@pytest.fixture(scope="module")
def api(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedApi]:
    with closing(bind(0)) as listener:
        port = listener.getsockname()[1]
    log = tmp_path_factory.mktemp("start-api") / "log"
    command = [SAM, "local", "start-api", "--port", str(port), "--warm-containers", "LAZY", *common]
    # a shell's background job ignores SIGINT, and would hand that down
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=log.parent, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        started = StartedApi(port, log)
        deadline = time.monotonic() + 60
        while "Running on" not in started.log:
            assert process.poll() is None, started.log
            assert time.monotonic() < deadline, started.log
            time.sleep(0.1)
        yield started
    finally:
        process.send_signal(signal.SIGINT)  # on which it removes its containers
        process.wait(60)


def read_event(project_root: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((project_root / "events" / name).read_text()))


def test_every_function_is_invoked(project_root: Path) -> None:
    template = load_template(project_root / "template.yaml")
    functions = {name for name, one in template["Resources"].items() if one["Type"] == "AWS::Serverless::Function"}
    workers = {function for function, _ in WORKERS.values()}
    by_events = {*BATCH_TASKS.values(), *PIPELINES.values()}
    assert functions == {*COMPLETIONS.values(), *OTHERS.values(), *workers, *by_events} | NOT_LOCAL


@pytest.mark.parametrize("event", COMPLETIONS)
def test_a_completion_is_answered_and_metered(
    ledger: LedgerReader, project_root: Path, common: tuple[str, ...], tmp_path: Path, event: str
) -> None:
    request = read_event(project_root, event)
    request["requestContext"]["requestId"] = f"sam-{event}"
    (tmp_path / "event.json").write_text(json.dumps(request))

    reply = invoke(common, COMPLETIONS[event], tmp_path / "event.json")

    assert reply["statusCode"] == 200, reply
    record = ledger.settled(reply["headers"]["x-request-id"])
    assert (record.model, record.streamed) == ("demo", "stream" in event)
    assert 0 < record.completion_tokens <= 24


@pytest.mark.parametrize("event", OTHERS)
def test_another_function_answers_its_event(project_root: Path, common: tuple[str, ...], event: str) -> None:
    reply = invoke(common, OTHERS[event], project_root / "events" / event)
    assert reply["statusCode"] == 200, reply
    assert reply["body"]


@pytest.mark.parametrize("event", WORKERS)
def test_a_worker_says_what_it_did(project_root: Path, common: tuple[str, ...], event: str) -> None:
    function, answer = WORKERS[event]
    assert invoke(common, function, project_root / "events" / event) == answer


def test_a_batch_goes_through_the_functions_of_its_state_machine(
    project_root: Path, common: tuple[str, ...], batches: BatchTable, s3: Any
) -> None:
    split, worked, joined = (
        invoke(common, function, project_root / "events" / event) for event, function in BATCH_TASKS.items()
    )

    task = read_event(project_root, "batch_assembler.json")
    assert split == {**task, "workers": split["workers"]}
    index = s3.get_object(Bucket=BUCKET, Key=split["index_key"])["Body"].read()
    assert [json.loads(line) for line in index.splitlines()] == [read_event(project_root, "batch_worker.json")["part"]]
    assert "errorType" not in worked
    assert "errorType" not in joined
    place = f"output/{KEY_ID}/{task['batch_id']}/output.jsonl"
    output = s3.get_object(Bucket=BUCKET, Key=place)["Body"].read().splitlines()
    assert [json.loads(line)["custom_id"] for line in output] == ["request-1", "request-2"]
    batch = batches.batch(TENANT, task["batch_id"])
    assert batch is not None
    assert (batch.status, batch.counts.completed, batch.counts.failed) == (BatchStatus.COMPLETED, 2, 0)


def test_a_file_in_the_bucket_starts_a_batch(
    project_root: Path, common: tuple[str, ...], batches: BatchTable, s3: Any, tmp_path: Path
) -> None:
    event = read_event(project_root, "batch_starter.json")
    event["detail"]["bucket"]["name"] = BUCKET
    read = read_event(project_root, "batches_file.json")["pathParameters"]["file_id"]
    s3.copy_object(Bucket=BUCKET, Key=event["detail"]["object"]["key"], CopySource=f"{BUCKET}/{file_key(read)}")
    (tmp_path / "event.json").write_text(json.dumps(event))

    reply = invoke(common, PIPELINES["batch_starter.json"], tmp_path / "event.json")

    batch = batches.batch(TENANT, reply["batch_id"])
    assert batch is not None
    assert batch.input_key == event["detail"]["object"]["key"]


def test_messages_of_the_queue_are_answered(
    project_root: Path, common: tuple[str, ...], batches: BatchTable, s3: Any
) -> None:
    event = "queued_completions.json"
    reply = invoke(common, PIPELINES[event], project_root / "events" / event)

    assert reply == {"batchItemFailures": []}
    records = read_event(project_root, event)["Records"]
    (place,) = {
        record["messageAttributes"]["reply_s3_uri"]["stringValue"]
        for record in records
        if "reply_s3_uri" in record["messageAttributes"]
    }
    prefix = place.removeprefix(f"s3://{BUCKET}/")
    (written,) = s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    detail = json.loads(s3.get_object(Bucket=BUCKET, Key=written["Key"])["Body"].read())
    assert (detail["custom_id"], detail["status"]) == ("with attributes", 200)


@pytest.mark.parametrize(
    ("function", "kind"), [("OpenAICompletionsFunction", "RuntimeError"), ("UsageRollupFunction", "KeyError")]
)
def test_a_wrong_event_is_an_error_that_says_what_is_wrong(
    common: tuple[str, ...], tmp_path: Path, function: str, kind: str
) -> None:
    (tmp_path / "event.json").write_text('{"hello": 1}')
    reply = invoke(common, function, tmp_path / "event.json")
    assert reply["errorType"] == kind
    assert {"RuntimeError": "valid for a supported handler", "KeyError": "Records"}[kind] in reply["errorMessage"]


def test_start_api_serves_every_route_of_the_form_and_no_other(project_root: Path, api: StartedApi) -> None:
    mounted = re.findall(r"Mounting (\w+) at http://127\.0\.0\.1:\d+(\S+) \[([A-Z, ]+)\]", api.log)
    found = {(method, path, function) for function, path, methods in mounted for method in methods.split(", ")}
    routes = read_gateway(project_root / "template.yaml", PARAMETERS).routes
    assert "was not found" not in api.log
    assert found == {(route.method, route.path, route.function.name) for route in routes}


@pytest.mark.parametrize("event", HTTP_EVENTS)
def test_start_api_answers_the_request_of_every_event(
    ledger: LedgerReader, project_root: Path, api: StartedApi, batches: BatchTable, event: str
) -> None:
    reply = api.send(read_event(project_root, event))

    assert reply.status_code == REFUSED.get(event, 200), reply.text
    if event in COMPLETIONS or event == "sourcegraph_code_stream.json":
        record = ledger.settled(reply.headers["x-request-id"])
        assert record.streamed == ("stream" in event)
        assert reply.headers["content-type"].startswith("text/event-stream") == ("stream" in event)
        assert 0 < record.completion_tokens <= 24


@pytest.mark.parametrize("event", ["openai_completions.json", "scale_completions.json", "sourcegraph_code.json"])
def test_start_api_lets_nobody_in_without_a_key(project_root: Path, api: StartedApi, event: str) -> None:
    reply = api.send(read_event(project_root, event), Authorization="")
    assert reply.status_code == 401


def test_start_api_knows_no_other_route(api: StartedApi) -> None:
    # its own answer: of the gateway's it makes none
    reply = httpx.get(f"{api.url}/v1/chat/completions", timeout=60)
    assert (reply.status_code, reply.json()) == (403, {"message": "Missing Authentication Token"})
