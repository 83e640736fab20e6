"""The ends of what asynchronous endpoints were asked: SageMaker's word over SNS, an object in S3, or the time.

Each of the three is enough, and all three may come, in any order and more than once. What nobody here expects is
somebody else's: callers who wait for an asynchronous endpoint look into the bucket themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote_plus

from completions.domain.events import RetryLaterError
from completions.domain.ports import Clock
from completions.domain.submissions import Pending
from completions.observability import log_unexpected, logger
from completions.pipelines.delivery import Replying
from completions.pipelines.submissions import Submissions


class UndeliveredError(Exception):
    """Replies could not be sent; the log says which. All others were, and the next event tries these again."""


class AsyncResults:
    """``handle`` raises ``UndeliveredError`` and lets Lambda, SNS or EventBridge call it again."""

    def __init__(self, submissions: Submissions, replying: Replying, clock: Clock) -> None:
        self._submissions = submissions
        self._replying = replying
        self._clock = clock

    def handle(self, event: Mapping[str, Any], deadline: float | None = None) -> int:
        """How many replies were sent. ``deadline`` is a reading of ``Clock.monotonic``: the rest is the next run's."""
        if event.get("detail-type") == "Scheduled Event" or event.get("source") == "aws.scheduler":
            return self._finished(self._submissions.overdue(), deadline, overdue=True)
        return self._finished(self._expected(event), deadline, overdue=False)

    def _finished(self, expected: Iterable[Pending], deadline: float | None, *, overdue: bool) -> int:
        """What goes wrong with one keeps none of the others waiting."""
        sent = failed = 0
        for pending in expected:
            if deadline is not None and self._clock.monotonic() >= deadline:
                logger.info("results_left", overdue=overdue)
                break
            try:
                sent += self._replying.finish(pending, overdue=overdue)
            except RetryLaterError as later:
                logger.warning("result_later", record_id=pending.record_id, reason=later.reason)
            except Exception as error:  # noqa: BLE001 - see above
                log_unexpected(error, record_id=pending.record_id)
            else:
                continue
            failed += 1
            if overdue:
                self._submissions.postpone(pending)
        if failed:
            raise UndeliveredError(f"{failed} replies could not be sent, {sent} were")
        return sent

    def _expected(self, event: Mapping[str, Any]) -> Iterator[Pending]:
        if event.get("source") == "aws.s3":
            detail = event["detail"]
            found = [self._submissions.by_place(f"s3://{detail['bucket']['name']}/{detail['object']['key']}")]
        else:
            found = [self._told(json.loads(record["Sns"]["Message"])) for record in event["Records"] if "Sns" in record]
            found += [
                self._submissions.by_place(f"s3://{one['bucket']['name']}/{unquote_plus(one['object']['key'])}")
                for record in event["Records"]
                if (one := record.get("s3"))
            ]
        yield from (pending for pending in found if pending is not None)

    def _told(self, notification: Mapping[str, Any]) -> Pending | None:
        """SageMaker's notification of success or failure, which names the inference."""
        name = notification.get("inferenceId")
        return self._submissions.by_record(name) if isinstance(name, str) else None
