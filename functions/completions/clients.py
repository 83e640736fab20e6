"""The clock, and boto3's clients as this service wants them. Endpoints and credentials are the environment's."""

from __future__ import annotations

import os
import random
import time
from datetime import UTC, datetime
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal

import boto3.session
from botocore.config import Config

from completions import __version__
from completions.domain.ports import Clock
from completions.settings import Settings

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sagemaker_runtime import SageMakerRuntimeClient
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_stepfunctions import SFNClient

_ATTEMPTS = 3
_MAKING = Lock()
_USER_AGENT: Final = f"completions-gateway/{__version__} Boto3/{boto3.__version__}"
"""A fixed one: botocore's own is put together anew, from twenty parts, for each request."""


@cache
def session() -> boto3.session.Session:
    """One for all clients: they share the credentials, and what was read of the descriptions of services."""
    return boto3.session.Session()


class SystemClock(Clock):
    """The machine's own time."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def build_dynamodb_client() -> DynamoDBClient:
    """Its calls are conditional writes and reads, so the SDK may repeat them."""
    client: DynamoDBClient = _client("dynamodb", _config(attempts=_ATTEMPTS, connect=1, read=3, validated=False))
    again: Any = _again_after_a_conflict  # an event's handler may answer, whatever its type says
    client.meta.events.register("needs-retry.dynamodb", again)
    return client


def _again_after_a_conflict(attempts: int, response: tuple[Any, Any] | None, **_: Any) -> float | None:
    """Seconds to wait where a transaction held the item: nothing was written, and the SDK itself does not try again."""
    code = "" if response is None else response[1].get("Error", {}).get("Code")
    if code != "TransactionConflictException" or attempts >= _ATTEMPTS:
        return None
    return random.uniform(0.005, 0.05) * attempts  # noqa: S311 - jitter


def build_sagemaker_client(settings: Settings) -> SageMakerRuntimeClient:
    """One attempt a call: the SDK would repeat a read timeout, and the GPU would be paid twice."""
    connect, read = settings.upstream_connect_timeout, settings.upstream_read_timeout
    config = _config(attempts=1, connect=connect, read=read, validated=False)
    client: SageMakerRuntimeClient = _client("sagemaker-runtime", config)
    return client


def build_s3_client() -> S3Client:
    """For the inputs and answers of asynchronous endpoints: reading again, and putting the same again, is safe."""
    client: S3Client = _client("s3", _config(attempts=_ATTEMPTS, connect=1, read=5))
    return client


def build_signing_s3_client() -> S3Client:
    """For URLs that others open. boto3 would sign them as of old, which opens nothing that KMS has encrypted, and for
    an address that sends the readers of a new bucket elsewhere."""
    elsewhere = any(name in os.environ for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    style: Literal["auto", "virtual"] = "auto" if elsewhere else "virtual"
    signing = Config(signature_version="s3v4", s3={"addressing_style": style})
    client: S3Client = _client("s3", _config(attempts=_ATTEMPTS, connect=1, read=5).merge(signing))
    return client


def build_sqs_client() -> SQSClient:
    """For replies, and for how long messages stay a worker's own. What is sent again may be there twice, which is
    better than never."""
    client: SQSClient = _client("sqs", _config(attempts=_ATTEMPTS, connect=1, read=5))
    return client


def build_events_client() -> Any:
    """EventBridge, for replies, sent as by SQS."""
    return _client("events", _config(attempts=_ATTEMPTS, connect=1, read=5))


def build_state_machine_client() -> SFNClient:
    """For starting executions, each under a name of its own: to start one again is safe."""
    client: SFNClient = _client("stepfunctions", _config(attempts=_ATTEMPTS, connect=1, read=5))
    return client


def _client(service: Any, config: Config) -> Any:
    with _MAKING:  # to use a client is for many threads, to make one is not
        return session().client(service, config=config)


def _config(*, attempts: int, connect: float, read: float, validated: bool = True) -> Config:
    """What is not ``validated`` the service checks alone: for calls of every request, whose form is this code's own."""
    return Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=connect,
        read_timeout=read,
        max_pool_connections=64,
        tcp_keepalive=True,
        parameter_validation=validated,
        user_agent=_USER_AGENT,
    )
