"""Batches through splitter, workers and assembler, over the real service and real boto3."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from batch_stage import (
    ANSWER,
    HANG,
    KEY_ID,
    MODEL,
    POISON,
    PRICE,
    Driver,
    Stage,
    batch_stage,
    jsonl,
    killed_worker,
    request_line,
    run_functions,
)
from batch_storm import check_storm
from completions.domain.batches import Batch, BatchStatus
from completions.pipelines import answering


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with batch_stage("eu-north-1", UPSTREAM_ATTEMPTS="1", BATCH_LINES_PER_WORKER="20") as running:
        yield running


def read(stage: Stage, batch: Batch) -> Batch:
    found: Batch | None = stage.table.batch(batch.tenant, batch.batch_id)
    assert found is not None
    return found


def test_a_small_file_is_answered_in_the_published_form(stage: Stage) -> None:
    batch = stage.batch(jsonl([request_line(1, "one two"), request_line(2, "three")]))

    assert Driver(stage).run(batch) == "completed"

    first, second = stage.results(batch, "output.jsonl")
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert first["id"].startswith("batch_req_")
    assert first["id"] != second["id"]
    assert (first["custom_id"], second["custom_id"], first["error"]) == ("request-1", "request-2", None)
    assert (first["response"]["status_code"], first["response"]["request_id"]) == (200, f"{batch.batch_id}-1")
    body = first["response"]["body"]
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", ANSWER * 3)
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert stage.results(batch, "errors.jsonl") == []


def test_the_manifest_the_batch_and_its_files_say_what_it_came_to(stage: Stage) -> None:
    batch = stage.batch(jsonl([request_line(1, "one two"), "no json", request_line(2, POISON)]))

    Driver(stage).run(batch)

    manifest, ended = stage.manifest(batch), read(stage, batch)
    nanos = 2 * PRICE.input_nanos + 3 * PRICE.output_nanos
    assert manifest["counts"] == {"total": 3, "completed": 1, "failed": 2}
    assert manifest["usage"]["total_tokens"] == 5
    assert manifest["cost"] == {"nanos": nanos, "dollars": "0.000000027"}
    assert (manifest["models"], manifest["status"], manifest["key_id"]) == ([MODEL], "completed", KEY_ID)
    assert (ended.status, ended.total, ended.model) == (BatchStatus.COMPLETED, 3, MODEL)
    assert (ended.counts.completed, ended.counts.failed, ended.counts.nanos) == (1, 2, nanos)
    for kind, file_id in (("output", ended.output_file_id), ("error", ended.error_file_id)):
        file = stage.table.file(batch.tenant, file_id)
        assert manifest["files"][kind] == {"file_id": file_id, "key": file.key, "bytes": file.size}
        assert len(stage.object(file.key)) == file.size
        assert file.purpose == "batch_output"
    assert manifest["timings"]["completed_at"] >= manifest["timings"]["in_progress_at"] >= batch.created_at.isoformat()


def test_a_failed_line_keeps_its_response_and_a_faulty_one_says_where_it_is(stage: Stage) -> None:
    batch = stage.batch(jsonl([request_line(1, "fine"), request_line(2, POISON), "", "no json"]))

    Driver(stage).run(batch)

    failed, faulty = stage.results(batch, "errors.jsonl")
    assert (failed["custom_id"], failed["error"], failed["response"]["status_code"]) == ("request-2", None, 500)
    assert failed["response"]["body"]["error"]["type"] == "server_error"
    assert (faulty["custom_id"], faulty["response"]) == (None, None)
    assert (faulty["error"]["code"], faulty["error"]["line"]) == ("invalid_json_line", 4)


def test_each_dialect_answers_its_own_lines(stage: Stage) -> None:
    url = f"/v1/llm/completions-sync?model_endpoint_name={MODEL}"
    messages = [{"speaker": "human", "text": "hello there"}]
    lines = [
        request_line(1, "one"),
        request_line(2, "two", url="/v2/completions"),
        request_line(3, "", url=url, body={"prompt": "three", "max_new_tokens": 2, "temperature": 0}),
        request_line(
            4, "", url="/.api/completions/code", body={"model": MODEL, "messages": messages, "maxTokensToSample": 2}
        ),
    ]
    batch = stage.batch(jsonl(lines))

    assert Driver(stage).run(batch) == "completed"

    assert stage.results(batch, "errors.jsonl") == []
    bodies = [line["response"]["body"] for line in stage.results(batch, "output.jsonl")]
    assert bodies[0]["object"] == "text_completion"
    assert bodies[2]["output"]["text"] == ANSWER * 2
    assert bodies[3]["completion"] == ANSWER * 2


FUNCTIONS = """
import json, sys
from completions.handlers import batch_assembler, batch_splitter, batch_worker

