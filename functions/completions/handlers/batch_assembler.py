"""The last state of a batch's run: what its parts came to is joined."""

from __future__ import annotations

from typing import Any

from completions.handlers import ready
from completions.pipeline_bootstrap import build_batch_assembler
from completions.pipelines.batch_tasks import AssemblyTask

_assembler = build_batch_assembler()
ready()


def handler(event: dict[str, Any], context: object) -> dict[str, object]:
    """How the batch ended, and where its manifest is."""
    task = AssemblyTask.model_validate(event)
    return _assembler.assemble(task.tenant, task.batch_id, None if task.failure is None else task.failure.error)
