"""Calls given up after a time: botocore has a timeout for each client, not for each call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitTimeoutError
from contextlib import suppress
from typing import Final, TypeVar

from completions.domain.errors import BackendTimeoutError

_T = TypeVar("_T")
_MOST_WAITING: Final = 64


class BoundedCalls:
    """Each call waits in a thread of its own, which goes on when nobody waits for it any more."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MOST_WAITING, thread_name_prefix="bounded-call")

    def within(self, seconds: float, call: Callable[[], _T], *, too_late: Callable[[_T], object] | None = None) -> _T:
        """What ``call`` returns or raises. Raises ``BackendTimeoutError`` after ``seconds``; what comes later is handed
        to ``too_late``."""
        future = self._pool.submit(call)
        try:
            return future.result(timeout=seconds)
        except WaitTimeoutError:
            # one that still waits for a thread is never sent
            if not future.cancel() and too_late is not None:
                future.add_done_callback(_handing_to(too_late))
            raise BackendTimeoutError("The model did not answer in time.", detail="no reply from AWS") from None


def _handing_to(too_late: Callable[[_T], object]) -> Callable[[Future[_T]], None]:
    def done(future: Future[_T]) -> None:
        with suppress(Exception):  # a call that nobody waits for any more may also have failed
            too_late(future.result())

    return done
