"""What each dialect's stream encoder costs an event, and how that grows with the answer.

The cumulative Sourcegraph form repeats all the text so far in each event, so its bytes grow with the square of the
answer; the work of encoding an event must not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from figures import Grid

from completions.dialects.dialect import AnswerHead, Dialect, StreamEncoder
from completions.dialects.openai import OpenAIDialect
from completions.dialects.scale import ScaleDialect
from completions.dialects.scale_v1 import ScaleV1Dialect
from completions.dialects.sourcegraph import SourcegraphDialect
from completions.domain.completion import ChoiceDelta, CompletionChunk, CompletionRequest, FinishReason, Usage

LENGTHS = (2_000, 4_000, 8_000)
HEAD = AnswerHead("request-1", 1_796_000_000, "demo", 1)
REQUEST = CompletionRequest("demo", ("x",), stream=True)
CUMULATIVE = CompletionRequest("demo", ("x",), stream=True, cumulative=True)


def encoders() -> dict[str, Callable[[], StreamEncoder]]:
    """A fresh encoder of each stream form."""

    def fresh(dialect: Dialect, request: CompletionRequest) -> Callable[[], StreamEncoder]:
        return lambda: dialect.stream_encoder(request, HEAD)

    return {
        "OpenAI": fresh(OpenAIDialect(), REQUEST),
        "Scale v2": fresh(ScaleDialect(), REQUEST),
        "Scale v1": fresh(ScaleV1Dialect(streamed=True), REQUEST),
        "Sourcegraph, deltas": fresh(SourcegraphDialect(True), REQUEST),
        "Sourcegraph, cumulative": fresh(SourcegraphDialect(True), CUMULATIVE),
    }


def chunks(length: int) -> list[CompletionChunk]:
    """An answer of ``length`` tokens, one a chunk, with some characters that need escaping."""
    pieces = [" token", " <T>", " \\n", " é"]
    return [
        CompletionChunk(
            (ChoiceDelta(0, pieces[number % 4], None, FinishReason.LENGTH if number == length - 1 else None),),
            Usage(8, number + 1),
        )
        for number in range(length)
    ]


def events_per_second(fresh: Callable[[], StreamEncoder], answer: list[CompletionChunk]) -> float:
    """The best of three passes, by CPU time."""
    passes = []
    for _ in range(3):
        encoder = fresh()
        started = time.process_time()
        for chunk in answer:
            encoder.chunk(chunk)
        encoder.done()
        passes.append(len(answer) / (time.process_time() - started))
    return max(passes)


def encoder_grid() -> tuple[Grid, float]:
    """A row a form; and for the cumulative one, how much longer four times the text takes than four times as long."""
    answers = [chunks(length) for length in LENGTHS]
    rows, growth = [], 1.0
    for name, fresh in encoders().items():
        rates = [events_per_second(fresh, answer) for answer in answers]
        growth = rates[0] / rates[-1]
        rows.append((name, *(f"{rate:,.0f}" for rate in rates), f"{1e6 / rates[-1]:.1f}", f"{growth:.2f}"))
    columns = (
        "stream form", *(f"events/s at {length:,}" for length in LENGTHS), "µs per event", "longest : shortest",
    )  # fmt: skip
    return Grid("What a dialect's stream encoder alone costs", columns, tuple(rows)), growth
