"""What the sweeper and a replay read and write of the usage table, beyond what a request does.

Writes are single conditional ones, as a request's are: a transaction would make the requests that meet it fail.

``pk`` ``REQ#<record id>``, ``sk`` ``SWEPT`` is a mark beside a record: the key's counters hold what the sweeper put
there in place of what the request came to. ``SWEEP``/``CLAIMS`` says up to when claims have been looked through.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import ClientError

from completions.domain.errors import MeteringError
from completions.domain.limits import Charge
from completions.domain.metering import Outcome
from completions.dynamodb_json import deserialized, serialized
from completions.metering.items import DAY_INDEX, RecordItem, SettlementFields, partition
from completions.metering.limit_items import CLOSED, OPEN, Hold, Result, closed_entry
from completions.metering.usage_table import limits_key, record_key

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

Item = Mapping[str, Any]

_SWEPT_SORT: Final = "SWEPT"
_PROGRESS_KEY: Final = {"pk": {"S": "SWEEP"}, "sk": {"S": "CLAIMS"}}
_MOST_READ: Final = 100
_MOST_DROPPED: Final = 50
"""Attributes one update removes; its expression has a size limit."""
_READS: Final = 5
_SECONDS: Final = "%Y-%m-%dT%H:%M:%S"


@dataclass(frozen=True, slots=True)
class Swept:
    """The mark: the claim whose hold the sweeper closed, when that was made, and what its counters hold of it."""

    claim_id: str
    at: datetime
    charge: Charge


class RecoveryTable:
    """Every method raises boto3's errors. A write whose condition does not hold is ``False``."""

    def __init__(self, client: DynamoDBClient, name: str, retention_days: int) -> None:
        self._client = client
        self._name = name
        self._retention_seconds = retention_days * 86_400

    def record(self, record_id: str) -> Item | None:
        """A record as it stands, in plain attributes."""
        return self._item(record_key(record_id))

    def records(self, record_ids: Collection[str]) -> dict[str, Item]:
        """Those records there are, by their id."""
        items = self._items([record_key(record_id) for record_id in set(record_ids)])
        return {item["pk"].removeprefix(partition("")): item for item in items}

    def limits(self, key_id: str) -> Item:
        """A key's limits item; empty when there is none."""
        return self._item(limits_key(key_id)) or {}

    def all_limits(self, key_ids: Collection[str]) -> Iterator[Item]:
        """The limits items of those of the keys that have one."""
        keys = sorted(set(key_ids))
        for start in range(0, len(keys), _MOST_READ):
            yield from self._items([limits_key(key_id) for key_id in keys[start : start + _MOST_READ]])

    def open_claims(self, day_shard: str, start: datetime, end: datetime) -> Iterator[Item]:
        """Claims of one partition of the day index that were made from ``start`` on, before ``end``, and stand open.

        The index lags, so each of them may be settled by now.
        """
        pages = self._client.get_paginator("query").paginate(
            TableName=self._name,
            IndexName=DAY_INDEX,
            KeyConditionExpression="day_shard = :shard AND created_at BETWEEN :start AND :end",
            FilterExpression="#state = :reserved",
            ExpressionAttributeNames={"#state": "state"},
            ExpressionAttributeValues={
                ":shard": {"S": day_shard},
                # a stored moment goes on after its seconds, so it is never equal to these
                ":start": {"S": start.strftime(_SECONDS)},
                ":end": {"S": end.strftime(_SECONDS)},
                ":reserved": {"S": "RESERVED"},
            },
        )
        for page in pages:
            yield from map(deserialized, page["Items"])

    def settle(self, record_id: str, claim_id: str, settlement: SettlementFields) -> bool:
        """Settle a claim that is open, or that was given up for lost."""
        condition = "claim_id = :mine AND (#state = :reserved OR outcome = :lost)"
        return self._write_record(record_id, serialized(settlement), condition, {":mine": {"S": claim_id}})

    def write_replayed(self, record: RecordItem) -> bool:
        """Write a whole record, unless another claim's stands there, or a settled one that was not given up for lost.

        A record that is there keeps its claim's id, and what others have noted on it.
        """
        fields = serialized(record)
        claim_id = fields.pop("claim_id")
        for key in ("pk", "sk", "state"):
            del fields[key]
        condition = (
            "attribute_not_exists(pk) OR (#created_at = :created_at AND (#state = :reserved OR #outcome = :lost))"
        )
        record_id = record.pk.removeprefix(partition(""))
        return self._write_record(
            record_id, fields, condition, {":claim": claim_id}, "claim_id = if_not_exists(claim_id, :claim)"
        )

    def mark_swept(self, hold: Hold, charge: Charge) -> None:
        """Note what the counters will hold of a request, before its hold is closed with it."""
        item = {
            "claim": {"S": hold.claim_id},
            "at": {"S": hold.at.isoformat()},
            "tokens": {"N": str(charge.tokens)},
            "nanos": {"N": str(charge.nanos)},
            "expires_at": {"N": str(int(hold.at.timestamp()) + self._retention_seconds)},
        }
        self._client.put_item(TableName=self._name, Item={**_swept_key(hold.record_id), **item})

    def swept(self, record_id: str) -> Swept | None:
        """The mark beside a record."""
        item = self._item(_swept_key(record_id))
        if item is None:
            return None
        charge = Charge(int(item["tokens"]), int(item["nanos"]))
        return Swept(item["claim"], datetime.fromisoformat(item["at"]), charge)

    def drop_swept(self, record_id: str) -> None:
        """Remove the mark beside a record."""
        self._client.delete_item(TableName=self._name, Key=_swept_key(record_id))

    def recount(self, key_id: str, hold: Hold, result: Result, added: Mapping[str, int]) -> bool:
        """Add to counters, and leave a ``closed`` entry: once, for with the entry there it is not done again."""
        names = {f"#c{number}": name for number, name in enumerate(added)}
        values = {f":c{number}": {"N": str(amount)} for number, amount in enumerate(added.values())}
        addition = ", ".join(f"#c{number} :c{number}" for number in range(len(added)))
        return self._conditional_update(
            Key=limits_key(key_id),
            UpdateExpression="SET #closed = :closed" + (f" ADD {addition}" if added else ""),
            ConditionExpression="attribute_not_exists(#closed) AND attribute_not_exists(#open)",
            ExpressionAttributeNames={"#closed": CLOSED + hold.record_id, "#open": OPEN + hold.record_id, **names},
            ExpressionAttributeValues={":closed": {"M": closed_entry(hold, result)}, **values},
        )

    def drop_limits_attributes(self, key_id: str, names: Sequence[str]) -> None:
        """Remove attributes that have done their work."""
        for start in range(0, len(names), _MOST_DROPPED):
            some = names[start : start + _MOST_DROPPED]
            self._client.update_item(
                TableName=self._name,
                Key=limits_key(key_id),
                UpdateExpression="REMOVE " + ", ".join(f"#n{number}" for number in range(len(some))),
                ExpressionAttributeNames={f"#n{number}": name for number, name in enumerate(some)},
            )

    def looked_through(self) -> datetime | None:
        """Up to when every claim is known to be settled."""
        item = self._item(_PROGRESS_KEY)
        return None if item is None else datetime.fromisoformat(item["through"])

    def note_looked_through(self, moment: datetime) -> None:
        """Claims made before ``moment`` need not be looked for again."""
        self._client.put_item(TableName=self._name, Item={**_PROGRESS_KEY, "through": {"S": moment.isoformat()}})

    def _write_record(
        self,
        record_id: str,
        fields: Mapping[str, Any],
        condition: str,
        values: Mapping[str, Any],
        further: str | None = None,
    ) -> bool:
        assignments = [f"#{name} = :{name}" for name in fields] + ([] if further is None else [further])
        return self._conditional_update(
            Key=record_key(record_id),
            UpdateExpression=f"SET #state = :settled, {', '.join(assignments)}",
            ConditionExpression=condition,
            ExpressionAttributeNames={"#state": "state", **{f"#{name}": name for name in fields}},
            ExpressionAttributeValues={
                **{f":{name}": value for name, value in fields.items()},
                ":settled": {"S": "SETTLED"},
                ":reserved": {"S": "RESERVED"},
                ":lost": {"S": Outcome.LOST.value},
                **values,
            },
        )

    def _conditional_update(self, **arguments: Any) -> bool:
        try:
            self._client.update_item(TableName=self._name, **arguments)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") != "ConditionalCheckFailedException":
                raise
            return False
        return True

    def _item(self, key: Any) -> Item | None:
        item = self._client.get_item(TableName=self._name, Key=key, ConsistentRead=True).get("Item")
        return None if item is None else deserialized(item)

    def _items(self, keys: Sequence[Any]) -> Iterator[Item]:
        for start in range(0, len(keys), _MOST_READ):
            wanted: Any = {self._name: {"Keys": keys[start : start + _MOST_READ], "ConsistentRead": True}}
            for _ in range(_READS):
                reply = self._client.batch_get_item(RequestItems=wanted)
                yield from map(deserialized, reply["Responses"].get(self._name, []))
                wanted = reply.get("UnprocessedKeys")
                if not wanted:
                    break
            else:
                raise MeteringError("The usage table cannot be read.", detail="throttled")


def _swept_key(record_id: str) -> dict[str, Any]:
    return {"pk": {"S": partition(record_id)}, "sk": {"S": _SWEPT_SORT}}
