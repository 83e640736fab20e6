"""What the containers' streamed answers share: blocking generators as HTTP bodies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Generator
from contextlib import closing

from starlette.concurrency import iterate_in_threadpool
from starlette.responses import StreamingResponse


def streamed(
    pieces: Generator[str, None, None], media_type: str, headers: dict[str, str] | None = None
) -> StreamingResponse:
    """A response of ``pieces``; when the client goes away the generator is closed, which ends the generation."""
    return StreamingResponse(_closing(pieces), media_type=media_type, headers=headers)


def compact_json(body: object) -> str:
    """JSON without blanks, in UTF-8 rather than escapes."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


async def _closing(pieces: Generator[str, None, None]) -> AsyncIterator[str]:
    with closing(pieces):
        async for piece in iterate_in_threadpool(pieces):
            yield piece
