"""A file has appeared below ``input/`` in the pipeline's bucket, as S3 tells by EventBridge: its batch is started."""

from __future__ import annotations

from typing import Any

from completions.handlers import ready
from completions.starter_bootstrap import build_batch_starter

_starter = build_batch_starter()
ready()


def handler(event: dict[str, Any], context: object) -> dict[str, str | None]:
    """The batch's id, none for what is no file. What it raises is tried again by Lambda, and then in its queue."""
    return {"batch_id": _starter.start(event)}
