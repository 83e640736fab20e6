"""A process of its own for what is measured against: a model endpoint that answers at once, or at a given pace.

It speaks SageMaker's two calls to vLLM's and TGI's containers, and OpenAI's ``/v1/completions``, so that every
contender is given the same answer. It is quicker than the stand-in of ``make serve``, which would take a core of its
own: answers are made once and kept. An answer has as many events as it is asked for tokens; an endpoint or model whose
name ends in ``-20ms`` sends one every 20 ms, any other all of them in one write. Prints its URL and runs until its
input ends.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from completions_cli.local import event_stream

PROMPT_TOKENS = 8
WORD = b"lorem"
"""What every token of an answer holds once, and nothing else of it does."""
WORDS = (" lorem", " lorems")
"""In turn: a peer takes a hundred equal pieces in a row for a model that loops, and ends the stream."""
_CALL = re.compile(r"/endpoints/([^/]+)/(invocations|invocations-response-stream)")
_PACE = re.compile(r"-(\d+)ms$")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def openai_events(tokens: int, *, usage: bool) -> Iterator[bytes]:
    """vLLM's records, with a running usage where it was asked for."""
    record = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "bench"}
    for number in range(1, tokens + 1):
        finish = "length" if number == tokens else None
        text = WORDS[number % 2]
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        fields: dict[str, Any] = {**record, "choices": [choice]}
        yield _sse(fields | ({"usage": _usage(number)} if usage else {}))
    if usage:
        yield _sse({**record, "choices": [], "usage": _usage(tokens)})
    yield b"data: [DONE]\n\n"


def tgi_events(tokens: int) -> Iterator[bytes]:
    """TGI's records; the last one has the whole text and the counts."""
    for number in range(1, tokens + 1):
        token = {"id": 5, "text": WORDS[number % 2], "logprob": -0.5, "special": False}
        fields: dict[str, Any] = {"index": number, "token": token, "generated_text": None, "details": None}
        if number == tokens:
            details = {"finish_reason": "length", "generated_tokens": tokens, "input_length": PROMPT_TOKENS}
            fields |= {"generated_text": "", "details": {**details, "seed": None}}
        yield b"data:" + json.dumps(fields).encode() + b"\n\n"


def whole(kind: str, tokens: int) -> bytes:
    """The answer in one document."""
    if kind == "tgi":
        return json.dumps([{"generated_text": WORDS[0] * tokens}]).encode()
    choice = {"index": 0, "text": WORDS[0] * tokens, "logprobs": None, "finish_reason": "length"}
    fields = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "bench", "choices": [choice]}
    return json.dumps({**fields, "usage": _usage(tokens)}).encode()


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}


def _sse(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def _head(content_type: str, length: int | None) -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n{size}\r\n\r\n".encode()


@lru_cache(maxsize=64)
def streamed(kind: str, tokens: int, usage: bool, framed: bool) -> tuple[bytes, tuple[bytes, ...]]:
    """The head, and one HTTP chunk an event."""
    events = tgi_events(tokens) if kind == "tgi" else openai_events(tokens, usage=usage)
    parts = [event_stream.payload_part(event) if framed else event for event in events]
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    chunks[-1] += b"0\r\n\r\n"
    return _head(event_stream.MEDIA_TYPE if framed else "text/event-stream", None), tuple(chunks)


@lru_cache(maxsize=64)
def unstreamed(kind: str, tokens: int) -> bytes:
    """Head and body."""
    body = whole(kind, tokens)
    return _head("application/json", len(body)) + body


class Endpoint(asyncio.Protocol):
    """One connection: requests one after another."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._paced: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for task in self._paced:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, end)
            stop = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < stop:
                return
            line, body = self._buffer[: self._buffer.index(b"\r\n")].decode(), self._buffer[end + 4 : stop]
            self._buffer = self._buffer[stop:]
            self._answer(line.split(" ")[1], json.loads(body or b"{}"))

    def _answer(self, path: str, body: dict[str, Any]) -> None:
        assert self._transport is not None
        call = _CALL.fullmatch(path)
        kind = "tgi" if "inputs" in body else "openai"
        parameters = body.get("parameters") or {}
        tokens = int(body.get("max_tokens") or parameters.get("max_new_tokens") or parameters.get("max_tokens") or 16)
        pace = _PACE.search(call[1] if call else str(body.get("model", "")))
        stream = call[2] == "invocations-response-stream" if call else bool(body.get("stream"))
        if not stream:
            self._transport.write(unstreamed(kind, tokens))
            return
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        head, chunks = streamed(kind, tokens, usage, call is not None)
        if pace is None:
            self._transport.write(head + b"".join(chunks))
            return
        task = asyncio.get_running_loop().create_task(self._send(head, chunks, int(pace[1]) / 1000))
        self._paced.add(task)
        task.add_done_callback(self._paced.discard)

    async def _send(self, head: bytes, chunks: tuple[bytes, ...], seconds: float) -> None:
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._transport.write(head + chunks[0])
        due = loop.time()
        for chunk in chunks[1:]:
            due += seconds
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._transport.write(chunk)


async def serve() -> None:
    """Until the parent closes our standard input."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Endpoint, "127.0.0.1", 0, backlog=512)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
