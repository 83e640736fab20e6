"""The pipeline's bucket: objects of any size, in the memory of some megabytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.batches import ObjectStore
from completions.domain.errors import BackendUnavailableError
from completions.observability import logger
from completions.stores.replies import unreachable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PIECE_BYTES: Final = 1 << 20
PART_BYTES: Final = 8 << 20
"""Of a multipart upload, which has up to 10,000 of them: an object may have 80 GiB."""
_MOST_BREAKS: Final = 5
"""With less than a piece between them."""
_ABSENT: Final = frozenset({"NoSuchKey", "404", "NotFound"})
_CONDITION: Final = "PreconditionFailed"


class S3ObjectStore(ObjectStore):
    """Needs ``s3:GetObject``, ``s3:PutObject`` and ``s3:AbortMultipartUpload`` on the objects, ``s3:DeleteObject`` for
    ``delete``, and ``s3:ListBucket``: without it, S3 does not say that an object is not there."""

    def __init__(self, s3: S3Client, bucket: str) -> None:
        self._s3 = s3
        self._bucket = bucket

    def put(self, key: str, content: bytes, content_type: str = "application/json") -> None:
        with _reached(key):
            self._s3.put_object(Bucket=self._bucket, Key=key, Body=content, ContentType=content_type)

    def put_new(self, key: str, content: bytes, content_type: str = "application/json") -> bool:
        """``False`` where there is an object of this key, which stays as it is."""
        try:
            with _reached(key):
                self._s3.put_object(
                    Bucket=self._bucket, Key=key, Body=content, ContentType=content_type, IfNoneMatch="*"
                )
        except _ConditionError:
            return False
        return True

    def get(self, key: str) -> bytes:
        with _reached(key), closing(self._s3.get_object(Bucket=self._bucket, Key=key)["Body"]) as body:
            return body.read()

    def size(self, key: str) -> int:
        with _reached(key):
            return self._s3.head_object(Bucket=self._bucket, Key=key)["ContentLength"]

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Fewer bytes where the object ends before."""
        if end <= start:
            return b""
        try:
            with _reached(key):
                reply = self._s3.get_object(Bucket=self._bucket, Key=key, Range=f"bytes={start}-{end - 1}")
                with closing(reply["Body"]) as body:
                    return body.read()
        except _ConditionError:
            return b""

    def pieces(self, key: str) -> Iterator[bytes]:
        """A connection that breaks is taken up again where it broke, unless the object has changed meanwhile."""
        position, broken_at, breaks = 0, 0, 0
        same: dict[str, str] = {}
        while True:
            try:
                with _reached(key):
                    asked: Any = {**same, "Range": f"bytes={position}-"} if position else same
                    reply = self._s3.get_object(Bucket=self._bucket, Key=key, **asked)
                same = {"IfMatch": reply["ETag"]}
                with closing(reply["Body"]) as body:
                    for piece in body.iter_chunks(PIECE_BYTES):
                        position += len(piece)
                        yield piece
                return
            except BotoCoreError as error:
                breaks = breaks + 1 if position - broken_at < PIECE_BYTES else 1
                broken_at = position
                if breaks > _MOST_BREAKS:
                    raise unreachable(error) from error
                logger.info("object_resumed", position=position, error=type(error).__name__)
            except _ConditionError as error:
                raise BackendUnavailableError("The file was replaced while it was read.", detail=str(error)) from None

    def keys(self, prefix: str) -> Iterator[str]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
        with _reached(prefix):
            for page in pages:
                yield from (entry["Key"] for entry in page.get("Contents", ()))

    def write_stream(self, key: str, pieces: Iterator[bytes], content_type: str = "application/json") -> int:
        parts = _parts(pieces)
        first = next(parts, b"")
        second = next(parts, None)
        if second is None:
            self.put(key, first, content_type)
            return len(first)
        with _reached(key):
            upload = self._s3.create_multipart_upload(Bucket=self._bucket, Key=key, ContentType=content_type)
        place: Any = {"Bucket": self._bucket, "Key": key, "UploadId": upload["UploadId"]}
        try:
            return self._upload(place, _with(first, second, parts))
        except BaseException:
            self._abort(place)
            raise

    def _upload(self, place: Any, parts: Iterator[bytes]) -> int:
        done: list[Any] = []
        size = 0
        for number, part in enumerate(parts, 1):
            with _reached(place["Key"]):
                reply = self._s3.upload_part(**place, PartNumber=number, Body=part)
            done.append({"PartNumber": number, "ETag": reply["ETag"]})
            size += len(part)
        with _reached(place["Key"]):
            self._s3.complete_multipart_upload(**place, MultipartUpload={"Parts": done})
        return size

    def _abort(self, place: Any) -> None:
        """What is left of one that cannot be aborted, the bucket's lifecycle rule removes."""
        try:
            self._s3.abort_multipart_upload(**place)
        except (ClientError, BotoCoreError) as error:
            logger.warning("upload_not_aborted", detail=unreachable(error).detail)

    def delete(self, key: str) -> None:
        with _reached(key):
            self._s3.delete_object(Bucket=self._bucket, Key=key)

    def download_url(self, key: str, seconds: int) -> str:
        with _reached(key):
            return self._s3.generate_presigned_url(
                "get_object", Params={"Bucket": self._bucket, "Key": key}, ExpiresIn=seconds
            )


class _ConditionError(Exception):
    """S3's own word for it."""


def _parts(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in parts as an upload wants them; the last may be smaller."""
    held = bytearray()
    for piece in pieces:
        held += piece
        while len(held) >= PART_BYTES:
            yield bytes(memoryview(held)[:PART_BYTES])
            del held[:PART_BYTES]
    if held:
        yield bytes(held)


def _with(first: bytes, second: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield second
    yield from rest


@contextmanager
def _reached(key: str) -> Iterator[None]:
    """S3's refusals in the domain's words. Raises ``LookupError``, ``ServiceError`` and ``_ConditionError``."""
    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code"))
        if code in _ABSENT:
            raise LookupError(f"There is no object '{key}'.") from None
        if code in {_CONDITION, "412", "InvalidRange", "416"}:
            raise _ConditionError(code) from None
        raise unreachable(error) from error
    except BotoCoreError as error:
        raise unreachable(error) from error
