"""What nobody foresaw, in the log."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, Final

from completions.observability import logger

_MOST_FRAMES: Final = 12


def log_unexpected(error: Exception, **names: Any) -> None:
    """Type and places, without the message, which may quote the caller's text."""
    frames = traceback.extract_tb(error.__traceback__)
    logger.error(
        "unexpected_error",
        **names,
        error=type(error).__name__,
        frames=[f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-_MOST_FRAMES:]],
    )
