"""What the state machine hands to its functions."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from completions.pipelines.batch_tasks import AssemblyTask, BatchTask, PartTask

BATCH = {"tenant": "owner:ada", "batch_id": "batch_1"}
PART = {"part": 0, "first_line": 1, "start": 0, "end": 10, "lines": 1, "skip": [], "check": 5}


def test_what_the_splitter_said_is_what_the_assembler_takes() -> None:
    task = AssemblyTask.model_validate({**BATCH, "parts": 3, "workers": 2})
    assert (task.tenant, task.batch_id, task.failure) == ("owner:ada", "batch_1", None)


def test_a_failure_is_known_by_its_name_alone() -> None:
    task = AssemblyTask.model_validate({**BATCH, "failure": {"Error": "States.Timeout", "Cause": "a stack trace"}})
    assert task.failure is not None
    assert task.failure.model_dump() == {"error": "States.Timeout"}


@pytest.mark.parametrize("event", [{}, {"tenant": "", "batch_id": "batch_1"}, {"tenant": "owner:ada"}])
def test_a_batch_has_a_tenant_and_an_id(event: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        BatchTask.model_validate(event)


@pytest.mark.parametrize("wrong", [{"part": -1}, {"lines": 0}, {"start": "0"}, {"more": 1}])
def test_a_part_is_as_the_index_has_it(wrong: dict[str, object]) -> None:
    PartTask.model_validate({**BATCH, "part": PART})
    with pytest.raises(ValidationError, match=rf"part\.{next(iter(wrong))}"):
        PartTask.model_validate({**BATCH, "part": {**PART, **wrong}})
