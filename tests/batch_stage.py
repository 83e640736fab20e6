"""The batch engine on loopback: moto's S3 and DynamoDB, the SageMaker stand-in, a container that answers at once, and
a driver that does what the state machine does."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import boto3
import pytest
from botocore.config import Config

from completions import pipeline_bootstrap
from completions.clients import SystemClock
from completions.domain.batches import Batch, timed_id
from completions.domain.catalog import ModelPrice, ModelRoute
from completions.domain.metering import Principal
from completions.dynamodb_json import deserialized
from completions.metering.sweep import SweepPolicy, UsageSweeper
from completions.pipelines.batch_parts import Part
from completions.pipelines.batch_work import UnfinishedError
from completions.registry.dynamodb import put_key, put_model
from completions.settings import read_pipeline_settings
from completions_cli.local.moto_server import moto_dynamodb
from completions_cli.local.sagemaker_runtime import SageMakerRuntime
from dynamodb_local import new_table

FUNCTIONS: Final = Path(__file__).parent.parent / "functions"
KEY_ID: Final = "key-batch"
OWNER: Final = "ada"
TENANT: Final = f"owner:{OWNER}"
MODEL: Final = "batch-model"
POISON: Final = "poison"
HANG: Final = "hang"
ANSWER: Final = " forty-two"
PRICE: Final = ModelPrice(version="2026-11", input_nanos=3, cached_input_nanos=3, output_nanos=7)


class Container:
    """vLLM's wire format: as many tokens as asked for, a prompt token for each word. It fails at every prompt that says
    so, and holds those that hang until ``release``; ``hanging`` is set when one does. ``prompts`` counts answers."""

    def __init__(self) -> None:
        self.prompts: Counter[str] = Counter()
        self.hanging, self.release = Event(), Event()

    def answer(self, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and body."""
        prompt = body["prompt"]
        if POISON in prompt:
            return 500, b'{"error": "CUDA error"}'
        if HANG in prompt and not self.release.is_set():
            self.hanging.set()
            self.release.wait(60)
            return 500, b'{"error": "too late"}'
        self.prompts[prompt] += 1
        tokens = body["max_tokens"]
        choice = {"index": 0, "text": ANSWER * tokens, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "x"}
        count = len(prompt.split())
        usage = {"prompt_tokens": count, "completion_tokens": tokens, "total_tokens": count + tokens}
        records = [json.dumps({**head, "choices": [choice]}), json.dumps({**head, "choices": [], "usage": usage})]
        return 200, b"".join(b"data: %s\n\n" % text.encode() for text in (*records, "[DONE]"))

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its URL."""
        container = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                status, body = container.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream" if status == 200 else "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None: ...

        with Server(("127.0.0.1", 0), Handler) as http:
            thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                yield f"http://127.0.0.1:{http.server_port}/invocations"
            finally:
                self.release.set()
                http.shutdown()
                thread.join()


@dataclass
class Stage:
    """Everything that runs. ``environment`` is what the functions have."""

    s3: Any
    dynamodb: Any
    sagemaker: SageMakerRuntime
    container: Container
    environment: Mapping[str, str]
    bucket: str
    table: Any
    clock: SystemClock = field(default_factory=SystemClock)

    def batch(self, content: bytes, **fields: Any) -> Batch:
        """A batch over such a file."""
        now = datetime.now(UTC)
        batch_id = timed_id("batch_", now)
        key = f"files/{batch_id}-input"
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=content)
        known = {"created_at": now, "expires_at": now + timedelta(hours=24), **fields}
        batch = Batch(batch_id, TENANT, KEY_ID, f"file-{batch_id}", key, **known)
        assert self.table.add(batch)
        return batch

    def object(self, key: str) -> bytes:
        """An object's content."""
        content: bytes = self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return content

    def results(self, batch: Batch, name: str) -> list[dict[str, Any]]:
        """The lines of one of the two files; none if there is no file."""
        key = f"output/{KEY_ID}/{batch.batch_id}/{name}"
        if not self.s3.list_objects_v2(Bucket=self.bucket, Prefix=key)["KeyCount"]:
            return []
        return [json.loads(line) for line in self.object(key).splitlines()]

    def manifest(self, batch: Batch) -> dict[str, Any]:
        """It."""
        found: dict[str, Any] = json.loads(self.object(f"output/{KEY_ID}/{batch.batch_id}/manifest.json"))
        return found

    def records(self, batch: Batch) -> list[dict[str, Any]]:
        """The usage records of a batch's lines."""
        pages = self.dynamodb.get_paginator("scan").paginate(
            TableName=self.environment["USAGE_TABLE"],
            FilterExpression="sk = :record AND begins_with(pk, :batch)",
            ExpressionAttributeValues={":record": {"S": "RECORD"}, ":batch": {"S": f"REQ#{batch.batch_id}-"}},
        )
        return [deserialized(item) for page in pages for item in page["Items"]]

    def sweep(self, seconds: float) -> int:
        """Give up what has been open for so long; how many there were."""
        table = self.environment["USAGE_TABLE"]
        policy = SweepPolicy(timedelta(seconds=seconds))
        sweeper = UsageSweeper(self.dynamodb, table, 400, self.clock, limited_keys=list, policy=policy)
        return sweeper.sweep().lost


