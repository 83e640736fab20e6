"""The app of files and batches over moto's tables and buckets, on a loopback port; its engine starts nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from completions.batches_bootstrap import BatchParts, batches_app
from completions.domain.batches import Batch, BatchStarter
from completions.domain.errors import BackendUnavailableError
from completions.domain.metering import Principal
from completions.service.batches import BatchService
from completions.stores.batch_table import BatchTable
from completions.stores.objects import S3ObjectStore
from completions.web.auth import secret_digest
from completions_cli.local.server import bind, serving
from completions_cli.local.tables import create_tables
from fakes import InMemoryRegistry, ManualClock
from moto_services import moto_services

TABLE = "PipelineTable"
KEY = "sk-alices"
COLLEAGUES_KEY = "sk-of-alices-team"
STRANGERS_KEY = "sk-bobs"
ALICE = Principal("key-alice", "alice", "search")
COLLEAGUE = Principal("key-carol", "carol", "search")
STRANGER = Principal("key-bob", "bob")
GONE = Principal("key-gone", "dan", "search", disabled=True)
EXPIRED = Principal("key-expired", "eve", expires_at=datetime(2026, 1, 1, tzinfo=UTC))
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


class RecordingStarter(BatchStarter):
    """``started`` keeps what was begun; ``failing`` makes it unreachable, ``then`` is what it does with a batch."""

    def __init__(self) -> None:
        self.started: list[Batch] = []
        self.failing = False
        self.then: Callable[[Batch], None] = lambda _: None

    def start(self, batch: Batch) -> None:
        if self.failing:
            raise BackendUnavailableError("Batches cannot be started right now.", retry_after=1)
        self.started.append(batch)
        self.then(batch)


@dataclass(frozen=True)
class BatchApp:
    """A running app and what is behind it; ``aws_url`` is moto's."""

    url: str
    aws_url: str
    bucket: str
    table: BatchTable
    objects: S3ObjectStore
    starter: RecordingStarter
    registry: InMemoryRegistry
    clock: ManualClock


def registry(principals: Sequence[Principal] = (ALICE, COLLEAGUE, STRANGER, GONE, EXPIRED)) -> InMemoryRegistry:
    known = {KEY: "key-alice", COLLEAGUES_KEY: "key-carol", STRANGERS_KEY: "key-bob"}
    secrets = {key_id: secret for secret, key_id in known.items()}
    return InMemoryRegistry({secret_digest(secrets.get(one.key_id, str(uuid.uuid4()))): one for one in principals}, [])


@contextmanager
def running_batch_app(region: str, root: Path) -> Iterator[BatchApp]:
    """``region`` is the test module's own."""
    with moto_services(region) as make_client:
        dynamodb, s3 = make_client("dynamodb"), make_client("s3")
        create_tables(dynamodb, root / "infra" / "tables.yaml")
        bucket = f"pipeline-{region}"  # all regions of a process have the same buckets
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": region})
        clock, starter, keys = ManualClock(NOON), RecordingStarter(), registry()
        table, objects = BatchTable(dynamodb, TABLE, 30, clock), S3ObjectStore(s3, bucket)
        batches = BatchService(table, table, lambda: objects, lambda: starter, clock)
        app = batches_app(BatchParts(keys, batches, clock))
        with serving(app, bind(0)) as url:
            yield BatchApp(url, s3.meta.endpoint_url, bucket, table, objects, starter, keys, clock)
