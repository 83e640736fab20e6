"""The usage table's stream: settled records are added to the roll-ups, and measured.

What cannot be added is reported by its number in the stream; Lambda delivers again from the first of those on.
"""

from __future__ import annotations

from typing import Any

from completions.handlers import ready
from completions.metering.record_metrics import write_metrics
from completions.metering.rollup_items import RolledRecord
from completions.metering.rollups import add_stream_records
from completions.worker_bootstrap import build_roll_ups

_roll_ups = build_roll_ups()
ready()


def handler(event: dict[str, Any], context: object) -> dict[str, list[dict[str, str]]]:
    """A partial batch response."""
    added: list[RolledRecord] = []
    try:
        failed = add_stream_records(_roll_ups, event["Records"], added.extend)
    finally:
        write_metrics(added)  # delivered again, they would not be added and so never be measured
    return {"batchItemFailures": [{"itemIdentifier": number} for number in failed]}
