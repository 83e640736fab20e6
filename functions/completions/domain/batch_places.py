"""Where a batch's parts lie in the pipeline's bucket. ``input/<key id>/<name>.jsonl`` is the operator's to write."""

from __future__ import annotations

from typing import Final

INPUT_PREFIX: Final = "input/"


def file_key(file_id: str) -> str:
    """A file that was uploaded over HTTP."""
    return f"files/{file_id}"


def index_key(batch_id: str) -> str:
    """The input's parts, a line of JSON for each; what the state machine's map reads."""
    return f"batches/{batch_id}/index.jsonl"


def faults_key(batch_id: str) -> str:
    """The error lines of what in the input is no request."""
    return f"batches/{batch_id}/faults.jsonl"


def part_key(batch_id: str, part: int, kind: str) -> str:
    """What one part came to; ``kind`` is ``result``."""
    return f"batches/{batch_id}/parts/{part:07d}.{kind}.jsonl"


def result_key(key_id: str, batch_id: str, name: str) -> str:
    """What the caller gets: ``output.jsonl``, ``errors.jsonl``, ``manifest.json``."""
    return f"output/{key_id}/{batch_id}/{name}"
