"""The usage table's stream: settled records are added to the roll-ups.

What cannot be added is reported by its number in the stream; Lambda delivers again from the first of those on.
"""

from __future__ import annotations

from typing import Any

from completions.metering.rollups import add_stream_records
from completions.worker_bootstrap import build_roll_ups

_roll_ups = build_roll_ups()


def handler(event: dict[str, Any], context: object) -> dict[str, list[dict[str, str]]]:
    """A partial batch response."""
    failed = add_stream_records(_roll_ups, event["Records"])
    return {"batchItemFailures": [{"itemIdentifier": number} for number in failed]}
