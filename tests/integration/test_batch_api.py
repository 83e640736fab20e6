"""Files and batches over HTTP, asked by the official SDK.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch, FileObject

import completions.domain.batches as domain
from batch_app import COLLEAGUES_KEY, KEY, NOON, STRANGERS_KEY, BatchApp, running_batch_app
from completions.domain.completion import Usage
from completions.service.batches import MOST_INLINE_BYTES

LINES = b"\xef\xbb\xbf" + b"".join(
    json.dumps(
        {
            "custom_id": f"é-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "demo", "prompt": "x"},
        },
        ensure_ascii=False,
    ).encode()
    + b"\r\n"
    for number in range(3)
)
DAY = 86_400


@pytest.fixture(scope="module")
def app(project_root: Path) -> Iterator[BatchApp]:
    with running_batch_app("eu-south-1", project_root) as running:
        yield running


@pytest.fixture(autouse=True)
def _later(app: BatchApp) -> Iterator[None]:
    app.clock.advance(3 * DAY)  # what other tests left is older than anything of this one
    app.starter.started.clear()
    yield
    app.starter.failing = False


@pytest.fixture
def client(app: BatchApp) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{app.url}/v1", api_key=KEY, max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def stranger(app: BatchApp) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{app.url}/v1", api_key=STRANGERS_KEY, max_retries=0) as sdk:
        yield sdk


def uploaded(client: OpenAI, content: bytes = LINES) -> FileObject:
    return client.files.create(file=("prompts.jsonl", content), purpose="batch")


def begun(client: OpenAI, **fields: Any) -> Batch:
    asked = {"endpoint": "/v1/completions", "completion_window": "24h", **fields}
    asked.setdefault("input_file_id", "")
    if not asked["input_file_id"]:
        asked["input_file_id"] = uploaded(client).id
    return client.batches.create(**asked)


def refusal(error: openai.APIStatusError) -> tuple[int, str | None, str | None, str | None]:
    return error.status_code, error.type, error.param, error.code


def test_a_file_is_uploaded_described_read_and_deleted(client: OpenAI, app: BatchApp) -> None:
    made = uploaded(client)
    now = int(app.clock.now().timestamp())

    assert made.id.startswith("file-")
    assert made.to_dict() == {
        "id": made.id,
        "object": "file",
        "bytes": len(LINES),
        "created_at": now,
        "expires_at": now + 30 * DAY,
        "filename": "prompts.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == LINES

    deleted = client.files.delete(made.id)
    assert deleted.to_dict() == {"id": made.id, "object": "file", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


def test_a_large_file_is_fetched_from_where_it_lies(client: OpenAI, app: BatchApp) -> None:
    content = LINES * (MOST_INLINE_BYTES // len(LINES) + 1)
    made = uploaded(client, content)

    assert client.files.content(made.id).content == content
    bare = httpx.get(
        f"{app.url}/v1/files/{made.id}/content", headers={"Authorization": f"Bearer {KEY}"}, follow_redirects=False
    )
    assert bare.status_code == 302
    assert "X-Amz-Expires=300" in bare.headers["location"]
    assert bare.headers["cache-control"] == "no-store"


def test_a_file_that_is_no_text_is_fetched_from_where_it_lies(client: OpenAI) -> None:
    made = uploaded(client, b"\xff\xfe\x00")

    assert client.files.content(made.id).content == b"\xff\xfe\x00"


def redirected(app: BatchApp, file_id: str) -> int:
    url = f"{app.url}/v1/files/{file_id}/content"
    return httpx.get(url, headers={"Authorization": f"Bearer {KEY}"}, follow_redirects=False).status_code


def test_a_file_that_grows_in_a_functions_answer_is_fetched_from_where_it_lies(client: OpenAI, app: BatchApp) -> None:
    content = json.dumps({"body": {"prompt": '"\\n"' * 580_000}}).encode()
    assert len(content) < MOST_INLINE_BYTES
    answer = json.dumps({"statusCode": 200, "body": content.decode()}, ensure_ascii=False)
    assert len(answer.encode()) > 6_291_556  # what Lambda takes
    made = uploaded(client, content)
    assert redirected(app, made.id) == 302
    assert client.files.content(made.id).content == content


def test_an_input_that_was_replaced_by_a_large_one_is_not_read_into_memory(client: OpenAI, app: BatchApp) -> None:
    now = app.clock.now()
    file = domain.StoredFile(domain.timed_id("file-", now), "team:search", "a", "batch", "input/key-alice/a", 10, now)
    app.table.add_file(file)
    app.objects.put(file.key, b"x" * (MOST_INLINE_BYTES + 1))
    assert redirected(app, file.file_id) == 302
    app.objects.put(file.key, b"")
    assert client.files.content(file.file_id).content == b""


def test_files_are_listed_newest_first_page_after_page(client: OpenAI, app: BatchApp) -> None:
    made = []
    for _ in range(5):
        made.append(uploaded(client))
        app.clock.advance(1)

    page = client.files.list(limit=2)
    assert [file.id for file in page.data] == [made[4].id, made[3].id]
    assert page.has_more is True
    assert [file.id for file in islice(client.files.list(limit=2), 5)] == [file.id for file in reversed(made)]
    assert [file.id for file in client.files.list(limit=2, order="asc", after=made[1].id)] == [
        file.id for file in made[2:]
    ]
    assert not list(client.files.list(after=made[0].id, purpose="vision"))


def test_a_list_by_purpose_finds_what_is_far_behind(client: OpenAI, app: BatchApp) -> None:
    at = app.clock.now()
    for number in range(130):
        moment = at + timedelta(milliseconds=number)
        purpose = "batch_output" if number in (0, 3) else "batch"
        file_id = domain.timed_id("file-", moment)
        app.table.add_file(domain.StoredFile(file_id, "team:search", f"{number}", purpose, "none", 1, moment))

    page = client.files.list(purpose="batch_output", limit=1)
    assert [file.filename for file in page.data] == ["3"]
    assert page.has_more
    assert [file.filename for file in islice(client.files.list(purpose="batch_output", limit=1), 2)] == ["3", "0"]


def test_a_team_shares_what_strangers_do_not_find(client: OpenAI, stranger: OpenAI, app: BatchApp) -> None:
    batch = begun(client)
    ids = {"file_id": batch.input_file_id, "batch_id": batch.id}

    with OpenAI(base_url=f"{app.url}/v1", api_key=COLLEAGUES_KEY, max_retries=0) as colleague:
        assert colleague.batches.retrieve(batch.id) == batch
        assert colleague.files.retrieve(batch.input_file_id).id == batch.input_file_id
    for ask in (
        lambda: stranger.files.retrieve(ids["file_id"]),
        lambda: stranger.files.content(ids["file_id"]),
        lambda: stranger.files.delete(ids["file_id"]),
        lambda: stranger.batches.retrieve(ids["batch_id"]),
        lambda: stranger.batches.cancel(ids["batch_id"]),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.BadRequestError) as raised:
        begun(stranger, input_file_id=ids["file_id"])
    assert raised.value.param == "input_file_id"
    assert not stranger.batches.list().data
    assert not stranger.files.list().data


def test_a_batch_is_created_and_started(client: OpenAI, app: BatchApp) -> None:
    batch = begun(client, metadata={"run": "7"})
    now = int(app.clock.now().timestamp())

    assert batch.id.startswith("batch_")
    assert batch.to_dict() == {
        "id": batch.id,
        "object": "batch",
        "endpoint": "/v1/completions",
        "model": None,
        "errors": None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + DAY,
        "in_progress_at": None,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        },
        "cost": {"value": 0.0, "currency": "usd"},
        "metadata": {"run": "7"},
    }
    assert client.batches.retrieve(batch.id) == batch
    (started,) = app.starter.started
    assert (started.batch_id, started.tenant, started.key_id) == (batch.id, "team:search", "key-alice")
    assert app.objects.get(started.input_key) == LINES


def test_a_batch_tells_how_far_it_is(client: OpenAI, app: BatchApp) -> None:
    made = begun(client)
    known = app.table.batch("team:search", made.id)
    assert known is not None
    status, minute = domain.BatchStatus, timedelta(minutes=1)
    fault = domain.LineError("invalid_json_line", "Line 2 is no JSON.", None, 2)
    steps: list[tuple[domain.BatchStatus, domain.BatchStatus, dict[str, object]]] = [
        (status.VALIDATING, status.IN_PROGRESS, {"total": 3, "model": "demo", "errors": (fault,)}),
        (status.IN_PROGRESS, status.FINALIZING, {}),
        (status.FINALIZING, status.COMPLETED, {"output_file_id": "file-1", "error_file_id": "file-2"}),
    ]
    start = app.clock.now()
    for number, (before, after, changes) in enumerate(steps, 1):
        app.table.move(known, after, start + number * minute, only_from=[before], changes=changes)
    app.table.count_part(known, "0", domain.LineCounts(2, 1, Usage(30, 40, 5), 1_500_000_000))

    batch = client.batches.retrieve(made.id)
    began = int(start.timestamp())

    assert batch.status == "completed"
    assert (batch.in_progress_at, batch.finalizing_at, batch.completed_at) == (began + 60, began + 120, began + 180)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (30, 40, 70)
    assert batch.usage.input_tokens_details.cached_tokens == 5
    assert batch.to_dict()["cost"] == {"value": 1.5, "currency": "usd"}
    assert (batch.model, batch.output_file_id, batch.error_file_id) == ("demo", "file-1", "file-2")
    assert batch.errors is not None
    assert batch.errors.to_dict() == {
        "object": "list",
        "data": [{"code": "invalid_json_line", "message": "Line 2 is no JSON.", "param": None, "line": 2}],
    }


def test_batches_are_listed_newest_first_page_after_page(client: OpenAI, app: BatchApp) -> None:
    made = []
    for _ in range(3):
        made.append(begun(client).id)
        app.clock.advance(1)

    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == [made[2], made[1]]
    assert page.has_more is True
    assert [batch.id for batch in islice(client.batches.list(limit=2), 3)] == made[::-1]
    assert [batch.id for batch in client.batches.list(limit=1, after=made[1]).data] == [made[0]]


def test_a_batch_is_cancelled_once_and_for_all(client: OpenAI, app: BatchApp) -> None:
    made = begun(client)

    cancelling = client.batches.cancel(made.id)
    app.clock.advance(5)

    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at == int(app.clock.now().timestamp()) - 5
    assert client.batches.cancel(made.id) == cancelling


def test_a_batch_that_has_ended_cannot_be_cancelled(client: OpenAI, app: BatchApp) -> None:
    made = begun(client)
    known = app.table.batch("team:search", made.id)
    assert known is not None
    app.table.move(known, domain.BatchStatus.COMPLETED, NOON, only_from=[domain.BatchStatus.VALIDATING])

    with pytest.raises(openai.ConflictError) as raised:
        client.batches.cancel(made.id)
    assert refusal(raised.value) == (409, "invalid_request_error", None, "batch_not_cancellable")
    assert "Cannot cancel a batch with status 'completed'." in raised.value.message


def test_a_file_that_a_batch_reads_is_not_deleted(client: OpenAI, app: BatchApp) -> None:
    made = begun(client)

    with pytest.raises(openai.ConflictError) as raised:
        client.files.delete(made.input_file_id)
    assert raised.value.code == "file_in_use"
    assert made.id in raised.value.message

    known = app.table.batch("team:search", made.id)
    assert known is not None
    app.table.move(known, domain.BatchStatus.FAILED, NOON, only_from=[domain.BatchStatus.VALIDATING])
    assert client.files.delete(made.input_file_id).deleted


def test_what_is_asked_again_under_its_name_is_done_once(client: OpenAI, app: BatchApp) -> None:
    named = {"Idempotency-Key": f"nightly-{app.clock.now()}"}

    files = [
        client.files.with_raw_response.create(file=("a.jsonl", LINES), purpose="batch", extra_headers=named)
        for _ in range(2)
    ]
    file_id = files[0].parse().id
    batches = [
        client.batches.with_raw_response.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h", extra_headers=named
        )
        for _ in range(2)
    ]

    assert files[1].parse().id == file_id
    assert [reply.headers.get("idempotent-replayed") for reply in files] == [None, "true"]
    assert batches[0].parse().id == batches[1].parse().id
    assert [reply.headers.get("idempotent-replayed") for reply in batches] == [None, "true"]
    assert {batch.batch_id for batch in app.starter.started} == {batches[0].parse().id}

    with pytest.raises(openai.ConflictError) as raised:
        client.files.create(file=("a.jsonl", b"other"), purpose="batch", extra_headers=named)
    assert raised.value.param == "Idempotency-Key"
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("a.jsonl", LINES), purpose="batch", extra_headers={"Idempotency-Key": "x" * 256})


def test_a_batch_that_could_not_be_started_has_failed(client: OpenAI, app: BatchApp) -> None:
    file = uploaded(client)
    app.starter.failing = True

    with pytest.raises(openai.InternalServerError) as raised:
        begun(client, input_file_id=file.id)
    assert raised.value.status_code == 503

    (batch,) = client.batches.list(limit=1).data
    assert batch.status == "failed"
    assert batch.failed_at == int(app.clock.now().timestamp())
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["not_started"]


def test_a_named_batch_that_could_not_be_started_is_started_by_asking_again(client: OpenAI, app: BatchApp) -> None:
    file = uploaded(client)
    named = {"Idempotency-Key": f"again-{app.clock.now()}"}
    app.starter.failing = True
    with pytest.raises(openai.InternalServerError):
        begun(client, input_file_id=file.id, extra_headers=named)

    app.starter.failing = False
    batch = begun(client, input_file_id=file.id, extra_headers=named)

    assert batch.status == "validating"
    assert [started.batch_id for started in app.starter.started] == [batch.id]
    assert len(client.batches.list(limit=1).data) == 1


def test_a_batch_that_was_cancelled_before_it_was_started_is_started_to_its_end(client: OpenAI, app: BatchApp) -> None:
    file = uploaded(client)
    named = {"Idempotency-Key": f"cancelled-{app.clock.now()}"}
    app.starter.failing = True
    with pytest.raises(openai.InternalServerError):
        begun(client, input_file_id=file.id, extra_headers=named)
    (batch,) = client.batches.list(limit=1).data
    with pytest.raises(openai.InternalServerError):  # who else would ever say that it is cancelled?
        client.batches.cancel(batch.id)

    app.starter.failing = False
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert [started.batch_id for started in app.starter.started] == [batch.id]


@pytest.mark.parametrize("endpoint", ["/v2/completions", "/.api/completions/code", "/v1/llm/completions-sync", "*"])
def test_a_batch_may_speak_any_dialect_or_each_lines_own(client: OpenAI, app: BatchApp, endpoint: str) -> None:
    batch = begun(client, endpoint=endpoint)

    assert batch.endpoint == endpoint
    assert app.starter.started[0].endpoint == (None if endpoint == "*" else endpoint)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/chat/completions"}, "endpoint"),
        ({"endpoint": 7}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-nobody"}, "input_file_id"),
        ({"input_file_id": "batch_1"}, "input_file_id"),
        ({"metadata": {f"k{number}": "v" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"extra_body": {"priority": "high"}}, "priority"),
        ({"extra_query": {"limit": "1"}}, "limit"),
    ],
)
def test_a_wrong_order_names_the_field(client: OpenAI, app: BatchApp, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        begun(client, **fields)

    assert raised.value.status_code == 400
    assert raised.value.type == "invalid_request_error"
    assert raised.value.param == param
    assert param in raised.value.message
    assert not app.starter.started


def test_metadata_at_its_limits_is_taken(client: OpenAI) -> None:
    metadata = {f"{number:064}": "v" * 512 for number in range(16)}

    assert begun(client, metadata=metadata).metadata == metadata


def test_a_batchs_own_output_is_no_input(client: OpenAI, app: BatchApp) -> None:
    at = app.clock.now()
    file_id = domain.timed_id("file-", at)
    app.table.add_file(domain.StoredFile(file_id, "team:search", "output.jsonl", "batch_output", "none", 1, at))

    with pytest.raises(openai.BadRequestError) as raised:
        begun(client, input_file_id=file_id)
    assert raised.value.code == "invalid_purpose"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=ten", "limit"),
        ("limit=1&limit=2", "limit"),
        ("after=", "after"),
        ("order=asc", "order"),
    ],
)
def test_a_wrong_query_names_the_parameter(app: BatchApp, query: str, param: str) -> None:
    reply = httpx.get(f"{app.url}/v1/batches?{query}", headers={"Authorization": f"Bearer {KEY}"})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_files_take_an_order_and_ten_thousand(app: BatchApp) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}

    assert httpx.get(f"{app.url}/v1/files?limit=10000&order=asc", headers=headers).status_code == 200
    assert httpx.get(f"{app.url}/v1/files?limit=10001", headers=headers).json()["error"]["param"] == "limit"
    assert httpx.get(f"{app.url}/v1/files?order=up", headers=headers).json()["error"]["param"] == "order"


def test_nobody_gets_in_without_a_key(app: BatchApp) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches")):
        assert httpx.request(method, app.url + path).status_code == 401


FORM = "multipart/form-data; boundary=b"
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n'


@pytest.mark.parametrize(
    ("body", "kind", "param", "said"),
    [
        (b"{}", "application/json", None, "multipart/form-data"),
        (PURPOSE + FILE + b"--b--\r\n", "multipart/form-data", None, "multipart/form-data"),
        (PURPOSE + FILE, FORM, None, "cut off"),
        ((PURPOSE + FILE)[:-9], FORM, None, "cut off"),
        (b"", FORM, None, "cut off"),
        (b"nothing of the kind", FORM, None, "parse"),
        (PURPOSE + b"--b--\r\n", FORM, "file", "You must provide"),
        (FILE + b"--b--\r\n", FORM, "purpose", "You must provide"),
        (PURPOSE + FILE + FILE + b"--b--\r\n", FORM, "file", "more than once"),
        (PURPOSE.replace(b"batch", b"fine-tune") + FILE + b"--b--\r\n", FORM, "purpose", "must be 'batch'"),
        (PURPOSE + FILE.replace(b"{}", b"") + b"--b--\r\n", FORM, "file", "is empty"),
        (PURPOSE + FILE.replace(b'; filename="a.jsonl"', b"") + b"--b--\r\n", FORM, "file", "file name"),
        (PURPOSE + FILE.replace(b"a.jsonl", b"a/") + b"--b--\r\n", FORM, "file", "file name"),
        (
            PURPOSE.replace(b"purpose", b"expires_after[seconds]") + PURPOSE + FILE + b"--b--\r\n",
            FORM,
            "expires_after[seconds]",
            "not supported",
        ),
        (
            PURPOSE + FILE.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n") + b"--b--\r\n",
            FORM,
            None,
            "transfer encoding",
        ),
        (PURPOSE + FILE.replace(b' name="file";', b"") + b"--b--\r\n", FORM, None, "no name"),
    ],
)
def test_a_wrong_upload_names_what_is_wrong(
    app: BatchApp, body: bytes, kind: str, param: str | None, said: str
) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind}
    reply = httpx.post(f"{app.url}/v1/files", content=body, headers=headers)

    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert said in error["message"]


def test_a_file_name_loses_its_folders_alone(app: BatchApp) -> None:
    file = FILE.replace(b"a.jsonl", "C:\\Entwürfe\\a b;c.jsonl".encode())
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": FORM}
    reply = httpx.post(f"{app.url}/v1/files", content=PURPOSE + file + b"--b--\r\n", headers=headers)

    assert reply.json()["filename"] == "a b;c.jsonl"


def test_an_upload_that_is_too_large_is_told_of_another_way(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        uploaded(client, b"x" * (6 * 1024 * 1024))

    assert refusal(raised.value) == (413, "invalid_request_error", "file", "request_too_large")
    assert "completions batch submit" in raised.value.message


@pytest.mark.parametrize("tail", ["x" * 3000, "%C3%A9", "%00", "..", ""])
def test_what_cannot_be_an_id_is_not_found(app: BatchApp, tail: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}

    for place in (f"/v1/files/file-{tail}", f"/v1/batches/batch_{tail}"):
        reply = httpx.get(app.url + place, headers=headers)
        assert reply.status_code == 404
        assert reply.json()["error"]["type"] == "invalid_request_error"
