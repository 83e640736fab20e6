"""Objects in S3 as an asynchronous endpoint uses them: an input put there, an answer that appears some time later.

An answer that is not there yet has two faces. With ``s3:ListBucket`` S3 says ``NoSuchKey``; without it, it says
``AccessDenied``, the same word as for an object that may never be read. Both are taken for "not yet", because least
privilege is ``s3:GetObject`` alone; what S3 said last goes into the detail of the timeout, so that a missing permission
can be told from a slow model. S3's own hiccups are "not yet" as well, for reading again costs no GPU. Every other
refusal (no such bucket, expired credentials) will not pass, and is raised at once.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError, IncompleteReadError

from completions.backends.payload_stream import document
from completions.domain.errors import BackendError, BackendUnavailableError, CompletionError, Recourse

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_SCHEME: Final = "s3://"
_PIECE_BYTES: Final = 65_536
_NOT_YET: Final = frozenset({"NoSuchKey", "AccessDenied"})
_NETWORK: Final = (HTTPClientError, ConnectionError, IncompleteReadError)


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket, and a key or the beginning of one."""

    bucket: str
    key: str

    @classmethod
    def parse(cls, uri: str) -> Self:
        """``s3://bucket/key``; a key may hold any character. Raises ``ValueError`` for anything else."""
        bucket, _, key = uri.removeprefix(_SCHEME).partition("/")
        if not uri.startswith(_SCHEME) or not bucket:
            raise ValueError("not an S3 address: s3://bucket/key is expected")
        return cls(bucket, key)

    @property
    def uri(self) -> str:
        """As SageMaker writes it."""
        return f"{_SCHEME}{self.bucket}/{self.key}"

    def below(self, name: str) -> S3Location:
        """``name`` under this prefix."""
        prefix = self.key if not self.key or self.key.endswith("/") else f"{self.key}/"
        return S3Location(self.bucket, prefix + name)


@dataclass(frozen=True, slots=True)
class Found:
    """What an endpoint left behind: its answer, or the account of its failure."""

    content: bytes
    failed: bool


class AnswerBox:
    """The two places where the end of one invocation can appear; ``failures`` is ``None`` where the endpoint has no
    failure path."""

    def __init__(self, s3: S3Client, answers: S3Location, failures: S3Location | None) -> None:
        self._s3 = s3
        self._places = {"answer": answers} | ({} if failures is None else {"failure": failures})
        self._last_seen: dict[str, str] = {}

    @property
    def last_seen(self) -> str:
        """What S3 said last of each place, for the log."""
        return ", ".join(f"{kind} {seen}" for kind, seen in self._last_seen.items())

    @property
    def is_sure(self) -> bool:
        """Whether S3 has said of each place that there is nothing yet."""
        return set(self._last_seen.values()) <= _NOT_YET

    def look(self) -> Found | None:
        """What is there now. Raises ``BackendError`` when nothing can ever be read."""
        for kind, place in self._places.items():
            seen = self._read(place)
            if isinstance(seen, bytes):
                return Found(seen, failed=kind == "failure")
            self._last_seen[kind] = seen
        return None

    def _read(self, place: S3Location) -> bytes | str:
        """The object, or why there is none yet."""
        try:
            with closing(self._s3.get_object(Bucket=place.bucket, Key=place.key)["Body"]) as body:
                return b"".join(document(body.iter_chunks(_PIECE_BYTES)))
        except ClientError as error:
            code = _code(error)
            if code not in _NOT_YET and not _passing(error):
                raise BackendError("The model's answer could not be read.", detail=f"S3 answered {code}") from error
            return code
        except _NETWORK as error:
            return type(error).__name__
        except BotoCoreError as error:
            raise BackendError("The model's answer could not be read.", detail=type(error).__name__) from error


def upload(s3: S3Client, place: S3Location, content: bytes, content_type: str) -> None:
    """Put an input where the endpoint will fetch it. Raises ``BackendUnavailableError``: nothing was dispatched."""
    try:
        s3.put_object(Bucket=place.bucket, Key=place.key, Body=content, ContentType=content_type)
    except ClientError as error:
        raise _upload_error(f"S3 answered {_code(error)}", passing=_passing(error)) from error
    except BotoCoreError as error:
        raise _upload_error(type(error).__name__, passing=isinstance(error, _NETWORK)) from error


def _upload_error(detail: str, *, passing: bool) -> CompletionError:
    return BackendUnavailableError(
        "The model is not available right now.",
        retry_after=1 if passing else None,
        recourse=Recourse.AGAIN if passing else Recourse.ELSEWHERE,
        detail=f"the input could not be stored: {detail}",
    )


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code") or "")[:80]


def _passing(error: ClientError) -> bool:
    """Whether S3 itself is at fault, or asks for patience (``SlowDown`` is a 503)."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0) >= 500
