"""The composition root of the functions that speak no HTTP. It imports no web framework: they start without one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from completions.domain.ports import Clock
from completions.metering.rollups import RollUps
from completions.metering.sweep import LostCharge, SweepPolicy, UsageSweeper
from completions.registry.dynamodb import list_keys
from completions.settings import Settings, read_settings

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_ATTEMPTS = 3


class SystemClock(Clock):
    """The machine's own time."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def build_dynamodb_client() -> DynamoDBClient:
    """Its calls are conditional writes and reads, so the SDK may repeat them."""
    client = boto3.client(
        "dynamodb",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            connect_timeout=1,
            read_timeout=3,
            max_pool_connections=64,
            tcp_keepalive=True,
        ),
    )
    again: Any = _again_after_a_conflict  # an event's handler may answer, whatever its type says
    client.meta.events.register("needs-retry.dynamodb", again)
    return client


def _again_after_a_conflict(attempts: int, response: tuple[Any, Any] | None, **_: Any) -> float | None:
    """Seconds to wait where a transaction held the item: nothing was written, and the SDK itself does not try again."""
    code = "" if response is None else response[1].get("Error", {}).get("Code")
    if code != "TransactionConflictException" or attempts >= _ATTEMPTS:
        return None
    return random.uniform(0.005, 0.05) * attempts  # noqa: S311 - jitter


def build_sweeper(settings: Settings | None = None) -> UsageSweeper:
    """Over the tables of ``settings``, the environment's unless given. Raises ``SettingsError``."""
    settings = settings or read_settings()
    client = build_dynamodb_client()
    registry_table = settings.registry_table

    def limited_keys() -> Iterator[str]:
        for entry in list_keys(client, registry_table):
            if entry.principal.limits.any:
                yield entry.principal.key_id

    policy = SweepPolicy(timedelta(seconds=settings.sweep_after_seconds), LostCharge(settings.sweep_charge))
    return UsageSweeper(
        client,
        settings.usage_table,
        settings.usage_retention_days,
        SystemClock(),
        limited_keys=limited_keys,
        policy=policy,
    )


def build_roll_ups(settings: Settings | None = None) -> RollUps:
    """Over the usage table of ``settings``, the environment's unless given. Raises ``SettingsError``."""
    settings = settings or read_settings()
    return RollUps(build_dynamodb_client(), settings.usage_table, SystemClock())
