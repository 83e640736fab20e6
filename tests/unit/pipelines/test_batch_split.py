"""A batch's file becomes parts and faults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from completions.domain.batch_places import faults_key, index_key
from completions.domain.batches import Batch, BatchStatus
from completions.domain.errors import BackendUnavailableError
from completions.pipelines.batch_parts import PART_BYTES, Part, read_part
from completions.pipelines.batch_split import BatchSplitter, SplitLimits
from fakes import ManualClock
from in_memory_batches import BATCH_ID, INPUT, NOON, MemoryBatches, MemoryObjects, batch, jsonl, line

PATHS = ("/v1/completions", "/v2/completions", "/v1/llm/completions-sync", "/.api/completions/code")
LIMITS = SplitLimits(PATHS, most_lines=1000, lines_per_part=10, bucket="b", workers=3, tolerated_failure_percentage=25)


class Split:
    """One run over ``content``."""

    def __init__(self, content: bytes | None, of: Batch | None = None, **limits: Any) -> None:
        self.objects = MemoryObjects()
        if content is not None:
            self.objects.put(INPUT, content)
        self.store = MemoryBatches(of or batch())
        clock = ManualClock(NOON + timedelta(seconds=30))
        self.splitter = BatchSplitter(self.objects, self.store, clock, replace(LIMITS, **limits))
        self.plan = self.again()

    def again(self) -> dict[str, object]:
        return self.splitter.split("owner:ada", BATCH_ID)

    @property
    def batch(self) -> Batch:
        return self.store.known[BATCH_ID]

    @property
    def parts(self) -> list[Part]:
        return [Part.model_validate_json(text) for text in self.objects.get(index_key(BATCH_ID)).splitlines()]

    @property
    def faults(self) -> list[dict[str, Any]]:
        written = self.objects.content.get(faults_key(BATCH_ID), b"")
        return [json.loads(text) for text in written.splitlines()]

    @property
    def codes(self) -> list[tuple[str, int]]:
        return [(fault["error"]["code"], fault["error"]["line"]) for fault in self.faults]

    def numbers(self) -> list[list[int]]:
        """The lines that the parts give back."""
        lines = [read_part(self.objects, self.batch, part) for part in self.parts]
        return [[one.number for one in part] for part in lines if part is not None]


def test_a_good_file_is_in_progress_and_the_state_machine_told_how_to_run_it() -> None:
    split = Split(jsonl(*(line(number) for number in range(25))))
    assert split.plan == {
        "tenant": "owner:ada",
        "batch_id": BATCH_ID,
        "bucket": "b",
        "index_key": f"batches/{BATCH_ID}/index.jsonl",
        "map_prefix": f"batches/{BATCH_ID}/map",
        "workers": 3,
        "tolerated_failure_percentage": 25,
        "parts": 3,
    }
    assert (split.batch.status, split.batch.total, split.batch.model) == (BatchStatus.IN_PROGRESS, 25, "demo")
    assert split.batch.moments[BatchStatus.IN_PROGRESS] == NOON + timedelta(seconds=30)
    assert split.numbers() == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    assert split.faults == []
    assert faults_key(BATCH_ID) not in split.objects.content


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + jsonl(line(1), line(2)),
        jsonl(line(1), line(2)).replace(b"\n", b"\r\n"),
        jsonl(line(1), line(2)).rstrip(b"\n"),
    ],
    ids=["bom", "crlf", "no last newline"],
)
def test_forms_of_text_files_are_all_one(content: bytes) -> None:
    split = Split(content)
    assert (split.batch.total, split.faults, split.numbers()) == (2, [], [[1, 2]])


def test_faulty_and_blank_lines_keep_their_numbers_and_the_rest_still_runs() -> None:
    split = Split(jsonl(b"", line(1), b"{", b" ", line(2), b"[]", b"", line(3), b"{"))
    assert split.codes == [("invalid_json_line", 3), ("invalid_json_line", 6), ("invalid_json_line", 9)]
    assert split.numbers() == [[2, 5, 8]]
    assert split.parts[0].skip == [3, 4, 6, 7]
    assert (split.batch.total, split.batch.counts.failed) == (6, 3)
    assert [(error.code, error.line) for error in split.batch.errors] == split.codes


@pytest.mark.parametrize(
    ("second", "of", "code", "param"),
    [
        (line(1), {}, "duplicate_custom_id", "custom_id"),
        (line(2, url="/v1/chat/completions"), {}, "url_mismatch", "url"),
        (line(2, url="/v2/completions"), {"endpoint": "/v1/completions"}, "url_mismatch", "url"),
        (line(2, body={"model": "other"}), {}, "model_mismatch", "body.model"),
        (line(2, method="GET"), {}, "invalid_request", "method"),
    ],
    ids=["duplicate", "no dialect's url", "not the endpoint", "another model", "method"],
)
def test_a_line_that_does_not_fit_the_others_is_faulty(
    second: Mapping[str, Any], of: dict[str, Any], code: str, param: str
) -> None:
    split = Split(jsonl(line(1), second, line(3)), batch(**of))
    (fault,) = split.faults
    assert (fault["custom_id"], fault["response"]) == (second["custom_id"], None)
    assert (fault["error"]["code"], fault["error"]["line"], fault["error"]["param"]) == (code, 2, param)
    assert split.numbers() == [[1, 3]]


def test_each_url_may_have_a_model_of_its_own_and_the_batch_then_names_none() -> None:
    url = "/v1/llm/completions-sync?model_endpoint_name="
    lines = [
        line(1),
        line(2, url="/v2/completions", body={"model": "other"}),
        line(3, url=url + "third", body={}),
        line(4, url=url + "fourth", body={}),
        line(5, url="/.api/completions/code", body={"messages": []}),
    ]
    split = Split(jsonl(*lines))
    assert split.codes == [("model_mismatch", 4)]
    assert split.numbers() == [[1, 2, 3, 5]]
    assert split.batch.model is None


def test_a_url_may_have_a_query() -> None:
    assert Split(jsonl(line(1, url="/v1/completions?x=1")), batch(endpoint="/v1/completions")).faults == []


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf\r\n \n"], ids=["nothing", "a newline", "blank lines"])
def test_a_file_without_requests_fails_the_batch(content: bytes) -> None:
    split = Split(content)
    assert split.plan["parts"] == 0
    assert split.batch.status is BatchStatus.FAILED
    assert [error.code for error in split.batch.errors] == ["empty_file"]


def test_a_file_that_is_gone_fails_the_batch() -> None:
    split = Split(None)
    assert (split.batch.status, split.batch.errors[0].code) == (BatchStatus.FAILED, "input_not_found")


def test_a_file_of_faults_alone_is_a_batch_with_an_error_file() -> None:
    split = Split(jsonl(b"{", b"{"))
    assert (split.plan["parts"], split.batch.status, split.batch.total) == (0, BatchStatus.IN_PROGRESS, 2)
    assert len(split.faults) == 2


def test_lines_beyond_the_limit_are_refused_one_by_one() -> None:
    split = Split(jsonl(*(line(number) for number in range(5))), most_lines=3)
    assert split.codes == [("too_many_tasks", 4), ("too_many_tasks", 5)]
    assert split.numbers() == [[1, 2, 3]]
    assert split.faults[0]["custom_id"] == "id-3"


def test_a_batch_shows_its_first_hundred_faults_and_the_file_all() -> None:
    split = Split(jsonl(*([b"{"] * 150)))
    assert len(split.batch.errors) == 100
    assert len(split.faults) == 150


def test_a_line_of_six_megabytes_is_a_part_and_a_longer_one_a_fault() -> None:
    empty = len(json.dumps(line(2, body={"model": "demo", "prompt": ""})))
    longest = line(2, body={"model": "demo", "prompt": "x" * (6_000_000 - empty)})
    longer = line(3, body={"model": "demo", "prompt": "x" * (6_000_001 - empty)})
    split = Split(jsonl(line(1), longest, longer, line(4)))
    assert split.codes == [("invalid_request", 3)]
    assert split.numbers() == [[1], [2], [4]]


def test_a_part_is_read_whole_so_it_ends_after_four_megabytes() -> None:
    split = Split(jsonl(*(line(number, body={"model": "demo", "prompt": "x" * 1_000_000}) for number in range(9))))
    assert split.numbers() == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert all(part.end - part.start <= PART_BYTES for part in split.parts)


def test_a_part_does_not_span_more_faults_than_an_item_of_the_map_can_name() -> None:
    faults, few = [b"{"] * 5000, [b"{"] * 60
    split = Split(jsonl(line(1), *faults, line(2), *few, line(3), *few, line(4)), most_lines=10_000)
    assert split.numbers() == [[1], [5002, 5063], [5124]]
    assert max(len(part.model_dump_json()) for part in split.parts) < 2000


def test_again_it_finds_and_writes_the_same() -> None:
    split = Split(jsonl(line(1), b"{", line(1), line(2)))
    content, known = dict(split.objects.content), split.batch
    assert split.again() == split.plan
    assert (split.objects.content, split.batch) == (content, known)


@pytest.mark.parametrize(
    ("of", "status"),
    [
        (batch(status=BatchStatus.CANCELLING, moments={BatchStatus.CANCELLING: NOON}), BatchStatus.CANCELLING),
        (batch(expires_at=NOON), BatchStatus.IN_PROGRESS),
    ],
    ids=["cancelled", "expired"],
)
def test_of_a_batch_that_is_over_no_part_is_run(of: Batch, status: BatchStatus) -> None:
    split = Split(jsonl(line(1), b"{"), of)
    assert split.plan["parts"] == 0
    assert (split.batch.status, split.batch.total) == (status, 2)
    assert len(split.parts) == 1
    if status is BatchStatus.CANCELLING:
        assert split.batch.moments == {BatchStatus.CANCELLING: NOON}


def test_one_that_has_ended_stays_as_it_is() -> None:
    split = Split(jsonl(line(1)), batch(status=BatchStatus.CANCELLED))
    assert (split.plan["parts"], split.batch.status) == (0, BatchStatus.CANCELLED)


def test_what_is_no_batch_is_an_error() -> None:
    split = Split(jsonl(line(1)))
    with pytest.raises(LookupError, match="batch_other"):
        split.splitter.split("owner:ada", "batch_other")
    with pytest.raises(LookupError):
        split.splitter.split("owner:eve", BATCH_ID)


def test_a_store_that_cannot_be_reached_is_left_to_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BackendUnavailableError("down")

    monkeypatch.setattr(MemoryObjects, "put", fail)
    with pytest.raises(BackendUnavailableError):
        BatchSplitter(_with_input(), MemoryBatches(batch()), ManualClock(NOON), LIMITS).split("owner:ada", BATCH_ID)


def _with_input() -> MemoryObjects:
    objects = MemoryObjects()
    objects.content[INPUT] = jsonl(line(1))
    return objects


def test_a_file_that_was_replaced_after_the_split_is_noticed() -> None:
    split = Split(jsonl(line(1), line(2)))
    for content in (jsonl(line(2), line(1)), jsonl(line(1)), b"{\n" * 200, b""):
        split.objects.put(INPUT, content)
        assert read_part(split.objects, split.batch, split.parts[0]) is None
