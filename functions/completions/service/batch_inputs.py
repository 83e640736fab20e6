"""Files that are put below ``input/<key id>/`` in the pipeline's bucket: each starts a batch, without any HTTP call."""

from __future__ import annotations

from typing import Final

from completions.domain.batch_places import INPUT_PREFIX
from completions.domain.batches import (
    BATCH_ID,
    FILE_ID,
    Batch,
    BatchNames,
    BatchStarter,
    BatchStore,
    StoredFile,
    timed_id,
)
from completions.domain.errors import AuthenticationError, InvalidRequestError
from completions.domain.metering import Principal
from completions.domain.ports import Clock, Registry
from completions.observability import logger
from completions.service.batches import INPUT_PURPOSE, WINDOW, begin

INPUT_OBJECT: Final = "input_object"
"""The metadata's name for where the file was put, by which the one who put it finds the batch."""
_MOST_METADATA: Final = 512


class BatchInputs:
    """Whoever may write into the bucket is trusted to name the key that pays."""

    def __init__(
        self, store: BatchStore, names: BatchNames, starter: BatchStarter, registry: Registry, clock: Clock
    ) -> None:
        self._store = store
        self._names = names
        self._starter = starter
        self._registry = registry
        self._clock = clock

    def start(self, key: str, version: str, size: int) -> Batch | None:
        """The batch of an object; ``None`` for a folder's mark, which holds nothing.

        ``version`` tells contents of one key apart: the same content at the same place is the same batch, however
        often it is put there or told of. Raises ``InvalidRequestError`` and ``AuthenticationError`` for a place or a
        key that is none, and ``ServiceError``.
        """
        if key.endswith("/") and size == 0:
            logger.info("input_folder", key=key)
            return None
        principal = self._owner(key)
        now = self._clock.now()
        batch_id = self._names.claim(principal.key_id, f"object\n{key}\n{version}", str(size), timed_id(BATCH_ID, now))
        file_id = FILE_ID + batch_id.removeprefix(BATCH_ID)
        filename = key.rpartition("/")[2]
        self._store.add_file(StoredFile(file_id, principal.tenant, filename, INPUT_PURPOSE, key, size, now))
        batch = Batch(
            batch_id=batch_id,
            tenant=principal.tenant,
            key_id=principal.key_id,
            input_file_id=file_id,
            input_key=key,
            created_at=now,
            expires_at=now + WINDOW,
            metadata={INPUT_OBJECT: key} if len(key) <= _MOST_METADATA else {},
        )
        made = begin(batch, self._store, self._starter)
        if made.known:
            logger.warning(
                "batch_known",
                batch_id=batch_id,
                key=key,
                status=made.item.status.value,
                detail="this content was put there before; under another name it would run again",
            )
        return made.item

    def _owner(self, key: str) -> Principal:
        key_id, _, name = key.removeprefix(INPUT_PREFIX).partition("/")
        if not key.startswith(INPUT_PREFIX) or not key_id or not name:
            raise InvalidRequestError(f"'{key[:200]}' names no key that pays: put files at input/KEY_ID/NAME.jsonl.")
        principal = self._registry.principal_of(key_id)
        if principal is None:
            raise AuthenticationError(f"'{key[:200]}': there is no key '{key_id[:200]}'.")
        expired = principal.expires_at is not None and principal.expires_at <= self._clock.now()
        if principal.disabled or expired:
            fault = "is disabled" if principal.disabled else "has expired"
            raise AuthenticationError(f"'{key[:200]}': the key '{key_id[:200]}' {fault}.")
        return principal