@contextmanager
def batch_stage(region: str, **settings: str) -> Iterator[Stage]:
    """A stage in a region of its own; ``settings`` are further variables of the environment."""
    container = Container()
    with (
        container.serving() as container_url,
        SageMakerRuntime({MODEL: container_url}) as sagemaker,
        moto_dynamodb() as aws_url,
        pytest.MonkeyPatch.context() as patch,
    ):
        environment = {
            "AWS_DEFAULT_REGION": region,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_ENDPOINT_URL_DYNAMODB": aws_url,
            "AWS_ENDPOINT_URL_S3": aws_url,
            "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": sagemaker.url,
            "PIPELINE_BUCKET": f"pipeline-{region}",
            "POWERTOOLS_LOG_LEVEL": "CRITICAL",
            "CIRCUIT_FAILURES": "1000000",  # no circuit may open on the sum of what the tests do to one endpoint
            **settings,
        }
        for name, value in environment.items():
            patch.setenv(name, value)
        patient = Config(read_timeout=120)  # a scan of all records takes moto seconds
        dynamodb, s3 = boto3.client("dynamodb", config=patient), boto3.client("s3", config=patient)
        place: Any = {"LocationConstraint": region}
        s3.create_bucket(Bucket=environment["PIPELINE_BUCKET"], CreateBucketConfiguration=place)
        for name in ("RegistryTable", "UsageTable", "PipelineTable"):
            variable = name.removesuffix("Table").upper() + "_TABLE"
            environment[variable] = new_table(dynamodb, name)
            patch.setenv(variable, environment[variable])
        put_key(dynamodb, environment["REGISTRY_TABLE"], "0" * 64, Principal(KEY_ID, OWNER))
        route = ModelRoute(MODEL, MODEL, "vllm", context_length=4096, created=1_700_000_000, price=PRICE)
        put_model(dynamodb, environment["REGISTRY_TABLE"], route)
        read = read_pipeline_settings()
        table = pipeline_bootstrap.build_batch_table(read, pipeline_bootstrap.build_clients())
        yield Stage(s3, dynamodb, sagemaker, container, environment, environment["PIPELINE_BUCKET"], table)


def request_line(number: int, prompt: str, **fields: Any) -> dict[str, Any]:
    """A request as a file has it."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3}
    return {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body, **fields}


def jsonl(lines: Sequence[object]) -> bytes:
    """A file of them; a string stands as it is."""
    return b"".join((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n" for line in lines)


class Driver:
    """Does what the state machine does. ``deliveries`` is how often each part is handed out, ``workers`` how many run
    side by side; an ``UnfinishedError`` hands a part out again."""

    def __init__(self, stage: Stage, *, workers: int = 4, deliveries: int = 1, seconds: float = 200) -> None:
        self._stage = stage
        self._splitter = pipeline_bootstrap.build_batch_splitter()
        self._workers = [pipeline_bootstrap.build_batch_worker() for _ in range(workers)]
        self._assembler = pipeline_bootstrap.build_batch_assembler()
        self._deliveries = deliveries
        self._seconds = seconds

    def split(self, batch: Batch) -> list[Part]:
        """The parts of its index."""
        plan = self._splitter.split(batch.tenant, batch.batch_id)
        index = self._stage.object(str(plan["index_key"])).splitlines() if plan["parts"] else []
        parts = [Part.model_validate_json(line) for line in index]
        assert len(parts) == plan["parts"]
        return parts

    def work(self, batch: Batch, parts: Sequence[Part]) -> None:
        """All of them, in any order, each as often as it is delivered."""
        handed_out = [part for part in parts for _ in range(self._deliveries)]
        random.Random(7).shuffle(handed_out)  # noqa: S311 - a fixed order
        with ThreadPoolExecutor(len(self._workers)) as pool:
            list(pool.map(lambda job: self._deliver(batch, job[1], job[0]), enumerate(handed_out)))

    def _deliver(self, batch: Batch, part: Part, number: int) -> None:
        worker = self._workers[number % len(self._workers)]
        while True:
            deadline = self._stage.clock.monotonic() + self._seconds
            try:
                worker.work(batch.tenant, batch.batch_id, part, deadline)
            except UnfinishedError:
                continue
            return

    def assemble(self, batch: Batch, failure: str | None = None) -> str:
        """How it ended."""
        return str(self._assembler.assemble(batch.tenant, batch.batch_id, failure)["status"])

    def run(self, batch: Batch) -> str:
        """From the file to the manifest."""
        self.work(batch, self.split(batch))
        return self.assemble(batch)


def run_functions(stage: Stage, script: str, event: object) -> str:
    """What a script prints that runs functions in a process of its own, as Lambda starts them."""
    run = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(event),
        env=_environment(stage),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return run.stdout


def _environment(stage: Stage) -> dict[str, str]:
    return {**os.environ, **stage.environment, "PYTHONPATH": str(FUNCTIONS)}


_WORK: Final = """
import json, sys
from completions.handlers.batch_worker import handler

class Context:
    def get_remaining_time_in_millis(self):
        return 200_000

handler(json.load(sys.stdin), Context())
"""


def killed_worker(stage: Stage, batch: Batch, part: Part, midway: Callable[[], object]) -> None:
    """A function of its own process, as Lambda starts it, that is killed as soon as ``midway`` returns."""
    event = {"tenant": batch.tenant, "batch_id": batch.batch_id, "part": part.model_dump()}
    with subprocess.Popen([sys.executable, "-c", _WORK], stdin=subprocess.PIPE, env=_environment(stage)) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(event).encode())
        process.stdin.close()
        try:
            midway()
            assert process.poll() is None, "the worker has ended by itself"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
