"""The composition root: settings to clients to adapters to apps. Every part can be handed in instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import boto3
from botocore.config import Config
from fastapi import FastAPI

from completions import __version__
from completions.backends.circuit import EndpointCircuits
from completions.backends.families import CODECS
from completions.backends.s3_answers import S3Location
from completions.backends.sagemaker import SageMakerBackend
from completions.backends.sagemaker_async import AsynchronousEndpoints
from completions.dialects.dialect import Dialect, Resource
from completions.dialects.openai import OpenAIDialect
from completions.dialects.organization import organization_resources
from completions.dialects.scale import ScaleDialect
from completions.dialects.scale_v1 import ScaleV1Dialect
from completions.dialects.sourcegraph import SourcegraphDialect
from completions.dialects.sourcegraph_site import site_resources
from completions.domain.ports import Backend, Clock, Registry, UsageLedger
from completions.domain.usage import UsageReports
from completions.metering.dynamodb import DynamoUsageLedger, FailOpen
from completions.metering.rollup_queries import DynamoUsageReports
from completions.registry.dynamodb import DynamoRegistry, list_keys
from completions.service.complete import CompletionService
from completions.service.dispatch import RetryPolicy
from completions.settings import Settings, read_settings
from completions.snapstart import refresh_after_restore
from completions.web.app import completions_app, resources_app
from completions.web.auth import Authenticator, IamAuthenticator, KeyAuthenticator
from completions.worker_bootstrap import SystemClock as SystemClock  # noqa: PLC0414 - this is where others look for it
from completions.worker_bootstrap import build_dynamodb_client as build_dynamodb_client  # noqa: PLC0414

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sagemaker_runtime import SageMakerRuntimeClient


@dataclass(frozen=True, slots=True)
class Parts:
    """What the apps are assembled from."""

    registry: Registry
    backend: Backend
    ledger: UsageLedger
    reports: UsageReports
    clock: Clock
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    openai_extra_fields: frozenset[str] = frozenset()
    sourcegraph_default_model: str | None = None
    auth_mode: Literal["keys", "iam"] = "keys"
    cors_origins: tuple[str, ...] = ()
    requests_at_once: int = 1

    @property
    def authenticator(self) -> Authenticator:
        """How callers are known."""
        kind = IamAuthenticator if self.auth_mode == "iam" else KeyAuthenticator
        return kind(self.registry, self.clock)

    @property
    def service(self) -> CompletionService:
        """The use cases over these parts."""
        return CompletionService(self.registry, self.backend, self.ledger, self.clock, self.retries)


def build_parts(settings: Settings | None = None) -> Parts:
    """The real parts, from the environment unless ``settings`` are given. Raises ``SettingsError``."""
    settings = settings or read_settings()
    clock = SystemClock()
    dynamodb = build_dynamodb_client()
    sagemaker = build_sagemaker_client(settings)
    refresh_after_restore([dynamodb, sagemaker])
    circuits = EndpointCircuits(settings.circuit_failures, settings.circuit_seconds)
    inputs = None if settings.async_input_s3_uri is None else S3Location.parse(settings.async_input_s3_uri)
    return Parts(
        registry=DynamoRegistry(dynamodb, settings.registry_table, clock, settings.registry_cache_seconds),
        backend=SageMakerBackend(
            sagemaker,
            CODECS,
            circuits,
            settings.upstream_read_timeout,
            AsynchronousEndpoints(sagemaker, build_s3_client, circuits, clock, inputs),
        ),
        ledger=DynamoUsageLedger(
            dynamodb,
            settings.usage_table,
            settings.usage_retention_days,
            clock,
            FailOpen(settings.metering_fail_open),
        ),
        reports=DynamoUsageReports(
            dynamodb,
            settings.usage_table,
            clock,
            lambda: (entry.principal for entry in list_keys(dynamodb, settings.registry_table)),
        ),
        clock=clock,
        retries=RetryPolicy(settings.upstream_attempts, start_poll_seconds=settings.start_poll_seconds),
        openai_extra_fields=settings.openai_extra_fields,
        sourcegraph_default_model=settings.sourcegraph_default_model,
        auth_mode=settings.auth_mode,
        cors_origins=settings.cors_origins,
        requests_at_once=settings.aws_lambda_max_concurrency,
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


def build_s3_client() -> S3Client:
    """For the inputs and answers of asynchronous endpoints: reading again, and putting the same again, is safe."""
    return boto3.client(
        "s3",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 3},
            connect_timeout=1,
            read_timeout=5,
            max_pool_connections=64,
            tcp_keepalive=True,
        ),
    )


def openai_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST /v1/completions`` and ``/completions``."""
    parts = parts or build_parts()
    return _completions(parts, _openai_endpoints(parts))


