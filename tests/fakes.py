"""In-memory stand-ins for the ports, and builders of the values they take. Each fake keeps what it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from threading import Lock
from types import TracebackType
from typing import Any, Self, TypeAlias

from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import (
    Choice,
    ChoiceDelta,
    CompletionChunk,
    CompletionRequest,
    FinishReason,
    Logprobs,
    Usage,
)
from completions.domain.errors import CompletionError, DuplicateRequestError, LimitStatus, MeteringError
from completions.domain.metering import Principal, Reservation, UsageRecord
from completions.domain.ports import Backend, BackendStream, Claim, Clock, Registry, UpstreamCall, UsageLedger
from completions.domain.usage import Granularity, KeyUse, UsageReports, UsageRow
from completions.service.answer import Drafts

ScriptItem: TypeAlias = CompletionChunk | BaseException | Callable[[], None]
"""What one step of a scripted answer does: give a chunk, raise, or run something on the way to the next chunk."""


class ManualClock(Clock):
    """Stands still until it is advanced; both of its readings move together."""

    def __init__(self, now: datetime = datetime(2026, 1, 1, 12, tzinfo=UTC), monotonic: float = 1000.0) -> None:
        self.slept: list[float] = []
        self._now = now
        self._monotonic = monotonic

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += timedelta(seconds=seconds)
        self._monotonic += seconds


class InMemoryRegistry(Registry):
    """``principals`` by the SHA-256 of their key; routes are found by id and by alias."""

    def __init__(self, principals: Mapping[str, Principal], routes: Sequence[ModelRoute]) -> None:
        self._principals = dict(principals)
        self._routes = list(routes)

    def principal(self, secret_sha256: str, *, next_model: str | None = None) -> Principal | None:
        return self._principals.get(secret_sha256)

    def principal_of(self, key_id: str) -> Principal | None:
        return next((one for one in self._principals.values() if one.key_id == key_id), None)

    def route(self, model: str) -> ModelRoute | None:
        return next((route for route in self._routes if model in (route.model_id, *route.aliases)), None)

    def routes(self) -> Sequence[ModelRoute]:
        return sorted(self._routes, key=lambda route: route.model_id)


class InMemoryLedger(UsageLedger):
    """``settled`` holds one entry for each call, so that a second settlement shows."""

    def __init__(
        self,
        *,
        fail_reserve: bool = False,
        fail_confirm: CompletionError | None = None,
        fail_settle: bool = False,
    ) -> None:
        self.reserved: list[Reservation] = []
        self.settled: list[UsageRecord] = []
        self._fail_reserve = fail_reserve
        self._fail_confirm = fail_confirm
        self._fail_settle = fail_settle

    def reserve(self, reservation: Reservation) -> Claim:
        if self._fail_reserve:
            raise MeteringError("The request could not be metered, so it was not served.")
        if any(known.record_id == reservation.record_id for known in self.reserved):
            raise DuplicateRequestError("This request was already served.")
        self.reserved.append(reservation)
        return InMemoryClaim(self.settled, fail_confirm=self._fail_confirm, fail_settle=self._fail_settle)


class InMemoryClaim(Claim):
    """Adds what it is settled with to ``settled``."""

    limits: Sequence[LimitStatus] = ()

    def __init__(
        self, settled: list[UsageRecord], *, fail_confirm: CompletionError | None = None, fail_settle: bool = False
    ) -> None:
        self._settled = settled
        self._fail_confirm = fail_confirm
        self._fail_settle = fail_settle

    def confirm(self) -> None:
        if self._fail_confirm is not None:
            raise self._fail_confirm

    def settle(self, record: UsageRecord) -> None:
        self._settled.append(record)
        if self._fail_settle:
            raise MeteringError("The usage could not be written.")


class InMemoryReports(UsageReports):
    """``asked`` keeps what rows were asked for."""

    def __init__(
        self, rows: Mapping[Granularity, Sequence[UsageRow]] | None = None, uses: Sequence[KeyUse] = ()
    ) -> None:
        self.asked: list[tuple[Granularity, datetime, datetime]] = []
        self._rows = rows or {}
        self._uses = uses

    def rows(
        self, granularity: Granularity, start: datetime, end: datetime, *, latencies: bool = False
    ) -> Iterator[UsageRow]:
        self.asked.append((granularity, start, end))
        return (row for row in self._rows.get(granularity, ()) if start <= row.start < end)

    def limits(self, moment: datetime) -> Sequence[KeyUse]:
        return self._uses


@dataclass(frozen=True, slots=True)
class BackendCall:
    """What a backend was asked."""

    request: CompletionRequest
    route: ModelRoute
    call: UpstreamCall


class ScriptedBackend(Backend):
    """Answers every call with ``script``, or refuses it with ``refusal``.

    ``calls`` and ``streams`` keep what was asked and handed out.
    """

    def __init__(
        self,
        script: Sequence[ScriptItem] = (),
        *,
        capabilities: Mapping[Parameter, Capability] | None = None,
        refusal: Exception | None = None,
        variant: str | None = "AllTraffic",
    ) -> None:
        self.calls: list[BackendCall] = []
        self.streams: list[ScriptedStream] = []
        self._script = tuple(script)
        self._capabilities = {**dict.fromkeys(Parameter, Capability.HONOURED), **(capabilities or {})}
        self._refusal = refusal
        self._variant = variant

    def abilities(self, route: ModelRoute) -> Abilities:
        return Abilities({**self._capabilities, **route.capabilities}, max_stops=4)

    def stream(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall) -> BackendStream:
        self.calls.append(BackendCall(request, route, call))
        call.dispatched()
        if self._refusal is not None:
            raise self._refusal
        stream = ScriptedStream(self._script, self._variant)
        self.streams.append(stream)
        return stream


Attempt: TypeAlias = CompletionError | Sequence[ScriptItem]
"""What one call meets: a refusal, or the script of an answer."""


class SequencedBackend(Backend):
    """Answers one call after the other with ``attempts``, or, given by endpoint name, with those of the route."""

    def __init__(
        self,
        attempts: Sequence[Attempt] | Mapping[str, Sequence[Attempt]],
        *,
        capabilities: Mapping[Parameter, Capability] | None = None,
    ) -> None:
        by_endpoint = attempts if isinstance(attempts, Mapping) else {"demo-endpoint": attempts}
        self.calls: list[BackendCall] = []
        self.streams: list[ScriptedStream] = []
        self._attempts = {endpoint: iter(script) for endpoint, script in by_endpoint.items()}
        self._capabilities = {**dict.fromkeys(Parameter, Capability.HONOURED), **(capabilities or {})}
        self._lock = Lock()

    def abilities(self, route: ModelRoute) -> Abilities:
        return Abilities({**self._capabilities, **route.capabilities}, max_stops=4)

    def stream(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall) -> BackendStream:
        with self._lock:
            self.calls.append(BackendCall(request, route, call))
            attempt = next(self._attempts[route.endpoint_name])
        call.dispatched()
        if isinstance(attempt, CompletionError):
            raise attempt
        stream = ScriptedStream(attempt, f"variant-of-{route.endpoint_name}")
        self.streams.append(stream)
        return stream


class ScriptedStream(BackendStream):
    """``closed`` tells whether its reader let go of it, ``waits`` how long each wait was allowed to be."""

    def __init__(self, script: Sequence[ScriptItem], variant: str | None) -> None:
        self.closed = False
        self.aborted = False
        self.waits: list[float] = []
        self._items = iter(script)
        self._variant = variant

    @property
    def variant(self) -> str | None:
        return self._variant

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> CompletionChunk:
        for item in self._items:
            if isinstance(item, CompletionChunk):
                return item
            if isinstance(item, BaseException):
                raise item
            item()
        raise StopIteration

    def limit_wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def route(**overrides: Any) -> ModelRoute:
    """A model that exists."""
    known = ModelRoute("demo", "demo-endpoint", "vllm", context_length=4096, created=1_700_000_000)
    return replace(known, **overrides)


def principal(**overrides: Any) -> Principal:
    """A key that may use every model."""
    return replace(Principal("key-1", "alice", "search"), **overrides)


def request(**overrides: Any) -> CompletionRequest:
    """One text prompt, all defaults."""
    return replace(CompletionRequest("demo", ("def f(",)), **overrides)


def delta(text: str, finish_reason: FinishReason | None = None, *, index: int = 0, **fields: Any) -> CompletionChunk:
    """A chunk with one choice; ``usage`` and ``logprobs`` as given."""
    usage: Usage | None = fields.get("usage")
    logprobs: Logprobs | None = fields.get("logprobs")
    return CompletionChunk((ChoiceDelta(index, text, logprobs, finish_reason),), usage)


def all_error_classes(root: type[CompletionError] = CompletionError) -> set[type[CompletionError]]:
    """The whole tree of canonical errors, its root included; a dialect's own kinds are the dialect's business."""
    children = (child for child in root.__subclasses__() if child.__module__ == CompletionError.__module__)
    return {root}.union(*(all_error_classes(child) for child in children))


def collected(chunks: Iterable[CompletionChunk]) -> tuple[Choice, ...]:
    """The choices that chunks come to."""
    drafts = Drafts()
    for chunk in chunks:
        drafts.add(chunk)
    return drafts.choices()
