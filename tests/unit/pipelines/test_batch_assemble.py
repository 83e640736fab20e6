"""What a batch's parts came to is joined: every line once, in one of the two files."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from completions.domain.batches import Batch, BatchStatus, LineCounts
from completions.domain.completion import Usage
from completions.domain.events import EventReply, EventRequest, KeptReply
from completions.pipelines.batch_assemble import BatchAssembler
from completions.pipelines.batch_parts import Part, faulty, keep_result, read_part, replied
from completions.pipelines.batch_split import BatchSplitter, SplitLimits
from completions.pipelines.batch_work import EarlierReplies
from event_fakes import MemoryBooks, MemoryReplies
from fakes import ManualClock
from in_memory_batches import (
    BATCH_ID,
    INPUT,
    NOON,
    MemoryBatches,
    MemoryObjects,
    answered,
    batch,
    jsonl,
    line,
)

FAILURE = "States.ExceedToleratedFailureThreshold"


class Run:
    """A file in parts of two lines, and an assembler."""

    def __init__(self, *lines: object, of: Batch | None = None, split: bool = True) -> None:
        self.clock = ManualClock(NOON)
        self.objects, self.store = MemoryObjects(), MemoryBatches(of or batch())
        self.replies, self.books = MemoryReplies(), MemoryBooks()
        self.objects.put(INPUT, jsonl(*lines))
        self.parts: list[Part] = []
        if split:
            limits = SplitLimits(["/v1/completions"], 1000, 2, "b", 1, 100)
            BatchSplitter(self.objects, self.store, self.clock, limits).split("owner:ada", BATCH_ID)
            index = self.objects.content.get(f"batches/{BATCH_ID}/index.jsonl", b"")
            self.parts = [Part.model_validate_json(text) for text in index.splitlines()]
        self.clock.advance(60)

    @property
    def batch(self) -> Batch:
        return self.store.known[BATCH_ID]

    def work(self, number: int, *, failing: tuple[int, ...] = (), counted: bool = True, code: str = "") -> None:
        """A part is finished by a worker; lines of these numbers were refused."""
        part = self.parts[number]
        found = []
        for one in read_part(self.objects, self.batch, part) or ():
            event = EventRequest(f"{BATCH_ID}-{one.number}", "key-1", one.url, one.body)
            refused = EventReply(event.name, 500, b"{}", error="BackendError")
            reply = refused if one.number in failing else answered(event)
            ended = faulty(self.batch, one.number, one.custom_id, code) if code else None
            found.append(ended or replied(self.batch, one, reply))
        result = keep_result(self.objects, self.batch, number, found)
        if counted:
            self.store.count_part(self.batch, str(number), result.head.counts)

    def kept(self, number: int) -> None:
        """A line was answered, and its worker gave up the part."""
        name = f"{BATCH_ID}-{number}"
        reply = answered(EventRequest(name, "key-1", "/v1/completions", b"{}"))
        self.books.ends[name] = None
        self.replies.kept[name] = KeptReply(reply, {"record_id": name, "outcome": "succeeded"})

    def move(self, status: BatchStatus, at: datetime = NOON) -> None:
        moments = {**self.batch.moments, status: at}
        self.store.known[BATCH_ID] = replace(self.batch, status=status, moments=moments)

    def assemble(self, failure: str | None = None) -> str:
        assembler = BatchAssembler(EarlierReplies(self.replies, self.books), self.objects, self.store, self.clock)
        return str(assembler.assemble("owner:ada", BATCH_ID, failure)["status"])

    def file(self, name: str) -> list[dict[str, Any]]:
        content = self.objects.content.get(f"output/key-1/{BATCH_ID}/{name}", b"")
        return [json.loads(text) for text in content.splitlines()]

    @property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.objects.get(f"output/key-1/{BATCH_ID}/manifest.json"))
        return found

    def ids(self, name: str) -> list[str | None]:
        return [one["custom_id"] for one in self.file(name)]

    def codes(self) -> list[tuple[str, int]]:
        errors = [one["error"] for one in self.file("errors.jsonl") if one["error"] is not None]
        return [(error["code"], error["line"]) for error in errors]


FIVE = [line(number) for number in range(1, 6)]


def test_the_files_are_in_the_inputs_order_faults_and_refusals_among_each_other() -> None:
    run = Run(line(1), b"{", line(3), line(4), b"[]", line(6), b"{")
    run.work(1, failing=(6,))
    run.work(0, failing=(1,))
    assert run.assemble() == "completed"
    assert run.ids("output.jsonl") == ["id-3", "id-4"]
    assert run.ids("errors.jsonl") == ["id-1", None, None, "id-6", None]
    assert run.codes() == [("invalid_json_line", 2), ("invalid_json_line", 5), ("invalid_json_line", 7)]


def test_the_manifest_says_what_the_batch_came_to() -> None:
    run = Run(line(1), line(2), line(3), b"{", of=batch(metadata={"job": "nightly"}, endpoint="/v1/completions"))
    run.work(0)
    run.work(1, failing=(3,))
    run.assemble()
    manifest = run.manifest
    files = manifest.pop("files")
    (error,) = manifest.pop("errors")
    assert (error["code"], error["line"]) == ("invalid_json_line", 4)
    assert manifest == {
        "batch_id": BATCH_ID,
        "status": "completed",
        "key_id": "key-1",
        "endpoint": "/v1/completions",
        "models": ["demo"],
        "metadata": {"job": "nightly"},
        "counts": {"total": 4, "completed": 2, "failed": 2},
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 6,
            "total_tokens": 10,
            "cached_tokens": 0,
            "estimated": False,
        },
        "cost": {"nanos": 18, "dollars": "0.000000018"},
        "timings": {
            "created_at": "2026-01-01T12:00:00+00:00",
            "in_progress_at": "2026-01-01T12:00:00+00:00",
            "finalizing_at": "2026-01-01T12:01:00+00:00",
            "completed_at": "2026-01-01T12:01:00+00:00",
            "seconds": 60.0,
        },
    }
    assert files["input"] == {"file_id": "file-1", "key": INPUT}
    for kind, name in (("output", "output.jsonl"), ("error", "errors.jsonl")):
        content = run.objects.get(f"output/key-1/{BATCH_ID}/{name}")
        stored = run.store.stored[files[kind]["file_id"]]
        assert (files[kind]["bytes"], files[kind]["key"]) == (len(content), stored.key)
        assert (stored.tenant, stored.purpose) == ("owner:ada", "batch_output")
        assert stored.filename == f"{BATCH_ID}_{kind}.jsonl"
    assert (run.batch.output_file_id, run.batch.error_file_id) == (
        files["output"]["file_id"],
        files["error"]["file_id"],
    )
    assert files["output"]["file_id"] != files["error"]["file_id"]


def test_money_is_a_decimal_to_the_nano_dollar() -> None:
    run = Run(line(1))
    lines = read_part(run.objects, run.batch, run.parts[0])
    assert lines is not None
    one = lines[0]
    reply = answered(EventRequest("x", "key-1", one.url, one.body), nanos=12_000_000_345)
    keep_result(run.objects, run.batch, 0, [replied(run.batch, one, reply)])
    run.assemble()
    assert run.manifest["cost"] == {"nanos": 12_000_000_345, "dollars": "12.000000345"}


def test_a_file_that_would_be_empty_is_not_there() -> None:
    good, bad = Run(line(1)), Run(b"{")
    good.work(0)
    assert (good.assemble(), bad.assemble()) == ("completed", "completed")
    assert (good.batch.error_file_id, good.manifest["files"]["error"]) == (None, None)
    assert (bad.batch.output_file_id, bad.manifest["files"]["output"]) == (None, None)
    assert bad.manifest["counts"] == {"total": 1, "completed": 0, "failed": 1}
    assert len(good.store.stored) == len(bad.store.stored) == 1


@pytest.mark.parametrize(
    ("status", "passed", "code", "ended"),
    [
        (BatchStatus.IN_PROGRESS, 60, "batch_failed", "completed"),
        (BatchStatus.IN_PROGRESS, 86_400, "batch_expired", "expired"),
        (BatchStatus.CANCELLING, 60, "batch_cancelled", "cancelled"),
    ],
)
def test_lines_of_a_part_without_result_say_why_unless_they_were_answered(
    status: BatchStatus, passed: int, code: str, ended: str
) -> None:
    run = Run(*FIVE)
    run.work(0)
    run.kept(4)
    run.clock.advance(passed)
    if status is not BatchStatus.IN_PROGRESS:
        run.move(status)
    assert run.assemble(FAILURE) == ended
    assert run.ids("output.jsonl") == ["id-1", "id-2", "id-4"]
    assert run.codes() == [(code, 3), (code, 5)]
    assert run.books.ends[f"{BATCH_ID}-4"] == "succeeded"
    assert run.manifest["counts"] == {"total": 5, "completed": 3, "failed": 2}
    assert run.batch.counts == LineCounts(3, 2, Usage(6, 9), 27)


def test_parts_that_their_workers_left_since_the_window_was_over_make_the_batch_expired() -> None:
    run = Run(*FIVE)
    run.work(0)
    run.work(1, code="batch_expired")
    run.work(2, code="batch_expired")
    assert run.assemble() == "expired"
    assert BatchStatus.EXPIRED in run.batch.moments


def test_a_batch_of_which_nothing_could_be_run_has_failed() -> None:
    run = Run(line(1), b"{", line(3))
    assert run.assemble(FAILURE) == "failed"
    assert run.codes() == [("batch_failed", 1), ("invalid_json_line", 2), ("batch_failed", 3)]
    assert [error.code for error in run.batch.errors] == ["invalid_json_line", "batch_failed"]
    assert run.manifest["status"] == "failed"


def test_one_that_could_not_be_split_has_failed() -> None:
    run = Run(line(1), split=False)
    assert run.assemble("Sandbox.Timedout") == "failed"
    assert [error.code for error in run.batch.errors] == ["batch_failed"]
    assert run.manifest["errors"][0]["code"] == "batch_failed"
    cancelled = Run(line(1), split=False, of=batch(status=BatchStatus.CANCELLING))
    assert cancelled.assemble("Sandbox.Timedout") == "cancelled"


def test_one_that_was_cancelled_before_it_was_run_looks_for_no_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(*FIVE, of=batch(status=BatchStatus.CANCELLING, moments={BatchStatus.CANCELLING: NOON}))
    monkeypatch.setattr(run.replies, "get", None)
    assert run.assemble() == "cancelled"
    assert run.codes() == [("batch_cancelled", number) for number in range(1, 6)]


def test_a_file_that_was_refused_has_a_manifest_and_no_files() -> None:
    run = Run()
    assert run.batch.status is BatchStatus.FAILED
    assert run.assemble() == "failed"
    assert run.manifest["errors"][0]["code"] == "empty_file"
    assert run.manifest["files"]["output"] is None
    assert run.store.stored == {}


def test_what_a_worker_did_not_live_to_count_is_counted() -> None:
    run = Run(line(1), b"{", line(3), line(4))
    run.work(0, counted=False)
    run.work(1)
    run.assemble()
    assert run.batch.counts == LineCounts(3, 1, Usage(6, 9), 27)
    assert run.manifest["counts"] == {"total": 4, "completed": 3, "failed": 1}


def test_again_it_does_and_writes_the_same() -> None:
    run = Run(*FIVE)
    for number in range(3):
        run.work(number, failing=(2,))
    run.assemble()
    content, known, stored = dict(run.objects.content), run.batch, dict(run.store.stored)
    run.clock.advance(60)
    assert run.assemble() == "completed"
    assert (run.objects.content, run.batch, run.store.stored) == (content, known, stored)


def test_one_that_died_before_its_last_step_is_finished_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(*FIVE)
    for number in range(3):
        run.work(number)
    move = run.store.move

    def die(batch: Batch, to: BatchStatus, *rest: Any, **more: Any) -> Batch | None:
        if to is BatchStatus.COMPLETED:
            raise SystemExit
        return move(batch, to, *rest, **more)

    monkeypatch.setattr(run.store, "move", die)
    with pytest.raises(SystemExit):
        run.assemble()
    output = run.file("output.jsonl")
    monkeypatch.setattr(run.store, "move", move)
    assert run.assemble() == "completed"
    assert (run.file("output.jsonl"), len(run.store.stored)) == (output, 1)


def test_one_that_is_cancelled_when_all_of_it_was_answered_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(*FIVE)
    for number in range(3):
        run.work(number)
    add_file = run.store.add_file

    def cancelled(file: Any) -> None:
        run.move(BatchStatus.CANCELLING, NOON + timedelta(seconds=61))
        add_file(file)

    monkeypatch.setattr(run.store, "add_file", cancelled)
    assert run.assemble() == "completed"
    assert len(run.file("output.jsonl")) == 5


def test_what_is_no_batch_is_an_error() -> None:
    run = Run(line(1))
    run.store.known.clear()
    with pytest.raises(LookupError, match=BATCH_ID):
        run.assemble()
