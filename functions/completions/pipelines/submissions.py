"""Messages whose model is an asynchronous endpoint: handed in by one function, answered by another at the end.

The message is done with once the endpoint has it. What is expected is noted before it is handed in, and where its end
will be after, so whoever dies in between leaves a claim that comes to its end by its time (``overdue``), and a message
that comes again and is tried again then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from completions.domain.completion import CompletionRequest
from completions.domain.deliveries import PlaceKind, ReplyPlace
from completions.domain.errors import BackendTimeoutError, CompletionError
from completions.domain.events import EventReply, EventRequest, RecordBook
from completions.domain.ports import Clock
from completions.domain.submissions import Pending, PendingStore, UnansweredError
from completions.observability import logger
from completions.pipelines.answering import EventAnswering, Later
from completions.pipelines.messages import MessageRequest
from completions.service.complete import CallContext
from completions.service.submitted import SubmittedCompletions

STAY: Final = timedelta(hours=1)
"""How long an answer is waited for: SageMaker's longest processing. The wait in its queue counts, too."""
_GRACE: Final = timedelta(minutes=5)
"""Until what did not come in time is given up: its event may be on its way."""
_POSTPONED: Final = timedelta(minutes=15)
"""What could not be replied to makes room for the others."""


class Submissions:
    """See the module."""

    def __init__(
        self,
        answering: EventAnswering,
        submitted: SubmittedCompletions,
        pending: PendingStore,
        records: RecordBook,
        clock: Clock,
    ) -> None:
        self._answering = answering
        self._submitted = submitted
        self._pending = pending
        self._records = records
        self._clock = clock

    def later(self, asked: MessageRequest) -> Later:
        """What ``EventAnswering.answer`` hands this message's request in with."""
        return _Later(asked, self._submitted, self._pending, self._records, self._clock)

    def finished(self, pending: Pending, *, overdue: bool = False) -> tuple[MessageRequest, EventReply] | None:
        """The reply of what has come to its end, kept and settled; ``None`` where that is not so yet.

        What is ``overdue`` has come to its end in any case. ``done`` is to follow when the reply was sent.
        """
        submission = pending.submission
        if submission is None or not pending.message:
            if overdue:  # while nobody knows that the endpoint has it, its message is in the queue, and is tried again
                if submission is not None:
                    logger.error("submission_forgotten", record_id=pending.record_id, reason="its message is gone")
                self._records.give_up(pending.record_id)
                self._pending.done(pending)
            return None
        asked = _read(pending.message)
        known = self._answering.kept(asked.event, pending.record_id)
        if known is not None:
            return asked, known
        try:
            request = self._answering.canonical(asked.event)
            collected = self._submitted.collect(request, submission)
        except UnansweredError as error:
            if not overdue:
                return None
            late = BackendTimeoutError("The model did not answer in time.", detail=error.detail)
            return asked, self._failed(asked.event, pending, late)
        except CompletionError as error:
            return asked, self._failed(asked.event, pending, error)
        return asked, self._answering.finish(asked.event, collected)

    def by_record(self, record_id: str) -> Pending | None:
        """What is expected under this id."""
        return self._pending.by_record(record_id)

    def by_place(self, uri: str) -> Pending | None:
        """What is expected to end in this object."""
        return self._pending.by_place(uri)

    def is_for(self, pending: Pending, asked: MessageRequest) -> bool:
        """Whether it is this message that will be replied to."""
        return bool(pending.message) and _read(pending.message).delivery_name == asked.delivery_name

    def overdue(self) -> Iterator[Pending]:
        """What should have come by now, read as it is asked for: messages are large."""
        return self._pending.overdue(self._clock.now() - _GRACE)

    def postpone(self, pending: Pending) -> None:
        """It could not be replied to now."""
        self._pending.postpone(pending, self._clock.now() - _GRACE + _POSTPONED)

    def done(self, pending: Pending) -> None:
        """Its reply was sent."""
        self._pending.done(pending)

    def _failed(self, event: EventRequest, pending: Pending, error: CompletionError) -> EventReply:
        logger.info("submission_failed", record_id=pending.record_id, error=type(error).__name__, detail=error.detail)
        reply = self._answering.fail(event, error)
        self._records.give_up(pending.record_id, type(error).__name__)
        return reply


class _Later(Later):
    def __init__(
        self,
        asked: MessageRequest,
        submitted: SubmittedCompletions,
        pending: PendingStore,
        records: RecordBook,
        clock: Clock,
    ) -> None:
        self._asked = asked
        self._submitted = submitted
        self._pending = pending
        self._records = records
        self._clock = clock

    def submit(self, request: CompletionRequest, context: CallContext) -> bool:
        if not self._submitted.takes(request, context.principal):
            return False
        until = self._clock.now() + STAY
        pending = Pending(context.request_id, until, _written(self._asked))
        if not self._records.known(context.request_id):  # else whoever claimed it has noted it
            self._pending.expect(pending)
        # the sweeper leaves the claim alone until then, and by then it has come to its end
        submission = self._submitted.submit(request, context, until + 2 * _GRACE)
        self._pending.submitted(pending, submission)
        logger.info("submitted", record_id=pending.record_id, model=submission.model)
        return True

    def expects(self, record_id: str) -> bool:
        return self._pending.is_submitted(record_id)


def _written(asked: MessageRequest) -> bytes:
    plain = {
        "name": asked.event.name,
        "key_id": asked.event.key_id,
        "url": asked.event.url,
        "body": asked.event.body.decode(),
        "delivery_name": asked.delivery_name,
        "place": [asked.place.kind.value, asked.place.address],
        "custom_id": asked.custom_id,
    }
    return json.dumps(plain).encode()


def _read(message: bytes) -> MessageRequest:
    plain = json.loads(message)
    kind, address = plain["place"]
    event = EventRequest(plain["name"], plain["key_id"], plain["url"], plain["body"].encode())
    return MessageRequest(event, plain["delivery_name"], ReplyPlace(PlaceKind(kind), address), plain["custom_id"])
