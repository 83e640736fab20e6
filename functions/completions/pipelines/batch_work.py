"""One part of a batch: its lines answered side by side, each once, and what they came to put in one object.

A line's name is the batch's and its number, so whatever an earlier worker was told is told again and nothing is paid
twice. Lines that have no answer when the function's time is up are left to the next try of the same part.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

from completions.domain.batches import Batch, BatchStore
from completions.domain.errors import ServiceError
from completions.domain.events import (
    EventReply,
    EventRequest,
    RecordBook,
    ReplyStore,
    RetryLaterError,
    StillRunningError,
)
from completions.domain.metering import Outcome
from completions.domain.ports import Clock
from completions.observability import log_unexpected
from completions.pipelines.batch_lines import RequestLine, line_name
from completions.pipelines.batch_pace import BatchWatch, TokenPace
from completions.pipelines.batch_parts import (
    SERVER_ERROR,
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
)

RESERVE_SECONDS: Final = 20.0
"""Of a function's time, for what is left to do once the lines are answered."""
LEAST_SECONDS: Final = 60.0
"""A line that had less would be paid for and come to nothing."""
_STORE_SECONDS: Final = 1.0


class UnfinishedError(Exception):
    """Lines have no answer yet; the part is to be tried again."""


class EarlierReplies:
    """What earlier deliveries of a request were told; nothing is begun. Raises ``ServiceError``."""

    def __init__(self, replies: ReplyStore, records: RecordBook) -> None:
        self._replies = replies
        self._records = records

    def find(self, name: str) -> EventReply | None:
        """The reply, its usage settled if the one who gave it did not live to."""
        kept = self._replies.get(name)
        if kept is None:
            return None
        if kept.record is not None and self._records.ended(str(kept.record["record_id"])) is not Outcome.SUCCEEDED:
            self._records.settle(kept.record)
        return kept.reply


class Answers(Protocol):
    """What answers a line; ``EventAnswering`` does."""

    def answer(self, event: EventRequest, deadline: float | None = None) -> EventReply:
        """Its one reply. Raises ``RetryLaterError``."""
        ...


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """``tokens_per_minute`` is this worker's own share; no line is begun that has less than ``least_seconds``."""

    lines_at_once: int
    tokens_per_minute: float | None = None
    least_seconds: float = LEAST_SECONDS


class BatchWorker:
    """See the module."""

    def __init__(
        self,
        answering: Answers,
        earlier: EarlierReplies,
        objects: PartObjects,
        batches: BatchStore,
        *,
        clock: Clock,
        limits: WorkLimits,
    ) -> None:
        self._answering = answering
        self._earlier = earlier
        self._objects = objects
        self._batches = batches
        self._clock = clock
        self._limits = limits

    def work(self, tenant: str, batch_id: str, part: Part, deadline: float) -> dict[str, int]:
        """Answer a part; how many of its lines were, and how many were not.

        Raises ``UnfinishedError``, ``ServiceError``, and ``LookupError`` for no such batch.
        """
        batch = self._batches.batch(tenant, batch_id)
        if batch is None:
            raise LookupError(f"There is no batch '{batch_id}'.")
        pace = TokenPace(self._limits.tokens_per_minute, self._clock)
        result = kept_result(self._objects, batch, part.part) or self._answered(batch, part, pace, deadline)
        self._batches.count_part(batch, str(part.part), result.head.counts)
        if (ahead := min(pace.seconds_ahead(), deadline - self._clock.monotonic())) > 0:
            self._clock.sleep(ahead)  # the next part will begin as if nothing had been spent
        return {"part": part.part, "completed": result.head.completed, "failed": result.head.failed}

    def _answered(self, batch: Batch, part: Part, pace: TokenPace, deadline: float) -> PartResult:
        lines = read_part(self._objects, batch, part)
        if lines is None:
            return keep_result(self._objects, batch, part.part, modified(batch, part))
        watch = BatchWatch(batch, self._batches, self._clock)

        def settled(line: RequestLine) -> LineResult | None:
            return self._settled(batch, line, watch, pace, deadline)

        with ThreadPoolExecutor(min(self._limits.lines_at_once, len(lines)), thread_name_prefix="line") as pool:
            results = [result for result in pool.map(settled, lines) if result is not None]
        if len(results) < len(lines):
            raise UnfinishedError(f"{len(lines) - len(results)} of {len(lines)} lines have no answer yet.")
        return keep_result(self._objects, batch, part.part, results)

    def _settled(
        self, batch: Batch, line: RequestLine, watch: BatchWatch, pace: TokenPace, deadline: float
    ) -> LineResult | None:
        """What the line came to; ``None`` when there was no time for it."""
        event = EventRequest(line_name(batch.batch_id, line.number), batch.key_id, line.url, line.body)
        running = False
        while True:
            try:
                earlier = self._earlier.find(event.name)
                if earlier is not None:
                    return replied(batch, line, earlier)
                code = watch.over()
                if code is not None and not running:
                    return faulty(batch, line.number, line.custom_id, code)
                if not self._wait(pace.seconds_ahead(), deadline):
                    return None
                reply = self._answering.answer(event, deadline)
                pace.spend(0 if reply.usage is None else reply.usage.total_tokens)
                return replied(batch, line, reply)
            except RetryLaterError as later:
                running, seconds = isinstance(later, StillRunningError), later.seconds
            except ServiceError:
                seconds = _STORE_SECONDS
            except Exception as error:  # noqa: BLE001 - a line that makes us fail must not take the others with it
                log_unexpected(error, request_id=event.name)
                return faulty(batch, line.number, line.custom_id, SERVER_ERROR)
            if not self._wait(seconds, deadline):
                return None

    def _wait(self, seconds: float, deadline: float) -> bool:
        """Whether there is time for it, and for a line after it."""
        if self._clock.monotonic() + seconds > deadline - self._limits.least_seconds:
            return False
        if seconds > 0:
            self._clock.sleep(seconds)
        return True
