"""How a batch looks on a terminal, and what waiting for one does when the service stumbles."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from completions_cli.batch_api import BatchApiError
from completions_cli.batch_view import LiveView, faults, line, watched

PASSING = BatchApiError("busy", passing=True)


def batch(status: str = "in_progress", completed: int = 0, failed: int = 0, **fields: Any) -> dict[str, Any]:
    counts = {"total": 200, "completed": completed, "failed": failed}
    usage = {"input_tokens": 12_000, "output_tokens": 3_456}
    return {"id": "batch_1", "status": status, "request_counts": counts, "usage": usage, **fields}


def test_a_line_has_counts_tokens_and_money() -> None:
    assert line(batch(completed=150, failed=3, cost={"value": 1.25, "currency": "usd"})) == (
        "batch_1 in_progress: 150 of 200 lines, 3 failed, 12,000 + 3,456 tokens, $1.2500"
    )


def test_what_another_service_does_not_tell_is_left_out() -> None:
    assert line({"id": "batch_1", "status": "validating"}) == (
        "batch_1 validating: 0 of 0 lines, 0 failed, 0 + 0 tokens"
    )
    assert list(faults({"errors": None})) == []


def test_faults_name_their_lines_and_are_not_too_many() -> None:
    found = [{"line": number, "message": "no JSON", "code": "invalid_json_line"} for number in range(1, 13)]

    said = list(faults({"errors": {"data": [{"line": None, "message": "empty", "code": "empty_file"}, *found]}}, 3))
    assert said == [
        "empty (empty_file)",
        "line 1: no JSON (invalid_json_line)",
        "line 2: no JSON (invalid_json_line)",
        "and 10 more",
    ]


def test_it_is_shown_until_it_has_ended() -> None:
    states = iter([batch("validating"), batch(completed=100), batch("completed", 200)])
    shown: list[Any] = []
    slept: list[float] = []

    assert watched(lambda: next(states), shown.append, 2.0, slept.append) == batch("completed", 200)
    assert [one["status"] for one in shown] == ["validating", "in_progress", "completed"]
    assert slept == [2.0, 2.0]


def test_passing_failures_are_waited_out_longer_and_longer() -> None:
    answers: list[Any] = [PASSING, PASSING, batch(), PASSING, batch("completed")]
    slept: list[float] = []

    def read() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, BatchApiError):
            raise answer
        return answer

    assert watched(read, lambda _: None, 2.0, slept.append)["status"] == "completed"
    assert slept == [4.0, 8.0, 2.0, 4.0]


@pytest.mark.parametrize(("error", "asked"), [(PASSING, 10), (BatchApiError("no such batch"), 1)])
def test_what_does_not_pass_is_told(error: BatchApiError, asked: int) -> None:
    reads: list[None] = []

    def read() -> Any:
        reads.append(None)
        raise error

    with pytest.raises(BatchApiError) as raised:
        watched(read, lambda _: None, 0.1, lambda _: None)
    assert raised.value is error
    assert len(reads) == asked


def test_a_terminal_has_a_bar_with_live_counts() -> None:
    written = StringIO()
    with LiveView(Console(file=written, force_terminal=True, width=140)) as view:
        view.show(batch("validating") | {"request_counts": {"total": 0, "completed": 0, "failed": 0}})
        view.show(batch(completed=150, failed=3, cost={"value": 1.25}))

    last = written.getvalue()
    assert "153/200" in last
    assert "3 failed, 12,000 + 3,456 tokens, $1.2500" in last


def test_where_nobody_watches_a_line_is_written_for_each_tenth() -> None:
    written = StringIO()
    with LiveView(Console(file=written)) as view:
        for completed in range(0, 201, 5):
            view.show(batch(completed=completed))
        view.show(batch("completed", 200))

    lines = written.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[1].startswith("batch_1 in_progress: 20 of 200 lines")
    assert lines[-1].startswith("batch_1 in_progress: 200 of 200 lines")
