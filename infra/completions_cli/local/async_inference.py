"""Asynchronous inference for the SageMaker stand-in: accepted at once, carried out in a thread, left in S3.

Limits and headers: the service model of ``sagemaker-runtime``. A failure object holds what the container answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import urllib3
from botocore.exceptions import BotoCoreError, ClientError

from completions.backends.s3_answers import S3Location
from completions_cli.local.faults import Fault

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

OPERATION: Final = "async-invocations"
MAX_INLINE_BYTES: Final = 128_000
_PREFIX: Final = "x-amzn-sagemaker-"
_FORWARDED: Final = {  # the media types travel under SageMaker's own names
    f"{_PREFIX}content-type": "Content-Type",
    f"{_PREFIX}accept": "Accept",
    f"{_PREFIX}custom-attributes": "X-Amzn-SageMaker-Custom-Attributes",
    f"{_PREFIX}inference-id": "X-Amzn-SageMaker-Inference-Id",
}
_SECONDS: Final = {
    f"{_PREFIX}requestttlseconds": range(60, 21_601),
    f"{_PREFIX}invocationtimeoutseconds": range(1, 3_601),
}


class InvalidInvocationError(Exception):
    """SageMaker answers ``ValidationError``."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a submission is told: the id in the body, the two places as headers."""

    inference_id: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Invocation:
    url: str
    headers: Mapping[str, str]
    body: bytes
    fault: Fault
    answer: S3Location
    failure: S3Location


class AsyncInference:
    """One endpoint's queue. Answers and failures are written to ``bucket``, which must exist."""

    def __init__(self, s3: S3Client, bucket: str) -> None:
        self._s3 = s3
        self._bucket = bucket
        self._workers = ThreadPoolExecutor(8, thread_name_prefix="async-inference")
        self._pool = urllib3.PoolManager(maxsize=8)
        self._stopping = Event()

    def submit(
        self, url: str, headers: Mapping[str, str], body: bytes, added: Mapping[str, str], fault: Fault
    ) -> Accepted:
        """Queue one invocation of the container at ``url``. ``headers`` are the caller's, their names in lower case;
        those of ``added`` are sent as well. Of the ``fault``, a delay holds the answer back and a model error replaces
        it. Raises ``InvalidInvocationError``.
        """
        _check(headers, body)
        name = uuid4()
        invocation = _Invocation(
            url,
            {theirs: headers[ours] for ours, theirs in _FORWARDED.items() if ours in headers} | dict(added),
            self._input(headers.get(f"{_PREFIX}inputlocation"), body),
            fault,
            S3Location(self._bucket, f"answers/{name}.out"),
            S3Location(self._bucket, f"failures/{name}-error.out"),
        )
        self._workers.submit(self._carry_out, invocation)
        return Accepted(
            headers.get(f"{_PREFIX}inference-id") or str(name),
            {
                "X-Amzn-SageMaker-OutputLocation": invocation.answer.uri,
                "X-Amzn-SageMaker-FailureLocation": invocation.failure.uri,
            },
        )

    def stop(self) -> None:
        """Drop what waits, and let what runs come to its end; a second time does nothing."""
        self._stopping.set()
        self._workers.shutdown(cancel_futures=True)
        self._pool.clear()

    def _input(self, uri: str | None, body: bytes) -> bytes:
        if uri is None:
            return body
        try:
            place = S3Location.parse(uri)
            return self._s3.get_object(Bucket=place.bucket, Key=place.key)["Body"].read()
        except (ValueError, ClientError) as error:
            raise InvalidInvocationError(f"The input cannot be read: {error}") from None

    def _carry_out(self, invocation: _Invocation) -> None:
        if self._stopping.wait(invocation.fault.delay_ms / 1000):
            return
        answered, content = self._answer(invocation)
        place = invocation.answer if answered else invocation.failure
        with suppress(BotoCoreError, ClientError):  # S3 may have been stopped in the meantime
            self._s3.put_object(Bucket=place.bucket, Key=place.key, Body=content)

    def _answer(self, invocation: _Invocation) -> tuple[bool, bytes]:
        refusal = invocation.fault.refusal
        if refusal is not None:
            return False, refusal.message.encode()
        try:
            reply = self._pool.request(
                "POST", invocation.url, body=invocation.body, headers=invocation.headers, retries=False, timeout=600
            )
        except urllib3.exceptions.HTTPError:
            return False, b"no container behind the endpoint"
        return reply.status < 400, reply.data


def _check(headers: Mapping[str, str], body: bytes) -> None:
    if (f"{_PREFIX}inputlocation" in headers) == bool(body):
        raise InvalidInvocationError("Exactly one of Body and InputLocation must be given.")
    if len(body) > MAX_INLINE_BYTES:
        raise InvalidInvocationError(f"Body is longer than {MAX_INLINE_BYTES} bytes.")
    for name, allowed in _SECONDS.items():
        value = headers.get(name)
        if value is not None and not (value.isdecimal() and int(value) in allowed):
            raise InvalidInvocationError(f"{name} is {value}, not between {allowed.start} and {allowed.stop - 1}.")
