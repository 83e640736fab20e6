"""However a streamed response ends, its answer is closed and its claim settled before it does."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from completions.dialects.dialect import AnswerHead
from completions.dialects.openai import OpenAIDialect
from completions.domain.completion import FinishReason, Usage
from completions.domain.errors import BackendError
from completions.domain.metering import Outcome
from completions.service.complete import CallContext, CompletionService
from completions.web.sse import StreamedReply
from fakes import InMemoryLedger, InMemoryRegistry, ManualClock, ScriptedBackend, delta, principal, request, route


def pause() -> None:
    time.sleep(0.2)


class Bench:
    """A reply that is ready to be sent, and what came of it."""

    def __init__(self, *script: Any, live: bool = True) -> None:
        self.ledger = InMemoryLedger()
        self.backend = ScriptedBackend(script)
        registry = InMemoryRegistry({}, [route()])
        service = CompletionService(registry, self.backend, self.ledger, ManualClock())
        canonical = request(stream=True)
        stream = service.stream(canonical, CallContext("r", principal(), "openai", 0))
        encoder = OpenAIDialect().stream_encoder(canonical, AnswerHead("r", 1, "demo", 1))
        self.reply = StreamedReply(stream, encoder, "r", live=live)
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


def spoken(bench: Bench) -> list[bytes]:
    """What each write carried."""
    return [message["body"] for message in bench.sent if message.get("body")]


async def test_the_first_frame_is_written_alone_and_at_once() -> None:
    bench = Bench(delta("a", usage=Usage(1, 1)), delta("b"), delta("c", FinishReason.STOP))
    await bench.reply({"type": "http"}, bench.stay, bench.send)
    assert spoken(bench)[0].count(b"data: ") == 1
    assert b'"text":"a"' in spoken(bench)[0]


async def test_frames_that_come_faster_than_they_are_taken_are_written_together_and_in_order() -> None:
    texts = [f"<{number}>" for number in range(300)]
    bench = Bench(*[delta(text) for text in texts], delta("", FinishReason.STOP, usage=Usage(1, 300)))
    await bench.reply({"type": "http"}, bench.stay, bench.send)
    body = b"".join(spoken(bench)).decode()
    assert [text for text in texts if text in body] == texts
    assert body.index("<0>") < body.index("<150>") < body.index("<299>") < body.index("[DONE]")
    assert len(spoken(bench)) < 100


async def test_a_frame_after_a_pause_waits_for_no_other() -> None:
    bench = Bench(delta("a", usage=Usage(1, 1)), pause, delta("b"), pause, delta("c", FinishReason.STOP))
    written: list[float] = []

    async def send(message: Any) -> None:
        written.append(time.monotonic())
        await bench.send(message)

    await bench.reply({"type": "http"}, bench.stay, send)
    assert len(spoken(bench)) >= 3
    assert written[2] - written[1] > 0.1  # the second frame came by itself, before the second pause


async def test_the_model_is_not_far_ahead_of_a_client_that_reads_slowly() -> None:
    long = "x" * 50_000
    bench = Bench(*[delta(long) for _ in range(20)], delta("", FinishReason.STOP, usage=Usage(1, 20)))

    async def slow(message: Any) -> None:
        await asyncio.sleep(0.02)
        await bench.send(message)

    await bench.reply({"type": "http"}, bench.stay, slow)
    assert b"".join(spoken(bench)).count(long.encode()) == 20
    assert max(map(len, spoken(bench))) < 4 * len(long)


async def test_a_client_that_leaves_while_the_model_is_ahead_of_it_keeps_no_thread() -> None:
    bench = Bench(*[delta("x" * 50_000) for _ in range(50)], delta("", FinishReason.STOP, usage=Usage(1, 50)))
    gone = asyncio.Event()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def stuck(message: Any) -> None:
        await bench.send(message)
        if len(bench.sent) == 2:
            gone.set()
            await asyncio.Event().wait()

    await asyncio.wait_for(bench.reply({"type": "http"}, receive, stuck), 5)
    assert bench.outcomes == [Outcome.ABORTED]
    assert bench.backend.streams[0].closed


async def test_where_nothing_leaves_before_its_end_all_of_it_is_one_write() -> None:
    bench = Bench(*LONG, live=False)
    await bench.reply({"type": "http"}, bench.stay, bench.send)
    (body,) = spoken(bench)
    assert [text in body for text in (b'"text":"a"', b'"text":"b"', b'"text":"c"', b"[DONE]")] == [True] * 4
    assert bench.outcomes == [Outcome.SUCCEEDED]


async def test_a_failure_is_told_in_that_form_too() -> None:
    bench = Bench(delta("a"), BackendError("The model failed to answer."), live=False)
    await bench.reply({"type": "http"}, bench.stay, bench.send)
    assert b'"error"' in spoken(bench)[-1]
    assert bench.outcomes == [Outcome.FAILED]
