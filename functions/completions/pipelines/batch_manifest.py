"""``manifest.json``: what a batch came to, in numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from completions.domain.batches import Batch, BatchStatus, LineCounts

FileKind = Literal["output", "error"]
FILE_NAMES: Final[Mapping[FileKind, str]] = {"output": "output.jsonl", "error": "errors.jsonl"}
_TIMED: Final = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING, BatchStatus.FINALIZING)


@dataclass(frozen=True, slots=True)
class ResultFile:
    """One of the two files; ``size`` is bytes."""

    kind: FileKind
    file_id: str
    key: str
    size: int


def manifest(batch: Batch, counts: LineCounts, models: Sequence[str], files: Sequence[ResultFile]) -> bytes:
    """Of a batch that has ended."""
    usage = counts.usage
    plain = {
        "batch_id": batch.batch_id,
        "status": batch.status.value,
        "key_id": batch.key_id,
        "endpoint": batch.endpoint,
        "models": list(models),
        "metadata": dict(batch.metadata),
        "counts": {"total": batch.total, "completed": counts.completed, "failed": counts.failed},
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "cached_tokens": usage.cached_tokens,
            "estimated": usage.estimated,
        },
        "cost": {"nanos": counts.nanos, "dollars": _dollars(counts.nanos)},
        "timings": _timings(batch),
        "files": {
            "input": {"file_id": batch.input_file_id, "key": batch.input_key},
            "output": _file("output", files),
            "error": _file("error", files),
        },
        "errors": [asdict(error) for error in batch.errors],
    }
    return json.dumps(plain, indent=2, ensure_ascii=False).encode() + b"\n"


def _timings(batch: Batch) -> dict[str, object]:
    moments = {status: batch.moments[status] for status in _TIMED if status in batch.moments}
    ended = batch.moments[batch.status]
    return {
        "created_at": batch.created_at.isoformat(),
        **{f"{status.value}_at": moment.isoformat() for status, moment in moments.items()},
        f"{batch.status.value}_at": ended.isoformat(),
        "seconds": round((ended - batch.created_at).total_seconds(), 3),
    }


def _file(kind: FileKind, files: Sequence[ResultFile]) -> dict[str, object] | None:
    found = next((file for file in files if file.kind == kind), None)
    return None if found is None else {"file_id": found.file_id, "key": found.key, "bytes": found.size}


def _dollars(nanos: int) -> str:
    """A decimal: floats would round money."""
    return f"{nanos // 10**9}.{nanos % 10**9:09d}"
