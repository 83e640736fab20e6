"""What the sweeper tells CloudWatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from completions.metering.sweep import SweepCounts

SWEEP_METRICS: Final[Mapping[str, str]] = {
    one.name: f"Sweep{one.name.capitalize()}" for one in fields(SweepCounts) if one.name != "complete"
}
"""The sweeper's, by the count's name. ``SweepReleased`` are holds found open past their time: what had leaked."""
