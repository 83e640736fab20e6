"""Usage records as a later delivery of the same request finds them."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.errors import BackendUnavailableError, MeteringError
from completions.domain.events import RecordBook
from completions.domain.metering import Outcome
from completions.domain.ports import Clock
from completions.metering.recovery_table import RecoveryTable
from completions.metering.replay import UsageReplayer, read_logged

_COUNTS: Final = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "nanos",
    "queue_ms",
    "total_ms",
    "attempts",
)
_UNKNOWN: Final = ("team", "fingerprint", "price_version", "first_token_ms", "variant")

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


class DynamoRecordBook(RecordBook):
    """Over the usage table; reads are consistent."""

    def __init__(self, client: DynamoDBClient, table: str, retention_days: int, clock: Clock) -> None:
        self._table = RecoveryTable(client, table, retention_days)
        self._replayer = UsageReplayer(client, table, retention_days, clock)

    def ended(self, record_id: str) -> Outcome | None:
        item = self._record(record_id)
        if item is None or item["state"] != "SETTLED":
            return None
        unread = item.get("error") == BackendUnavailableError.__name__ and item["completion_tokens"] == 0
        return Outcome.REFUSED if unread else Outcome(item["outcome"])

    def known(self, record_id: str) -> bool:
        return self._record(record_id) is not None

    def _record(self, record_id: str) -> Mapping[str, Any] | None:
        try:
            return self._table.record(record_id)
        except (ClientError, BotoCoreError) as error:
            raise _unreachable(error) from error

    def settle(self, record: Mapping[str, object]) -> None:
        try:
            self._replayer.replay(read_logged(record))
        except (ClientError, BotoCoreError) as error:
            raise _unreachable(error) from error

    def give_up(self, record_id: str, error: str | None = None) -> None:
        try:
            item = self._table.record(record_id)
            if item is None or item["state"] != "RESERVED":
                return
            plain = {name: int(value) if isinstance(value, Decimal) else value for name, value in item.items()}
            nothing = dict.fromkeys(_COUNTS, 0)
            unknown = dict.fromkeys(_UNKNOWN)
            failed = {"record_id": record_id, "outcome": Outcome.FAILED.value, "estimated": False, "error": error}
            self._replayer.replay(read_logged({**unknown, **plain, **nothing, **failed}))
        except (ClientError, BotoCoreError) as fault:
            raise _unreachable(fault) from fault


def _unreachable(error: Exception) -> MeteringError:
    code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
    return MeteringError("The usage table cannot be reached.", retry_after=1, detail=code or type(error).__name__)
