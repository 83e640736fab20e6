"""A file on its way to a batch: what it is called, and the way through the bucket for what HTTP does not carry."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from completions_cli.batch_api import BatchApi

MOST_HTTP_BYTES: Final = 4 * 1024 * 1024
"""What certainly fits into a call of a Lambda function, in base64 and with all that is around it."""
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]+")
_LOOKS: Final = 30
_LOOK_SECONDS: Final = 2.0


class InputError(Exception):
    """The file is none that can be submitted."""


@dataclass(frozen=True, slots=True)
class BatchInput:
    """``name`` is the caller's or the file's; ``digest`` the content's SHA-256, in hexadecimal."""

    path: Path
    name: str
    size: int
    digest: str

    @property
    def request_name(self) -> str:
        """Under which it is submitted once, however often: the same content under the same name."""
        return f"{self.name}-{self.digest[:32]}"

    def object_key(self, key_id: str) -> str:
        """Its place in the bucket."""
        return f"input/{key_id}/{self.request_name}.jsonl"


@contextmanager
def opened_input(file: str, name: str | None) -> Iterator[BatchInput]:
    """``-`` is the standard input. Raises ``InputError``."""
    with tempfile.TemporaryDirectory(prefix="completions-batch-") as folder:
        path = Path(file)
        if file == "-":
            path = Path(folder) / "stdin.jsonl"
            with path.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
        try:
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            size = path.stat().st_size
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from None
        if size == 0:
            raise InputError(f"{file}: is empty; a batch has a line for each request")
        called = _UNFIT.sub("-", path.stem if name is None else name).strip("-")[:100]
        if not called:
            raise InputError(f"--name {name}: has no letter or digit")
        yield BatchInput(path, called, size, digest)


def put_into_bucket(given: BatchInput, bucket: str, key: str, progress: Callable[[int], Any]) -> bool:
    """Whether it was put there now; ``False`` where it was before. Raises botocore's and boto3's errors."""
    import boto3  # noqa: PLC0415 - --help should not pay for boto3
    from boto3.exceptions import Boto3Error  # noqa: PLC0415
    from botocore.exceptions import ClientError  # noqa: PLC0415

    s3 = boto3.client("s3")
    try:
        try:
            s3.head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in ("404", "NoSuchKey", "NotFound"):
                raise
        else:
            return False
        try:
            s3.upload_file(
                str(given.path), bucket, key, Callback=progress, ExtraArgs={"ContentType": "application/jsonl"}
            )
        except Boto3Error as error:
            raise InputError(f"s3://{bucket}/{key}: {error}") from None
    finally:
        s3.close()
    return True


def batch_of_object(
    api: BatchApi, key: str, looks: int = _LOOKS, sleep: Callable[[float], None] = time.sleep
) -> Mapping[str, Any] | None:
    """The batch that began with an object; ``None`` where there is none after a minute."""
    for look in range(looks):
        if look:
            sleep(_LOOK_SECONDS)
        for batch in api.batches(100):
            if (batch.get("metadata") or {}).get("input_object") == key:
                return batch
    return None
