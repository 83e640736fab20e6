"""One small module per Lambda function. Each ends with ``ready()``, when all that it needs is made."""

from __future__ import annotations

import gc
from typing import Final

_THRESHOLDS: Final = gc.get_threshold()
# A start makes some 150,000 objects and no garbage: to look through them again and again is a tenth of its time.
gc.set_threshold(250_000, *_THRESHOLDS[1:])


def ready() -> None:
    """What the start made is here to stay, and never looked through for garbage; what comes now is, as ever."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
