"""What asynchronous endpoints were asked, in the pipelines' table; the messages, which hold prompts, in its bucket.

Three kinds of item, all under ``ASYNC``: the expectation itself by its record id, a pointer to it for each object in
which its end may appear, and one in the partition of what is due, whose sort key is the moment. A message lies under
the record's id and its own digest: of two who ask under one name, it is the one with the claim that is replied to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.ports import Ticket
from completions.domain.submissions import Pending, PendingStore, Submission
from completions.stores.replies import unreachable

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient
    from mypy_boto3_s3 import S3Client

_SORT: Final = "ASYNC"
_DUE: Final = "ASYNCDUE"
_KEPT_AFTER: Final = timedelta(days=7)
"""The table's TTL: by then the schedule has long seen it."""
_MOMENT: Final = "%Y-%m-%dT%H:%M:%SZ"


class DynamoPendingStore(PendingStore):
    """Reads are consistent, but for the list of what is due."""

    def __init__(self, client: DynamoDBClient, table: str, s3: S3Client, bucket: str) -> None:
        self._client = client
        self._table = table
        self._s3 = s3
        self._bucket = bucket

    def expect(self, pending: Pending) -> None:
        with _reaching():
            self._s3.put_object(
                Bucket=self._bucket,
                Key=_message_key(pending),
                Body=pending.message,
                ContentType="application/json",
            )
            try:
                self._client.put_item(
                    TableName=self._table,
                    Item=_expected(pending),
                    ConditionExpression="attribute_not_exists(submission)",
                )
            except self._client.exceptions.ConditionalCheckFailedException:
                return
            self._client.put_item(
                TableName=self._table, Item=_item(pending, _due_key(pending.record_id, pending.until))
            )

    def submitted(self, pending: Pending, submission: Submission) -> None:
        plain = json.dumps(
            {
                "answer": submission.ticket.answer,
                "failure": submission.ticket.failure,
                "model": submission.model,
                "reservation": dict(submission.reservation),
            }
        )
        with _reaching():
            for uri in (submission.ticket.answer, submission.ticket.failure):
                if uri is not None:
                    self._client.put_item(TableName=self._table, Item=_item(pending, _place_key(uri)))
            # a rival's expectation may stand there, with its own time
            self._client.put_item(
                TableName=self._table, Item=_item(pending, _due_key(pending.record_id, pending.until))
            )
            self._client.put_item(TableName=self._table, Item={**_expected(pending), "submission": {"S": plain}})

    def is_submitted(self, record_id: str) -> bool:
        with _reaching():
            return "submission" in self._found(_record_key(record_id))

    def by_record(self, record_id: str) -> Pending | None:
        with _reaching():
            item = self._found(_record_key(record_id))
            return self._pending(item) if item else None

    def by_place(self, uri: str) -> Pending | None:
        with _reaching():
            item = self._found(_place_key(uri))
        return self.by_record(item["record_id"]["S"]) if item else None

    def overdue(self, now: datetime) -> Iterator[Pending]:
        with _reaching():
            pages = self._client.get_paginator("query").paginate(
                TableName=self._table,
                KeyConditionExpression="pk = :due AND sk < :now",
                ExpressionAttributeValues={":due": {"S": _DUE}, ":now": {"S": now.astimezone(UTC).strftime(_MOMENT)}},
            )
            for due in (item for page in pages for item in page["Items"]):
                record_id = due["record_id"]["S"]
                item = self._found(_record_key(record_id))
                if item and _due_key(record_id, _until(item))["sk"] == due["sk"]:
                    yield self._pending(item)
                else:  # done, but for this, or to be looked at another time
                    self._client.delete_item(TableName=self._table, Key={"pk": due["pk"], "sk": due["sk"]})

    def postpone(self, pending: Pending, until: datetime) -> None:
        with _reaching():
            self._client.put_item(TableName=self._table, Item=_item(pending, _due_key(pending.record_id, until)))
            try:
                self._client.update_item(
                    TableName=self._table,
                    Key=_record_key(pending.record_id),
                    UpdateExpression="SET #until = :until",
                    ConditionExpression="attribute_exists(pk)",
                    ExpressionAttributeNames={"#until": "until"},
                    ExpressionAttributeValues={":until": {"S": until.isoformat()}},
                )
            except self._client.exceptions.ConditionalCheckFailedException:
                return  # done meanwhile
            self._client.delete_item(TableName=self._table, Key=_due_key(pending.record_id, pending.until))

    def done(self, pending: Pending) -> None:
        places = [] if pending.submission is None else [pending.submission.ticket.answer]
        if pending.submission is not None and pending.submission.ticket.failure is not None:
            places.append(pending.submission.ticket.failure)
        with _reaching():
            # what is due is the last of the items: while it is there, it is found that the rest is done
            for key in (
                *map(_place_key, places),
                _record_key(pending.record_id),
                _due_key(pending.record_id, pending.until),
            ):
                self._client.delete_item(TableName=self._table, Key=key)
            self._s3.delete_object(Bucket=self._bucket, Key=_message_key(pending))

    def _found(self, key: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._client.get_item(TableName=self._table, Key=key, ConsistentRead=True).get("Item", {})

    def _pending(self, item: Mapping[str, Any]) -> Pending:
        submission = _submission(item["submission"]["S"]) if "submission" in item else None
        return Pending(item["record_id"]["S"], _until(item), self._message(item["message"]["S"]), submission)

    def _message(self, key: str) -> bytes:
        """Empty where the bucket's lifecycle rule has been faster."""
        try:
            with closing(self._s3.get_object(Bucket=self._bucket, Key=key)["Body"]) as body:
                return body.read()
        except self._s3.exceptions.NoSuchKey:
            return b""


def _submission(text: str) -> Submission:
    plain = json.loads(text)
    return Submission(Ticket(plain["answer"], plain["failure"]), plain["model"], plain["reservation"])


def _item(pending: Pending, key: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **key,
        "record_id": {"S": pending.record_id},
        "until": {"S": pending.until.isoformat()},
        "expires_at": {"N": str(int((pending.until + _KEPT_AFTER).timestamp()))},
    }


def _expected(pending: Pending) -> dict[str, Any]:
    return {**_item(pending, _record_key(pending.record_id)), "message": {"S": _message_key(pending)}}


def _until(item: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(item["until"]["S"])


def _record_key(record_id: str) -> dict[str, Any]:
    return {"pk": {"S": f"ASYNC#{record_id}"}, "sk": {"S": _SORT}}


def _place_key(uri: str) -> dict[str, Any]:
    """By digest: an address may be as long as S3 likes."""
    return {"pk": {"S": f"ASYNCPLACE#{hashlib.sha256(uri.encode()).hexdigest()}"}, "sk": {"S": _SORT}}


def _due_key(record_id: str, until: datetime) -> dict[str, Any]:
    moment = until.astimezone(UTC).strftime(_MOMENT)
    return {"pk": {"S": _DUE}, "sk": {"S": f"{moment}#{record_id}"}}


def _message_key(pending: Pending) -> str:
    return f"pending/{pending.record_id}/{hashlib.sha256(pending.message).hexdigest()[:32]}.json"


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise unreachable(error) from error
