"""SQS, EventBridge and S3 as the places that replies go to, and SQS as the queue that requests come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.deliveries import Delivery, Outlets, PlaceKind, Visibility
from completions.domain.errors import BackendUnavailableError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sqs import SQSClient

SUCCEEDED: Final = "completion.succeeded"
FAILED: Final = "completion.failed"


class EventsClient(Protocol):
    """What is used of boto3's client of EventBridge."""

    def put_events(self, *, Entries: Sequence[Mapping[str, str]]) -> Mapping[str, Any]: ...


class AwsOutlets(Outlets):
    """Each client is made when it is first needed, and once. ``source`` is what the events say they come from.

    Needs ``sqs:SendMessage``, ``events:PutEvents`` and ``s3:PutObject`` where replies go. Queues are of this region.
    """

    def __init__(
        self,
        sqs: Callable[[], SQSClient],
        events: Callable[[], EventsClient],
        s3: Callable[[], S3Client],
        source: str,
    ) -> None:
        self._sqs, self._events, self._s3 = cache(sqs), cache(events), cache(s3)
        self._source = source

    def send(self, delivery: Delivery) -> None:
        try:
            match delivery.place.kind:
                case PlaceKind.QUEUE:
                    self._send_message(delivery)
                case PlaceKind.BUS:
                    self._put_event(delivery)
                case PlaceKind.OBJECT:
                    self.put(_object_uri(delivery), delivery.detail.encode())
        except (ClientError, BotoCoreError) as error:
            raise _refused(delivery.place.kind.value, error) from error

    def put(self, s3_uri: str, content: bytes) -> None:
        bucket, _, key = s3_uri.removeprefix("s3://").partition("/")
        try:
            self._s3().put_object(Bucket=bucket, Key=key, Body=content, ContentType="application/json")
        except (ClientError, BotoCoreError) as error:
            raise _refused("s3_uri", error) from error

    def _send_message(self, delivery: Delivery) -> None:
        url = delivery.place.address
        ordered = {"MessageGroupId": delivery.group, "MessageDeduplicationId": delivery.name}
        more: Any = ordered if url.endswith(".fifo") else {}
        self._sqs().send_message(
            QueueUrl=url,
            MessageBody=delivery.detail,
            MessageAttributes={"status": {"DataType": "Number", "StringValue": str(delivery.status)}},
            **more,
        )

    def _put_event(self, delivery: Delivery) -> None:
        entry = {
            "Source": self._source,
            "DetailType": SUCCEEDED if delivery.succeeded else FAILED,
            "Detail": delivery.detail,
            "EventBusName": delivery.place.address,
        }
        reply = self._events().put_events(Entries=[entry])
        if reply.get("FailedEntryCount"):  # a refused event is no error of the call
            raise _unsent("event_bus", str(reply["Entries"][0].get("ErrorCode")))


class SqsVisibility(Visibility):
    """Needs ``sqs:GetQueueUrl`` and ``sqs:ChangeMessageVisibility`` on the queues whose messages come in."""

    def __init__(self, sqs: Callable[[], SQSClient]) -> None:
        self._sqs = cache(sqs)
        self._url_of = cache(self._url)

    def change(self, queue_arn: str, receipts: Sequence[str], seconds: int) -> None:
        try:
            reply = self._sqs().change_message_visibility_batch(
                QueueUrl=self._url_of(queue_arn),
                Entries=[
                    {"Id": str(number), "ReceiptHandle": receipt, "VisibilityTimeout": seconds}
                    for number, receipt in enumerate(receipts)
                ],
            )
        except (ClientError, BotoCoreError) as error:
            raise _refused("visibility", error) from error
        if failed := reply.get("Failed"):
            raise _unsent("visibility", failed[0]["Code"])

    def _url(self, queue_arn: str) -> str:
        account, name = queue_arn.split(":")[4:6]
        return self._sqs().get_queue_url(QueueName=name, QueueOwnerAWSAccountId=account)["QueueUrl"]


def _object_uri(delivery: Delivery) -> str:
    uri = delivery.place.address
    return f"{uri}{delivery.name}.json" if uri.endswith("/") else uri


def _refused(what: str, error: ClientError | BotoCoreError) -> BackendUnavailableError:
    code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
    return _unsent(what, code or type(error).__name__)


def _unsent(what: str, code: str) -> BackendUnavailableError:
    """``what`` is the kind of place; its address may be anybody's, and stays out of the log."""
    return BackendUnavailableError("The reply could not be delivered.", retry_after=2, detail=f"{what}: {code}")
