"""Usage records as a later delivery of the same request finds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.errors import BackendUnavailableError, MeteringError
from completions.domain.events import RecordBook
from completions.domain.metering import Outcome
from completions.domain.ports import Clock
from completions.metering.recovery_table import RecoveryTable
from completions.metering.replay import UsageReplayer, read_logged

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


class DynamoRecordBook(RecordBook):
    """Over the usage table; reads are consistent."""

    def __init__(self, client: DynamoDBClient, table: str, retention_days: int, clock: Clock) -> None:
        self._table = RecoveryTable(client, table, retention_days)
        self._replayer = UsageReplayer(client, table, retention_days, clock)

    def ended(self, record_id: str) -> Outcome | None:
        try:
            item = self._table.record(record_id)
        except (ClientError, BotoCoreError) as error:
            raise _unreachable(error) from error
        if item is None or item["state"] != "SETTLED":
            return None
        unread = item.get("error") == BackendUnavailableError.__name__ and item["completion_tokens"] == 0
        return Outcome.REFUSED if unread else Outcome(item["outcome"])

    def settle(self, record: Mapping[str, object]) -> None:
        try:
            self._replayer.replay(read_logged(record))
        except (ClientError, BotoCoreError) as error:
            raise _unreachable(error) from error


def _unreachable(error: Exception) -> MeteringError:
    code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
    return MeteringError("The usage table cannot be reached.", retry_after=1, detail=code or type(error).__name__)
