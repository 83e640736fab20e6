"""The composition root of the functions that events start. It imports no web framework: they start without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from completions.backends.sagemaker import SageMakerBackend
from completions.clients import (
    SystemClock,
    build_dynamodb_client,
    build_events_client,
    build_s3_client,
    build_sagemaker_client,
    build_sqs_client,
)
from completions.domain.deliveries import PlaceKind, ReplyPlace
from completions.domain.events import RecordBook
from completions.domain.ports import Clock, Registry, UsageLedger
from completions.metering.dynamodb import FailOpen
from completions.metering.record_book import DynamoRecordBook
from completions.observability import SERVICE
from completions.pipelines.answering import EventAnswering
from completions.pipelines.async_results import AsyncResults
from completions.pipelines.batch_assemble import BatchAssembler
from completions.pipelines.batch_split import BatchSplitter, SplitLimits
from completions.pipelines.batch_work import BatchWorker, EarlierReplies, WorkLimits
from completions.pipelines.delivery import Replying
from completions.pipelines.messages import MessageDefaults
from completions.pipelines.queue_worker import QueueWorker
from completions.pipelines.submissions import Submissions
from completions.service.complete import CompletionService
from completions.service.submitted import SubmittedCompletions
from completions.service_bootstrap import (
    build_backend,
    build_ledger,
    build_registry,
    build_retries,
    every_dialects_endpoints,
)
from completions.settings import PipelineSettings, read_pipeline_settings
from completions.stores.batch_table import BatchTable
from completions.stores.deliveries import DynamoDeliveryLog
from completions.stores.objects import S3ObjectStore
from completions.stores.outlets import AwsOutlets, SqsVisibility
from completions.stores.pending import DynamoPendingStore
from completions.stores.replies import S3ReplyStore

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sqs import SQSClient


@dataclass(frozen=True, slots=True)
class PipelineClients:
    """What every pipeline function talks to."""

    dynamodb: DynamoDBClient
    s3: S3Client
    clock: Clock


def build_clients() -> PipelineClients:
    """From the environment."""
    return PipelineClients(build_dynamodb_client(), build_s3_client(), SystemClock())


@dataclass(frozen=True, slots=True)
class _Service:
    """The service for events. It never fails open: without the books nothing could tell what was answered."""

    registry: Registry
    backend: SageMakerBackend
    ledger: UsageLedger
    records: RecordBook


def _build_service(settings: PipelineSettings, clients: PipelineClients) -> _Service:
    return _Service(
        build_registry(clients.dynamodb, settings, clients.clock),
        build_backend(build_sagemaker_client(settings), settings, clients.clock),
        build_ledger(clients.dynamodb, settings, clients.clock, FailOpen.NOBODY),
        DynamoRecordBook(clients.dynamodb, settings.usage_table, settings.usage_retention_days, clients.clock),
    )


def build_answering(
    settings: PipelineSettings, clients: PipelineClients, service: _Service | None = None
) -> EventAnswering:
    """The use case of one event's request."""
    parts = service or _build_service(settings, clients)
    retries = build_retries(settings)
    return EventAnswering(
        every_dialects_endpoints(settings),
        CompletionService(parts.registry, parts.backend, parts.ledger, clients.clock, retries),
        parts.registry,
        replies=S3ReplyStore(clients.s3, settings.pipeline_bucket),
        records=parts.records,
        clock=clients.clock,
    )


def build_replying(
    settings: PipelineSettings, clients: PipelineClients, sqs: Callable[[], SQSClient]
) -> tuple[Replying, Submissions]:
    """Of queue and asynchronous answers: what sends replies, and what is waited for."""
    service = _build_service(settings, clients)
    answering = build_answering(settings, clients, service)
    submitted = SubmittedCompletions(service.registry, service.backend, service.backend, service.ledger, clients.clock)
    pending = DynamoPendingStore(clients.dynamodb, settings.pipeline_table, clients.s3, settings.pipeline_bucket)
    submissions = Submissions(answering, submitted, pending, service.records, clients.clock)
    replying = Replying(
        answering,
        DynamoDeliveryLog(clients.dynamodb, settings.pipeline_table, settings.pipeline_retention_days, clients.clock),
        AwsOutlets(sqs, build_events_client, lambda: clients.s3, SERVICE),
        large_uri=f"s3://{settings.pipeline_bucket}/replies-large/",
        submissions=submissions,
    )
    return replying, submissions


def build_async_results() -> AsyncResults:
    """Of this environment. Raises ``SettingsError``."""
    clients = build_clients()
    replying, submissions = build_replying(read_pipeline_settings(), clients, cache(build_sqs_client))
    return AsyncResults(submissions, replying, clients.clock)


def build_queue_worker() -> QueueWorker:
    """Of this environment. Raises ``SettingsError``."""
    settings, clients = read_pipeline_settings(), build_clients()
    sqs = cache(build_sqs_client)
    replying, _ = build_replying(settings, clients, sqs)
    bus = ReplyPlace(PlaceKind.BUS, settings.pipeline_bus)
    defaults = MessageDefaults(settings.pipeline_key_id, bus, settings.pipeline_bucket)
    return QueueWorker(replying, defaults, SqsVisibility(sqs), settings.queue_visibility_seconds)


def build_batch_splitter() -> BatchSplitter:
    """Of this environment. Raises ``SettingsError``."""
    settings, clients = read_pipeline_settings(), build_clients()
    limits = SplitLimits(
        paths=every_dialects_endpoints(settings),
        most_lines=settings.batch_most_lines,
        lines_per_part=settings.batch_lines_per_worker,
        bucket=settings.pipeline_bucket,
        workers=settings.batch_workers,
        tolerated_failure_percentage=settings.batch_tolerated_failure_percentage,
    )
    objects = S3ObjectStore(clients.s3, settings.pipeline_bucket)
    return BatchSplitter(objects, build_batch_table(settings, clients), clients.clock, limits)


def build_batch_worker() -> BatchWorker:
    """Of this environment. Raises ``SettingsError``."""
    settings, clients = read_pipeline_settings(), build_clients()
    pace = settings.batch_tokens_per_minute
    return BatchWorker(
        build_answering(settings, clients),
        build_earlier_replies(settings, clients),
        S3ObjectStore(clients.s3, settings.pipeline_bucket),
        build_batch_table(settings, clients),
        clock=clients.clock,
        limits=WorkLimits(settings.batch_lines_at_once, None if pace is None else pace / settings.batch_workers),
    )


def build_batch_assembler() -> BatchAssembler:
    """Of this environment. Raises ``SettingsError``."""
    settings, clients = read_pipeline_settings(), build_clients()
    objects = S3ObjectStore(clients.s3, settings.pipeline_bucket)
    table = build_batch_table(settings, clients)
    return BatchAssembler(build_earlier_replies(settings, clients), objects, table, clients.clock)


def build_batch_table(settings: PipelineSettings, clients: PipelineClients) -> BatchTable:
    """Files and batches."""
    return BatchTable(clients.dynamodb, settings.pipeline_table, settings.pipeline_retention_days, clients.clock)


def build_earlier_replies(settings: PipelineSettings, clients: PipelineClients) -> EarlierReplies:
    """What lines were answered before."""
    records = DynamoRecordBook(clients.dynamodb, settings.usage_table, settings.usage_retention_days, clients.clock)
    return EarlierReplies(S3ReplyStore(clients.s3, settings.pipeline_bucket), records)
