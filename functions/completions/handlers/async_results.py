"""What asynchronous endpoints were asked for by messages has come to its end: by SNS, by S3, or by the clock."""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

from completions.handlers import ready
from completions.pipeline_bootstrap import build_async_results

_SPARE_SECONDS: Final = 25.0
"""Left of the function's time when the last reply is begun: one that is cut off may be sent twice."""

_results = build_async_results()
ready()


class Context(Protocol):
    """Lambda's, as far as it is used."""

    def get_remaining_time_in_millis(self) -> int: ...


def handler(event: dict[str, Any], context: Context) -> dict[str, int]:
    """How many replies were sent."""
    left = context.get_remaining_time_in_millis() / 1000
    return {"replies": _results.handle(event, time.monotonic() + left - min(_SPARE_SECONDS, left / 2))}
