"""What the state machine of ``infra/batch.asl.json`` hands to its functions."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from completions.pipelines.batch_parts import Part


class BatchTask(BaseModel):
    """One batch."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    tenant: str = Field(min_length=1)
    batch_id: str = Field(min_length=1)


class PartTask(BatchTask):
    """One part of it."""

    part: Part


class Failure(BaseModel):
    """What a state ended with; its cause may be a stack trace, and is left alone."""

    error: str = Field(default="", alias="Error")


class AssemblyTask(BatchTask):
    """A batch whose run is over."""

    failure: Failure | None = None
