"""What can be made to go wrong at a stand-in endpoint, and the script of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RefusalKind = Literal[
    "throttled",
    "not_ready",
    "no_capacity",
    "not_found",
    "access_denied",
    "unavailable",
    "internal",
    "internal_dependency",
    "connection_reset",
    "model_error",
]


class Refusal(BaseModel):
    """The call fails at once. ``status`` and ``message`` are the container's own, for ``model_error``.

    ``connection_reset`` ends the connection without a reply.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: RefusalKind
    status: int = 500
    message: str = ""


class Replacement(BaseModel):
    """An answer that the container never gave: ``body`` (in JSON: base64), ``repeat`` times over. It is sent piece by
    piece, so that an endless line needs no memory."""

    model_config = ConfigDict(extra="forbid", frozen=True, val_json_bytes="base64", ser_json_bytes="base64")

    body: bytes
    repeat: int = Field(default=1, ge=1)
    content_type: str = "text/event-stream"


class Fault(BaseModel):
    """How one call, or ``calls`` of them, misbehaves; ``None`` calls means every one from here on.

    ``head_delay_ms`` waits before anything is answered, refusals too. ``replacement`` answers in the container's place.
    Of a stream, ``split_every`` cuts the bytes into parts of that many, ``delay_ms`` waits before each part, and
    ``stall_ms`` once, after ``stall_after`` bytes. ``end_after``, ``exception_after`` and ``cut_after`` end it after so
    many bytes: in good order but incomplete, with an exception frame, or by closing the connection.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    calls: int | None = Field(default=1, ge=1)
    refusal: Refusal | None = None
    head_delay_ms: int = Field(default=0, ge=0)
    replacement: Replacement | None = None
    split_every: int | None = Field(default=None, ge=1)
    delay_ms: int = Field(default=0, ge=0)
    stall_after: int = Field(default=0, ge=0)
    stall_ms: int = Field(default=0, ge=0)
    exception_after: int | None = Field(default=None, ge=0)
    exception_kind: Literal["ModelStreamError", "InternalStreamFailure"] = "ModelStreamError"
    exception_code: Literal["ModelInvocationTimeExceeded", "StreamBroken"] = "StreamBroken"
    cut_after: int | None = Field(default=None, ge=0)
    end_after: int | None = Field(default=None, ge=0)

    @property
    def kept_bytes(self) -> int | None:
        """How much of the answer gets through; ``None`` for all."""
        limits = (self.end_after, self.exception_after, self.cut_after)
        return min((limit for limit in limits if limit is not None), default=None)

    def parts(self, data: Iterable[bytes], wait: Callable[[int], None]) -> Iterator[bytes]:
        """``data`` cut into parts, held up and ended as the fault says; ``wait`` takes milliseconds."""
        limit, sent, to_stall = self.kept_bytes, 0, self.stall_ms > 0
        for piece in data:
            start, end = 0, len(piece) if limit is None else min(len(piece), limit - sent)
            while start < end:
                stop = min(end, start + (self.split_every or end))
                if to_stall and sent < self.stall_after:
                    stop = min(stop, start + self.stall_after - sent)
                elif to_stall:
                    to_stall = False
                    wait(self.stall_ms)
                wait(self.delay_ms)
                yield piece[start:stop]
                sent += stop - start
                start = stop
            if limit is not None and sent >= limit:
                return


class FaultScript:
    """The faults of each endpoint, consumed in order, a call at a time; an empty script means good behaviour."""

    def __init__(self) -> None:
        self._faults: dict[str, deque[Fault]] = {}
        self._lock = Lock()

    def replace(self, endpoint: str, faults: list[Fault]) -> None:
        """Forget what was scripted for ``endpoint`` and start on ``faults``."""
        with self._lock:
            self._faults[endpoint] = deque(faults)

    def take(self, endpoint: str) -> Fault:
        """The fault of the next call."""
        with self._lock:
            faults = self._faults.get(endpoint)
            if not faults:
                return Fault()
            fault = faults[0]
            if fault.calls is None:
                return fault
            faults.popleft()
            if fault.calls > 1:
                faults.appendleft(fault.model_copy(update={"calls": fault.calls - 1}))
            return fault
