"""S3's "Object Created" events, as EventBridge delivers them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from completions.domain.errors import CompletionError
from completions.observability import logger
from completions.service.batch_inputs import BatchInputs


class ObjectEventError(Exception):
    """The event is none of these, or starts nothing; the message says why."""


class _Bucket(BaseModel):
    name: str


class _Object(BaseModel):
    """``key`` is as it is, not encoded as in S3's own notifications. A bucket with versions has their ids besides."""

    key: str = Field(min_length=1)
    size: int = Field(ge=0)
    etag: str = Field(min_length=1)


class _Detail(BaseModel):
    bucket: _Bucket
    object: _Object


class ObjectCreated(BaseModel):
    """What is read of the event."""

    model_config = ConfigDict(extra="ignore")

    kind: str = Field(alias="detail-type", pattern="^Object Created$")
    detail: _Detail


class ObjectStarter:
    """``bucket`` is the pipeline's: of another one nothing is started."""

    def __init__(self, inputs: BatchInputs, bucket: str) -> None:
        self._inputs = inputs
        self._bucket = bucket

    def start(self, event: object) -> str | None:
        """The batch's id, ``None`` for what is no file. Raises ``ObjectEventError`` and ``ServiceError``."""
        try:
            created = ObjectCreated.model_validate(event).detail
        except ValidationError as error:
            faults = [".".join(map(str, fault["loc"])) or "event" for fault in error.errors(include_input=False)]
            raise _refused(f"no event of an object that was created: wrong {', '.join(faults)}") from None
        if created.bucket.name != self._bucket:
            raise _refused(f"the bucket '{created.bucket.name}' is not the pipeline's")
        try:
            batch = self._inputs.start(created.object.key, created.object.etag, created.object.size)
        except CompletionError as error:
            logger.error(
                "batch_not_started",
                key=created.object.key,
                error=type(error).__name__,
                reason=error.message,
                detail=error.detail,
            )
            raise
        return None if batch is None else batch.batch_id


def _refused(message: str) -> ObjectEventError:
    logger.error("batch_not_started", reason=message)
    return ObjectEventError(message)
