"""Lambda's event source mapping of a table's stream: read, filter, batch, call, and call again where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from threading import Event, Thread
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from completions.observability import logger
from completions_cli.local.triggers import StreamTrigger, matches

_WINDOW_SECONDS: Final = 1.0
"""Shorter than the template's: here somebody waits for the figures. Much shorter costs moto more than the requests."""
_MOST_BACKOFF: Final = 5.0

Call = Callable[[Mapping[str, Any]], Any]


@contextmanager
def polling_streams(triggers: Sequence[StreamTrigger], url: str) -> Iterator[None]:
    """While this lasts, each trigger's function is sent what happens in its table, from the stream's beginning on."""
    stop = Event()
    settings = Config(connect_timeout=1, read_timeout=5)
    with closing(boto3.client("dynamodbstreams", endpoint_url=url, config=settings)) as client:
        threads = [
            Thread(target=StreamPoller(client, trigger, trigger.target.load(), stop).run, daemon=True)
            for trigger in triggers
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


class StreamPoller:
    """One mapping. Shards are read side by side, a shard that was split after its parent."""

    def __init__(self, client: Any, trigger: StreamTrigger, call: Call, stop: Event) -> None:
        self._client = client
        self._trigger = trigger
        self._call = call
        self._stop = stop
        self._iterators: dict[str, str | None] = {}
        self._arn = ""

    def run(self) -> None:
        """Until it is stopped."""
        while not self._stop.wait(_WINDOW_SECONDS):
            try:
                self.poll()
            except (ClientError, BotoCoreError) as error:
                logger.warning("stream_unreadable", table=self._trigger.table, error=type(error).__name__)
                if isinstance(error, ClientError):  # an iterator lives for a quarter of an hour; begin anew
                    self._iterators = {shard: None for shard, iterator in self._iterators.items() if iterator is None}

    def poll(self) -> None:
        """Read each shard once and deliver what is there."""
        self._find_shards()
        for shard, iterator in list(self._iterators.items()):
            if iterator is None:
                continue
            reply = self._client.get_records(ShardIterator=iterator, Limit=1000)
            events = [lambda_event(record, self._arn) for record in reply["Records"]]
            wanted = [event for event in events if any(matches(one, event) for one in self._trigger.patterns)]
            size = self._trigger.batch_size
            for first in range(0, len(wanted), size):
                self.deliver(wanted[first : first + size])
            self._iterators[shard] = reply.get("NextShardIterator")  # none behind a shard that is closed

    def deliver(self, batch: Sequence[Mapping[str, Any]], attempt: int = 0) -> None:
        """Call the function until all of the batch is done, or given up: what failed, and all behind it, once more."""
        while batch:
            left = self._left(batch)
            if not left:
                return
            if attempt == self._trigger.retry_attempts or self._stop.wait(min(_MOST_BACKOFF, 0.1 * 2**attempt)):
                logger.error("stream_batch_dropped", function=self._trigger.target.name, records=len(left))
                return
            attempt += 1
            if self._trigger.bisect and len(left) > 1:
                middle = len(left) // 2
                self.deliver(left[:middle], attempt)
                left = left[middle:]
            batch = left

    def _left(self, batch: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        try:
            reply = self._call({"Records": list(batch)})
        except Exception as error:  # noqa: BLE001 - whatever a function raises fails the whole batch
            logger.warning("function_failed", function=self._trigger.target.name, error=type(error).__name__)
            return batch
        failed = {failure["itemIdentifier"] for failure in (reply or {}).get("batchItemFailures", ())}
        numbers = [event["dynamodb"]["SequenceNumber"] for event in batch]
        if not failed <= set(numbers):
            return batch
        first = min((numbers.index(number) for number in failed), default=len(batch))
        return batch[first:]

    def _find_shards(self) -> None:
        if self._iterators and None not in self._iterators.values():
            return
        streams = self._client.list_streams(TableName=self._trigger.table)["Streams"]
        if not streams:
            return
        self._arn = streams[0]["StreamArn"]
        shards = self._client.describe_stream(StreamArn=self._arn)["StreamDescription"]["Shards"]
        for shard in shards:
            name = shard["ShardId"]
            if name not in self._iterators and self._iterators.get(shard.get("ParentShardId", "")) is None:
                reply = self._client.get_shard_iterator(
                    StreamArn=self._arn, ShardId=name, ShardIteratorType="TRIM_HORIZON"
                )
                self._iterators[name] = reply["ShardIterator"]


def lambda_event(record: Any, stream_arn: str) -> dict[str, Any]:
    """One of the stream's records as Lambda sends it."""
    change = dict(record["dynamodb"])
    if "ApproximateCreationDateTime" in change:
        change["ApproximateCreationDateTime"] = change["ApproximateCreationDateTime"].timestamp()
    return {
        "eventID": record["eventID"],
        "eventName": record["eventName"],
        "eventVersion": "1.1",
        "eventSource": "aws:dynamodb",
        "awsRegion": stream_arn.split(":")[3],
        "dynamodb": change,
        "eventSourceARN": stream_arn,
    }
