"""The queue of requests: a message is answered once, and its reply goes to a queue, a bus or an object."""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

from completions.handlers import ready
from completions.pipeline_bootstrap import build_queue_worker

_SPARE_SECONDS: Final = 20.0
"""Left of the function's time when the model must have finished: to settle, to reply, and to say what is not done."""

_worker = build_queue_worker()
ready()


class Context(Protocol):
    """Lambda's, as far as it is used."""

    def get_remaining_time_in_millis(self) -> int: ...


def handler(event: dict[str, Any], context: Context) -> dict[str, list[dict[str, str]]]:
    """A partial batch response."""
    left = context.get_remaining_time_in_millis() / 1000
    deadline = time.monotonic() + left - min(_SPARE_SECONDS, left / 4)
    failed = _worker.work(event["Records"], deadline)
    return {"batchItemFailures": [{"itemIdentifier": message_id} for message_id in failed]}
