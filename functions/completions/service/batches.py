"""The use cases of files and batches: what their owners may do over HTTP. Running a batch is the engine's business."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from completions.domain.batch_places import file_key
from completions.domain.batches import (
    BATCH_ID,
    FILE_ID,
    Batch,
    BatchConflictError,
    Batches,
    BatchNames,
    BatchOrder,
    BatchStarter,
    BatchStatus,
    BatchStore,
    FileContent,
    LineError,
    Made,
    ObjectStore,
    Page,
    StoredFile,
    Upload,
    timed_id,
)
from completions.domain.errors import InvalidRequestError, ServiceError, UnknownPathError
from completions.domain.metering import Principal
from completions.domain.ports import Clock
from completions.observability import logger

INPUT_PURPOSE: Final = "batch"
WINDOW: Final = timedelta(hours=24)
MOST_INLINE_BYTES: Final = 4 * 1024 * 1024
"""What is larger is fetched from where it lies: a Lambda function answers with 6 MB at most."""
_MOST_ANSWER_BYTES: Final = 6_000_000
URL_SECONDS: Final = 300
_PAGE: Final = 100
_MOST_ID: Final = 100
_CANCELLABLE: Final = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


class BatchService(Batches):
    """``objects`` and ``starter`` make what they stand for when it is first needed: most calls ask for a status."""

    def __init__(
        self,
        store: BatchStore,
        names: BatchNames,
        objects: Callable[[], ObjectStore],
        starter: Callable[[], BatchStarter],
        clock: Clock,
    ) -> None:
        self._store = store
        self._names = names
        self._objects = objects
        self._starter = starter
        self._clock = clock

    def add_file(self, owner: Principal, upload: Upload, name: str | None = None) -> Made[StoredFile]:
        now = self._clock.now()
        file_id = timed_id(FILE_ID, now)
        if name is not None:
            content = hashlib.sha256(upload.content).hexdigest()
            file_id = self._claimed(owner, "file", name, [upload.filename, upload.purpose, content], file_id)
            known = self._store.file(owner.tenant, file_id)
            if known is not None:
                return Made(known, known=True)
        key = file_key(file_id)
        # the object first: a row without one would be a file that cannot be read
        self._objects().put(key, upload.content, "application/jsonl")
        file = StoredFile(file_id, owner.tenant, upload.filename, upload.purpose, key, len(upload.content), now)
        self._store.add_file(file)
        return Made(file)

    def file(self, owner: Principal, file_id: str) -> StoredFile:
        found = self._store.file(owner.tenant, file_id) if _is_id(file_id, FILE_ID) else None
        if found is None:
            raise _no_file(file_id)
        return found

    def files(
        self, owner: Principal, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> Page[StoredFile]:
        found: list[StoredFile] = []
        while len(found) <= limit:
            step = max(limit + 1 - len(found), _PAGE)
            files = self._store.files(owner.tenant, after=after, limit=step, newest_first=newest_first)
            found += [file for file in files if purpose in (None, file.purpose)]
            if len(files) < step:
                break
            after = files[-1].file_id
        return Page(found[:limit], len(found) > limit)

    def content(self, owner: Principal, file_id: str) -> FileContent:
        file = self.file(owner, file_id)
        objects = self._objects()
        if file.size <= MOST_INLINE_BYTES:
            try:  # what is below input/ may have been replaced since, by something of any size
                content = objects.read_range(file.key, 0, MOST_INLINE_BYTES + 1)
            except LookupError:
                raise _no_file(file_id) from None
            if len(content) <= MOST_INLINE_BYTES and _passes(content):
                return FileContent(content=content)
        return FileContent(url=objects.download_url(file.key, URL_SECONDS))

    def remove_file(self, owner: Principal, file_id: str) -> None:
        file = self.file(owner, file_id)
        reader = self._reader(owner, file)
        if reader is not None:
            raise BatchConflictError(
                f"The file '{file_id}' is being read by the batch '{reader.batch_id}'; cancel that first.",
                param="file_id",
                code="file_in_use",
            )
        self._objects().delete(file.key)
        self._store.remove_file(owner.tenant, file_id)

    def create(self, owner: Principal, order: BatchOrder, name: str | None = None) -> Made[Batch]:
        file = self._input(owner, order.input_file_id)
        now = self._clock.now()
        batch_id = timed_id(BATCH_ID, now)
        if name is not None:
            batch_id = self._claimed(owner, "batch", name, _asked(order), batch_id)
        batch = Batch(
            batch_id=batch_id,
            tenant=owner.tenant,
            key_id=owner.key_id,
            input_file_id=file.file_id,
            input_key=file.key,
            created_at=now,
            expires_at=now + WINDOW,
            endpoint=order.endpoint,
            completion_window=order.completion_window,
            metadata=order.metadata,
        )
        try:
            return begin(batch, self._store, self._starter())
        except ServiceError:
            if name is None:  # nobody could ask for this one again
                self._give_up(batch)
            raise

    def batch(self, owner: Principal, batch_id: str) -> Batch:
        found = self._store.batch(owner.tenant, batch_id) if _is_id(batch_id, BATCH_ID) else None
        if found is None:
            raise UnknownPathError(f"No batch found with id '{batch_id[:100]}'.", param="batch_id", code="not_found")
        return found

    def batches(self, owner: Principal, *, after: str | None, limit: int) -> Page[Batch]:
        found = self._store.batches(owner.tenant, after=after, limit=limit + 1)
        return Page(found[:limit], len(found) > limit)

    def cancel(self, owner: Principal, batch_id: str) -> Batch:
        batch = self.batch(owner, batch_id)
        if batch.status is not BatchStatus.CANCELLING:
            moved = self._store.move(batch, BatchStatus.CANCELLING, self._clock.now(), only_from=_CANCELLABLE)
            batch = moved or self.batch(owner, batch_id)
        if batch.status is not BatchStatus.CANCELLING:  # it has ended meanwhile, or before
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise BatchConflictError(message, code="batch_not_cancellable")
        if BatchStatus.IN_PROGRESS not in batch.moments:  # it was perhaps never started, and nobody else would end it
            self._starter().start(batch)
        return batch

    def _claimed(self, owner: Principal, kind: str, name: str, asked: object, proposal: str) -> str:
        fingerprint = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return self._names.claim(owner.key_id, f"{kind}\n{name}", fingerprint, proposal)

    def _input(self, owner: Principal, file_id: str) -> StoredFile:
        found = self._store.file(owner.tenant, file_id) if _is_id(file_id, FILE_ID) else None
        if found is None:
            raise InvalidRequestError(
                f"'input_file_id': there is no file '{file_id[:100]}'; upload it with purpose 'batch' first.",
                param="input_file_id",
                code="invalid_value",
            )
        if found.purpose != INPUT_PURPOSE:
            raise InvalidRequestError(
                f"'input_file_id': '{file_id}' has purpose '{found.purpose}'; a batch reads a file of purpose 'batch'.",
                param="input_file_id",
                code="invalid_purpose",
            )
        return found

    def _reader(self, owner: Principal, file: StoredFile) -> Batch | None:
        """A batch that has not ended and reads this file. Those that began two windows ago are not looked at."""
        earliest, after = self._clock.now() - 2 * WINDOW, None
        while True:
            batches = self._store.batches(owner.tenant, after=after, limit=_PAGE)
            for batch in batches:
                if batch.created_at < earliest:
                    return None
                if batch.input_file_id == file.file_id and not batch.status.ended:
                    return batch
            if len(batches) < _PAGE:
                return None
            after = batches[-1].batch_id

    def _give_up(self, batch: Batch) -> None:
        fault = LineError("not_started", "The batch could not be started; create it again.")
        changes = {"errors": (fault,)}
        try:
            self._store.move(
                batch, BatchStatus.FAILED, self._clock.now(), only_from=[BatchStatus.VALIDATING], changes=changes
            )
        except ServiceError as error:
            logger.warning("batch_not_started", batch_id=batch.batch_id, detail=error.detail)


def begin(batch: Batch, store: BatchStore, starter: BatchStarter) -> Made[Batch]:
    """Write it and start it. One that is known and was perhaps never started is started now."""
    known = None if store.add(batch) else store.batch(batch.tenant, batch.batch_id)
    if known is None or known.status is BatchStatus.VALIDATING:
        starter.start(known or batch)
    return Made(known or batch, known=known is not None)


def _is_id(text: str, kind: str) -> bool:
    """What cannot be one is not looked for: DynamoDB takes no key of any length."""
    return text.startswith(kind) and len(text) <= _MOST_ID and text.isascii()


def _asked(order: BatchOrder) -> object:
    return [order.input_file_id, order.endpoint, order.completion_window, dict(order.metadata)]


def _no_file(file_id: str) -> UnknownPathError:
    return UnknownPathError(f"No such File object: {file_id[:100]}", param="id", code="not_found")


def _passes(content: bytes) -> bool:
    """Whether a function can answer with it: text, for nothing else passes API Gateway as it is, and not too large as
    a string of JSON, which may be twice as long."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return False
    return len(json.dumps(text, ensure_ascii=False).encode()) <= _MOST_ANSWER_BYTES
