"""Reading back what the service wrote about a request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from completions.dynamodb_json import deserialized
from completions.metering.items import RECORD_SORT, RecordItem, partition

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


class LedgerReader:
    """Over one usage table."""

    def __init__(self, client: DynamoDBClient, table: str) -> None:
        self._client = client
        self._table = table

    def raw(self, request_id: str) -> dict[str, Any] | None:
        """The request's item as it stands, claimed or settled."""
        key = {"pk": {"S": partition(request_id)}, "sk": {"S": RECORD_SORT}}
        item = self._client.get_item(TableName=self._table, Key=key, ConsistentRead=True).get("Item")
        return None if item is None else deserialized(item)

    def settled(self, request_id: str, patience: float = 5) -> RecordItem:
        """The settled record, waiting ``patience`` seconds for it: a client may be faster than the settlement."""
        deadline = time.monotonic() + patience
        while True:
            item = self.raw(request_id)
            if item is not None and item["state"] == "SETTLED" and "total_ms" in item:  # moto's updates are not atomic
                return RecordItem.model_validate(item)
            if time.monotonic() > deadline:
                raise AssertionError(f"no settled record for {request_id}: {item and item['state']}")
            time.sleep(0.02)

    def count(self) -> int:
        """How many records there are in all."""
        pages = self._client.get_paginator("scan").paginate(
            TableName=self._table,
            Select="COUNT",
            FilterExpression="sk = :record",
            ExpressionAttributeValues={":record": {"S": RECORD_SORT}},
        )
        return sum(page["Count"] for page in pages)

    def states(self, model: str) -> dict[str, str]:
        """The state of every record of a model, by partition key."""
        pages = self._client.get_paginator("scan").paginate(
            TableName=self._table,
            FilterExpression="sk = :record AND #model = :model",
            ExpressionAttributeNames={"#model": "model"},
            ExpressionAttributeValues={":record": {"S": RECORD_SORT}, ":model": {"S": model}},
        )
        items = (deserialized(item) for page in pages for item in page["Items"])
        return {item["pk"]: item["state"] for item in items}
