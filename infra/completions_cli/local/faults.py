"""What can be made to go wrong at a stand-in endpoint, and the script of it."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RefusalKind = Literal["throttled", "not_ready", "no_capacity", "unavailable", "internal", "model_error"]


class Refusal(BaseModel):
    """The call fails at once. ``status`` and ``message`` are the container's own, for ``model_error``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: RefusalKind
    status: int = 500
    message: str = ""


class Fault(BaseModel):
    """How one call, or ``calls`` of them, misbehaves; ``None`` calls means every one from here on.

    ``split_every`` cuts the container's bytes into parts of that many; ``delay_ms`` waits before each part.
    ``end_after``, ``exception_after`` and ``cut_after`` end the stream after so many bytes of the container's answer:
    in good order but incomplete, with an exception frame, or by closing the connection.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    calls: int | None = Field(default=1, ge=1)
    refusal: Refusal | None = None
    split_every: int | None = Field(default=None, ge=1)
    delay_ms: int = Field(default=0, ge=0)
    exception_after: int | None = Field(default=None, ge=0)
    exception_code: Literal["ModelInvocationTimeExceeded", "StreamBroken"] = "StreamBroken"
    cut_after: int | None = Field(default=None, ge=0)
    end_after: int | None = Field(default=None, ge=0)

    @property
    def kept_bytes(self) -> int | None:
        """How much of the container's answer gets through; ``None`` for all."""
        limits = (self.end_after, self.exception_after, self.cut_after)
        return min((limit for limit in limits if limit is not None), default=None)


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
