"""The shape of the pipeline table's items about files and batches.

- ``FILES#<tenant>`` and ``BATCHES#<tenant>``, by id: ids begin with their moment, so that a list is one query.
- ``BATCH#<id>`` with ``PART#<part>`` for each part of a batch that was counted.
- ``NAMES#<key id>``, by the digest of a name that a caller gave: the id it stands for.

``expires_at`` is the table's TTL, in epoch seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from pydantic import AwareDatetime, BaseModel, ConfigDict

from completions.domain.batches import Batch, BatchStatus, LineCounts, LineError, StoredFile
from completions.domain.completion import Usage

FILES: Final = "FILES#"
BATCHES: Final = "BATCHES#"
PARTS: Final = "BATCH#"
PART: Final = "PART#"
NAMES: Final = "NAMES#"


class _Item(BaseModel):
    model_config = ConfigDict(extra="ignore")


class FileItem(_Item):
    """A file."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    key: str
    size: int
    created_at: AwareDatetime
    expires_at: int

    def to_file(self) -> StoredFile:
        """The domain's view."""
        return StoredFile(**self.model_dump(exclude={"expires_at"}))

    @classmethod
    def from_file(cls, file: StoredFile, expires_at: int) -> FileItem:
        """To be written."""
        return cls.model_validate({**_fields(file), "expires_at": expires_at})


class ErrorItem(_Item):
    """A fault of a batch's file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchItem(_Item):
    """A batch. ``window_ends_at`` is its own ``expires_at``; its counts stand beside each other, to be added to."""

    batch_id: str
    tenant: str
    key_id: str
    input_file_id: str
    input_key: str
    created_at: AwareDatetime
    window_ends_at: AwareDatetime
    endpoint: str | None = None
    status: BatchStatus
    completion_window: str
    metadata: dict[str, str] = {}
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    estimated: bool = False
    nanos: int = 0
    errors: list[ErrorItem] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    moments: dict[BatchStatus, AwareDatetime] = {}
    expires_at: int

    def to_batch(self) -> Batch:
        """The domain's view."""
        usage = Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.estimated)
        return Batch(
            batch_id=self.batch_id,
            tenant=self.tenant,
            key_id=self.key_id,
            input_file_id=self.input_file_id,
            input_key=self.input_key,
            created_at=self.created_at,
            expires_at=self.window_ends_at,
            endpoint=self.endpoint,
            status=self.status,
            completion_window=self.completion_window,
            metadata=self.metadata,
            model=self.model,
            total=self.total,
            counts=LineCounts(self.completed, self.failed, usage, self.nanos),
            errors=tuple(LineError(**error.model_dump()) for error in self.errors),
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            moments=self.moments,
        )

    @classmethod
    def from_batch(cls, batch: Batch, expires_at: int) -> BatchItem:
        """To be written."""
        return cls.model_validate(
            {
                **_fields(batch),
                **counted(batch.counts),
                "window_ends_at": batch.expires_at,
                "estimated": batch.counts.usage.estimated,
                "errors": [_fields(error) for error in batch.errors],
                "expires_at": expires_at,
            }
        )


class BatchChanges(BaseModel):
    """What may change along with a batch's status; what is not given stays."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    total: int | None = None
    errors: list[ErrorItem] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None


class PartItem(_Item):
    """A part that was counted."""

    expires_at: int


class NameItem(_Item):
    """A caller's name."""

    stands_for: str
    fingerprint: str
    expires_at: int


def counted(counts: LineCounts) -> dict[str, int]:
    """The numbers, under the names they have in an item."""
    return {
        "completed": counts.completed,
        "failed": counts.failed,
        "prompt_tokens": counts.usage.prompt_tokens,
        "completion_tokens": counts.usage.completion_tokens,
        "cached_tokens": counts.usage.cached_tokens,
        "nanos": counts.nanos,
    }


def iso(moment: datetime) -> str:
    """As pydantic writes it into an item."""
    return moment.isoformat()


def _fields(value: Any) -> Mapping[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
