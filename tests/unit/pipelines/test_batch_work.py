"""A part's lines are answered: each once, in time, at the pace that was set, and not after the batch is over."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from threading import Lock
from typing import Any

import pytest

from completions.domain.batch_places import index_key
from completions.domain.batches import Batch, BatchStatus
from completions.domain.completion import Usage
from completions.domain.errors import BackendUnavailableError
from completions.domain.events import EventReply, EventRequest, KeptReply, RetryLaterError, StillRunningError
from completions.domain.metering import Outcome
from completions.observability import logger
from completions.pipelines.batch_parts import Part, PartResult, kept_result
from completions.pipelines.batch_split import BatchSplitter, SplitLimits
from completions.pipelines.batch_work import BatchWorker, EarlierReplies, UnfinishedError, WorkLimits
from event_fakes import MemoryBooks, MemoryReplies
from fakes import ManualClock
from in_memory_batches import (
    BATCH_ID,
    INPUT,
    NOON,
    MemoryBatches,
    MemoryObjects,
    ScriptedAnswers,
    answered,
    batch,
    jsonl,
    line,
)

Reply = Callable[[EventRequest], EventReply]


class Work:
    """A split file, and a worker on its first part. Lines are asked one at a time unless ``limits`` say else."""

    def __init__(self, *lines: object, reply: Reply | None = None, limits: WorkLimits | None = None) -> None:
        self.clock = ManualClock(NOON)
        self.objects, self.store = MemoryObjects(), MemoryBatches(batch())
        self.objects.put(INPUT, jsonl(*(lines or (line(1), line(2), line(3)))))
        limited = SplitLimits(["/v1/completions"], 1000, 50, "b", 1, 100)
        BatchSplitter(self.objects, self.store, self.clock, limited).split("owner:ada", BATCH_ID)
        self.part = Part.model_validate_json(self.objects.get(index_key(BATCH_ID)).splitlines()[0])
        self.replies, self.books = MemoryReplies(), MemoryBooks()
        self.answers = ScriptedAnswers(reply)
        earlier = EarlierReplies(self.replies, self.books)
        limits = limits or WorkLimits(lines_at_once=1)
        self.worker = BatchWorker(self.answers, earlier, self.objects, self.store, clock=self.clock, limits=limits)

    @property
    def batch(self) -> Batch:
        return self.store.known[BATCH_ID]

    def run(self, seconds: float = 880) -> PartResult:
        self.worker.work("owner:ada", BATCH_ID, self.part, self.clock.monotonic() + seconds)
        result = kept_result(self.objects, self.batch, 0)
        assert result is not None
        return result

    def move(self, **changes: Any) -> None:
        self.store.known[BATCH_ID] = replace(self.batch, **changes)


def ids(lines: bytes) -> list[str]:
    return [json.loads(text)["custom_id"] for text in lines.splitlines()]


def codes(lines: bytes) -> list[str | None]:
    return [(json.loads(text)["error"] or {}).get("code") for text in lines.splitlines()]


def test_every_line_is_asked_under_its_own_name_and_counted_once() -> None:
    work = Work()
    result = work.run()
    assert work.answers.asked == [f"{BATCH_ID}-1", f"{BATCH_ID}-2", f"{BATCH_ID}-3"]
    assert (ids(result.output), result.errors) == (["id-1", "id-2", "id-3"], b"")
    assert work.batch.counts == replace(work.batch.counts, completed=3, failed=0, usage=Usage(6, 9), nanos=27)


def test_lines_are_in_the_files_order_whichever_is_answered_first() -> None:
    lock = Lock()

    def reply(event: EventRequest) -> EventReply:
        with lock:
            first = not work.answers.asked[1:]
        if first:
            raise RetryLaterError("busy", 0.01)
        return answered(event)

    lines = [line(number) for number in range(20)]
    work = Work(*lines, reply=reply, limits=WorkLimits(lines_at_once=8))
    assert ids(work.run().output) == [f"id-{number}" for number in range(20)]


def test_a_refusal_goes_to_the_error_file_with_its_response_and_costs_nothing() -> None:
    refused = b'{"error":{"message":"no"}}'
    work = Work(reply=lambda event: EventReply(event.name, 400, refused, error="InvalidRequestError"))
    result = work.run()
    first = json.loads(result.errors.splitlines()[0])
    assert first["response"] == {"status_code": 400, "request_id": f"{BATCH_ID}-1", "body": json.loads(refused)}
    assert first["error"] is None
    assert (result.output, work.batch.counts.failed, work.batch.counts.nanos) == (b"", 3, 0)


def test_a_part_that_was_finished_is_not_begun_again() -> None:
    work = Work()
    first = work.run()
    assert work.run() == first
    assert len(work.answers.asked) == 3
    assert work.batch.counts.completed == 3


def test_the_first_of_two_workers_has_said_everything() -> None:
    def reply(event: EventRequest) -> EventReply:
        if not event.name.startswith("rival") and event.name.endswith("-3"):
            rival.run()
        return answered(event, body=b'{"by":"us"}')

    work = Work(reply=reply)
    rival = Work(reply=lambda event: answered(event, body=b'{"by":"rival"}', nanos=1))
    rival.objects, rival.store = work.objects, work.store
    rival.worker = BatchWorker(
        rival.answers,
        EarlierReplies(rival.replies, rival.books),
        work.objects,
        work.store,
        clock=rival.clock,
        limits=WorkLimits(1),
    )
    result = work.run()
    assert {json.loads(text)["response"]["body"]["by"] for text in result.output.splitlines()} == {"rival"}
    assert work.batch.counts.nanos == 3


def test_a_reply_that_was_kept_is_told_again_whatever_has_become_of_the_key() -> None:
    work = Work(reply=lambda event: EventReply(event.name, 401, b"{}", error="AuthenticationError"))
    name = f"{BATCH_ID}-2"
    kept = answered(EventRequest(name, "key-1", "/v1/completions", b"{}"))
    work.replies.kept[name] = KeptReply(kept, {"record_id": name, "outcome": "succeeded"})
    work.books.ends[name] = None  # its worker died before it could settle
    result = work.run()
    assert (ids(result.output), ids(result.errors)) == (["id-2"], ["id-1", "id-3"])
    assert work.books.ends[name] is Outcome.SUCCEEDED


def test_a_busy_model_is_asked_again_after_its_pause() -> None:
    def reply(event: EventRequest) -> EventReply:
        if len(work.answers.asked) < 3:
            raise RetryLaterError("busy", 20)
        return answered(event)

    work = Work(line(1), reply=reply)
    assert ids(work.run().output) == ["id-1"]
    assert work.clock.slept == [20, 20]


def test_lines_without_an_answer_are_left_to_the_next_try_after_all_others_are_done() -> None:
    def reply(event: EventRequest) -> EventReply:
        if event.name.endswith("-1"):
            raise RetryLaterError("busy", 100)
        work.replies.put(event.name, KeptReply(answered(event), None))
        return answered(event)

    work = Work(reply=reply)
    with pytest.raises(UnfinishedError, match=r"^1 of 3 lines have no answer yet\.$"):
        work.run(seconds=200)
    assert work.answers.asked[-2:] == [f"{BATCH_ID}-2", f"{BATCH_ID}-3"]
    assert work.store.counted == {}
    work.answers.reply = answered
    asked = len(work.answers.asked)
    assert len(ids(work.run().output)) == 3
    assert work.answers.asked[asked:] == [f"{BATCH_ID}-1"]


def test_no_line_is_begun_that_has_less_than_a_minute() -> None:
    work = Work()
    with pytest.raises(UnfinishedError, match=r"^3 of 3"):
        work.run(seconds=59)
    assert work.answers.asked == []


def test_storage_that_is_away_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [BackendUnavailableError("down"), BackendUnavailableError("down")]

    def get(name: str) -> KeptReply | None:
        if faults:
            raise faults.pop()
        return None

    work = Work(line(1))
    monkeypatch.setattr(work.replies, "get", get)
    assert ids(work.run().output) == ["id-1"]


def test_a_line_that_makes_us_fail_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(logger, "error", lambda event, **fields: logged.append({"event": event, **fields}))

    def reply(event: EventRequest) -> EventReply:
        if event.name.endswith("-2"):
            raise KeyError("the prompt's own text")
        return answered(event)

    result = Work(reply=reply).run()
    assert (ids(result.output), ids(result.errors), codes(result.errors)) == (
        ["id-1", "id-3"],
        ["id-2"],
        ["server_error"],
    )
    assert (logged[0]["event"], logged[0]["error"]) == ("unexpected_error", "KeyError")
    assert "text" not in json.dumps(logged)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"status": BatchStatus.CANCELLING}, "batch_cancelled"),
        ({"status": BatchStatus.CANCELLED}, "batch_cancelled"),
        ({"status": BatchStatus.EXPIRED}, "batch_expired"),
        ({"expires_at": NOON}, "batch_expired"),
    ],
)
def test_of_a_batch_that_is_over_nothing_is_begun_and_what_was_answered_is_told(
    changes: dict[str, Any], code: str
) -> None:
    work = Work()
    work.move(**changes)
    name = f"{BATCH_ID}-2"
    work.replies.kept[name] = KeptReply(answered(EventRequest(name, "key-1", "/v1/completions", b"{}")), None)
    result = work.run()
    assert work.answers.asked == []
    assert (ids(result.output), ids(result.errors), codes(result.errors)) == (["id-2"], ["id-1", "id-3"], [code, code])
    assert [json.loads(text)["error"]["line"] for text in result.errors.splitlines()] == [1, 3]


def test_a_batch_is_looked_up_every_ten_seconds_not_for_every_line() -> None:
    def reply(event: EventRequest) -> EventReply:
        work.clock.advance(0.5)
        return answered(event)

    work = Work(*(line(number) for number in range(50)), reply=reply)
    work.store.looks = 0
    work.run()
    assert work.store.looks == 1 + 2  # at the start, and of 25 seconds the 10th and the 20th


def test_a_batch_that_is_cancelled_on_the_way_ends_within_ten_seconds() -> None:
    def reply(event: EventRequest) -> EventReply:
        work.clock.advance(4)
        work.move(status=BatchStatus.CANCELLING)
        return answered(event)

    work = Work(*(line(number) for number in range(1, 7)), reply=reply)
    assert ids(work.run().output) == ["id-1", "id-2", "id-3"]


def test_a_window_that_ends_on_the_way_ends_the_part() -> None:
    def reply(event: EventRequest) -> EventReply:
        work.clock.advance(4)
        return answered(event)

    work = Work(reply=reply)
    work.move(expires_at=NOON + timedelta(seconds=5))
    result = work.run()
    assert (ids(result.output), codes(result.errors)) == (["id-1", "id-2"], ["batch_expired"])


def test_a_line_that_another_worker_is_at_is_waited_for_also_when_the_batch_is_over() -> None:
    def reply(event: EventRequest) -> EventReply:
        if len(work.answers.asked) < 3:
            work.move(status=BatchStatus.CANCELLING)
            raise StillRunningError("another delivery is being answered", 15)
        return answered(event)

    work = Work(line(1), reply=reply)
    assert ids(work.run().output) == ["id-1"]


def test_a_pace_is_kept_over_the_whole_part() -> None:
    starts: list[float] = []

    def reply(event: EventRequest) -> EventReply:
        starts.append(work.clock.monotonic())
        return answered(event, usage=Usage(4, 6))

    work = Work(reply=reply, limits=WorkLimits(lines_at_once=1, tokens_per_minute=60))
    begun = work.clock.monotonic()
    work.run()
    assert [start - begun for start in starts] == [0, 10, 20]
    assert work.clock.monotonic() - begun == 30


def test_a_pace_does_not_count_what_an_earlier_worker_has_spent() -> None:
    work = Work(limits=WorkLimits(lines_at_once=1, tokens_per_minute=60))
    for number in (1, 2):
        name = f"{BATCH_ID}-{number}"
        reply = answered(EventRequest(name, "key-1", "/v1/completions", b"{}"), usage=Usage(0, 1_000_000))
        work.replies.kept[name] = KeptReply(reply, None)
    assert len(ids(work.run().output)) == 3
    assert work.clock.slept == [5]  # the third line's own


def test_a_pace_that_is_too_slow_for_one_function_goes_on_in_the_next() -> None:
    work = Work(limits=WorkLimits(lines_at_once=1, tokens_per_minute=1))
    keep = work.answers.reply

    def reply(event: EventRequest) -> EventReply:
        work.replies.put(event.name, KeptReply(keep(event), None))
        return keep(event)

    work.answers.reply = reply
    for left in (2, 1):
        with pytest.raises(UnfinishedError, match=f"^{left} of 3"):
            work.run(seconds=200)
    assert len(ids(work.run(seconds=200).output)) == 3


def test_a_file_that_was_replaced_is_not_paid_for() -> None:
    work = Work(line(1), b"{", b"", line(2))
    work.objects.put(INPUT, jsonl(line(7), b"{", b"", line(8)))
    result = work.run()
    assert work.answers.asked == []
    assert codes(result.errors) == ["input_modified", "input_modified"]
    assert [json.loads(text)["error"]["line"] for text in result.errors.splitlines()] == [1, 4]
    work = Work()
    work.objects.delete(INPUT)
    assert codes(work.run().errors) == ["input_modified"] * 3


def test_what_is_no_batch_is_an_error() -> None:
    work = Work()
    with pytest.raises(LookupError, match="batch_other"):
        work.worker.work("owner:ada", "batch_other", work.part, work.clock.monotonic() + 100)


def test_a_look_at_the_batch_that_fails_is_made_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(event: EventRequest) -> EventReply:
        work.clock.advance(11)
        monkeypatch.setattr(work.store, "batch", fail)
        return answered(event)

    def fail(*_: object) -> Batch:
        raise BackendUnavailableError("down")

    work = Work(reply=reply)
    assert len(ids(work.run().output)) == 3
