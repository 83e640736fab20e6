"""The usage table: a conditional put claims a request, a conditional update settles it once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.errors import DuplicateRequestError, MeteringError
from completions.domain.metering import Reservation, UsageRecord
from completions.domain.ports import UsageLedger
from completions.dynamodb_json import deserialized, serialized
from completions.metering.items import (
    DAY_INDEX,
    RECORD_SORT,
    RecordItem,
    day_shards,
    partition,
    reserved_item,
    settlement_fields,
)

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


class DynamoUsageLedger(UsageLedger):
    """``retention_days`` is how long records are kept before the table's TTL removes them.

    The client may retry after a lost reply: a put that meets its own claim has succeeded, and the update's condition
    holds once.
    """

    def __init__(self, client: DynamoDBClient, table: str, retention_days: int) -> None:
        self._client = client
        self._table = table
        self._retention_days = retention_days

    def reserve(self, reservation: Reservation) -> None:
        claim_id = str(uuid4())
        try:
            self._client.put_item(
                TableName=self._table,
                Item=serialized(reserved_item(reservation, claim_id, self._retention_days)),
                ConditionExpression="attribute_not_exists(pk)",
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        except ClientError as error:
            if _code(error) == "ConditionalCheckFailedException":
                if _old_item(error).get("claim_id") == {"S": claim_id}:
                    return
                raise DuplicateRequestError(
                    "A request with this id was already received, and is not answered twice; send it under a new id.",
                    code="duplicate_request",
                ) from error
            raise _metering_error(error) from error
        except BotoCoreError as error:
            raise _metering_error(error) from error

    def settle(self, record: UsageRecord) -> None:
        fields = serialized(settlement_fields(record))
        names = {f"#{name}": name for name in (*fields, "state")}
        assignments = ", ".join(f"#{name} = :{name}" for name in fields)
        values = {f":{name}": value for name, value in fields.items()}
        try:
            self._client.update_item(
                TableName=self._table,
                Key={"pk": {"S": partition(record.reservation.record_id)}, "sk": {"S": RECORD_SORT}},
                UpdateExpression=f"SET #state = :settled, {assignments}",
                ConditionExpression="#state = :reserved",
                ExpressionAttributeNames=names,
                ExpressionAttributeValues={**values, ":settled": {"S": "SETTLED"}, ":reserved": {"S": "RESERVED"}},
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        except ClientError as error:
            if _code(error) == "ConditionalCheckFailedException" and _old_item(error):
                return  # settled before: a retry after a lost reply
            raise _metering_error(error) from error
        except BotoCoreError as error:
            raise _metering_error(error) from error


def day_records(client: DynamoDBClient, table: str, day: date) -> Iterator[RecordItem]:
    """The settled records of one UTC day, in no particular order. Raises boto3's errors."""
    for page in _day_pages(client, table, day, "SETTLED"):
        for item in page["Items"]:
            yield RecordItem.model_validate(deserialized(item))


def open_claims(client: DynamoDBClient, table: str, day: date) -> int:
    """How many of a day's claims are not settled: in progress, or left by a crash. Raises boto3's errors."""
    return sum(page["Count"] for page in _day_pages(client, table, day, "RESERVED"))


def _day_pages(client: DynamoDBClient, table: str, day: date, state: str) -> Iterator[Mapping[str, Any]]:
    paginator = client.get_paginator("query")
    for shard in day_shards(day):
        yield from paginator.paginate(
            TableName=table,
            IndexName=DAY_INDEX,
            KeyConditionExpression="day_shard = :shard",
            FilterExpression="#state = :state",
            ExpressionAttributeNames={"#state": "state"},
            ExpressionAttributeValues={":shard": {"S": shard}, ":state": {"S": state}},
        )


def _old_item(error: ClientError) -> Mapping[str, Any]:
    """What ``ReturnValuesOnConditionCheckFailure`` brought back; botocore's types do not know of it."""
    response: Mapping[str, Any] = error.response
    item: Mapping[str, Any] = response.get("Item") or {}
    return item


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _metering_error(error: Exception) -> MeteringError:
    detail = _code(error) if isinstance(error, ClientError) else type(error).__name__
    return MeteringError("The request could not be metered, so it was not served.", retry_after=1, detail=detail)
