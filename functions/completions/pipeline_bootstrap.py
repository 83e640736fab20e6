"""The composition root of the functions that events start. It imports no web framework: they start without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from completions.clients import SystemClock, build_dynamodb_client, build_s3_client, build_sagemaker_client
from completions.domain.ports import Clock
from completions.metering.dynamodb import FailOpen
from completions.metering.record_book import DynamoRecordBook
from completions.pipelines.answering import EventAnswering
from completions.service.complete import CompletionService
from completions.service_bootstrap import (
    build_backend,
    build_ledger,
    build_registry,
    build_retries,
    every_dialects_endpoints,
)
from completions.settings import PipelineSettings
from completions.stores.replies import S3ReplyStore

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient
    from mypy_boto3_s3 import S3Client


@dataclass(frozen=True, slots=True)
class PipelineClients:
    """What every pipeline function talks to."""

    dynamodb: DynamoDBClient
    s3: S3Client
    clock: Clock


def build_clients() -> PipelineClients:
    """From the environment."""
    return PipelineClients(build_dynamodb_client(), build_s3_client(), SystemClock())


def build_answering(settings: PipelineSettings, clients: PipelineClients) -> EventAnswering:
    """The service for events. It never fails open: without the books nothing could tell what was answered."""
    registry = build_registry(clients.dynamodb, settings, clients.clock)
    service = CompletionService(
        registry,
        build_backend(build_sagemaker_client(settings), settings, clients.clock),
        build_ledger(clients.dynamodb, settings, clients.clock, FailOpen.NOBODY),
        clients.clock,
        build_retries(settings),
    )
    records = DynamoRecordBook(clients.dynamodb, settings.usage_table, settings.usage_retention_days, clients.clock)
    replies = S3ReplyStore(clients.s3, settings.pipeline_bucket)
    return EventAnswering(
        every_dialects_endpoints(settings), service, registry, replies=replies, records=records, clock=clients.clock
    )
