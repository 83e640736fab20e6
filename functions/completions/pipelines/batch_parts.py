"""A batch's parts: which lines of the file each has, and what it came to.

What a part came to is one object, which is put once: of two workers on the same part the first has said everything.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pydantic import BaseModel, ConfigDict, Field

from completions.domain.batch_places import part_key
from completions.domain.batches import Batch, LineCounts, LineError, ObjectStore
from completions.domain.completion import Usage
from completions.domain.events import EventReply
from completions.pipelines.batch_lines import (
    LineFaultError,
    RawLine,
    RequestLine,
    fault_line,
    parse_line,
    read_lines,
    reply_line,
)

PART_BYTES: Final = 4 << 20
"""A part's lines are read whole, unless a single one is longer."""
MOST_SKIPPED: Final = 100
"""Faulty or blank lines within a part: an item of Step Functions' map has 256 KiB."""
RESULT: Final = "result"


class PartObjects(ObjectStore, Protocol):
    """An object store that can put an object once."""

    def put_new(self, key: str, content: bytes, content_type: str = "application/json") -> bool:
        """``False`` where there is an object of this key, which stays as it is."""
        ...


class Part(BaseModel):
    """A line of the index: ``lines`` requests among the file's bytes from ``start`` up to ``end``. ``skip`` are the
    numbers of those lines that are none. ``check`` is a CRC-32 of the requests."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    part: int = Field(ge=0)
    first_line: int = Field(ge=1)
    start: int = Field(ge=0)
    end: int = Field(ge=0)
    lines: int = Field(ge=1)
    skip: list[int] = []
    check: int


class PartCutter:
    """Takes the lines of a file in order, and makes parts of them."""

    def __init__(self, most_lines: int) -> None:
        self.parts: list[Part] = []
        self._most_lines = most_lines
        self._first: RawLine | None = None
        self._end = self._lines = self._check = 0
        self._skip: list[int] = []
        self._between: list[int] = []
        """Lines behind the part's last request that are none."""

    def add(self, raw: RawLine, content: bytes) -> None:
        """A line that is a request."""
        if self._first is not None and self._is_full(self._first, raw):
            self.close()
        if self._first is None:
            self._first = raw
        else:
            self._skip += self._between
        self._between = []
        self._end, self._lines = raw.end, self._lines + 1
        self._check = zlib.crc32(content, self._check)

    def skip(self, raw: RawLine) -> None:
        """A line that is none."""
        if self._first is not None and len(self._between) <= MOST_SKIPPED:
            self._between.append(raw.number)

    def close(self) -> None:
        """The part ends here."""
        if self._first is not None:
            self.parts.append(
                Part(
                    part=len(self.parts),
                    first_line=self._first.number,
                    start=self._first.start,
                    end=self._end,
                    lines=self._lines,
                    skip=self._skip,
                    check=self._check,
                )
            )
        self._first = None
        self._lines = self._check = 0
        self._skip, self._between = [], []

    def _is_full(self, first: RawLine, raw: RawLine) -> bool:
        return (
            self._lines >= self._most_lines
            or raw.end - first.start > PART_BYTES
            or len(self._skip) + len(self._between) > MOST_SKIPPED
        )


def read_part(objects: ObjectStore, batch: Batch, part: Part) -> list[RequestLine] | None:
    """Its requests; ``None`` where the file is not the one any more that was split."""
    try:
        content = objects.read_range(batch.input_key, part.start, part.end)
    except LookupError:
        return None
    skip, check = set(part.skip), 0
    lines: list[RequestLine] = []
    for raw in read_lines([content], part.first_line, part.start):
        if raw.number in skip:
            continue
        if raw.content is None:
            return None
        check = zlib.crc32(raw.content, check)
        try:
            lines.append(parse_line(raw))
        except LineFaultError:
            return None
    return lines if check == part.check and len(lines) == part.lines else None


@dataclass(frozen=True, slots=True)
class LineResult:
    """What one line came to: a reply, or a fault. ``custom_id`` is unknown where the file is gone."""

    number: int
    custom_id: str | None
    content: bytes
    reply: EventReply | None = None
    code: str | None = None

    @property
    def completed(self) -> bool:
        """Whether it goes to the output file."""
        return self.reply is not None and self.reply.succeeded and self.reply.error is None


def replied(batch: Batch, line: RequestLine, reply: EventReply) -> LineResult:
    """A line that has a reply, be it an answer or a refusal."""
    return LineResult(line.number, line.custom_id, reply_line(batch.batch_id, line, reply), reply)


