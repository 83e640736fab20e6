"""Files and batches: many requests in one file, answered in files, as OpenAI's Files and Batch API has them.

Source: OpenAI's ``Batch``, ``OpenAIFile`` and batch line objects (openai-openapi).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, Generic, Protocol, TypeVar

from completions.domain.completion import Usage
from completions.domain.errors import DuplicateRequestError
from completions.domain.metering import Principal

FILE_ID: Final = "file-"
BATCH_ID: Final = "batch_"


class BatchStatus(StrEnum):
    """OpenAI's words for how far a batch is."""

    VALIDATING = "validating"
    FAILED = "failed"
    """Nothing of it was run: its file is no such file."""
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with one line of a batch's file; ``line`` counts from 1, ``None`` where it is the file itself."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class LineCounts:
    """What became of a batch's lines so far, or of a part of them; ``nanos`` is money in nano-dollars."""

    completed: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    nanos: int = 0


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file by its id. ``tenant`` is whose it is, ``key`` its place in the pipeline's bucket."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    key: str
    size: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Batch:
    """``key_id`` pays for it. ``endpoint`` is the one URL of its lines, ``None`` where each line says its own.

    ``input_key`` is the input's place in the bucket. ``total`` is known once the file is split. ``errors`` are its
    file's first faults, ``moments`` when each status began.
    """

    batch_id: str
    tenant: str
    key_id: str
    input_file_id: str
    input_key: str
    created_at: datetime
    expires_at: datetime
    endpoint: str | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    completion_window: str = "24h"
    metadata: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    total: int = 0
    counts: LineCounts = field(default_factory=LineCounts)
    errors: Sequence[LineError] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    moments: Mapping[BatchStatus, datetime] = field(default_factory=dict)


class BatchStore(Protocol):
    """Files and batches by tenant: nobody finds another's. Raises ``ServiceError`` when it cannot be reached."""

    def add_file(self, file: StoredFile) -> None:
        """Write it; the same file again changes nothing."""
        ...

    def file(self, tenant: str, file_id: str) -> StoredFile | None: ...

    def files(self, tenant: str, *, after: str | None, limit: int, newest_first: bool = True) -> Sequence[StoredFile]:
        """Up to ``limit`` of them, those behind ``after``."""
        ...

    def remove_file(self, tenant: str, file_id: str) -> None: ...

    def add(self, batch: Batch) -> bool:
        """Write a new one; ``False`` when there is one of this id, which stays as it is."""
        ...

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        """It, as it is now."""
        ...

    def batches(self, tenant: str, *, after: str | None, limit: int) -> Sequence[Batch]:
        """The newest first, up to ``limit`` of them, those behind ``after``."""
        ...

    def move(
        self,
        batch: Batch,
        to: BatchStatus,
        at: datetime,
        *,
        only_from: Sequence[BatchStatus],
        changes: Mapping[str, object] | None = None,
    ) -> Batch | None:
        """Give it another status, and with it ``changes``: of ``model``, ``total``, ``errors``, ``output_file_id`` and
        ``error_file_id``. ``None`` when its status is none of ``only_from`` any more."""
        ...

    def count_part(self, batch: Batch, part: str, counts: LineCounts) -> None:
        """Add a part's lines to the batch's, once: the same part again changes nothing."""
        ...


class ObjectStore(Protocol):
    """The pipeline's bucket. Raises ``ServiceError`` when it cannot be reached, ``LookupError`` for no such object."""

    def put(self, key: str, content: bytes, content_type: str = "application/json") -> None: ...

    def get(self, key: str) -> bytes: ...

    def size(self, key: str) -> int: ...

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """The bytes from ``start`` up to, not including, ``end``."""
        ...

    def pieces(self, key: str) -> Iterator[bytes]:
        """The object, streamed: an object of any size in the memory of one piece."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """Every key that begins so, in order."""
        ...

    def write_stream(self, key: str, pieces: Iterator[bytes], content_type: str = "application/json") -> int:
        """Put an object of any size, in the memory of some megabytes; its size. It is there when all of it is."""
        ...

    def delete(self, key: str) -> None: ...

    def download_url(self, key: str, seconds: int) -> str:
        """A URL that gives the object to whoever has it, for so long."""
        ...


def timed_id(kind: str, moment: datetime, seed: str | None = None) -> str:
    """A new id that begins with ``kind``. Ids of one kind sort as their moments do.

    With a ``seed`` it is the same for the same moment: what is done again makes nothing new.
    """
    tail = secrets.token_hex(10) if seed is None else hashlib.sha256(seed.encode()).hexdigest()[:20]
    return f"{kind}{int(moment.timestamp() * 1000):012x}{tail}"


class BatchConflictError(DuplicateRequestError):
    """What is asked does not fit what is there: a batch that has ended, or a name that means something else."""


class BatchNames(Protocol):
    """Names that callers gave to what they asked for, so that it is done once. Raises ``ServiceError``."""

    def claim(self, key_id: str, name: str, fingerprint: str, proposal: str) -> str:
        """The id that ``name`` stands for: ``proposal``, unless it had one. Names are a key's own.

        Raises ``BatchConflictError`` where it had one, and was given to something of another ``fingerprint``.
        """
        ...


class BatchStarter(Protocol):
    """The engine. Raises ``ServiceError``."""

    def start(self, batch: Batch) -> None:
        """Begin with it; what was begun already goes on as it does."""
        ...


@dataclass(frozen=True, slots=True)
class Upload:
    """A file as a caller sends it."""

    filename: str
    content: bytes
    purpose: str = "batch"


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """A batch as a caller asks for it; ``endpoint`` as in ``Batch``."""

    input_file_id: str
    endpoint: str | None
    completion_window: str = "24h"
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileContent:
    """What is in a file, or where it can be fetched."""

    content: bytes | None = None
    url: str | None = None


_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[_Item]):
    """A part of a list; ``more`` says that it goes on."""

    items: Sequence[_Item]
    more: bool


@dataclass(frozen=True, slots=True)
class Made(Generic[_Item]):
    """What was asked for; ``known`` where the same key had asked for the same under the same name before."""

    item: _Item
    known: bool = False


class Batches(Protocol):
    """Files and batches, to their owners. Raises ``UnknownPathError`` for what is not there, or is somebody else's,
    and ``ServiceError``. A ``name`` is the caller's own: what is asked for again under it is not done again."""

    def add_file(self, owner: Principal, upload: Upload, name: str | None = None) -> Made[StoredFile]: ...

    def file(self, owner: Principal, file_id: str) -> StoredFile: ...

    def files(
        self, owner: Principal, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> Page[StoredFile]:
        """Those behind ``after``."""
        ...

    def content(self, owner: Principal, file_id: str) -> FileContent:
        """Itself while it is small, else where it is."""
        ...

    def remove_file(self, owner: Principal, file_id: str) -> None:
        """Raises ``BatchConflictError`` while a batch reads it."""
        ...

    def create(self, owner: Principal, order: BatchOrder, name: str | None = None) -> Made[Batch]:
        """Raises ``InvalidRequestError`` for a file that cannot be a batch's input."""
        ...

    def batch(self, owner: Principal, batch_id: str) -> Batch: ...

    def batches(self, owner: Principal, *, after: str | None, limit: int) -> Page[Batch]:
        """The newest first, those behind ``after``."""
        ...

    def cancel(self, owner: Principal, batch_id: str) -> Batch:
        """Raises ``BatchConflictError`` for one that has ended, or is about to."""
        ...
