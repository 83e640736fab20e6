"""The composition root: settings to clients to adapters to apps. Every part can be handed in instead."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from fastapi import FastAPI

from completions.backends.sagemaker import SageMakerBackend
from completions.backends.vllm import VllmCodec
from completions.dialects.openai import OpenAIDialect
from completions.domain.ports import Backend, Clock, Registry, UsageLedger
from completions.metering.dynamodb import DynamoUsageLedger
from completions.registry.dynamodb import DynamoRegistry
from completions.service.complete import CompletionService
from completions.settings import Settings, read_settings
from completions.web.app import completions_app, resources_app

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient
    from mypy_boto3_sagemaker_runtime import SageMakerRuntimeClient


class SystemClock(Clock):
    """The machine's own time."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Parts:
    """What the apps are assembled from."""

    registry: Registry
    backend: Backend
    ledger: UsageLedger
    clock: Clock

    @property
    def service(self) -> CompletionService:
        """The use cases over these parts."""
        return CompletionService(self.registry, self.backend, self.ledger, self.clock)


def build_parts(settings: Settings | None = None) -> Parts:
    """The real parts, from the environment unless ``settings`` are given. Raises ``SettingsError``."""
    settings = settings or read_settings()
    clock = SystemClock()
    dynamodb = build_dynamodb_client()
    return Parts(
        registry=DynamoRegistry(dynamodb, settings.registry_table, clock, settings.registry_cache_seconds),
        backend=SageMakerBackend(
            build_sagemaker_client(settings), {"vllm": VllmCodec()}, settings.upstream_read_timeout
        ),
        ledger=DynamoUsageLedger(dynamodb, settings.usage_table, settings.usage_retention_days),
        clock=clock,
    )


def build_dynamodb_client() -> DynamoDBClient:
    """Its calls are conditional writes and reads, so the SDK may repeat them."""
    return boto3.client(
        "dynamodb",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 3},
            connect_timeout=1,
            read_timeout=3,
            max_pool_connections=64,
            tcp_keepalive=True,
        ),
    )


def build_sagemaker_client(settings: Settings) -> SageMakerRuntimeClient:
    """One attempt a call: the SDK would repeat a read timeout, and the GPU would be paid twice."""
    return boto3.client(
        "sagemaker-runtime",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=settings.upstream_connect_timeout,
            read_timeout=settings.upstream_read_timeout,
            max_pool_connections=64,
            tcp_keepalive=True,
        ),
    )


def openai_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST /v1/completions`` and ``/completions``."""
    parts = parts or build_parts()
    dialect = OpenAIDialect()
    endpoints = {"/v1/completions": dialect, "/completions": dialect}
    return completions_app(endpoints, parts.service, parts.registry, parts.clock)


def openai_models_app(parts: Parts | None = None) -> FastAPI:
    """``/v1/models`` and ``/v1/models/{id}``."""
    parts = parts or build_parts()
    dialect = OpenAIDialect()
    return resources_app(dialect, dialect.model_resources(), parts.registry, parts.clock)