class Context:
    def get_remaining_time_in_millis(self):
        return 200_000

batch = json.load(sys.stdin)
plan = json.loads(json.dumps(batch_splitter.handler(batch, Context())))
index = batch_splitter._splitter._objects.get(plan["index_key"])
for line in index.splitlines():
    json.dumps(batch_worker.handler({**batch, "part": json.loads(line)}, Context()))
failure = {"Error": "States.Timeout", "Cause": "a stack trace"}
print(json.dumps(batch_assembler.handler({**plan, "failure": failure}, Context())))
loaded = {name.partition(".")[0] for name in sys.modules} & {"fastapi", "starlette", "mangum", "anyio"}
assert not loaded, loaded
"""


def test_the_functions_take_each_others_words_as_the_state_machine_hands_them_on(stage: Stage) -> None:
    batch = stage.batch(jsonl([request_line(number, f"function {number}") for number in range(25)]))
    told = run_functions(stage, FUNCTIONS, {"tenant": batch.tenant, "batch_id": batch.batch_id})
    manifest = f"output/{KEY_ID}/{batch.batch_id}/manifest.json"
    assert json.loads(told) == {"batch_id": batch.batch_id, "status": "completed", "manifest": manifest}
    assert len(stage.results(batch, "output.jsonl")) == 25


def test_the_whole_run_again_changes_and_costs_nothing(stage: Stage) -> None:
    batch = stage.batch(jsonl([request_line(number, f"again {number}") for number in range(30)]))
    driver = Driver(stage)
    parts = driver.split(batch)
    driver.work(batch, parts)
    assert driver.split(batch) == parts
    driver.work(batch, parts)
    driver.assemble(batch)
    ended, output = read(stage, batch), stage.results(batch, "output.jsonl")

    assert driver.split(batch) == []
    driver.work(batch, parts)
    assert driver.assemble(batch) == "completed"

    assert (read(stage, batch), stage.results(batch, "output.jsonl")) == (ended, output)
    assert ended.counts.completed == 30
    assert all(stage.container.prompts[f"again {number}"] == 1 for number in range(30))


def test_a_cancelled_batch_delivers_what_was_paid_for_and_begins_nothing_more(stage: Stage) -> None:
    batch = stage.batch(jsonl([request_line(number, f"cancelled {number}") for number in range(60)]))
    driver = Driver(stage)
    parts = driver.split(batch)
    driver.work(batch, parts[:1])
    stage.table.move(read(stage, batch), BatchStatus.CANCELLING, batch.created_at, only_from=[BatchStatus.IN_PROGRESS])

    driver.work(batch, parts[:2])  # the third was never handed out
    assert driver.assemble(batch) == "cancelled"

    assert [line["custom_id"] for line in stage.results(batch, "output.jsonl")] == [f"request-{n}" for n in range(20)]
    errors = stage.results(batch, "errors.jsonl")
    assert [line["error"]["line"] for line in errors] == list(range(21, 61))
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert read(stage, batch).counts.failed == 40
    assert sum(stage.container.prompts[f"cancelled {number}"] for number in range(60)) == 20


def test_a_part_that_was_given_up_delivers_the_lines_that_were_answered(stage: Stage) -> None:
    stage.container.hanging.clear()
    stage.container.release.clear()
    lines = [request_line(number, f"given up {number}") for number in range(20)]
    lines[19] = request_line(19, f"{HANG} for ever")
    batch = stage.batch(jsonl(lines))
    driver = Driver(stage)
    (part,) = driver.split(batch)
    killed_worker(stage, batch, part, lambda: _all_but_one_kept(stage, batch))
    stage.container.release.set()

    assert driver.assemble(batch, "States.ExceedToleratedFailureThreshold") == "completed"

    assert [line["custom_id"] for line in stage.results(batch, "output.jsonl")] == [f"request-{n}" for n in range(19)]
    (error,) = stage.results(batch, "errors.jsonl")
    assert (error["custom_id"], error["error"]["code"], error["error"]["line"]) == ("request-19", "batch_failed", 20)
    assert stage.manifest(batch)["counts"] == {"total": 20, "completed": 19, "failed": 1}


def _all_but_one_kept(stage: Stage, batch: Batch) -> None:
    assert stage.container.hanging.wait(30)
    for _ in range(300):
        kept = stage.s3.list_objects_v2(Bucket=stage.bucket, Prefix=f"replies/{batch.batch_id}-")["KeyCount"]
        if kept == 19:
            return
        stage.clock.sleep(0.05)
    raise AssertionError(f"{kept} replies of 19 were kept")


def test_every_line_is_answered_once_whatever_goes_wrong(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_RUNNING_SECONDS", 1.0)
    monkeypatch.setattr(answering, "_BUSY_SECONDS", 0.1)
    check_storm(stage, 300)
