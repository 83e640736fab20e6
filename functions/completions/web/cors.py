"""Browsers' cross-origin requests, for the origins that the operator names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware

from completions.web.framework import FastAPI

_METHODS: Final = ("GET", "POST", "DELETE")
_LIMITS: Final = [
    f"x-ratelimit-{fact}-{kind}" for fact in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
]
_EXPOSED: Final = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    *_LIMITS,
)  # fmt: skip
_MAX_AGE: Final = 7200  # as long as Chrome remembers an answer at most


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of ``origins`` (``*`` for all) use ``app``; none leaves it as it is.

    To be called last, for what is added last stands outermost: a preflight is answered before anything looks for a key,
    and an error, too, says who may read it. Any header may be sent: SDKs bring their own (``x-stainless-…``), which
    change with their versions. Cookies count for nothing here, so a page can send no more than any other program.
    """
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=tuple(origins),
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
            max_age=_MAX_AGE,
        )
