"""The composition root: settings to clients to adapters to apps. Every part can be handed in instead.

A function serves one app, and its start is waited for: what one app alone needs is imported where that app is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from completions import __version__
from completions.clients import SystemClock, build_dynamodb_client, build_sagemaker_client
from completions.dialects.dialect import Dialect, Resource
from completions.domain.ports import Backend, Clock, Registry, UsageLedger
from completions.service.complete import CompletionService
from completions.service.dispatch import RetryPolicy
from completions.service_bootstrap import (
    build_backend,
    build_ledger,
    build_registry,
    build_reports,
    build_retries,
    openai_endpoints,
    scale_endpoints,
    scale_v1_endpoints,
    sourcegraph_endpoints,
)
from completions.settings import Settings, read_settings
from completions.snapstart import refresh_after_restore
from completions.web.app import completions_app, resources_app
from completions.web.auth import Authenticator, IamAuthenticator, KeyAuthenticator
from completions.web.framework import FastAPI

if TYPE_CHECKING:
    from completions.domain.usage import UsageReports


@dataclass(frozen=True, slots=True)
class Parts:
    """What the apps are assembled from."""

    registry: Registry
    backend: Backend
    ledger: UsageLedger
    reports: UsageReports | None
    clock: Clock
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    openai_extra_fields: frozenset[str] = frozenset()
    sourcegraph_default_model: str | None = None
    auth_mode: Literal["keys", "iam"] = "keys"
    cors_origins: tuple[str, ...] = ()
    requests_at_once: int = 1

    @property
    def service(self) -> CompletionService:
        """The use cases over these parts."""
        return CompletionService(self.registry, self.backend, self.ledger, self.clock, self.retries)


@dataclass(frozen=True, slots=True)
class ReadingParts:
    """What is needed of them where nothing is completed."""

    registry: Registry
    reports: UsageReports | None
    clock: Clock
    sourcegraph_default_model: str | None = None
    auth_mode: Literal["keys", "iam"] = "keys"
    cors_origins: tuple[str, ...] = ()


def build_parts(settings: Settings | None = None, *, with_reports: bool = True) -> Parts:
    """The real parts, from the environment unless ``settings`` are given. Raises ``SettingsError``."""
    from completions.metering.dynamodb import FailOpen  # noqa: PLC0415 - see the module

    settings = settings or read_settings()
    clock = SystemClock()
    dynamodb = build_dynamodb_client()
    sagemaker = build_sagemaker_client(settings)
    refresh_after_restore([dynamodb, sagemaker])
    return Parts(
        registry=build_registry(dynamodb, settings, clock),
        backend=build_backend(sagemaker, settings, clock),
        ledger=build_ledger(dynamodb, settings, clock, FailOpen(settings.metering_fail_open)),
        reports=build_reports(dynamodb, settings, clock) if with_reports else None,
        clock=clock,
        retries=build_retries(settings),
        openai_extra_fields=settings.openai_extra_fields,
        sourcegraph_default_model=settings.sourcegraph_default_model,
        auth_mode=settings.auth_mode,
        cors_origins=settings.cors_origins,
        requests_at_once=settings.aws_lambda_max_concurrency,
    )


def build_reading_parts(settings: Settings | None = None, *, with_reports: bool = False) -> ReadingParts:
    """The real ones, from the environment unless ``settings`` are given. Raises ``SettingsError``."""
    settings = settings or read_settings()
    clock = SystemClock()
    dynamodb = build_dynamodb_client()
    refresh_after_restore([dynamodb])
    return ReadingParts(
        registry=build_registry(dynamodb, settings, clock),
        reports=build_reports(dynamodb, settings, clock) if with_reports else None,
        clock=clock,
        sourcegraph_default_model=settings.sourcegraph_default_model,
        auth_mode=settings.auth_mode,
        cors_origins=settings.cors_origins,
    )


def openai_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST /v1/completions`` and ``/completions``."""
    parts = parts or build_parts(with_reports=False)
    return _completions(parts, openai_endpoints(parts.openai_extra_fields))


