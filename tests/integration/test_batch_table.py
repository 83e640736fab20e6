"""Files and batches in DynamoDB, as the pipeline table is declared."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from completions.domain.batches import (
    BATCH_ID,
    FILE_ID,
    Batch,
    BatchConflictError,
    BatchStatus,
    LineCounts,
    LineError,
    StoredFile,
    timed_id,
)
from completions.domain.completion import Usage
from completions.domain.errors import BackendUnavailableError
from completions.stores.batch_table import BatchTable
from completions_cli.local.tables import create_tables
from fakes import ManualClock
from moto_services import MakeClient, moto_services

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

TABLE = "PipelineTable"
NOON = datetime(2026, 11, 30, 12, 0, 0, 123456, tzinfo=UTC)
PART = LineCounts(completed=48, failed=2, usage=Usage(480, 960, 16), nanos=1_234_567)


@pytest.fixture(scope="module")
def make_client() -> Iterator[MakeClient]:
    with moto_services("ap-south-2") as make:
        yield make


@pytest.fixture(scope="module")
def client(make_client: MakeClient, project_root: Path) -> DynamoDBClient:
    made: DynamoDBClient = make_client("dynamodb")
    create_tables(made, project_root / "infra" / "tables.yaml")
    return made


@pytest.fixture
def table(client: DynamoDBClient) -> BatchTable:
    return BatchTable(client, TABLE, 30, ManualClock(NOON))


@pytest.fixture
def tenant() -> str:
    return f"team:{uuid.uuid4()}"


def a_file(tenant: str, at: datetime = NOON) -> StoredFile:
    file_id = timed_id(FILE_ID, at)
    return StoredFile(file_id, tenant, "prompts.jsonl", "batch", f"files/{file_id}", 120, at)


def a_batch(tenant: str, at: datetime = NOON, **fields: Any) -> Batch:
    batch_id = timed_id(BATCH_ID, at)
    made = Batch(batch_id, tenant, "key-1", "file-1", "files/file-1", at, at + timedelta(hours=24))
    return replace(made, **fields)


def raw(client: DynamoDBClient, pk: str, sk: str) -> dict[str, Any]:
    key: Any = {"pk": {"S": pk}, "sk": {"S": sk}}
    return dict(client.get_item(TableName=TABLE, Key=key, ConsistentRead=True)["Item"])


def test_a_file_is_found_by_its_owner_alone_until_it_is_removed(table: BatchTable, tenant: str) -> None:
    file = a_file(tenant)
    table.add_file(file)

    assert table.file(tenant, file.file_id) == file
    assert table.file("owner:somebody", file.file_id) is None

    table.remove_file(tenant, file.file_id)
    table.remove_file(tenant, file.file_id)
    assert table.file(tenant, file.file_id) is None


def test_the_same_file_again_changes_nothing(table: BatchTable, tenant: str) -> None:
    file = a_file(tenant)
    table.add_file(file)
    table.add_file(replace(file, size=7))

    assert table.file(tenant, file.file_id) == file


def test_files_are_listed_by_time_in_either_order_and_from_any_place(table: BatchTable, tenant: str) -> None:
    files = [a_file(tenant, NOON + timedelta(seconds=number)) for number in range(5)]
    for file in reversed(files):
        table.add_file(file)

    assert list(table.files(tenant, after=None, limit=2)) == [files[4], files[3]]
    assert list(table.files(tenant, after=files[3].file_id, limit=10)) == [files[2], files[1], files[0]]
    assert list(table.files(tenant, after=files[1].file_id, limit=2, newest_first=False)) == [files[2], files[3]]
    assert list(table.files(tenant, after=files[0].file_id, limit=10)) == []


def test_a_batch_comes_back_as_it_was_written(table: BatchTable, tenant: str) -> None:
    batch = a_batch(
        tenant,
        endpoint="/v2/completions",
        metadata={"run": "7", "empty": ""},
        model="demo",
        total=50,
        counts=PART,
        errors=(LineError("invalid_json_line", "no JSON", None, 3), LineError("empty_file", "empty", "input_file_id")),
        output_file_id="file-out",
        error_file_id="file-err",
        moments={BatchStatus.IN_PROGRESS: NOON},
    )

    assert table.add(batch)
    assert table.batch(tenant, batch.batch_id) == batch
    assert table.batch("owner:somebody", batch.batch_id) is None


def test_a_second_batch_of_an_id_is_refused_and_the_first_stays(table: BatchTable, tenant: str) -> None:
    batch = a_batch(tenant)

    assert table.add(batch)
    assert not table.add(replace(batch, key_id="key-2"))
    assert table.batch(tenant, batch.batch_id) == batch


def test_batches_are_listed_newest_first(table: BatchTable, tenant: str) -> None:
    batches = [a_batch(tenant, NOON + timedelta(milliseconds=number)) for number in range(3)]
    for batch in batches:
        table.add(batch)

    assert list(table.batches(tenant, after=None, limit=2)) == [batches[2], batches[1]]
    assert list(table.batches(tenant, after=batches[1].batch_id, limit=2)) == [batches[0]]


def test_items_end_after_the_retention(table: BatchTable, client: DynamoDBClient, tenant: str) -> None:
    file, batch = a_file(tenant), a_batch(tenant)
    table.add_file(file)
    table.add(batch)
    table.count_part(batch, "0", PART)
    ends = {"N": str(int((NOON + timedelta(days=30)).timestamp()))}

    assert raw(client, f"FILES#{tenant}", file.file_id)["expires_at"] == ends
    assert raw(client, f"BATCHES#{tenant}", batch.batch_id)["expires_at"] == ends
    assert raw(client, f"BATCH#{batch.batch_id}", "PART#0")["expires_at"] == ends


def test_a_move_writes_status_moment_and_changes_at_once(table: BatchTable, tenant: str) -> None:
    batch = a_batch(tenant)
    table.add(batch)
    fault = LineError("invalid_json_line", "Line 3 is no JSON.", None, 3)

    moved = table.move(
        batch,
        BatchStatus.IN_PROGRESS,
        NOON,
        only_from=[BatchStatus.VALIDATING],
        changes={"total": 5, "model": "demo", "errors": (fault,)},
    )

    expected = replace(
        batch,
        status=BatchStatus.IN_PROGRESS,
        moments={BatchStatus.IN_PROGRESS: NOON},
        total=5,
        model="demo",
        errors=(fault,),
    )
    assert moved == expected
    assert table.batch(tenant, batch.batch_id) == expected


def test_a_move_from_another_status_is_none_and_changes_nothing(table: BatchTable, tenant: str) -> None:
    batch = a_batch(tenant)
    table.add(batch)

    assert table.move(batch, BatchStatus.COMPLETED, NOON, only_from=[BatchStatus.FINALIZING]) is None
    assert table.batch(tenant, batch.batch_id) == batch


def test_a_move_that_is_repeated_finds_its_own_work(table: BatchTable, tenant: str) -> None:
    batch = a_batch(tenant)
    table.add(batch)
    first = table.move(batch, BatchStatus.CANCELLING, NOON, only_from=[BatchStatus.VALIDATING])

    again = table.move(batch, BatchStatus.CANCELLING, NOON, only_from=[BatchStatus.VALIDATING])
    later = NOON + timedelta(microseconds=1)

    assert again == first
    assert table.move(batch, BatchStatus.CANCELLING, later, only_from=[BatchStatus.VALIDATING]) is None


def test_what_may_not_change_is_a_mistake(table: BatchTable, tenant: str) -> None:
    batch = a_batch(tenant)
    table.add(batch)

    with pytest.raises(ValueError, match="key_id"):
        table.move(
            batch, BatchStatus.FAILED, NOON, only_from=[BatchStatus.VALIDATING], changes={"key_id": "somebody's"}
        )


def test_a_part_counts_once(table: BatchTable, tenant: str) -> None:
    batch = a_batch(tenant)
    table.add(batch)

    table.count_part(batch, "1", PART)
    table.count_part(batch, "1", PART)
    table.count_part(batch, "2", replace(PART, usage=Usage(1, 2, 3, estimated=True)))

    found = table.batch(tenant, batch.batch_id)
    assert found is not None
    assert found.counts == LineCounts(96, 4, Usage(481, 962, 19, estimated=True), 2_469_134)


def test_parts_that_are_counted_side_by_side_add_up(table: BatchTable, tenant: str) -> None:
    batch = a_batch(tenant)
    table.add(batch)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: table.count_part(batch, str(number % 20), PART), range(40)))

    found = table.batch(tenant, batch.batch_id)
    assert found is not None
    assert found.counts == LineCounts(20 * 48, 20 * 2, Usage(20 * 480, 20 * 960, 20 * 16), 20 * 1_234_567)


def test_a_part_of_no_batch_is_an_error_and_is_not_marked(table: BatchTable, tenant: str) -> None:
    batch = a_batch(tenant)

    with pytest.raises(BackendUnavailableError):
        table.count_part(batch, "1", PART)

    table.add(batch)
    table.count_part(batch, "1", PART)
    found = table.batch(tenant, batch.batch_id)
    assert found is not None
    assert found.counts == PART


def test_a_name_stands_for_one_id(table: BatchTable) -> None:
    key = str(uuid.uuid4())

    assert table.claim(key, "nightly", "digest", "batch_1") == "batch_1"
    assert table.claim(key, "nightly", "digest", "batch_2") == "batch_1"
    assert table.claim("another" + key, "nightly", "digest", "batch_3") == "batch_3"
    with pytest.raises(BatchConflictError):
        table.claim(key, "nightly", "another digest", "batch_4")


def test_a_name_is_free_when_its_time_is_up_though_the_table_still_has_it(client: DynamoDBClient) -> None:
    clock, key = ManualClock(), str(uuid.uuid4())
    table = BatchTable(client, TABLE, 30, clock)
    table.claim(key, "nightly", "digest", "batch_1")
    clock.advance(30 * 86_400 - 1)
    assert table.claim(key, "nightly", "digest", "batch_2") == "batch_1"
    clock.advance(2)
    assert table.claim(key, "nightly", "another digest", "batch_3") == "batch_3"
    assert table.claim(key, "nightly", "another digest", "batch_4") == "batch_3"


def test_a_table_that_is_not_there_is_a_service_error(client: DynamoDBClient, tenant: str) -> None:
    absent = BatchTable(client, "NoSuchTable", 30, ManualClock(NOON))
    batch = a_batch(tenant)

    for ask in (
        lambda: absent.add(batch),
        lambda: absent.batch(tenant, "batch_1"),
        lambda: absent.batches(tenant, after=None, limit=1),
        lambda: absent.move(batch, BatchStatus.FAILED, NOON, only_from=[BatchStatus.VALIDATING]),
        lambda: absent.count_part(batch, "1", PART),
        lambda: absent.remove_file(tenant, "file-1"),
    ):
        with pytest.raises(BackendUnavailableError) as raised:
            ask()
        assert raised.value.detail == "ResourceNotFoundException"


def test_an_item_that_cannot_be_read_is_a_service_error(table: BatchTable, client: DynamoDBClient, tenant: str) -> None:
    client.put_item(TableName=TABLE, Item={"pk": {"S": f"BATCHES#{tenant}"}, "sk": {"S": "batch_1"}})

    with pytest.raises(BackendUnavailableError) as raised:
        table.batch(tenant, "batch_1")
    assert raised.value.detail is not None
    assert "batch_1" in raised.value.detail


def test_ids_sort_as_their_moments_do_and_derive_from_a_seed() -> None:
    moments = [NOON + timedelta(milliseconds=number) for number in (0, 1, 999, 86_400_000)]
    ids = [timed_id(BATCH_ID, moment) for moment in moments]

    assert ids == sorted(ids)
    assert len(set(ids)) == 4
    assert {len(one) for one in ids} == {len("batch_") + 32}
    assert timed_id(BATCH_ID, NOON, "a") == timed_id(BATCH_ID, NOON, "a") != timed_id(BATCH_ID, NOON, "b")
    assert timed_id(BATCH_ID, NOON) != timed_id(BATCH_ID, NOON)
