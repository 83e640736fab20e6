"""What each dialect's stream encoder costs an event, and how that grows with the answer.

The cumulative Sourcegraph form repeats all the text so far in each event, so its bytes grow with the square of the
answer; the work of encoding an event must not. Rows show events a second for answers of three lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.table import Table

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
    """The best of three passes."""
    passes = []
    for _ in range(3):
        encoder = fresh()
        started = time.perf_counter()
        for chunk in answer:
            encoder.chunk(chunk)
        encoder.done()
        passes.append(len(answer) / (time.perf_counter() - started))
    return max(passes)


def stream_table() -> Table:
    """Events a second, and what an event of the longest answer costs against one of the shortest."""
    table = Table(
        "stream form", *(f"events/s at {length:,}" for length in LENGTHS), "µs per event", "longest : shortest"
    )
    table.title = "What a dialect's stream encoder costs"
    for column in table.columns[1:]:
        column.justify = "right"
    answers = [chunks(length) for length in LENGTHS]
    for name, fresh in encoders().items():
        rates = [events_per_second(fresh, answer) for answer in answers]
        row = [f"{rate:,.0f}" for rate in rates]
        table.add_row(name, *row, f"{1e6 / rates[-1]:.1f}", f"{rates[0] / rates[-1]:.2f}")
    return table
