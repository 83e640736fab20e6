"""The first state of a batch's run: its file is read, and divided into parts."""

from __future__ import annotations

from typing import Any

from completions.handlers import ready
from completions.pipeline_bootstrap import build_batch_splitter
from completions.pipelines.batch_tasks import BatchTask

_splitter = build_batch_splitter()
ready()


def handler(event: dict[str, Any], context: object) -> dict[str, object]:
    """Where the parts are listed, and how they are to be run."""
    task = BatchTask.model_validate(event)
    return _splitter.split(task.tenant, task.batch_id)
