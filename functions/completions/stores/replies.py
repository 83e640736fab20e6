"""Kept replies as objects in S3, by the name of their request. The bucket's lifecycle rule ends them."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.completion import Usage
from completions.domain.errors import BackendUnavailableError
from completions.domain.events import EventReply, KeptReply, ReplyStore

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PREFIX: Final = "replies/"


class S3ReplyStore(ReplyStore):
    """Needs ``s3:GetObject`` and ``s3:PutObject`` below the prefix, and ``s3:ListBucket``: without it, S3 does not say
    that an object is not there."""

    def __init__(self, s3: S3Client, bucket: str) -> None:
        self._s3 = s3
        self._bucket = bucket

    def get(self, name: str) -> KeptReply | None:
        try:
            content = self._s3.get_object(Bucket=self._bucket, Key=_key(name))["Body"].read()
        except self._s3.exceptions.NoSuchKey:
            return None
        except (ClientError, BotoCoreError) as error:
            raise unreachable(error) from error
        return _read(content)

    def put(self, name: str, kept: KeptReply) -> None:
        try:
            self._s3.put_object(
                Bucket=self._bucket, Key=_key(name), Body=_written(kept), ContentType="application/json"
            )
        except (ClientError, BotoCoreError) as error:
            raise unreachable(error) from error


def unreachable(error: ClientError | BotoCoreError) -> BackendUnavailableError:
    """S3's refusal or silence in the domain's words."""
    code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
    return BackendUnavailableError(
        "The pipeline's storage cannot be reached right now.", retry_after=1, detail=code or type(error).__name__
    )


def _key(name: str) -> str:
    return f"{PREFIX}{name}.json"


def _written(kept: KeptReply) -> bytes:
    reply, usage = kept.reply, kept.reply.usage
    plain = {
        "request_id": reply.request_id,
        "status": reply.status,
        "body": base64.b64encode(reply.body).decode(),
        "model": reply.model,
        "usage": None
        if usage is None
        else [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.estimated],
        "nanos": reply.nanos,
        "error": reply.error,
        "message": reply.message,
        "record": kept.record,
    }
    return json.dumps(plain).encode()


def _read(content: bytes) -> KeptReply:
    plain: dict[str, Any] = json.loads(content)
    usage = plain["usage"]
    reply = EventReply(
        plain["request_id"],
        plain["status"],
        base64.b64decode(plain["body"]),
        plain["model"],
        None if usage is None else Usage(*usage),
        plain["nanos"],
        plain["error"],
        plain["message"],
    )
    return KeptReply(reply, plain["record"])
