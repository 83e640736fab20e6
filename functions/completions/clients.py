"""The clock, and boto3's clients as this service wants them. Endpoints and credentials are the environment's."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from completions.domain.ports import Clock
from completions.settings import Settings

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sagemaker_runtime import SageMakerRuntimeClient

_ATTEMPTS = 3


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
    client = boto3.client(
        "dynamodb",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            connect_timeout=1,
            read_timeout=3,
            max_pool_connections=64,
            tcp_keepalive=True,
        ),
    )
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
    return boto3.client(
        "sagemaker-runtime",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=settings.upstream_connect_timeout,
            read_timeout=settings.upstream_read_timeout,
            max_pool_connections=64,
            tcp_keepalive=True,
        ),
    )


def build_s3_client() -> S3Client:
    """For the inputs and answers of asynchronous endpoints: reading again, and putting the same again, is safe."""
    return boto3.client(
        "s3",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 3},
            connect_timeout=1,
            read_timeout=5,
            max_pool_connections=64,
            tcp_keepalive=True,
        ),
    )
