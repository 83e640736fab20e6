"""What both composition roots assemble alike: the service's adapters over clients and settings, and the dialects.

A start is waited for, and most functions speak one dialect, some complete nothing: what is not every function's is
imported where it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from completions.clients import build_s3_client
from completions.dialects.dialect import Dialect
from completions.domain.metering import Principal
from completions.domain.ports import Clock, Registry, UsageLedger
from completions.registry.dynamodb import DynamoRegistry
from completions.service.dispatch import RetryPolicy
from completions.settings import Settings

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient
    from mypy_boto3_sagemaker_runtime import SageMakerRuntimeClient

    from completions.backends.sagemaker import SageMakerBackend
    from completions.domain.usage import UsageReports
    from completions.metering.dynamodb import FailOpen


def build_registry(dynamodb: DynamoDBClient, settings: Settings, clock: Clock) -> Registry:
    """Keys and models."""
    return DynamoRegistry(dynamodb, settings.registry_table, clock, settings.registry_cache_seconds)


def build_backend(sagemaker: SageMakerRuntimeClient, settings: Settings, clock: Clock) -> SageMakerBackend:
    """Every container family, behind streaming and asynchronous endpoints."""
    from completions.backends.circuit import EndpointCircuits  # noqa: PLC0415 - see the module
    from completions.backends.families import CODECS  # noqa: PLC0415
    from completions.backends.s3_answers import S3Location  # noqa: PLC0415
    from completions.backends.sagemaker import SageMakerBackend  # noqa: PLC0415
    from completions.backends.sagemaker_async import AsynchronousEndpoints  # noqa: PLC0415

    circuits = EndpointCircuits(settings.circuit_failures, settings.circuit_seconds)
    inputs = None if settings.async_input_s3_uri is None else S3Location.parse(settings.async_input_s3_uri)
    asynchronous = AsynchronousEndpoints(sagemaker, build_s3_client, circuits, clock, inputs)
    return SageMakerBackend(sagemaker, CODECS, circuits, settings.upstream_read_timeout, asynchronous)


def build_ledger(dynamodb: DynamoDBClient, settings: Settings, clock: Clock, fail_open: FailOpen) -> UsageLedger:
    """The books."""
    from completions.metering.dynamodb import DynamoUsageLedger  # noqa: PLC0415 - see the module

    return DynamoUsageLedger(dynamodb, settings.usage_table, settings.usage_retention_days, clock, fail_open)


def build_reports(dynamodb: DynamoDBClient, settings: Settings, clock: Clock) -> UsageReports:
    """What the books have added up."""
    from completions.metering.rollup_queries import DynamoUsageReports  # noqa: PLC0415 - see the module
    from completions.registry.dynamodb import list_keys  # noqa: PLC0415

    def keys() -> Iterator[Principal]:
        return (entry.principal for entry in list_keys(dynamodb, settings.registry_table))

    return DynamoUsageReports(dynamodb, settings.usage_table, clock, keys)


def build_retries(settings: Settings) -> RetryPolicy:
    """How often a model is asked."""
    return RetryPolicy(settings.upstream_attempts, start_poll_seconds=settings.start_poll_seconds)


def every_dialects_endpoints(settings: Settings) -> dict[str, Dialect]:
    """Each path of each dialect's completions."""
    return (
        openai_endpoints(settings.openai_extra_fields)
        | scale_endpoints()
        | scale_v1_endpoints()
        | sourcegraph_endpoints(settings.sourcegraph_default_model)
    )


def every_dialects_paths() -> frozenset[str]:
    """Their paths, which no setting changes."""
    dialects = (openai_endpoints(frozenset()), scale_endpoints(), scale_v1_endpoints(), sourcegraph_endpoints(None))
    return frozenset().union(*dialects)


def openai_endpoints(extra_fields: frozenset[str]) -> dict[str, Dialect]:
    """OpenAI's completions, by path."""
    from completions.dialects.openai import OpenAIDialect  # noqa: PLC0415 - see the module

    dialect = OpenAIDialect(extra_fields)
    return {"/v1/completions": dialect, "/completions": dialect}


def scale_endpoints() -> dict[str, Dialect]:
    """Scale's."""
    from completions.dialects.scale import ScaleDialect  # noqa: PLC0415 - see the module

    return {"/v2/completions": ScaleDialect()}


def scale_v1_endpoints() -> dict[str, Dialect]:
    """Scale's first ones."""
    from completions.dialects.scale_v1 import ScaleV1Dialect  # noqa: PLC0415 - see the module

    return {
        "/v1/llm/completions-sync": ScaleV1Dialect(streamed=False),
        "/v1/llm/completions-stream": ScaleV1Dialect(streamed=True),
    }


def sourcegraph_endpoints(default_model: str | None) -> dict[str, Dialect]:
    """Sourcegraph's."""
    from completions.dialects.sourcegraph import SourcegraphDialect  # noqa: PLC0415 - see the module

    return {
        "/.api/completions/code": SourcegraphDialect(False, default_model),
        "/.api/completions/stream": SourcegraphDialect(True, default_model),
    }
