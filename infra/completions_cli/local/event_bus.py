"""EventBridge's rules whose target is a function, and the events as the function gets them.

moto finds the rules that an event matches, those of S3 too, but hands it to queues alone. So each such rule has a queue
here, whose poller calls the function as an event calls it: again when it fails, and not for ever.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from completions.observability import logger
from completions_cli.local.pipeline_template import Queue, Rule
from completions_cli.local.triggers import QueueTrigger, RuleTrigger

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

_RETRY_SECONDS: Final = (60.0, 120.0)
_LONGEST_VISIBILITY: Final = "43200"  # a call is repeated by its caller here, never by the queue


def queue_of(trigger: RuleTrigger) -> Queue:
    """The queue between a rule and its function."""
    return Queue(f"{trigger.name}Events", {"VisibilityTimeout": _LONGEST_VISIBILITY})


def rule_of(trigger: RuleTrigger) -> Rule:
    """The rule, with that queue for its target."""
    return Rule(trigger.name, trigger.bus, trigger.pattern, [queue_of(trigger).arn])


def mapping_of(trigger: RuleTrigger) -> QueueTrigger:
    """How that queue is polled."""
    return QueueTrigger(trigger.target, queue_of(trigger), 1, 0, partial=False, most_at_once=8)


class EventCalls:
    """Calls a rule's function with the events of its queue. ``retry_factor`` shortens the minutes between attempts."""

    def __init__(
        self,
        trigger: RuleTrigger,
        call: Callable[[Mapping[str, Any]], Any],
        sqs: SQSClient,
        failures_url: str | None,
        *,
        retry_factor: float,
        stop: Event,
    ) -> None:
        self._trigger = trigger
        self._call = call
        self._sqs = sqs
        self._failures_url = failures_url
        self._retry_factor = retry_factor
        self._stop = stop

    def __call__(self, batch: Mapping[str, Any]) -> None:
        """The poller's call, with one message."""
        for record in batch["Records"]:
            self._deliver(event_of(record))

    def _deliver(self, event: Mapping[str, Any]) -> None:
        for attempt in range(1, self._trigger.attempts + 1):
            try:
                self._call(event)
            except Exception as error:  # noqa: BLE001 - whatever a function raises
                name = type(error).__name__
                logger.warning("function_failed", function=self._trigger.target.name, error=name)
                if attempt == self._trigger.attempts:
                    self._give_up(event, error)
                elif self._stop.wait(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS)) - 1] * self._retry_factor):
                    return
            else:
                return

    def _give_up(self, event: Mapping[str, Any], error: Exception) -> None:
        name = self._trigger.target.name
        # said at any level: a caller of this kind hears nothing
        logger.critical("event_given_up", function=name, error=type(error).__name__, event_id=event.get("id"))
        if self._failures_url is not None:
            body = json.dumps(failure_record(self._trigger, event, error))
            self._sqs.send_message(QueueUrl=self._failures_url, MessageBody=body)


def event_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The event in a queue's message. Those of S3 are put right where moto's are no event's of S3."""
    event: dict[str, Any] = json.loads(record["body"])
    event.pop("ingestion-time", None)
    if (event.get("source"), event.get("detail-type")) != ("aws.s3", "Object Created"):
        return event
    sent = int(record["attributes"]["SentTimestamp"])
    told = {name: value for name, value in event["detail"]["object"].items() if value not in (None, "null")}
    told["etag"] = told.pop("eTag")
    told["sequencer"] = f"{sent:012X}{hashlib.sha256(record['messageId'].encode()).hexdigest()[:6].upper()}"
    reason = "CompleteMultipartUpload" if "-" in told["etag"] else "PutObject"
    detail = {**event["detail"], "object": told, "reason": reason}
    return {**event, "id": record["messageId"], "detail": detail}


def failure_record(trigger: RuleTrigger, event: Mapping[str, Any], error: Exception) -> dict[str, Any]:
    """What Lambda tells a destination. Source: its developer guide, "Retaining records of asynchronous invocations"."""
    return {
        "version": "1.0",
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        "requestContext": {
            "requestId": str(uuid.uuid4()),
            "functionArn": trigger.target.arn,
            "condition": "RetriesExhausted",
            "approximateInvokeCount": trigger.attempts,
        },
        "requestPayload": event,
        "responseContext": {"statusCode": 200, "executedVersion": "$LATEST", "functionError": "Unhandled"},
        "responsePayload": {"errorMessage": str(error), "errorType": type(error).__name__},
    }
