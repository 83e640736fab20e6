"""Batches, their files and their objects in memory, and what a batch's parts are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Any, Final

from completions.domain.batches import Batch, BatchStatus, BatchStore, LineCounts, StoredFile
from completions.domain.completion import Usage
from completions.domain.events import EventReply, EventRequest
from completions.pipelines.batch_parts import PartObjects, summed

NOON: Final = datetime(2026, 1, 1, 12, tzinfo=UTC)
BATCH_ID: Final = "batch_019b79a5e3c00123"
INPUT: Final = "files/input"


class MemoryBatches(BatchStore):
    """``looks`` counts how often a batch was read; ``files`` by id."""

    def __init__(self, *batches: Batch) -> None:
        self.known = {batch.batch_id: batch for batch in batches}
        self.stored: dict[str, StoredFile] = {}
        self.counted: dict[tuple[str, str], LineCounts] = {}
        self.looks = 0
        self._lock = Lock()

    def add_file(self, file: StoredFile) -> None:
        self.stored.setdefault(file.file_id, file)

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        return self.stored.get(file_id)

    def files(self, tenant: str, *, after: str | None, limit: int, newest_first: bool = True) -> Sequence[StoredFile]:
        raise NotImplementedError

    def remove_file(self, tenant: str, file_id: str) -> None:
        raise NotImplementedError

    def add(self, batch: Batch) -> bool:
        return self.known.setdefault(batch.batch_id, batch) is batch

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        self.looks += 1
        found = self.known.get(batch_id)
        return found if found is not None and found.tenant == tenant else None

    def batches(self, tenant: str, *, after: str | None, limit: int) -> Sequence[Batch]:
        raise NotImplementedError

    def move(
        self,
        batch: Batch,
        to: BatchStatus,
        at: datetime,
        *,
        only_from: Sequence[BatchStatus],
        changes: Mapping[str, object] | None = None,
    ) -> Batch | None:
        with self._lock:
            known = self.known[batch.batch_id]
            if known.status not in only_from:
                return None
            given: Any = changes or {}
            moved = replace(known, status=to, moments={**known.moments, to: at}, **given)
            self.known[batch.batch_id] = moved
            return moved

    def count_part(self, batch: Batch, part: str, counts: LineCounts) -> None:
        with self._lock:
            if (batch.batch_id, part) not in self.counted:
                self.counted[batch.batch_id, part] = counts
                known = self.known[batch.batch_id]
                self.known[batch.batch_id] = replace(known, counts=summed([known.counts, counts]))


class MemoryObjects(PartObjects):
    """Pieces have ``piece_bytes``."""

    def __init__(self, piece_bytes: int = 1 << 20) -> None:
        self.content: dict[str, bytes] = {}
        self._piece_bytes = piece_bytes

    def put(self, key: str, content: bytes, content_type: str = "application/json") -> None:
        self.content[key] = content

    def put_new(self, key: str, content: bytes, content_type: str = "application/json") -> bool:
        return self.content.setdefault(key, content) is content

    def get(self, key: str) -> bytes:
        return self.content[key]

    def size(self, key: str) -> int:
        return len(self.content[key])

    def read_range(self, key: str, start: int, end: int) -> bytes:
        return self.content[key][start:end]

    def pieces(self, key: str) -> Iterator[bytes]:
        content = self.content[key]
        for start in range(0, len(content), self._piece_bytes):
            yield content[start : start + self._piece_bytes]

    def keys(self, prefix: str) -> Iterator[str]:
        return iter(sorted(key for key in self.content if key.startswith(prefix)))

    def write_stream(self, key: str, pieces: Iterator[bytes], content_type: str = "application/json") -> int:
        self.content[key] = b"".join(pieces)
        return len(self.content[key])

    def delete(self, key: str) -> None:
        del self.content[key]

    def download_url(self, key: str, seconds: int) -> str:
        raise NotImplementedError


class ScriptedAnswers:
    """Answers as ``reply`` says; ``asked`` are the names of what it was asked."""

    def __init__(self, reply: Callable[[EventRequest], EventReply] | None = None) -> None:
        self.asked: list[str] = []
        self.reply = reply or answered

    def answer(self, event: EventRequest, deadline: float | None = None) -> EventReply:
        self.asked.append(event.name)
        return self.reply(event)


def answered(event: EventRequest, **fields: Any) -> EventReply:
    """An answer of three tokens to a prompt of two, at 9 nano-dollars."""
    known = EventReply(event.name, 200, b'{"choices":[]}', "demo", Usage(2, 3), 9)
    return replace(known, **fields)


def batch(**fields: Any) -> Batch:
    """One that has just been made."""
    known = Batch(BATCH_ID, "owner:ada", "key-1", "file-1", INPUT, NOON, NOON + timedelta(hours=24))
    return replace(known, **fields)


def line(number: int, **fields: Any) -> dict[str, Any]:
    """A request as a file has it; ``None`` leaves a field out."""
    body = {"model": "demo", "prompt": f"prompt {number}"}
    known = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body, **fields}
    return {name: value for name, value in known.items() if value is not None}


def jsonl(*lines: object) -> bytes:
    """A file of them; bytes stand as they are."""
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)
