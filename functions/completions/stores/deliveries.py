"""Marks of what was sent, in the pipelines' table: ``pk`` is ``DELIVERY#<name>``, ``sk`` is ``DELIVERY``."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError
from pydantic import BaseModel, ConfigDict

from completions.domain.deliveries import DeliveryLog
from completions.domain.events import RetryLaterError
from completions.domain.ports import Clock
from completions.dynamodb_json import deserialized, serialized
from completions.stores.replies import unreachable

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

LEASE: Final = timedelta(seconds=60)
"""Sending takes a few seconds at most, with all its retries: who has not finished by then has died."""
_SORT: Final = "DELIVERY"


class _Mark(BaseModel):
    """``lease_until`` is epoch milliseconds; ``expires_at``, the table's TTL, epoch seconds."""

    model_config = ConfigDict(extra="ignore")

    state: Literal["sending", "delivered"]
    token: str
    lease_until: int
    expires_at: int


class DynamoDeliveryLog(DeliveryLog):
    """Reads are consistent. Marks outlive every message that can come again: SQS keeps one for 14 days at most."""

    def __init__(self, client: DynamoDBClient, table: str, retention_days: int, clock: Clock) -> None:
        self._client = client
        self._table = table
        self._retention = timedelta(days=retention_days)
        self._clock = clock

    def delivered(self, name: str) -> bool:
        try:
            reply = self._client.get_item(TableName=self._table, Key=_key(name), ConsistentRead=True)
        except (ClientError, BotoCoreError) as error:
            raise unreachable(error) from error
        item = reply.get("Item")
        return item is not None and _Mark.model_validate(deserialized(item)).state == "delivered"

    def begin(self, name: str) -> str | None:
        now, token = self._clock.now(), str(uuid4())
        mark = _Mark(
            state="sending",
            token=token,
            lease_until=_milliseconds((now + LEASE).timestamp()),
            expires_at=int((now + self._retention).timestamp()),
        )
        try:
            self._client.put_item(
                TableName=self._table,
                Item=serialized(mark, **_plain_key(name)),
                ConditionExpression="attribute_not_exists(pk) OR (#state = :sending AND lease_until < :now)",
                ExpressionAttributeNames={"#state": "state"},
                ExpressionAttributeValues={
                    ":sending": {"S": "sending"},
                    ":now": {"N": str(_milliseconds(now.timestamp()))},
                },
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        except ClientError as error:
            if not _condition_failed(error):
                raise unreachable(error) from error
            return self._met(error, token)
        except BotoCoreError as error:
            raise unreachable(error) from error
        return token

    def _met(self, error: ClientError, token: str) -> str | None:
        """What stood in the way: a mark that says it was sent, this very put (its reply was lost), or another's."""
        response: Any = error.response  # botocore's types do not know of ReturnValuesOnConditionCheckFailure
        mark = _Mark.model_validate(deserialized(response["Item"]))
        if mark.state == "delivered":
            return None
        if mark.token == token:
            return token
        left = (mark.lease_until - _milliseconds(self._clock.now().timestamp())) / 1000
        raise RetryLaterError("another delivery of the reply is on its way", max(left, 1.0))

    def finish(self, name: str) -> None:
        try:
            self._client.update_item(
                TableName=self._table,
                Key=_key(name),
                UpdateExpression="SET #state = :delivered",
                ExpressionAttributeNames={"#state": "state"},
                ExpressionAttributeValues={":delivered": {"S": "delivered"}},
            )
        except (ClientError, BotoCoreError) as error:
            raise unreachable(error) from error

    def give_up(self, name: str, token: str) -> None:
        try:
            self._client.update_item(
                TableName=self._table,
                Key=_key(name),
                UpdateExpression="SET lease_until = :over",
                ConditionExpression="#token = :mine AND #state = :sending",
                ExpressionAttributeNames={"#state": "state", "#token": "token"},
                ExpressionAttributeValues={":mine": {"S": token}, ":sending": {"S": "sending"}, ":over": {"N": "0"}},
            )
        except ClientError as error:
            if not _condition_failed(error):
                raise unreachable(error) from error
        except BotoCoreError as error:
            raise unreachable(error) from error


def _plain_key(name: str) -> dict[str, str]:
    return {"pk": f"DELIVERY#{name}", "sk": _SORT}


def _key(name: str) -> Any:
    return {attribute: {"S": value} for attribute, value in _plain_key(name).items()}


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _condition_failed(error: ClientError) -> bool:
    return error.response.get("Error", {}).get("Code") == "ConditionalCheckFailedException"
