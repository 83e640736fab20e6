"""Files and batches in the pipeline table; ``batch_items`` has the shape of the items."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from pydantic import ValidationError

from completions.domain.batches import (
    Batch,
    BatchConflictError,
    BatchNames,
    BatchStatus,
    BatchStore,
    LineCounts,
    StoredFile,
)
from completions.domain.errors import BackendUnavailableError
from completions.domain.ports import Clock
from completions.dynamodb_json import deserialized, serialized
from completions.stores.batch_items import (
    BATCHES,
    FILES,
    NAMES,
    PART,
    PARTS,
    BatchChanges,
    BatchItem,
    FileItem,
    NameItem,
    PartItem,
    counted,
    iso,
)
from completions.stores.replies import unreachable

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_NEW: Final = "attribute_not_exists(pk)"
_TRIES: Final = 12
_PAUSE_SECONDS: Final = 0.02

_Read = TypeVar("_Read")


class BatchTable(BatchStore, BatchNames):
    """Reads are consistent. Needs GetItem, PutItem, UpdateItem, DeleteItem, Query on the table."""

    def __init__(self, client: DynamoDBClient, table: str, retention_days: int, clock: Clock) -> None:
        self._client = client
        self._table = table
        self._retention = timedelta(days=retention_days)
        self._clock = clock

    def add_file(self, file: StoredFile) -> None:
        item = FileItem.from_file(file, self._ends(file.created_at))
        self._put_new(serialized(item, pk=FILES + file.tenant, sk=file.file_id))

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        return _parsed(self._get(FILES + tenant, file_id), lambda item: FileItem.model_validate(item).to_file())

    def files(self, tenant: str, *, after: str | None, limit: int, newest_first: bool = True) -> Sequence[StoredFile]:
        items = self._listed(FILES + tenant, after, limit, newest_first)
        return [_read(item, lambda item: FileItem.model_validate(item).to_file()) for item in items]

    def remove_file(self, tenant: str, file_id: str) -> None:
        with _reached():
            self._client.delete_item(TableName=self._table, Key=_key(FILES + tenant, file_id))

    def add(self, batch: Batch) -> bool:
        item = BatchItem.from_batch(batch, self._ends(batch.created_at))
        return self._put_new(serialized(item, pk=BATCHES + batch.tenant, sk=batch.batch_id))

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        return _parsed(self._get(BATCHES + tenant, batch_id), _to_batch)

    def batches(self, tenant: str, *, after: str | None, limit: int) -> Sequence[Batch]:
        return [_read(item, _to_batch) for item in self._listed(BATCHES + tenant, after, limit, newest_first=True)]

    def move(
        self,
        batch: Batch,
        to: BatchStatus,
        at: datetime,
        *,
        only_from: Sequence[BatchStatus],
        changes: Mapping[str, object] | None = None,
    ) -> Batch | None:
        given = serialized(BatchChanges.model_validate(changes or {}, from_attributes=True))
        names = {"#status": "status", "#moments": "moments", "#to": to.value} | {f"#{name}": name for name in given}
        values: dict[str, Any] = {":to": {"S": to.value}, ":at": {"S": iso(at)}}
        values |= {f":{name}": value for name, value in given.items()}
        values |= {f":from{number}": {"S": status.value} for number, status in enumerate(only_from)}
        sets = ["#status = :to", "#moments.#to = :at", *(f"#{name} = :{name}" for name in given)]
        try:
            with _reached():
                reply = self._client.update_item(
                    TableName=self._table,
                    Key=_key(BATCHES + batch.tenant, batch.batch_id),
                    UpdateExpression="SET " + ", ".join(sets),
                    ConditionExpression=f"#status IN ({', '.join(f':from{n}' for n in range(len(only_from)))})",
                    ExpressionAttributeNames=names,
                    ExpressionAttributeValues=values,
                    ReturnValues="ALL_NEW",
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                )
        except self._client.exceptions.ConditionalCheckFailedException as error:
            return _own(error, to, at)
        return _read(deserialized(reply["Attributes"]), _to_batch)

    def count_part(self, batch: Batch, part: str, counts: LineCounts) -> None:
        ends = self._ends(batch.created_at)
        mark = serialized(PartItem(expires_at=ends), pk=PARTS + batch.batch_id, sk=PART + part)
        numbers = counted(counts)
        expression = "ADD " + ", ".join(f"{name} :{name}" for name in numbers)
        values: dict[str, Any] = {f":{name}": {"N": str(number)} for name, number in numbers.items()}
        if counts.usage.estimated:
            expression += " SET estimated = :yes"
            values[":yes"] = {"BOOL": True}
        update = {
            "TableName": self._table,
            "Key": _key(BATCHES + batch.tenant, batch.batch_id),
            "UpdateExpression": expression,
            "ConditionExpression": "attribute_exists(pk)",
            "ExpressionAttributeValues": values,
        }
        put = {"TableName": self._table, "Item": mark, "ConditionExpression": _NEW}
        self._transact([{"Put": put}, {"Update": update}], batch)

    def claim(self, key_id: str, name: str, fingerprint: str, proposal: str) -> str:
        digest = hashlib.sha256(name.encode()).hexdigest()
        item = NameItem(stands_for=proposal, fingerprint=fingerprint, expires_at=self._ends(self._clock.now()))
        # the table keeps what has expired for some days more; what the name stood for may be gone by then
        condition, now = f"{_NEW} OR expires_at < :now", str(int(self._clock.now().timestamp()))
        if self._put(serialized(item, pk=NAMES + key_id, sk=digest), condition, {":now": {"N": now}}):
            return proposal
        known = _parsed(self._get(NAMES + key_id, digest), NameItem.model_validate)
        if known is None:  # its time was up in between
            raise BackendUnavailableError("The name has just become free; try again.", retry_after=1)
        if known.fingerprint != fingerprint:
            raise BatchConflictError("This idempotency key was used for another request.", param="Idempotency-Key")
        return known.stands_for

    def _transact(self, actions: list[Any], batch: Batch) -> None:
        """A batch's workers count at the same time, on one item: what is held up waits for its turn."""
        for attempt in range(1, _TRIES + 1):
            try:
                with _reached():
                    self._client.transact_write_items(TransactItems=actions)
            except self._client.exceptions.TransactionCanceledException as error:
                reasons: Any = error.response.get("CancellationReasons", ())
                codes = [reason.get("Code") for reason in reasons]
                if codes[:1] == ["ConditionalCheckFailed"]:
                    return  # it was counted before
                if "ConditionalCheckFailed" in codes:
                    detail = f"no batch {batch.batch_id}"
                    raise BackendUnavailableError("The batch is not there any more.", detail=detail) from None
                if attempt == _TRIES:
                    raise unreachable(error) from error
                time.sleep(random.uniform(0.5, 1) * _PAUSE_SECONDS * attempt)  # noqa: S311 - jitter
            else:
                return

    def _put_new(self, item: dict[str, Any]) -> bool:
        """Whether there was none of this key."""
        return self._put(item, _NEW, {})

    def _put(self, item: dict[str, Any], condition: str, values: dict[str, Any]) -> bool:
        """Whether the condition held."""
        more: Any = {"ExpressionAttributeValues": values} if values else {}
        try:
            with _reached():
                self._client.put_item(TableName=self._table, Item=item, ConditionExpression=condition, **more)
        except self._client.exceptions.ConditionalCheckFailedException:
            return False
        return True

    def _get(self, pk: str, sk: str) -> dict[str, Any] | None:
        with _reached():
            found = self._client.get_item(TableName=self._table, Key=_key(pk, sk), ConsistentRead=True).get("Item")
        return None if found is None else deserialized(found)

    def _listed(self, pk: str, after: str | None, limit: int, newest_first: bool) -> list[dict[str, Any]]:
        condition, values = "pk = :pk", {":pk": {"S": pk}}
        if after is not None:
            condition += f" AND sk {'<' if newest_first else '>'} :after"
            values[":after"] = {"S": after}
        found: list[dict[str, Any]] = []
        with _reached():
            pages = self._client.get_paginator("query").paginate(
                TableName=self._table,
                KeyConditionExpression=condition,
                ExpressionAttributeValues=values,
                ScanIndexForward=not newest_first,
                ConsistentRead=True,
                PaginationConfig={"MaxItems": limit, "PageSize": limit},
            )
            for page in pages:
                found += map(deserialized, page["Items"])
        return found

    def _ends(self, created_at: datetime) -> int:
        return int((created_at + self._retention).timestamp())


