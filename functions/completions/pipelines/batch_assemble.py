"""What a batch's parts came to is joined: an output file, an error file, a manifest.

Each line of the input is answered in one of the two files. What a part without result was told of its lines is still
looked up, for it was paid for; the others say why there is no answer. Run again, it does and writes the same.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import itemgetter
from typing import Final, TypeVar

from pydantic_core import from_json

from completions.domain.batch_places import faults_key, index_key, result_key
from completions.domain.batches import (
    FILE_ID,
    Batch,
    BatchStatus,
    BatchStore,
    LineCounts,
    LineError,
    StoredFile,
    timed_id,
)
from completions.domain.ports import Clock
from completions.observability import logger
from completions.pipelines.batch_lines import RequestLine, line_name, read_lines
from completions.pipelines.batch_manifest import FILE_NAMES, FileKind, ResultFile, manifest
from completions.pipelines.batch_pace import why_over
from completions.pipelines.batch_parts import (
    EXPIRED,
    GIVEN_UP,
    MESSAGES,
    LineResult,
    Part,
    PartObjects,
    PartResult,
    faulty,
    keep_result,
    kept_result,
    modified,
    read_part,
    replied,
    summed,
)
from completions.pipelines.batch_split import FAULTS_PART
from completions.pipelines.batch_work import EarlierReplies

PARTS_AT_ONCE: Final = 4
"""Each is held in memory until its turn comes."""
_LINES: Final = "application/x-ndjson"
_BEFORE: Final = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
_FINISHING: Final = (BatchStatus.FINALIZING, BatchStatus.CANCELLING)

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class BatchAssembler:
    """See the module."""

    def __init__(self, earlier: EarlierReplies, objects: PartObjects, batches: BatchStore, clock: Clock) -> None:
        self._earlier = earlier
        self._objects = objects
        self._batches = batches
        self._clock = clock

    def assemble(self, tenant: str, batch_id: str, failure: str | None = None) -> dict[str, object]:
        """Finish a batch; ``failure`` is what ended its run early. How it ended, and where its manifest is.

        Raises ``ServiceError``, and ``LookupError`` for no such batch.
        """
        batch = self._batches.batch(tenant, batch_id)
        if batch is None:
            raise LookupError(f"There is no batch '{batch_id}'.")
        if failure is not None:
            logger.error("batch_run_failed", batch_id=batch_id, error=failure)
        if not batch.status.ended:
            batch = self._finished(batch)
        elif batch.status is BatchStatus.FAILED and batch.total == 0:
            self._write_manifest(batch, _Joined())  # the splitter ended it
        logger.info("batch_ended", batch_id=batch_id, status=batch.status, lines=batch.total)
        return {"batch_id": batch_id, "status": batch.status, "manifest": _key(batch, "manifest.json")}

    def _finished(self, batch: Batch) -> Batch:
        code = why_over(batch, self._clock) or GIVEN_UP
        if batch.total == 0:  # it could not even be split
            error = LineError(code, "The input file could not be read to its end.")
            return self._end(replace(batch, errors=(error,)), _Joined())
        batch = self._finalizing(batch)
        if batch.status.ended:
            return batch  # by a rival
        joined = self._joined(batch, code)
        if joined.failed:
            batch = replace(batch, errors=(*batch.errors, LineError(GIVEN_UP, MESSAGES[GIVEN_UP])))
        return self._end(batch, joined)

    def _finalizing(self, batch: Batch) -> Batch:
        moved = self._batches.move(batch, BatchStatus.FINALIZING, self._clock.now(), only_from=_BEFORE)
        return moved or self._batches.batch(batch.tenant, batch.batch_id) or batch

    def _end(self, batch: Batch, joined: _Joined) -> Batch:
        """The manifest is there before anybody is told that it is."""
        now, ended = self._clock.now(), joined.status(batch)
        told = replace(batch, status=ended, moments={**batch.moments, ended: now})
        self._write_manifest(told, joined)
        changes: dict[str, object] = {f"{file.kind}_file_id": file.file_id for file in joined.files}
        changes["errors"] = batch.errors
        moved = self._batches.move(batch, ended, now, only_from=(*_BEFORE, *_FINISHING), changes=changes)
        return moved or self._batches.batch(batch.tenant, batch.batch_id) or told

    def _write_manifest(self, batch: Batch, joined: _Joined) -> None:
        content = manifest(batch, joined.sum, sorted(joined.models), joined.files)
        self._objects.put(_key(batch, "manifest.json"), content)

    def _joined(self, batch: Batch, code: str) -> _Joined:
        """Both files, written and registered."""
        parts = self._parts(batch)
        faults = LineCounts(failed=batch.total - sum(part.lines for part in parts))
        joined = _Joined()

        def result(part: Part) -> PartResult:
            return kept_result(self._objects, batch, part.part) or self._given_up(batch, part, code)

        with ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="part") as pool:
            output = self._write(batch, "output", joined.outputs(_ahead(pool, result, parts)))
            bad = _ahead(pool, result, (parts[number] for number in joined.bad))
            lines = chain.from_iterable(one.error_lines() for one in bad)
            merged = heapq.merge(self._faults(batch, faults), lines, key=itemgetter(0))
            error = self._write(batch, "error", (content for _, content in merged))
        joined.files = [file for file in (output, error) if file is not None]
        joined.counts[FAULTS_PART] = faults
        self._count(batch, joined)
        return joined

    def _parts(self, batch: Batch) -> list[Part]:
        lines = read_lines(self._objects.pieces(index_key(batch.batch_id)))
        return [Part.model_validate_json(line.content or b"") for line in lines]

    def _given_up(self, batch: Batch, part: Part, code: str) -> PartResult:
        """A part that no worker has finished."""
        lines = read_part(self._objects, batch, part)
        results = modified(batch, part) if lines is None else [self._told(batch, line, code) for line in lines]
        return keep_result(self._objects, batch, part.part, results)

    def _told(self, batch: Batch, line: RequestLine, code: str) -> LineResult:
        if BatchStatus.IN_PROGRESS in batch.moments:  # else it was never begun
            reply = self._earlier.find(line_name(batch.batch_id, line.number))
            if reply is not None:
                return replied(batch, line, reply)
        return faulty(batch, line.number, line.custom_id, code)

    def _faults(self, batch: Batch, counts: LineCounts) -> Iterator[tuple[int, bytes]]:
        if counts.failed == 0:
            return
        for line in read_lines(self._objects.pieces(faults_key(batch.batch_id))):
            content = line.content or b""
            yield from_json(content)["error"]["line"], content + b"\n"

    def _write(self, batch: Batch, kind: FileKind, pieces: Iterator[bytes]) -> ResultFile | None:
        """The file, unless it would be empty."""
        first = next(pieces, None)
        if first is None:
            return None
        key = _key(batch, FILE_NAMES[kind])
        size = self._objects.write_stream(key, chain([first], pieces), _LINES)
        file_id = timed_id(FILE_ID, batch.created_at, f"{batch.batch_id}/{kind}")
        name, now = f"{batch.batch_id}_{kind}.jsonl", self._clock.now()
        self._batches.add_file(StoredFile(file_id, batch.tenant, name, "batch_output", key, size, now))
        return ResultFile(kind, file_id, key, size)

    def _count(self, batch: Batch, joined: _Joined) -> None:
        """Count what workers did not live to count, and nobody else has."""
        current = self._batches.batch(batch.tenant, batch.batch_id)
        if current is not None and current.counts != joined.sum:
            for part, counts in joined.counts.items():
                self._batches.count_part(batch, part, counts)


@dataclass(slots=True)
class _Joined:
    """What all parts came to; ``bad`` are those that have errors."""

    counts: dict[str, LineCounts] = field(default_factory=dict)
    files: list[ResultFile] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    codes: set[str] = field(default_factory=set)
    replies: int = 0

    @property
    def sum(self) -> LineCounts:
        """Over all of them."""
        return summed(self.counts.values())

    @property
    def failed(self) -> bool:
        """Whether nothing of it was run."""
        return self.replies == 0 and self.codes == {GIVEN_UP}

    def outputs(self, results: Iterable[PartResult]) -> Iterator[bytes]:
        """The output file. When it has been taken, the rest is known, too."""
        for number, result in enumerate(results):
            head = result.head
            self.counts[str(number)] = head.counts
            self.models.update(head.models)
            self.codes.update(head.codes)
            self.replies += head.replies
            if head.failed:
                self.bad.append(number)
            if result.output:
                yield result.output

    def status(self, batch: Batch) -> BatchStatus:
        """How the batch ends."""
        if batch.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED
        if EXPIRED in self.codes:
            return BatchStatus.EXPIRED
        return BatchStatus.FAILED if self.failed or batch.total == 0 else BatchStatus.COMPLETED


def _ahead(pool: ThreadPoolExecutor, work: Callable[[_Item], _Found], items: Iterable[_Item]) -> Iterator[_Found]:
    """In order, the next ones begun already; unlike ``pool.map`` not all of them."""
    rest = iter(items)
    begun: deque[Future[_Found]] = deque(pool.submit(work, item) for item in islice(rest, PARTS_AT_ONCE))
    while begun:
        found = begun.popleft().result()
        begun.extend(pool.submit(work, item) for item in islice(rest, 1))
        yield found


def _key(batch: Batch, name: str) -> str:
    return result_key(batch.key_id, batch.batch_id, name)
