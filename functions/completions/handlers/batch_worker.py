"""One part of a batch: its lines are answered."""

from __future__ import annotations

import time
from typing import Any

from completions.handlers import ready
from completions.pipeline_bootstrap import build_batch_worker
from completions.pipelines.batch_tasks import PartTask
from completions.pipelines.batch_work import RESERVE_SECONDS

_worker = build_batch_worker()
ready()


def handler(event: dict[str, Any], context: Any) -> dict[str, int]:
    """How many lines were answered, and how many were not. Raises ``UnfinishedError``: the part is tried again."""
    task = PartTask.model_validate(event)
    deadline = time.monotonic() + context.get_remaining_time_in_millis() / 1000 - RESERVE_SECONDS
    return _worker.work(task.tenant, task.batch_id, task.part, deadline)
