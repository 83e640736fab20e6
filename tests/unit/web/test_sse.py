"""However a streamed response ends, its answer is closed and its claim settled before it does."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from completions.dialects.dialect import AnswerHead
from completions.dialects.openai import OpenAIDialect
from completions.domain.completion import FinishReason, Usage
from completions.domain.metering import Outcome
from completions.service.complete import CallContext, CompletionService
from completions.web.sse import StreamedReply
from fakes import InMemoryLedger, InMemoryRegistry, ManualClock, ScriptedBackend, delta, principal, request, route


def pause() -> None:
    time.sleep(0.2)


class Bench:
    """A reply that is ready to be sent, and what came of it."""

    def __init__(self, *script: Any) -> None:
        self.ledger = InMemoryLedger()
        self.backend = ScriptedBackend(script)
        registry = InMemoryRegistry({}, [route()])
        service = CompletionService(registry, self.backend, self.ledger, ManualClock())
        canonical = request(stream=True)
        stream = service.stream(canonical, CallContext("r", principal(), "openai", 0))
        encoder = OpenAIDialect().stream_encoder(canonical, AnswerHead("r", 1, "demo", 1))
        self.reply = StreamedReply(stream, encoder, "r")
        self.sent: list[Any] = []

    @property
    def outcomes(self) -> list[Outcome]:
        return [record.outcome for record in self.ledger.settled]

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def stay(self) -> Any:
        await asyncio.Event().wait()

    async def leave(self) -> Any:
        return {"type": "http.disconnect"}


LONG = (delta("a", usage=Usage(1, 1)), pause, delta("b"), pause, delta("c", FinishReason.STOP))


async def test_a_whole_answer_is_sent_and_settled() -> None:
    bench = Bench(*LONG)
    await bench.reply({"type": "http"}, bench.stay, bench.send)
    assert b"[DONE]" in b"".join(message.get("body", b"") for message in bench.sent)
    assert bench.sent[-1]["more_body"] is False
    assert bench.outcomes == [Outcome.SUCCEEDED]


async def test_a_client_who_left_before_the_first_frame_is_settled_as_aborted() -> None:
    bench = Bench(*LONG)
    await bench.reply({"type": "http"}, bench.leave, bench.send)
    assert bench.outcomes == [Outcome.ABORTED]
    assert bench.backend.streams[0].closed


async def test_a_head_that_cannot_be_sent_is_settled_too() -> None:
    bench = Bench(*LONG)

    async def broken(_: Any) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await bench.reply({"type": "http"}, bench.stay, broken)
    assert bench.outcomes == [Outcome.ABORTED]


async def test_a_server_that_cancels_in_the_middle_of_a_chunk_settles_it() -> None:
    bench = Bench(*LONG)
    task = asyncio.ensure_future(bench.reply({"type": "http"}, bench.stay, bench.send))
    await asyncio.sleep(0.1)  # the thread is within the first pause
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.outcomes == [Outcome.ABORTED]
    assert bench.backend.streams[0].closed
