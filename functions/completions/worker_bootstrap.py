"""The composition root of the functions that keep the books. It imports no web framework: they start without one.

Each of them imports its own part alone, where that is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from completions.clients import SystemClock, build_dynamodb_client
from completions.settings import Settings, read_settings

if TYPE_CHECKING:
    from completions.metering.rollups import RollUps
    from completions.metering.sweep import UsageSweeper


def build_sweeper(settings: Settings | None = None) -> UsageSweeper:
    """Over the tables of ``settings``, the environment's unless given. Raises ``SettingsError``."""
    from completions.metering.sweep import LostCharge, SweepPolicy, UsageSweeper  # noqa: PLC0415 - see the module
    from completions.registry.keys import list_keys  # noqa: PLC0415

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
    from completions.metering.rollups import RollUps  # noqa: PLC0415 - see the module

    settings = settings or read_settings()
    return RollUps(build_dynamodb_client(), settings.usage_table, SystemClock())
