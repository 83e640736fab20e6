"""One event's request through the same service as HTTP's: decoded by its dialect, answered whole, paid once.

Every try has a record of its own, ``<name>``, ``<name>-2`` and so on, and a record can be claimed once. So a delivery
that comes again meets the claim of the one before, and does what its end asks for:

- there is a kept reply: that is the answer, and a record its worker left open is settled with what was kept;
- the record is open: somebody is at it, or died at it; the sweeper will close it. Come back later;
- it ended without a reply: the next try.

A reply is kept before its record is settled, so that nothing is paid for and then lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol
from urllib.parse import parse_qsl, urlsplit

from completions.dialects.dialect import AnswerHead, Dialect, ErrorHead, WireReply, WireRequest
from completions.domain.completion import Completion, CompletionRequest
from completions.domain.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CompletionError,
    DuplicateRequestError,
    InvalidRequestError,
    MeteringError,
    QuotaExceededError,
    RateLimitError,
    ServiceError,
    UnknownPathError,
)
from completions.domain.events import (
    EventReply,
    EventRequest,
    KeptReply,
    RecordBook,
    ReplyStore,
    RetryLaterError,
    StillRunningError,
    SubmittedError,
)
from completions.domain.metering import Outcome, Principal, UsageRecord, plain_record
from completions.domain.ports import Clock, Registry
from completions.observability import logger
from completions.service.complete import CallContext, CompletionService
from completions.service.submitted import Collected

MOST_FAILURES: Final = 3
"""Tries that may fail before the failure is the reply. Being turned away unread is no failure."""
_MOST_TRIES: Final = 1000
_RUNNING_SECONDS: Final = 15.0
_BUSY_SECONDS: Final = 2.0


class ReplyUnkeptError(ServiceError):
    """There is an answer, and nowhere to keep it. It was paid for, so it counts as a failure."""


_BUSY: Final = (RateLimitError, BackendUnavailableError, MeteringError, ReplyUnkeptError)


@dataclass(frozen=True, slots=True)
class _Spoken:
    """A request that was understood: who asks what, in which dialect."""

    event: EventRequest
    dialect: Dialect
    principal: Principal
    canonical: CompletionRequest
    wire: WireRequest


class Later(Protocol):
    """The way of a request whose answer comes by another event."""

    def submit(self, request: CompletionRequest, context: CallContext) -> bool:
        """Hand it in; ``False``, and nothing done, where its model answers at once. Raises ``CompletionError``."""
        ...

    def expects(self, record_id: str) -> bool:
        """Whether it was handed in, and has not come to its end."""
        ...


class EventAnswering:
    """``endpoints`` maps each path to its dialect; an answer is whole on all of them, also where HTTP streams."""

    def __init__(
        self,
        endpoints: Mapping[str, Dialect],
        service: CompletionService,
        registry: Registry,
        *,
        replies: ReplyStore,
        records: RecordBook,
        clock: Clock,
    ) -> None:
        self._endpoints = endpoints
        self._service = service
        self._registry = registry
        self._replies = replies
        self._records = records
        self._clock = clock

    def answer(self, event: EventRequest, deadline: float | None = None, later: Later | None = None) -> EventReply:
        """The one reply of this request. ``deadline`` is a reading of ``Clock.monotonic``.

        Raises ``RetryLaterError``, and ``SubmittedError`` for what ``later`` has handed in; what is wrong with the
        request itself, or with the model for good, is a reply.
        """
        dialect = self._endpoints.get(_path(event.url))
        if dialect is None:
            known = ", ".join(sorted(self._endpoints))
            error = UnknownPathError(f"'url' is none of this service's completions: {known}.", param="url")
            return self._refusal(event, self._endpoints["/v1/completions"], error)
        try:
            spoken = self._understood(event, dialect)
            return self._answered(spoken, deadline, later)
        except ServiceError as error:  # the registry or a store, before anything was asked or paid
            raise _later(error) from error
        except CompletionError as error:
            return self._refusal(event, dialect, error)

    def _decoded(self, event: EventRequest, dialect: Dialect) -> tuple[CompletionRequest, WireRequest]:
        wire = _wire(event)
        canonical = dialect.decode(wire)
        if canonical.stream and b'"stream"' in event.body and not _streams_only(event.url):
            raise InvalidRequestError("An event is answered whole: 'stream' must be absent or false.", param="stream")
        return replace(canonical, stream=False, include_usage=False), wire

    def _understood(self, event: EventRequest, dialect: Dialect) -> _Spoken:
        canonical, wire = self._decoded(event, dialect)
        principal = self._registry.principal_of(event.key_id)
        if principal is None:
            raise AuthenticationError(f"There is no key '{event.key_id[:200]}'.", param="key_id")
        expired = principal.expires_at is not None and principal.expires_at <= self._clock.now()
        if principal.disabled or expired:
            fault = "is disabled" if principal.disabled else "has expired"
            raise AuthenticationError(f"The key '{event.key_id[:200]}' {fault}.", param="key_id")
        return _Spoken(event, dialect, principal, canonical, wire)

    def _answered(self, spoken: _Spoken, deadline: float | None, later: Later | None) -> EventReply:
        failures = 0
        for record_id in _tries(spoken.event.name):
            if deadline is not None and self._clock.monotonic() >= deadline:
                raise RetryLaterError("the function's time is up", _BUSY_SECONDS)
            try:
                return self._tried(spoken, record_id, deadline, later)
            except DuplicateRequestError:
                reply, ended = self._found(spoken, record_id, later)
                if reply is not None:
                    return reply
                failures += ended is not Outcome.REFUSED
                if failures >= MOST_FAILURES:
                    return self._failed(spoken, ServiceError(f"The request failed {failures} times."))
            except CompletionError as error:
                if _passing(error):
                    raise _later(error) from error
                if not isinstance(error, ServiceError):
                    return self._refusal(spoken.event, spoken.dialect, error, spoken.canonical)
                logger.info("event_failed", record_id=record_id, error=type(error).__name__, detail=error.detail)
                failures += 1
                if failures >= MOST_FAILURES:
                    return self._failed(spoken, error)
        raise RetryLaterError("too many tries", _RUNNING_SECONDS)

    def _tried(self, spoken: _Spoken, record_id: str, deadline: float | None, later: Later | None) -> EventReply:
        """One try under a record of its own. Its reply is kept before it is settled."""
        kept: list[EventReply] = []

        def keep(completion: Completion, record: UsageRecord) -> None:
            reply = self._reply(spoken, completion, record)
            try:
                self._replies.put(spoken.event.name, KeptReply(reply, plain_record(record)))
            except ServiceError as error:
                raise ReplyUnkeptError(error.message, retry_after=error.retry_after, detail=error.detail) from error
            kept.append(reply)

        context = CallContext(
            request_id=record_id,
            principal=spoken.principal,
            dialect=spoken.dialect.name,
            arrived=self._clock.monotonic(),
            deadline=deadline,
            record_id=record_id,
            fingerprint=hashlib.sha256(spoken.event.url.encode() + b"\n" + spoken.event.body).hexdigest(),
        )
        if later is not None and later.submit(spoken.canonical, context):
            raise SubmittedError(record_id)
        self._service.complete(spoken.canonical, context, keep)
        return kept[0]

    def _found(self, spoken: _Spoken, record_id: str, later: Later | None) -> tuple[EventReply | None, Outcome | None]:
        """What an earlier delivery came to: its reply, or how it ended. Raises ``RetryLaterError`` while it runs."""
        ended = self._records.ended(record_id)  # before the reply, which is kept before the end
        kept = self._replies.get(spoken.event.name)
        if kept is not None:
            if kept.record is not None and ended is not Outcome.SUCCEEDED:
                self._records.settle(kept.record)
            return kept.reply, ended
        if later is not None and later.expects(record_id):  # also what the sweeper took for lost: it may come yet
            raise SubmittedError(record_id)
        if ended is None:
            raise StillRunningError("another delivery is being answered", _RUNNING_SECONDS)
        return None, ended

    def canonical(self, event: EventRequest) -> CompletionRequest:
        """What it asks for. Raises ``CompletionError``, though not for one that was answered or submitted before."""
        return self._decoded(event, self._endpoints[_path(event.url)])[0]

    def kept(self, event: EventRequest, record_id: str) -> EventReply | None:
        """The reply, if there is one, with the books as it says. It is the last word: nothing is kept in its place."""
        kept = self._replies.get(event.name)
        if kept is None:
            return None
        if kept.record is not None:
            self._records.settle(kept.record)
        if kept.record is None or kept.record["record_id"] != record_id:
            self._records.give_up(record_id, kept.reply.error)
        return kept.reply

    def finish(self, event: EventRequest, collected: Collected) -> EventReply:
        """The reply of what was submitted and has been answered, kept and then settled."""
        dialect = self._endpoints[_path(event.url)]
        completion, canonical = collected.completion, self.canonical(event)
        head = AnswerHead(event.name, int(self._clock.now().timestamp()), completion.model, collected.total_ms)
        wire = dialect.encode(completion, canonical, head)
        reply = EventReply(event.name, wire.status, wire.body, completion.model, completion.usage, collected.nanos)
        self._replies.put(event.name, KeptReply(reply, collected.record))
        self._records.settle(collected.record)
        return reply

    def fail(self, event: EventRequest, error: CompletionError) -> EventReply:
        """The reply of what was submitted and will not be answered, kept."""
        reply = self._refusal(event, self._endpoints[_path(event.url)], error)
        self._replies.put(event.name, KeptReply(reply, None))
        return reply

    def _failed(self, spoken: _Spoken, error: CompletionError) -> EventReply:
        """The last word on a request that was tried: kept, so that it stays the last."""
        reply = self._refusal(spoken.event, spoken.dialect, error, spoken.canonical)
        self._replies.put(spoken.event.name, KeptReply(reply, None))
        return reply

    def _reply(self, spoken: _Spoken, completion: Completion, record: UsageRecord) -> EventReply:
        now = int(self._clock.now().timestamp())
        head = AnswerHead(spoken.event.name, now, completion.model, record.timings.total_ms)
        wire = spoken.dialect.encode(completion, spoken.canonical, head)
        return EventReply(
            spoken.event.name, wire.status, wire.body, completion.model, completion.usage, record.charge.nanos
        )

    def _refusal(
        self, event: EventRequest, dialect: Dialect, error: CompletionError, request: CompletionRequest | None = None
    ) -> EventReply:
        head = ErrorHead(event.name, self._clock.now().timestamp(), request)
        wire = dialect.encode_error(error, head)
        status = wire.status if wire.status >= 400 else 500 if isinstance(error, ServiceError) else 400
        return EventReply(
            event.name, status, _json_body(wire, error), error=type(error).__name__, message=error.message
        )


def _tries(name: str) -> Iterator[str]:
    yield name
    for number in range(2, _MOST_TRIES):
        yield f"{name}-{number}"


def _path(url: str) -> str:
    try:
        return urlsplit(url).path
    except ValueError:  # half an IPv6 address
        return ""


def _json_body(wire: WireReply, error: CompletionError) -> bytes:
    """Of a dialect whose failures are text, or events of a stream, the text in an object."""
    if wire.media_type.partition(";")[0] == "application/json":
        return wire.body
    is_text = wire.media_type.startswith("text/plain")
    return json.dumps({"error": {"message": wire.body.decode().rstrip("\n") if is_text else error.message}}).encode()


def _wire(event: EventRequest) -> WireRequest:
    parts = urlsplit(event.url)
    items = parse_qsl(parts.query, keep_blank_values=True)
    return WireRequest("POST", parts.path, dict(items), {"content-type": "application/json"}, event.body, {}, items)


def _streams_only(url: str) -> bool:
    """Whether HTTP always streams there, so that a body that says so asks for nothing else."""
    return urlsplit(url).path.endswith("stream")


def _passing(error: CompletionError) -> bool:
    return isinstance(error, _BUSY) and not isinstance(error, QuotaExceededError)


def _later(error: CompletionError) -> RetryLaterError:
    reason = type(error).__name__ if error.detail is None else f"{type(error).__name__}: {error.detail}"
    return RetryLaterError(reason, _BUSY_SECONDS if error.retry_after is None else max(error.retry_after, 0.05))
