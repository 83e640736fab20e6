"""A reply's detail, version 1, and its delivery: once for each name, as far as a queue lets anybody say so.

A mark is put before a reply is sent and changed after. A process that dies between the two leaves the mark, and when
its lease is over the reply is sent again, for nobody knows whether it was sent: ``request_id`` tells it is the same.
"""

from __future__ import annotations

import json
from typing import Any, Final, Protocol

from completions.domain.deliveries import Delivery, DeliveryLog, Outlets, PlaceKind
from completions.domain.errors import ServiceError
from completions.domain.events import EventReply, EventRequest, RetryLaterError, SubmittedError
from completions.domain.submissions import Pending
from completions.observability import logger
from completions.pipelines.answering import Later
from completions.pipelines.messages import MessageFault, MessageRequest
from completions.pipelines.submissions import Submissions

MOST_INLINE: Final = 200_000
"""Bytes of a body that stand in the detail itself. What is larger goes to the bucket: a bus refuses 256 KB."""
_NO_GROUP: Final = "none"
_AGAIN_SECONDS: Final = 2.0
_ELSEWHERE_SECONDS: Final = 15.0


class Answers(Protocol):
    """``EventAnswering``, as it is used here."""

    def answer(self, event: EventRequest, deadline: float | None = None, later: Later | None = None) -> EventReply: ...


class Replying:
    """Answers requests and sends the replies. ``large_uri`` is the prefix of bodies that a detail only points to.

    With ``submissions`` no function waits for an asynchronous endpoint.
    """

    def __init__(
        self,
        answering: Answers,
        log: DeliveryLog,
        outlets: Outlets,
        large_uri: str,
        submissions: Submissions | None = None,
    ) -> None:
        self._submissions = submissions
        self._answering = answering
        self._log = log
        self._outlets = outlets
        self._large_uri = large_uri

    def reply(self, asked: MessageRequest | MessageFault, deadline: float | None) -> None:
        """Return when the reply was sent, now or before, or will be when the model's answer is there.

        Raises ``RetryLaterError``.
        """
        name = asked.name if isinstance(asked, MessageFault) else asked.delivery_name
        try:
            if self._log.delivered(name):
                logger.info("reply_was_delivered", reply=name)
                return
            if isinstance(asked, MessageFault):
                self._deliver(_faults_delivery(asked))
            else:
                self._answer(asked, deadline)
        except ServiceError as error:
            raise _again(error) from error

    def finish(self, pending: Pending, *, overdue: bool = False) -> bool:
        """Whether the reply of what was submitted was sent. Raises ``RetryLaterError``."""
        if self._submissions is None:
            return False
        try:
            finished = self._submissions.finished(pending, overdue=overdue)
            if finished is None:
                return False
            self._deliver(self._delivery(*finished))
            self._submissions.done(pending)
        except ServiceError as error:
            raise _again(error) from error
        return True

    def _answer(self, asked: MessageRequest, deadline: float | None) -> None:
        later = None if self._submissions is None else self._submissions.later(asked)
        try:
            reply = self._answering.answer(asked.event, deadline, later)
        except SubmittedError as submitted:
            self._await(asked, submitted.record_id)
            return
        self._deliver(self._delivery(asked, reply))

    def _await(self, asked: MessageRequest, record_id: str) -> None:
        """Return when the reply will be sent by another event. Raises ``RetryLaterError``."""
        pending = None if self._submissions is None else self._submissions.by_record(record_id)
        if self._submissions is None or pending is None:
            raise RetryLaterError("what was submitted is being answered", _AGAIN_SECONDS)
        # its end may have come, and been told, before anybody knew where to look for it
        self.finish(pending)
        if not self._submissions.is_for(pending, asked):  # the same is asked again, for another place
            raise RetryLaterError("the reply of what was submitted goes elsewhere", _ELSEWHERE_SECONDS)

    def _delivery(self, asked: MessageRequest, reply: EventReply) -> Delivery:
        detail = reply_detail(asked, reply)
        body = json.loads(reply.body)
        if len(json.dumps(body)) > MOST_INLINE and asked.place.kind is not PlaceKind.OBJECT:
            detail["body_s3_uri"] = f"{self._large_uri}{asked.delivery_name}.json"
            self._outlets.put(detail["body_s3_uri"], reply.body)
        else:
            detail["body"] = body
        return Delivery(asked.delivery_name, asked.event.key_id, asked.place, reply.status, json.dumps(detail))

    def _deliver(self, delivery: Delivery) -> None:
        token = self._log.begin(delivery.name)
        if token is None:
            return
        try:
            self._outlets.send(delivery)
        except ServiceError as error:
            logger.warning("reply_undelivered", reply=delivery.name, detail=error.detail)
            self._log.give_up(delivery.name, token)
            raise
        self._log.finish(delivery.name)
        logger.info("reply_delivered", reply=delivery.name, place=delivery.place.kind.value, status=delivery.status)


def _again(error: ServiceError) -> RetryLaterError:
    seconds = _AGAIN_SECONDS if error.retry_after is None else error.retry_after
    return RetryLaterError(f"{type(error).__name__}: {error.detail}", seconds)


def reply_detail(asked: MessageRequest, reply: EventReply) -> dict[str, Any]:
    """A reply's fields but for the body."""
    detail: dict[str, Any] = {
        "version": "1",
        "request_id": asked.delivery_name,
        "key_id": asked.event.key_id,
        "url": asked.event.url,
        "status": reply.status,
        "body": None,
        "body_s3_uri": None,
    }
    if asked.custom_id is not None:
        detail["custom_id"] = asked.custom_id
    if reply.model is not None:
        detail["model"] = reply.model
    if (usage := reply.usage) is not None:
        detail["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "estimated": usage.estimated,
        }
        detail["cost_nanos"] = reply.nanos
    if reply.error is not None:
        detail["error"] = {"type": reply.error, "message": reply.message or "The request failed."}
    return detail


def _faults_delivery(fault: MessageFault) -> Delivery:
    detail: dict[str, Any] = {
        "version": "1",
        "request_id": fault.name,
        "key_id": fault.key_id,
        "url": fault.url,
        "status": fault.status,
        "body": None,
        "body_s3_uri": None,
        "error": {"type": "InvalidMessage", "code": fault.code, "message": fault.message},
    }
    if fault.custom_id is not None:
        detail["custom_id"] = fault.custom_id
    return Delivery(fault.name, fault.key_id or _NO_GROUP, fault.place, fault.status, json.dumps(detail))
