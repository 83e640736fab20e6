"""The bucket, the queues and the bus of this machine, with the functions behind them.

They are made when somebody first asks for S3, SQS or EventBridge: a stack that is used without starts without.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from completions.observability import logger
from completions_cli.local.event_bus import EventCalls, mapping_of, queue_of, rule_of
from completions_cli.local.moto_server import tell_uploads_once
from completions_cli.local.pipeline_template import ACCOUNT, REGION, Pipelines, Queue, Rule
from completions_cli.local.queue_poller import QueuePoller
from completions_cli.local.state_machine import StateMachine
from completions_cli.local.triggers import QueueTrigger, RuleTrigger

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sqs import SQSClient

PIPELINE_TABLE: Final = "PipelineTable"
REQUESTS_QUEUE: Final = "CompletionRequests"
LOCAL_KEY_ID: Final = "local"
_STOP_SECONDS: Final = 1.0
_PRESENT: Final = ("BucketAlreadyOwnedByYou", "ResourceAlreadyExistsException")


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What is to be made, and who is called. ``retry_factor`` shortens the waits between two calls for one event."""

    declared: Pipelines
    queues: Sequence[QueueTrigger] = ()
    rules: Sequence[RuleTrigger] = ()
    retry_factor: float = 1.0


class LocalPipelines:
    """They are at ``url``, which is moto's."""

    def __init__(self, plan: PipelinePlan, url: str) -> None:
        self._plan = plan
        self._url = url
        self._stop = Event()
        self._cleanup = ExitStack()
        self._pollers: list[QueuePoller] = []

    def start(self) -> None:
        """Make all of it, and begin to poll. What is there already stays."""
        try:
            self._start()
        except (BotoCoreError, ClientError) as error:  # who asked is told 500, and this the reason
            logger.critical("pipelines_not_started", error=str(error))
            raise

    def _start(self) -> None:
        tell_uploads_once()
        s3: S3Client = self._client("s3")
        sqs: SQSClient = self._client("sqs")
        events = self._client("events")
        self._make_buckets(s3)
        urls = self._make_queues(sqs)
        self._make_rules(events)
        for trigger in self._plan.queues:
            self._poll(sqs, trigger, urls[trigger.queue.name], trigger.target.when_called())
        for rule in self._plan.rules:
            failures = None if rule.failures is None else urls[rule.failures.name]
            calls = EventCalls(
                rule, rule.target.when_called(), sqs, failures, retry_factor=self._plan.retry_factor, stop=self._stop
            )
            self._poll(sqs, mapping_of(rule), urls[queue_of(rule).name], calls)

    def stop(self) -> None:
        """Call nothing more; a moment for what is being done."""
        self._stop.set()
        until = time.monotonic() + _STOP_SECONDS
        for poller in self._pollers:
            poller.join(until)
        self._cleanup.close()

    def _client(self, service: Any) -> Any:
        settings = Config(connect_timeout=1, read_timeout=10, max_pool_connections=32)
        client: Any = boto3.client(service, endpoint_url=self._url, region_name=REGION, config=settings)
        return self._cleanup.enter_context(closing(client))

    def _make_buckets(self, s3: S3Client) -> None:
        for bucket in self._plan.declared.buckets:
            try:
                s3.create_bucket(Bucket=bucket.name)
            except ClientError as error:
                _require_present(error)
            if bucket.tells:
                s3.put_bucket_notification_configuration(
                    Bucket=bucket.name, NotificationConfiguration={"EventBridgeConfiguration": {}}
                )

    def _make_queues(self, sqs: SQSClient) -> dict[str, str]:
        """Their URLs by name. A queue's dead letters need theirs first."""
        queues: list[Queue] = [*self._plan.declared.queues, *map(queue_of, self._plan.rules)]
        queues.sort(key=lambda queue: "RedrivePolicy" in queue.attributes)
        urls = {}
        for queue in queues:
            attributes: Any = dict(queue.attributes)
            urls[queue.name] = sqs.create_queue(QueueName=queue.name, Attributes=attributes)["QueueUrl"]
        return urls

    def _make_rules(self, events: Any) -> None:
        for bus in self._plan.declared.buses:
            try:
                events.create_event_bus(Name=bus)
            except ClientError as error:
                _require_present(error)
        rules: list[Rule] = [*self._plan.declared.rules, *map(rule_of, self._plan.rules)]
        for rule in rules:
            events.put_rule(Name=rule.name, EventBusName=rule.bus, EventPattern=json.dumps(rule.pattern))
            targets: Any = [{"Id": str(number), "Arn": arn} for number, arn in enumerate(rule.targets)]
            events.put_targets(Rule=rule.name, EventBusName=rule.bus, Targets=targets)

    def _poll(self, sqs: SQSClient, trigger: QueueTrigger, url: str, call: Any) -> None:
        poller = QueuePoller(sqs, trigger, url, call, self._stop)
        self._pollers.append(poller)
        poller.start()


def _require_present(error: ClientError) -> None:
    if error.response.get("Error", {}).get("Code") not in _PRESENT:
        raise error


def pipeline_environment(
    declared: Pipelines, machines: Sequence[StateMachine], *, services_url: str, states_url: str
) -> dict[str, str]:
    """What the functions, and whoever works with the stack, find all of it by."""
    environment = {
        "AWS_ENDPOINT_URL_S3": services_url,
        "AWS_ENDPOINT_URL_SQS": services_url,
        "AWS_ENDPOINT_URL_EVENTBRIDGE": services_url,
        "AWS_ENDPOINT_URL_SFN": states_url,
        "PIPELINE_TABLE": PIPELINE_TABLE,
        "PIPELINE_KEY_ID": LOCAL_KEY_ID,
    }
    for variable, output in (("PIPELINE_BUCKET", "PipelineBucketName"), ("PIPELINE_BUS", "CompletionsBusName")):
        if output in declared.outputs:
            environment[variable] = declared.outputs[output]
    if any(queue.name == REQUESTS_QUEUE for queue in declared.queues):
        environment["COMPLETION_REQUESTS_QUEUE_URL"] = f"{services_url}/{ACCOUNT}/{REQUESTS_QUEUE}"
    if machines:
        environment["BATCH_STATE_MACHINE"] = machines[0].arn
    return environment
