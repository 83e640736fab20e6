"""Files that appear in the bucket, as EventBridge tells the function: what is started, what is not, and who hears of
it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from batch_app import NOON, RecordingStarter, registry
from completions.domain.batches import Batch, BatchStatus
from completions.domain.errors import AuthenticationError, BackendUnavailableError, InvalidRequestError
from completions.pipelines.object_events import ObjectEventError, ObjectStarter
from completions.service.batch_inputs import BatchInputs
from completions.stores.batch_table import BatchTable
from completions.stores.state_machine import StateMachine
from completions_cli.local.tables import create_tables
from fakes import ManualClock
from moto_services import MakeClient, moto_services

BUCKET = "pipeline-bucket"
KEY = "input/key-alice/eval/prompts.jsonl"


@pytest.fixture(scope="module")
def make_client(project_root: Path) -> Iterator[MakeClient]:
    with moto_services("me-central-1") as make:
        create_tables(make("dynamodb"), project_root / "infra" / "tables.yaml")
        yield make


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture
def table(make_client: MakeClient, clock: ManualClock) -> BatchTable:
    return BatchTable(make_client("dynamodb"), "PipelineTable", 30, clock)


@pytest.fixture
def engine() -> RecordingStarter:
    return RecordingStarter()


@pytest.fixture
def starter(table: BatchTable, engine: RecordingStarter, clock: ManualClock) -> ObjectStarter:
    return ObjectStarter(BatchInputs(table, table, engine, registry(), clock), BUCKET)


@pytest.fixture
def event(project_root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((project_root / "events" / "batch_starter.json").read_text())
    return loaded


def put(event: dict[str, Any], key: str, **fields: Any) -> dict[str, Any]:
    """The event of an object of its own."""
    made = copy.deepcopy(event)
    made["detail"]["object"] |= {"key": key, **fields}
    return made


def test_a_file_starts_a_batch_that_its_owner_finds(
    starter: ObjectStarter, engine: RecordingStarter, table: BatchTable, event: dict[str, Any]
) -> None:
    batch_id = starter.start(put(event, KEY, etag="one"))

    assert batch_id is not None
    batch = table.batch("team:search", batch_id)
    assert batch is not None
    assert engine.started == [batch]
    assert batch == Batch(
        batch_id=batch_id,
        tenant="team:search",
        key_id="key-alice",
        input_file_id="file-" + batch_id.removeprefix("batch_"),
        input_key=KEY,
        created_at=NOON,
        expires_at=NOON + timedelta(hours=24),
        endpoint=None,
        metadata={"input_object": KEY},
    )
    file = table.file("team:search", batch.input_file_id)
    assert file is not None
    assert (file.filename, file.purpose, file.key, file.size) == ("prompts.jsonl", "batch", KEY, 412)


def test_the_same_content_at_the_same_place_is_one_batch(
    starter: ObjectStarter, engine: RecordingStarter, clock: ManualClock, event: dict[str, Any], table: BatchTable
) -> None:
    first = starter.start(put(event, KEY, etag="two"))
    batch = table.batch("team:search", str(first))
    assert batch is not None
    table.move(batch, BatchStatus.IN_PROGRESS, NOON, only_from=[BatchStatus.VALIDATING])
    clock.advance(60)

    again = starter.start(put(event, KEY, etag="two", sequencer="006"))
    other_content = starter.start(put(event, KEY, etag="three"))
    other_place = starter.start(put(event, KEY + ".jsonl", etag="two"))

    assert again == first
    assert len({first, other_content, other_place}) == 3
    assert [started.batch_id for started in engine.started] == [first, other_content, other_place]


def test_a_batch_that_could_not_be_started_is_started_by_the_next_delivery(
    starter: ObjectStarter, engine: RecordingStarter, event: dict[str, Any]
) -> None:
    appeared = put(event, KEY, etag="four")
    engine.failing = True
    with pytest.raises(BackendUnavailableError):
        starter.start(appeared)
    engine.failing = False

    batch_id = starter.start(appeared)

    assert [started.batch_id for started in engine.started] == [batch_id]


def test_an_empty_file_is_a_batch_too_and_a_folder_is_none(
    starter: ObjectStarter, engine: RecordingStarter, event: dict[str, Any]
) -> None:
    assert starter.start(put(event, "input/key-alice/", etag="five", size=0)) is None
    assert not engine.started

    assert starter.start(put(event, "input/key-alice/empty.jsonl", etag="five", size=0)) is not None


@pytest.mark.parametrize("key", ["input/prompts.jsonl", "input//prompts.jsonl", "output/key-alice/prompts.jsonl"])
def test_a_place_without_a_key_is_an_error(
    starter: ObjectStarter, engine: RecordingStarter, event: dict[str, Any], key: str
) -> None:
    with pytest.raises(InvalidRequestError, match="input/KEY_ID/NAME"):
        starter.start(put(event, key))
    assert not engine.started


@pytest.mark.parametrize(
    ("key_id", "fault"),
    [("key-nobody", "there is no key"), ("key-gone", "is disabled"), ("key-expired", "has expired")],
)
def test_a_key_that_may_not_pay_is_an_error(
    starter: ObjectStarter, engine: RecordingStarter, event: dict[str, Any], key_id: str, fault: str
) -> None:
    with pytest.raises(AuthenticationError, match=fault):
        starter.start(put(event, f"input/{key_id}/prompts.jsonl"))
    assert not engine.started


def test_an_event_of_another_kind_or_bucket_is_an_error(starter: ObjectStarter, event: dict[str, Any]) -> None:
    other_bucket = copy.deepcopy(event)
    other_bucket["detail"]["bucket"]["name"] = "another"

    for wrong, said in (
        ({**event, "detail-type": "Object Deleted"}, "detail-type"),
        ({"Records": []}, "detail"),
        ([], "event"),
        (other_bucket, "'another' is not the pipeline's"),
    ):
        with pytest.raises(ObjectEventError, match=said):
            starter.start(wrong)


def test_one_execution_is_started_for_each_batch(
    make_client: MakeClient, starter: ObjectStarter, engine: RecordingStarter, event: dict[str, Any]
) -> None:
    client = make_client("stepfunctions")
    definition = json.dumps({"StartAt": "Done", "States": {"Done": {"Type": "Succeed"}}})
    role = "arn:aws:iam::123456789012:role/batches"
    arn = client.create_state_machine(name="batches", definition=definition, roleArn=role)["stateMachineArn"]
    starter.start(put(event, KEY, etag="six"))
    (batch,) = engine.started

    StateMachine(client, arn).start(batch)
    StateMachine(client, arn).start(batch)

    (execution,) = client.list_executions(stateMachineArn=arn)["executions"]
    assert execution["name"] == batch.batch_id
    described = client.describe_execution(executionArn=execution["executionArn"])
    assert json.loads(described["input"]) == {"tenant": "team:search", "batch_id": batch.batch_id}
    with pytest.raises(BackendUnavailableError) as raised:
        StateMachine(client, arn + "-gone").start(batch)
    assert raised.value.detail == "StateMachineDoesNotExist"