def openai_models_app(parts: Parts | ReadingParts | None = None) -> FastAPI:
    """``/v1/models`` and ``/v1/models/{id}``."""
    from completions.dialects.openai import OpenAIDialect  # noqa: PLC0415 - see the module

    dialect = OpenAIDialect()
    return _resources(parts or build_reading_parts(), dialect, dialect.model_resources())


def organization_app(parts: Parts | ReadingParts | None = None) -> FastAPI:
    """``/v1/organization/…``: usage, costs, latency and limits, for admin keys. ``parts`` must have reports."""
    from completions.dialects.openai import OpenAIDialect  # noqa: PLC0415 - see the module
    from completions.dialects.organization import organization_resources  # noqa: PLC0415

    parts = parts or build_reading_parts(with_reports=True)
    reports = cast("UsageReports", parts.reports)
    return _resources(parts, OpenAIDialect(), organization_resources(reports, parts.clock))


def scale_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST /v2/completions``."""
    return _completions(parts or build_parts(with_reports=False), scale_endpoints())


def scale_v1_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST /v1/llm/completions-sync`` and ``/v1/llm/completions-stream``."""
    return _completions(parts or build_parts(with_reports=False), scale_v1_endpoints())


def scale_models_app(parts: Parts | ReadingParts | None = None) -> FastAPI:
    """``/v1/llm/model-endpoints`` and ``/v1/llm/model-endpoints/{name}``."""
    from completions.dialects.scale_v1 import ScaleV1Dialect  # noqa: PLC0415 - see the module

    dialect = ScaleV1Dialect(streamed=False)
    return _resources(parts or build_reading_parts(), dialect, dialect.model_resources())


def sourcegraph_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST /.api/completions/code`` and ``/.api/completions/stream``."""
    parts = parts or build_parts(with_reports=False)
    return _completions(parts, sourcegraph_endpoints(parts.sourcegraph_default_model))


def every_dialects_completions_app(parts: Parts | None = None) -> FastAPI:
    """``POST`` of every dialect's completions. What no dialect claims is refused in OpenAI's form."""
    parts = parts or build_parts(with_reports=False)
    endpoints = (
        openai_endpoints(parts.openai_extra_fields)
        | scale_endpoints()
        | scale_v1_endpoints()
        | sourcegraph_endpoints(parts.sourcegraph_default_model)
    )
    return _completions(parts, endpoints)


def sourcegraph_site_app(parts: Parts | ReadingParts | None = None) -> FastAPI:
    """``/.api/modelconfig/supported-models.json``, ``/.api/client-config`` and ``/.api/graphql``."""
    from completions.dialects.sourcegraph import SourcegraphDialect  # noqa: PLC0415 - see the module
    from completions.dialects.sourcegraph_site import site_resources  # noqa: PLC0415

    parts = parts or build_reading_parts()
    dialect = SourcegraphDialect(False, parts.sourcegraph_default_model)
    return _resources(parts, dialect, site_resources(parts.sourcegraph_default_model, __version__))


def _completions(parts: Parts, endpoints: Mapping[str, Dialect]) -> FastAPI:
    return completions_app(
        endpoints,
        parts.service,
        _authenticator(parts),
        parts.clock,
        origins=parts.cors_origins,
        requests_at_once=parts.requests_at_once,
    )


def _authenticator(parts: Parts | ReadingParts) -> Authenticator:
    kind = IamAuthenticator if parts.auth_mode == "iam" else KeyAuthenticator
    return kind(parts.registry, parts.clock)


def _resources(parts: Parts | ReadingParts, dialect: Dialect, resources: Sequence[Resource]) -> FastAPI:
    return resources_app(
        dialect, resources, parts.registry, _authenticator(parts), parts.clock, origins=parts.cors_origins
    )
