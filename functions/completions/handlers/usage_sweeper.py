"""Every minute: finishes what functions that died left open in the usage table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aws_lambda_powertools.metrics import MetricUnit

from completions.handlers import ready
from completions.metering.sweep import SweepCounts, SweepError
from completions.metering.sweep_metrics import SWEEP_METRICS
from completions.observability import new_metrics
from completions.worker_bootstrap import build_sweeper

_sweeper = build_sweeper()
ready()


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
    metrics = new_metrics()
    for name, metric in SWEEP_METRICS.items():
        if count := getattr(counts, name):
            metrics.add_metric(metric, MetricUnit.Count, count)
    if metrics.metric_set:
        metrics.flush_metrics()
