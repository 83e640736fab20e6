"""The environment of a deployed function, validated once at start: a missing variable fails the init, not a request."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from completions.dialects.extra_fields import EXTRA_FIELDS

_ORIGIN: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(?:\[[0-9a-f:]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_OWN_PORTS: Final = {("http", "80"), ("https", "443")}


class SettingsError(Exception):
    """The environment is incomplete or wrong; the message names every variable at fault."""


class Settings(BaseModel):
    """Variables by their own names, lower-cased. AWS's (region, credentials, ``AWS_ENDPOINT_URL_*``) are boto3's."""

    # built when it is read: a function reads one of these classes
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    registry_table: str = Field(min_length=1)
    usage_table: str = Field(min_length=1)
    auth_mode: Literal["keys", "iam"] = "keys"
    """How callers are known: by API keys, or by the signatures that API Gateway's AWS_IAM authorization has checked."""
    aws_lambda_max_concurrency: int = Field(default=1, ge=1)
    """Requests that this environment serves side by side; Lambda sets it on managed instances."""
    cors_origins: tuple[str, ...] = ()
    """Whose pages may ask from a browser: ``*``, or origins separated by commas."""
    registry_cache_seconds: float = Field(default=30, ge=0)
    usage_retention_days: int = Field(default=400, ge=1)
    openai_extra_fields: frozenset[str] = frozenset()
    """Request fields beyond OpenAI's own that its dialect lets through, separated by commas."""
    sourcegraph_default_model: str | None = None
    """What an empty ``model`` means, and what editors are told to complete with."""
    upstream_connect_timeout: float = Field(default=3, gt=0)
    upstream_read_timeout: float = Field(default=60, gt=0)
    """Seconds between two reads: the longest prefill, and the longest gap between two tokens."""

    upstream_attempts: int = Field(default=3, ge=1, le=10)
    """Calls to one model for one request, where repeating is safe."""
    start_poll_seconds: float = Field(default=10, gt=0)
    """How often a model that starts is asked again on behalf of a caller who waits."""
    circuit_failures: int = Field(default=5, ge=1)
    """Failures in a row after which an endpoint is left alone for ``circuit_seconds``."""
    circuit_seconds: int = Field(default=30, ge=1)
    async_input_s3_uri: str | None = Field(default=None, pattern=r"^s3://[a-z0-9.-]{3,63}(/.*)?$", max_length=900)
    """Where bodies above 128,000 bytes are put for asynchronous endpoints. They hold prompts: the bucket needs a
    lifecycle rule, and the function ``s3:PutObject`` on it. Without it such requests are refused."""

    metering_fail_open: Literal["nobody", "unlimited", "everybody"] = "unlimited"
    """Whose requests are served while the usage table cannot be written: their records go to the log instead."""

    sweep_after_seconds: int = Field(default=960, ge=1)
    """How old a hold must be to be given up: longer than any function runs, plus what clocks differ by."""
    sweep_charge: Literal["nothing", "estimate"] = "nothing"
    """What a request costs whose function died."""

    @field_validator("openai_extra_fields", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return {name.strip() for name in value.split(",")} - {""} if isinstance(value, str) else value

    @field_validator("openai_extra_fields")
    @classmethod
    def _known(cls, names: frozenset[str]) -> frozenset[str]:
        if unknown := sorted(names - EXTRA_FIELDS):
            raise ValueError(f"no such field: {', '.join(unknown)}; there are {', '.join(sorted(EXTRA_FIELDS))}")
        return names

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return [origin for part in value.split(",") if (origin := part.strip())] if isinstance(value, str) else value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        if origins == ("*",):
            return origins
        if "*" in origins:
            raise ValueError("'*' allows every origin, and stands alone")
        for origin in origins:
            match = _ORIGIN.fullmatch(origin)
            if match is None or match.groups() in _OWN_PORTS:
                raise ValueError(
                    f"{origin!r} is no origin as browsers write it: scheme and host in lower case, a port that is not "
                    "the scheme's own, nothing behind, as https://app.example.com or http://localhost:3000"
                )
        return origins


class PipelineSettings(Settings):
    """What the functions that events start have besides."""

    pipeline_bucket: str = Field(min_length=3)
    """Inputs, outputs, and the replies that are kept for those who ask again."""
    pipeline_table: str = Field(min_length=1)
    """Batches, files, and what is on its way."""
    pipeline_bus: str = Field(default="default", min_length=1)
    """EventBridge's, where events say what became of a request."""
    pipeline_key_id: str | None = None
    """The key that pays for an event that names none; without it, such an event is refused."""
    pipeline_retention_days: int = Field(default=30, ge=15)
    """How long batches, files and marks of delivery are kept; the bucket's lifecycle rules say the same."""
    queue_visibility_seconds: int = Field(default=960, ge=3, le=43_200)
    """``VisibilityTimeout`` of the queue of requests: how long it gives a message to nobody else."""
    batch_state_machine: str | None = None
    """The ARN of the state machine that runs batches, for those who start them."""
    batch_most_lines: int = Field(default=50_000, ge=1)
    """OpenAI's limit. The ids of all lines are compared in memory."""
    batch_lines_per_worker: int = Field(default=50, ge=1)
    """Lines of one part, which one invocation answers: a cold start is paid once for so many."""
    batch_lines_at_once: int = Field(default=8, ge=1, le=64)
    """Lines that a worker asks the model side by side."""
    batch_workers: int = Field(default=10, ge=1)
    """Workers of one batch that run side by side."""
    batch_tolerated_failure_percentage: float = Field(default=100, ge=0, le=100)
    """Share of a batch's parts that may be given up before the others are."""
    batch_tokens_per_minute: int | None = Field(default=None, ge=1)
    """The pace of one batch, shared by its workers, so that what is interactive finds the model free."""


AnySettings = TypeVar("AnySettings", bound=Settings)


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of this environment. Raises ``SettingsError``."""
    return _read(Settings, environment)


def read_pipeline_settings(environment: Mapping[str, str] = os.environ) -> PipelineSettings:
    """Those of a function that events start. Raises ``SettingsError``."""
    return _read(PipelineSettings, environment)


def _read(kind: type[AnySettings], environment: Mapping[str, str]) -> AnySettings:
    known = {name: environment[name.upper()] for name in kind.model_fields if environment.get(name.upper(), "") != ""}
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        faults = [f"{str(fault['loc'][0]).upper()}: {fault['msg']}" for fault in error.errors(include_input=False)]
        raise SettingsError("environment: " + "; ".join(faults)) from None
