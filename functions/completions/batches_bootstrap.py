"""The composition root of files and batches over HTTP. Apart from the other apps', which start without any of this."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Final, Literal

from fastapi import FastAPI

from completions.clients import SystemClock, build_dynamodb_client, build_signing_s3_client, build_state_machine_client
from completions.dialects.openai import OpenAIDialect
from completions.dialects.openai_batches import batch_resources
from completions.domain.batches import Batches, BatchStarter, ObjectStore
from completions.domain.ports import Clock, Registry
from completions.service.batches import BatchService
from completions.service_bootstrap import build_registry, every_dialects_paths
from completions.settings import PipelineSettings, SettingsError, read_pipeline_settings
from completions.snapstart import refresh_after_restore
from completions.stores.batch_table import BatchTable
from completions.stores.objects import S3ObjectStore
from completions.stores.state_machine import StateMachine
from completions.web.app import resources_app
from completions.web.auth import IamAuthenticator, KeyAuthenticator

KEPT: Final = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class BatchParts:
    """What the app is assembled from. Files are ``kept`` so long."""

    registry: Registry
    batches: Batches
    clock: Clock
    kept: timedelta = KEPT
    auth_mode: Literal["keys", "iam"] = "keys"
    cors_origins: tuple[str, ...] = ()


def build_batch_parts(settings: PipelineSettings | None = None) -> BatchParts:
    """The real parts, from the environment unless ``settings`` are given. Raises ``SettingsError``."""
    settings = settings or read_pipeline_settings()
    if settings.batch_state_machine is None:
        raise SettingsError("environment: BATCH_STATE_MACHINE: without it no batch can be started")
    bucket, state_machine = settings.pipeline_bucket, settings.batch_state_machine
    clock = SystemClock()
    dynamodb = build_dynamodb_client()
    refresh_after_restore([dynamodb])
    table = BatchTable(dynamodb, settings.pipeline_table, settings.pipeline_retention_days, clock)

    def objects() -> ObjectStore:
        return S3ObjectStore(build_signing_s3_client(), bucket)

    def starter() -> BatchStarter:
        return StateMachine(build_state_machine_client(), state_machine)

    return BatchParts(
        registry=build_registry(dynamodb, settings, clock),
        batches=BatchService(table, table, cache(objects), cache(starter), clock),
        clock=clock,
        kept=timedelta(days=settings.pipeline_retention_days),
        auth_mode=settings.auth_mode,
        cors_origins=settings.cors_origins,
    )


def batches_app(parts: BatchParts | None = None) -> FastAPI:
    """``/v1/files`` and ``/v1/batches``, and what is below them."""
    parts = parts or build_batch_parts()
    kind = IamAuthenticator if parts.auth_mode == "iam" else KeyAuthenticator
    return resources_app(
        OpenAIDialect(),
        batch_resources(parts.batches, every_dialects_paths(), parts.kept),
        parts.registry,
        kind(parts.registry, parts.clock),
        parts.clock,
        origins=parts.cors_origins,
    )
