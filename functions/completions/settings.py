"""The environment of a deployed function, validated once at start: a missing variable fails the init, not a request."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class SettingsError(Exception):
    """The environment is incomplete or wrong; the message names every variable at fault."""


class Settings(BaseModel):
    """Variables by their own names, lower-cased. AWS's (region, credentials, ``AWS_ENDPOINT_URL_*``) are boto3's."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    registry_table: str = Field(min_length=1)
    usage_table: str = Field(min_length=1)
    registry_cache_seconds: float = Field(default=30, ge=0)
    usage_retention_days: int = Field(default=400, ge=1)
    upstream_connect_timeout: float = Field(default=3, gt=0)
    upstream_read_timeout: float = Field(default=60, gt=0)
    """Seconds between two reads: the longest prefill, and the longest gap between two tokens."""


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of this environment. Raises ``SettingsError``."""
    known = {
        name: environment[name.upper()] for name in Settings.model_fields if environment.get(name.upper(), "") != ""
    }
    try:
        return Settings.model_validate(known)
    except ValidationError as error:
        faults = [f"{str(fault['loc'][0]).upper()}: {fault['msg']}" for fault in error.errors(include_input=False)]
        raise SettingsError("environment: " + "; ".join(faults)) from None
