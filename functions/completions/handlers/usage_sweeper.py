"""Every minute: finishes what functions that died left open in the usage table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aws_lambda_powertools import Metrics
from aws_lambda_powertools.metrics import MetricUnit

from completions.metering.sweep import SweepCounts, SweepError
from completions.worker_bootstrap import build_sweeper

_sweeper = build_sweeper()
_metrics = Metrics(namespace="completions", service="completions")


def handler(event: dict[str, Any], context: object) -> dict[str, int]:
    """What was found, by kind. Raises ``SweepError`` when something could not be swept."""
    try:
        counts = _sweeper.sweep()
    except SweepError as error:
        _measure(error.counts)
        raise
    _measure(counts)
    return asdict(counts)


def _measure(counts: SweepCounts) -> None:
    """Metrics of what there was; a minute without anything adds none."""
    found = {name: count for name, count in asdict(counts).items() if count and name != "complete"}
    for name, count in found.items():
        _metrics.add_metric(f"Sweep{name.capitalize()}", MetricUnit.Count, count)
    if found:
        _metrics.flush_metrics()