def faulty(batch: Batch, number: int, custom_id: str | None, code: str) -> LineResult:
    """A line that was not run, or not to an end."""
    fault = LineError(code, MESSAGES[code], line=number)
    return LineResult(number, custom_id, fault_line(batch.batch_id, fault, custom_id), code=code)


def modified(batch: Batch, part: Part) -> list[LineResult]:
    """What a part comes to whose lines are not there any more."""
    numbers = (number for number in itertools.count(part.first_line) if number not in part.skip)
    return [faulty(batch, number, None, MODIFIED) for number in itertools.islice(numbers, part.lines)]


EXPIRED: Final = "batch_expired"
CANCELLED: Final = "batch_cancelled"
GIVEN_UP: Final = "batch_failed"
MODIFIED: Final = "input_modified"
SERVER_ERROR: Final = "server_error"
MESSAGES: Final = {
    EXPIRED: "This request could not be answered within the batch's window.",
    CANCELLED: "The batch was cancelled before this request was begun.",
    GIVEN_UP: "This request was given up, because its part of the batch could not be finished.",
    MODIFIED: "The input file was replaced or removed after the batch had been validated.",
    SERVER_ERROR: "The service failed at this request.",
}


class PartHead(BaseModel):
    """The first line of a part's result. Behind it are ``output_bytes`` of the output file, then the lines of the error
    file, whose numbers are ``error_lines``. ``replies`` counts lines that have one, ``codes`` are the faults'."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    completed: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    estimated: bool
    nanos: int
    replies: int
    models: list[str]
    codes: list[str]
    output_bytes: int
    error_lines: list[int]

    @property
    def counts(self) -> LineCounts:
        """In the domain's words."""
        usage = Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.estimated)
        return LineCounts(self.completed, self.failed, usage, self.nanos)


@dataclass(frozen=True, slots=True)
class PartResult:
    """What a part came to."""

    head: PartHead
    output: bytes
    errors: bytes

    def error_lines(self) -> Iterator[tuple[int, bytes]]:
        """The error file's, by their number in the input."""
        return zip(self.head.error_lines, self.errors.splitlines(keepends=True), strict=True)


def summed(all_counts: Iterable[LineCounts]) -> LineCounts:
    """All of them together."""
    total = LineCounts()
    for one in all_counts:
        usage = Usage(
            total.usage.prompt_tokens + one.usage.prompt_tokens,
            total.usage.completion_tokens + one.usage.completion_tokens,
            total.usage.cached_tokens + one.usage.cached_tokens,
            total.usage.estimated or one.usage.estimated,
        )
        total = LineCounts(total.completed + one.completed, total.failed + one.failed, usage, total.nanos + one.nanos)
    return total


def written_result(lines: Sequence[LineResult]) -> bytes:
    """As it is kept; ``lines`` are in the file's order."""
    good = [line for line in lines if line.completed]
    bad = [line for line in lines if not line.completed]
    replies = [line.reply for line in lines if line.reply is not None]
    usage = summed(LineCounts(usage=reply.usage, nanos=reply.nanos) for reply in replies if reply.usage is not None)
    output = b"".join(line.content for line in good)
    head = PartHead(
        completed=len(good),
        failed=len(bad),
        prompt_tokens=usage.usage.prompt_tokens,
        completion_tokens=usage.usage.completion_tokens,
        cached_tokens=usage.usage.cached_tokens,
        estimated=usage.usage.estimated,
        nanos=usage.nanos,
        replies=len(replies),
        models=sorted({reply.model for reply in replies if reply.model is not None}),
        codes=sorted({line.code for line in bad if line.code is not None}),
        output_bytes=len(output),
        error_lines=[line.number for line in bad],
    )
    return b"".join([head.model_dump_json().encode(), b"\n", output, *(line.content for line in bad)])


def read_result(content: bytes) -> PartResult:
    """What ``written_result`` wrote."""
    head_end = content.index(b"\n") + 1
    head = PartHead.model_validate_json(content[:head_end])
    output_end = head_end + head.output_bytes
    return PartResult(head, content[head_end:output_end], content[output_end:])


def kept_result(objects: ObjectStore, batch: Batch, part: int) -> PartResult | None:
    """What an earlier worker said."""
    try:
        return read_result(objects.get(part_key(batch.batch_id, part, RESULT)))
    except LookupError:
        return None


def keep_result(objects: PartObjects, batch: Batch, part: int, lines: Sequence[LineResult]) -> PartResult:
    """Say what a part came to, unless somebody did; what was said."""
    content = written_result(lines)
    key = part_key(batch.batch_id, part, RESULT)
    return read_result(content if objects.put_new(key, content, "application/x-ndjson") else objects.get(key))