def _key(pk: str, sk: str) -> Any:
    return {"pk": {"S": pk}, "sk": {"S": sk}}


def _to_batch(item: Mapping[str, Any]) -> Batch:
    return BatchItem.model_validate(item).to_batch()


def _own(error: ClientError, to: BatchStatus, at: datetime) -> Batch | None:
    """Where the SDK repeated a call whose reply was lost, it finds its own change, to the microsecond."""
    item: Any = error.response.get("Item")
    found = None if item is None else _read(deserialized(item), _to_batch)
    return found if found is not None and found.status is to and found.moments.get(to) == at else None


def _parsed(item: Mapping[str, Any] | None, parse: Callable[[Mapping[str, Any]], _Read]) -> _Read | None:
    return None if item is None else _read(item, parse)


def _read(item: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], _Read]) -> _Read:
    try:
        return parse(item)
    except ValidationError as error:
        fields = sorted({str(fault["loc"][0]) for fault in error.errors(include_input=False) if fault["loc"]})
        raise BackendUnavailableError(
            "The pipeline's table holds an entry that cannot be read.",
            detail=f"pipeline item {item.get('sk')!r}: wrong {', '.join(fields)}",
        ) from None


@contextmanager
def _reached() -> Iterator[None]:
    """Refusals that say something about an item pass; the others mean that the table cannot be reached."""
    try:
        yield
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in _TOLD:
            raise
        raise unreachable(error) from error
    except BotoCoreError as error:
        raise unreachable(error) from error


_TOLD: Final = frozenset({"ConditionalCheckFailedException", "TransactionCanceledException"})
