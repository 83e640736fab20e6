"""moto as the local stack runs it: writes that meet, and transactions that fail."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from completions_cli.local.tables import moto_dynamodb
from dynamodb_local import new_table

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

SETTINGS = Config(region_name="sa-east-1", retries={"total_max_attempts": 1}, max_pool_connections=32)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, DynamoDBClient]]:
    with moto_dynamodb() as url, closing(boto3.client("dynamodb", endpoint_url=url, config=SETTINGS)) as client:
        yield url, client


def key(name: str) -> Any:
    return {"pk": {"S": name}, "sk": {"S": "x"}}


def added(table: str, name: str, condition: str | None = None) -> Any:
    """One more of a counter."""
    update: dict[str, Any] = {
        "TableName": table,
        "Key": key(name),
        "UpdateExpression": "ADD n :one",
        "ExpressionAttributeValues": {":one": {"N": "1"}},
    }
    return update if condition is None else {**update, "ConditionExpression": condition}


def test_a_transaction_that_fails_takes_back_its_own_writes_alone(server: tuple[str, DynamoDBClient]) -> None:
    url, client = server
    table = new_table(client)
    client.update_table(
        TableName=table, StreamSpecification={"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"}
    )
    client.put_item(TableName=table, Item={**key("old"), "n": {"N": "7"}})
    failing: Any = [
        {"Update": added(table, "old")},
        {"Update": added(table, "new")},
        {"Update": added(table, "never", "attribute_exists(pk)")},
    ]

    with closing(boto3.client("dynamodbstreams", endpoint_url=url, config=SETTINGS)) as streams:
        arn = streams.list_streams(TableName=table)["Streams"][0]["StreamArn"]
        (shard,) = streams.describe_stream(StreamArn=arn)["StreamDescription"]["Shards"]
        iterator = streams.get_shard_iterator(
            StreamArn=arn, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        with pytest.raises(client.exceptions.TransactionCanceledException) as caught:
            client.transact_write_items(TransactItems=failing)
        client.put_item(TableName=table, Item=key("after"))
        events = streams.get_records(ShardIterator=iterator)["Records"]

    reasons: Any = caught.value.response
    assert [reason["Code"] for reason in reasons["CancellationReasons"]] == ["None", "None", "ConditionalCheckFailed"]
    items = {item["pk"]["S"]: item.get("n", {}).get("N") for item in client.scan(TableName=table)["Items"]}
    assert items == {"old": "7", "after": None}
    assert [event["dynamodb"]["Keys"]["pk"]["S"] for event in events] == ["old", "after"]


def test_writes_that_meet_are_all_counted_beside_transactions_that_fail(server: tuple[str, DynamoDBClient]) -> None:
    _, client = server
    table = new_table(client)
    doomed: Any = [{"Update": added(table, "counter")}, {"Update": added(table, "never", "attribute_exists(pk)")}]

    def write(number: int) -> None:
        if number % 4:
            client.update_item(**added(table, "counter"))
            return
        with pytest.raises(client.exceptions.TransactionCanceledException):
            client.transact_write_items(TransactItems=doomed)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(200)))
    assert client.get_item(TableName=table, Key=key("counter"))["Item"]["n"] == {"N": "150"}
