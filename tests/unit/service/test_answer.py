"""Chunks joined to choices."""

from __future__ import annotations

import pytest

from completions.domain.completion import Choice, FinishReason, Logprobs
from completions.domain.errors import TruncatedStreamError
from fakes import collected, delta

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_interleaved_choices_are_joined_in_index_order() -> None:
    chunks = [delta("b", index=1), delta("a", index=0), delta("B", STOP, index=1), delta("A", LENGTH, index=0)]
    assert collected(chunks) == (Choice(0, "aA", LENGTH), Choice(1, "bB", STOP))


def test_logprobs_are_joined_array_by_array() -> None:
    first = Logprobs(("a",), (None,), (None,), (0,))
    second = Logprobs(("b", "c"), (-1.0, -2.0), ({"b": -1.0}, {"c": -2.0}), (1, 2))
    (choice,) = collected([delta("a", logprobs=first), delta("bc", STOP, logprobs=second)])
    assert choice.logprobs == Logprobs(("a", "b", "c"), (None, -1.0, -2.0), (None, {"b": -1.0}, {"c": -2.0}), (0, 1, 2))


def test_a_choice_without_a_finish_reason_is_truncated() -> None:
    with pytest.raises(TruncatedStreamError):
        collected([delta("a", STOP, index=0), delta("b", index=1)])


def test_no_chunks_are_no_choices() -> None:
    assert collected([]) == ()
