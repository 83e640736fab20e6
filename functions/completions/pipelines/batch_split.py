"""A batch's file is read once, in flat memory: what is a request goes to a part, what is none to the error file.

Run again, it finds and writes the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from completions.domain.batch_places import faults_key, index_key
from completions.domain.batches import Batch, BatchStatus, BatchStore, LineCounts, LineError
from completions.domain.ports import Clock
from completions.observability import logger
from completions.pipelines.batch_lines import (
    LineFaultError,
    RawLine,
    RequestLine,
    fault_line,
    parse_line,
    read_lines,
)
from completions.pipelines.batch_pace import why_over
from completions.pipelines.batch_parts import PartCutter, PartObjects

MOST_ERRORS: Final = 100
"""A batch shows so many; the error file has all."""
FAULTS_PART: Final = "faults"
"""The name under which the lines that are no requests are counted."""
_LINES: Final = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """``paths`` are the dialects' completions. The last four are the state machine's to keep to."""

    paths: Collection[str]
    most_lines: int
    lines_per_part: int
    bucket: str
    workers: int
    tolerated_failure_percentage: float


class BatchSplitter:
    """See the module."""

    def __init__(self, objects: PartObjects, batches: BatchStore, clock: Clock, limits: SplitLimits) -> None:
        self._objects = objects
        self._batches = batches
        self._clock = clock
        self._limits = limits

    def split(self, tenant: str, batch_id: str) -> dict[str, object]:
        """The state machine's next input. Raises ``ServiceError``, and ``LookupError`` for no such batch."""
        batch = self._batches.batch(tenant, batch_id)
        if batch is None:
            raise LookupError(f"There is no batch '{batch_id}'.")
        if batch.status.ended:
            return self._plan(batch, 0)
        try:
            survey = self._read(batch)
        except LookupError:
            return self._failed(batch, LineError("input_not_found", "The input file is not there any more."))
        if survey.total == 0:
            return self._failed(batch, LineError("empty_file", "The input file has no requests."))
        index = b"".join(part.model_dump_json().encode() + b"\n" for part in survey.cutter.parts)
        self._objects.put(index_key(batch_id), index, _LINES)
        batch = self._begun(batch, survey)
        if survey.faulty:
            self._batches.count_part(batch, FAULTS_PART, LineCounts(failed=survey.faulty))
        logger.info(
            "batch_split", batch_id=batch_id, lines=survey.total, faulty=survey.faulty, parts=len(survey.cutter.parts)
        )
        # of one that is over nothing was begun: the assembler says so of every line
        return self._plan(batch, len(survey.cutter.parts) if why_over(batch, self._clock) is None else 0)

    def _read(self, batch: Batch) -> _Survey:
        survey = _Survey(batch, self._limits)
        faults = survey.faults(read_lines(self._objects.pieces(batch.input_key)))
        first = next(faults, None)
        if first is not None:
            self._objects.write_stream(faults_key(batch.batch_id), chain([first], faults), _LINES)
        return survey

    def _begun(self, batch: Batch, survey: _Survey) -> Batch:
        """In progress, unless it was cancelled meanwhile."""
        changes = {"model": survey.model, "total": survey.total, "errors": tuple(survey.errors)}
        for status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING):
            to = BatchStatus.IN_PROGRESS if status is BatchStatus.VALIDATING else status
            moment = batch.moments.get(to, self._clock.now())
            moved = self._batches.move(batch, to, moment, only_from=[status], changes=changes)
            if moved is not None:
                return moved
        return self._batches.batch(batch.tenant, batch.batch_id) or batch

    def _failed(self, batch: Batch, error: LineError) -> dict[str, object]:
        """Nothing of it is run."""
        running = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        changes = {"errors": (error,)}
        self._batches.move(batch, BatchStatus.FAILED, self._clock.now(), only_from=running, changes=changes)
        logger.info("batch_refused", batch_id=batch.batch_id, code=error.code)
        return self._plan(batch, 0)

    def _plan(self, batch: Batch, parts: int) -> dict[str, object]:
        return {
            "tenant": batch.tenant,
            "batch_id": batch.batch_id,
            "bucket": self._limits.bucket,
            "index_key": index_key(batch.batch_id),
            "map_prefix": f"batches/{batch.batch_id}/map",
            "workers": self._limits.workers,
            "tolerated_failure_percentage": self._limits.tolerated_failure_percentage,
            "parts": parts,
        }


@dataclass(slots=True)
class _Survey:
    """One pass over the lines of a file; ``total`` are those that are not blank."""

    batch: Batch
    limits: SplitLimits
    total: int = 0
    faulty: int = 0
    errors: list[LineError] = field(default_factory=list)
    cutter: PartCutter = field(init=False)
    _models: dict[str, str] = field(default_factory=dict)
    """The first one that is named at each path."""
    _ids: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.cutter = PartCutter(self.limits.lines_per_part)

    @property
    def model(self) -> str | None:
        """The one that all lines name, if there is one."""
        models = set(self._models.values())
        return models.pop() if len(models) == 1 else None

    def faults(self, lines: Iterable[RawLine]) -> Iterator[bytes]:
        """The error file's lines. When they have all been taken, the survey is complete."""
        for raw in lines:
            if raw.is_blank:
                self.cutter.skip(raw)
                continue
            self.total += 1
            try:
                self._check(parse_line(raw))
            except LineFaultError as error:
                self.faulty += 1
                self.cutter.skip(raw)
                if len(self.errors) < MOST_ERRORS:
                    self.errors.append(error.fault)
                yield fault_line(self.batch.batch_id, error.fault, error.custom_id)
            else:
                self.cutter.add(raw, raw.content or b"")
        self.cutter.close()

    def _check(self, line: RequestLine) -> None:
        """What is wrong with it beside the others."""
        if self.total > self.limits.most_lines:
            raise _fault(line, "too_many_tasks", f"A batch has at most {self.limits.most_lines} requests.")
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=8).digest()
        if digest in self._ids:
            raise _fault(line, "duplicate_custom_id", "Another line has the same 'custom_id'.", "custom_id")
        self._ids.add(digest)
        self._check_url(line)
        if line.model is None:
            return  # its dialect knows what that means
        known = self._models.setdefault(line.path, line.model)
        if known != line.model:
            message = f"All requests of one URL name the same model; the first one named '{known[:200]}'."
            raise _fault(line, "model_mismatch", message, "body.model")

    def _check_url(self, line: RequestLine) -> None:
        endpoint = self.batch.endpoint
        if endpoint is not None and line.path != endpoint:
            raise _fault(line, "url_mismatch", f"The batch's endpoint is '{endpoint}'.", "url")
        if line.path not in self.limits.paths:
            known = ", ".join(sorted(self.limits.paths))
            raise _fault(line, "url_mismatch", f"'url' is none of this service's completions: {known}.", "url")


def _fault(line: RequestLine, code: str, message: str, param: str | None = None) -> LineFaultError:
    return LineFaultError(LineError(code, message, param, line.number), line.custom_id)