def openai_models_app(parts: Parts | None = None) -> FastAPI:
    """``/v1/models`` and ``/v1/models/{id}``."""
    dialect = OpenAIDialect()
    return _resources(parts or build_parts(), dialect, dialect.model_resources())


def organization_app(parts: Parts | None = None) -> FastAPI:
    """``/v1/organization/…``: usage, costs, latency and limits, for admin keys."""
    parts = parts or build_parts()
    return _resources(parts, OpenAIDialect(), organization_resources(parts.reports, parts.clock))


def scale_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST /v2/completions``."""
    return _completions(parts or build_parts(), _scale_endpoints())


def scale_v1_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST /v1/llm/completions-sync`` and ``/v1/llm/completions-stream``."""
    return _completions(parts or build_parts(), _scale_v1_endpoints())


def scale_models_app(parts: Parts | None = None) -> FastAPI:
    """``/v1/llm/model-endpoints`` and ``/v1/llm/model-endpoints/{name}``."""
    dialect = ScaleV1Dialect(streamed=False)
    return _resources(parts or build_parts(), dialect, dialect.model_resources())


def sourcegraph_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST /.api/completions/code`` and ``/.api/completions/stream``."""
    parts = parts or build_parts()
    return _completions(parts, _sourcegraph_endpoints(parts))


def every_dialects_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST`` of every dialect's completions. What no dialect claims is refused in OpenAI's form."""
    parts = parts or build_parts()
    endpoints = _openai_endpoints(parts) | _scale_endpoints() | _scale_v1_endpoints() | _sourcegraph_endpoints(parts)
    return _completions(parts, endpoints)


def sourcegraph_site_app(parts: Parts | None = None) -> FastAPI:
    """``/.api/modelconfig/supported-models.json``, ``/.api/client-config`` and ``/.api/graphql``."""
    parts = parts or build_parts()
    dialect = SourcegraphDialect(False, parts.sourcegraph_default_model)
    return _resources(parts, dialect, site_resources(parts.sourcegraph_default_model, __version__))


def _openai_endpoints(parts: Parts) -> dict[str, Dialect]:
    dialect = OpenAIDialect(parts.openai_extra_fields)
    return {"/v1/completions": dialect, "/completions": dialect}


def _scale_endpoints() -> dict[str, Dialect]:
    return {"/v2/completions": ScaleDialect()}


def _scale_v1_endpoints() -> dict[str, Dialect]:
    return {
        "/v1/llm/completions-sync": ScaleV1Dialect(streamed=False),
        "/v1/llm/completions-stream": ScaleV1Dialect(streamed=True),
    }


def _sourcegraph_endpoints(parts: Parts) -> dict[str, Dialect]:
    return {
        "/.api/completions/code": SourcegraphDialect(False, parts.sourcegraph_default_model),
        "/.api/completions/stream": SourcegraphDialect(True, parts.sourcegraph_default_model),
    }


def _completions(parts: Parts, endpoints: Mapping[str, Dialect]) -> FastAPI:
    return completions_app(
        endpoints,
        parts.service,
        parts.authenticator,
        parts.clock,
        origins=parts.cors_origins,
        requests_at_once=parts.requests_at_once,
    )


def _resources(parts: Parts, dialect: Dialect, resources: Sequence[Resource]) -> FastAPI:
    return resources_app(
        dialect, resources, parts.registry, parts.authenticator, parts.clock, origins=parts.cors_origins
    )
