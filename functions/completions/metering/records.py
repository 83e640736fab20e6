"""Reading records back, a day at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from typing import TYPE_CHECKING, Any

from completions.dynamodb_json import deserialized
from completions.metering.items import DAY_INDEX, RecordItem, day_shards

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


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
