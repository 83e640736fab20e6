"""Functions for the local stack's tests: they keep what they are called with, and answer or fail as they are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

calls: list[Any] = []
answer: list[Callable[[Any], Any]] = []


def handler(event: Any, context: Any) -> Any:
    """What the templates of the tests name."""
    calls.append(event)
    return answer[0](event) if answer else None


def begin(reply: Callable[[Any], Any] | None = None) -> None:
    """Forget what was; from now on ``reply`` answers."""
    calls.clear()
    answer[:] = [] if reply is None else [reply]


def until(count: int, seconds: float = 10) -> list[Any]:
    """The calls, once there are so many."""
    deadline = time.monotonic() + seconds
    while len(calls) < count:
        assert time.monotonic() < deadline, f"{len(calls)} calls of {count}"
        time.sleep(0.01)
    return list(calls)
