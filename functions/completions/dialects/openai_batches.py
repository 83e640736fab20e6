"""OpenAI's files and batches: ``/v1/files`` and ``/v1/batches``.

Sources: openai/openai-openapi (``OpenAIFile``, ``Batch``, their lists) and what openai-python reads of an answer. A
batch has a field of this gateway's own, ``cost``. An ``Idempotency-Key`` makes a file or a batch once, however often it
is asked for; ``idempotent-replayed`` then says that it was there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from completions.dialects.dialect import Resource, WireReply, WireRequest
from completions.dialects.openai_batches_wire import (
    EVERY_ENDPOINT,
    parse_batches_query,
    parse_files_query,
    parse_name,
    parse_order,
    refuse_query,
)
from completions.dialects.openai_form import parse_upload
from completions.dialects.text_completion import to_json
from completions.domain.batches import Batch, Batches, BatchStatus, LineError, Page, StoredFile
from completions.domain.catalog import ModelRoute
from completions.domain.errors import InvalidRequestError
from completions.domain.metering import Principal

LINES: Final = "application/jsonl"
REPLAYED: Final = "idempotent-replayed"
_NANOS_PER_DOLLAR: Final = 10**9
_MOMENTS: Final = {
    "in_progress_at": BatchStatus.IN_PROGRESS,
    "finalizing_at": BatchStatus.FINALIZING,
    "completed_at": BatchStatus.COMPLETED,
    "failed_at": BatchStatus.FAILED,
    "expired_at": BatchStatus.EXPIRED,
    "cancelling_at": BatchStatus.CANCELLING,
    "cancelled_at": BatchStatus.CANCELLED,
}
_Routes = Sequence[ModelRoute]


def batch_resources(batches: Batches, endpoints: Collection[str], kept: timedelta) -> tuple[Resource, ...]:
    """All nine routes. ``endpoints`` are the paths that lines of a batch may ask; files are ``kept`` so long."""
    files = _Files(batches, kept)
    jobs = _Jobs(batches, endpoints)
    return (
        Resource("POST", "/v1/files", files.create),
        Resource("GET", "/v1/files", files.list),
        Resource("GET", "/v1/files/{file_id}", files.retrieve),
        Resource("DELETE", "/v1/files/{file_id}", files.delete),
        Resource("GET", "/v1/files/{file_id}/content", files.content),
        Resource("POST", "/v1/batches", jobs.create),
        Resource("GET", "/v1/batches", jobs.list),
        Resource("GET", "/v1/batches/{batch_id}", jobs.retrieve),
        Resource("POST", "/v1/batches/{batch_id}/cancel", jobs.cancel),
    )


class _Files:
    """``/v1/files``."""

    def __init__(self, batches: Batches, kept: timedelta) -> None:
        self._batches = batches
        self._kept = kept

    def create(self, wire: WireRequest, principal: Principal, routes: _Routes) -> WireReply:
        refuse_query(wire)
        made = self._batches.add_file(principal, parse_upload(wire), parse_name(wire))
        return _reply(self._object(made.item), known=made.known)

    def list(self, wire: WireRequest, principal: Principal, routes: _Routes) -> WireReply:
        query = parse_files_query(wire)
        page = self._batches.files(
            principal, purpose=query.purpose, after=query.after, limit=query.limit, newest_first=query.newest_first
        )
        return _reply(_list([self._object(file) for file in page.items], page))

    def retrieve(self, wire: WireRequest, principal: Principal, routes: _Routes) -> WireReply:
        refuse_query(wire)
        return _reply(self._object(self._batches.file(principal, wire.path_parameters["file_id"])))

    def delete(self, wire: WireRequest, principal: Principal, routes: _Routes) -> WireReply:
        refuse_query(wire)
        file_id = wire.path_parameters["file_id"]
        self._batches.remove_file(principal, file_id)
        return _reply({"id": file_id, "object": "file", "deleted": True})

    def content(self, wire: WireRequest, principal: Principal, routes: _Routes) -> WireReply:
        refuse_query(wire)
        found = self._batches.content(principal, wire.path_parameters["file_id"])
        if found.content is not None:
            return WireReply(200, found.content, LINES, {})
        return WireReply(302, b"", LINES, {"location": found.url or "", "cache-control": "no-store"})

    def _object(self, file: StoredFile) -> dict[str, Any]:
        return {
            "id": file.file_id,
            "object": "file",
            "bytes": file.size,
            "created_at": _seconds(file.created_at),
            "expires_at": _seconds(file.created_at + self._kept),
            "filename": file.filename,
            "purpose": file.purpose,
            "status": "processed",
            "status_details": None,
        }


class _Jobs:
    """``/v1/batches``."""

    def __init__(self, batches: Batches, endpoints: Collection[str]) -> None:
        self._batches = batches
        self._endpoints = endpoints

    def create(self, wire: WireRequest, principal: Principal, routes: _Routes) -> WireReply:
        made = self._batches.create(principal, parse_order(wire, self._endpoints), parse_name(wire))
        return _reply(batch_object(made.item), known=made.known)

    def list(self, wire: WireRequest, principal: Principal, routes: _Routes) -> WireReply:
        query = parse_batches_query(wire)
        page = self._batches.batches(principal, after=query.after, limit=query.limit)
        return _reply(_list([batch_object(batch) for batch in page.items], page))

    def retrieve(self, wire: WireRequest, principal: Principal, routes: _Routes) -> WireReply:
        refuse_query(wire)
        return _reply(batch_object(self._batches.batch(principal, wire.path_parameters["batch_id"])))

    def cancel(self, wire: WireRequest, principal: Principal, routes: _Routes) -> WireReply:
        refuse_query(wire)
        if wire.body.strip() not in (b"", b"{}"):
            raise InvalidRequestError("Cancelling takes no arguments: send no body.")
        return _reply(batch_object(self._batches.cancel(principal, wire.path_parameters["batch_id"])))


def batch_object(batch: Batch) -> dict[str, Any]:
    """OpenAI's ``Batch``; ``cost`` is this gateway's."""
    usage, moments = batch.counts.usage, batch.moments
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": EVERY_ENDPOINT if batch.endpoint is None else batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": [_fault(error) for error in batch.errors]} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": _seconds(batch.created_at),
        "expires_at": _seconds(batch.expires_at),
        **{name: _seconds(moments[status]) if status in moments else None for name, status in _MOMENTS.items()},
        "request_counts": {
            "total": batch.total,
            "completed": batch.counts.completed,
            "failed": batch.counts.failed,
        },
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        },
        "cost": {"value": float(Decimal(batch.counts.nanos) / _NANOS_PER_DOLLAR), "currency": "usd"},
        "metadata": dict(batch.metadata),
    }


def _fault(error: LineError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "param": error.param, "line": error.line}


def _list(objects: list[dict[str, Any]], page: Page[Any]) -> dict[str, Any]:
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": page.more,
    }


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())


def _reply(body: object, *, known: bool = False) -> WireReply:
    headers: Mapping[str, str] = {REPLAYED: "true"} if known else {}
    return WireReply(200, to_json(body).encode(), "application/json", headers)
