"""Stop texts cut on our side: whatever the pieces, the answer ends where the whole text would have been cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions.domain.completion import CompletionChunk, CompletionRequest, FinishReason, Logprobs, Usage
from completions.service.stops import cut_at_stops
from fakes import delta, request

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def cut(pieces: list[str], *stops: str, **fields: object) -> list[CompletionChunk]:
    """The released chunks of one choice whose last piece finishes it by length."""
    chunks = [delta(piece, LENGTH if number == len(pieces) - 1 else None) for number, piece in enumerate(pieces)]
    return list(cut_at_stops(chunks, stops, replace(request(), **fields)))  # type: ignore[arg-type]


def text(chunks: list[CompletionChunk], index: int = 0) -> str:
    return "".join(one.text for chunk in chunks for one in chunk.choices if one.index == index)


def finish(chunks: list[CompletionChunk]) -> list[FinishReason]:
    return [one.finish_reason for chunk in chunks for one in chunk.choices if one.finish_reason is not None]


def test_a_stop_within_one_piece_ends_the_answer_before_it() -> None:
    chunks = cut(["one END two", "three"], "END")
    assert (text(chunks), finish(chunks)) == ("one ", [STOP])


def test_a_stop_split_over_pieces_never_leaks() -> None:
    chunks = cut(["one E", "N", "D two"], "END")
    assert (text(chunks), finish(chunks)) == ("one ", [STOP])


def test_what_only_looked_like_a_stop_is_released() -> None:
    chunks = cut(["one E", "NERGY"], "END")
    assert (text(chunks), finish(chunks)) == ("one ENERGY", [LENGTH])


def test_what_is_held_back_at_the_end_is_flushed() -> None:
    chunks = cut(["one EN"], "END")
    assert (text(chunks), finish(chunks)) == ("one EN", [LENGTH])


def test_an_included_stop_stays() -> None:
    assert text(cut(["one E", "ND two"], "END", include_stop=True)) == "one END"


def test_the_earliest_of_several_stops_counts() -> None:
    assert text(cut(["a B c D"], "D", "B")) == "a "


def test_the_echoed_prompt_is_not_searched() -> None:
    chunks = cut(["stop her", "e and stop"], "stop", echo=True, prompts=("stop here",))
    assert text(chunks) == "stop here and "


def test_a_stop_that_is_complete_first_wins_over_one_that_began_earlier() -> None:
    assert text(cut(["abc", "d"], "abcd", "bc")) == text(cut(["abcd"], "abcd", "bc")) == "a"


def test_each_choice_is_cut_on_its_own() -> None:
    chunks = [delta("aX", index=0), delta("b", index=1), delta("c", LENGTH, index=1)]
    released = list(cut_at_stops(chunks, ("X",), replace(request(), n=2, best_of=2)))
    assert (text(released, 0), text(released, 1)) == ("a", "bc")


def test_usage_goes_on_after_a_cut() -> None:
    chunks = [delta("aX", index=0), delta("b", LENGTH, index=1, usage=Usage(1, 3))]
    released = list(cut_at_stops(chunks, ("X",), replace(request(), n=2, best_of=2)))
    assert released[-1].usage == Usage(1, 3)


def test_the_container_is_not_heard_out_once_the_last_choice_is_cut() -> None:
    def speaking() -> list[CompletionChunk]:
        raise AssertionError("asked for more")

    source = iter([delta("aX")])

    def chunks() -> object:
        yield from source
        yield from speaking()

    assert text(list(cut_at_stops(chunks(), ("X",), request()))) == "a"  # type: ignore[arg-type]


def test_a_container_that_finished_by_itself_is_heard_out() -> None:
    chunks = [delta("a", STOP), CompletionChunk(usage=Usage(1, 1))]
    assert list(cut_at_stops(chunks, ("X",), request()))[-1].usage == Usage(1, 1)


def test_log_probabilities_of_the_stop_text_are_dropped() -> None:
    logprobs = Logprobs(("a", "X", "Y"), (-1.0, -2.0, -3.0), (None, None, None), (0, 1, 2))
    chunks = list(cut_at_stops([delta("aXY", STOP, logprobs=logprobs)], ("XY",), request()))
    (choice,) = chunks[0].choices
    assert choice.logprobs == Logprobs(("a",), (-1.0,), (None,), (0,))


@pytest.mark.parametrize("include_stop", [False, True])
@given(data=st.data())
def test_any_pieces_of_any_text_give_the_cut_of_the_whole(data: st.DataObject, include_stop: bool) -> None:
    alphabet = st.text("abc", max_size=30)
    stops = data.draw(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
    whole = data.draw(alphabet)
    marks = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[start:end] for start, end in zip([0, *marks], [*marks, len(whole)], strict=True)]

    canonical: CompletionRequest = replace(request(), include_stop=include_stop)
    chunks = [delta(piece, LENGTH if number == len(pieces) - 1 else None) for number, piece in enumerate(pieces)]
    released = list(cut_at_stops(chunks, tuple(stops), canonical))

    found = [(whole.index(stop) + len(stop), whole.index(stop)) for stop in stops if stop in whole]
    if not found:
        assert (text(released), finish(released)) == (whole, [LENGTH])
    else:
        end, start = min(found)
        assert (text(released), finish(released)) == (whole[: end if include_stop else start], [STOP])


@pytest.mark.parametrize("stop", ["<|eot_id|>", "a.b*", "(x", "[", "\\d"])
def test_a_stop_text_is_no_pattern(stop: str) -> None:
    text = "".join(one.text for chunk in cut(["acb", "bxd", stop, "y"], stop) for one in chunk.choices)
    assert text == "acbbxd"


def test_a_token_that_is_held_back_is_not_told_by_its_logprobs() -> None:
    pair = Logprobs(("a", "b"), (-1.0, -2.0), (None, None), (0, 1))
    last = Logprobs(("X",), (-3.0,), (None,), (2,))
    chunks = [delta("ab", logprobs=pair), delta("X", LENGTH, logprobs=last)]
    deltas = [one for chunk in cut_at_stops(chunks, ("bX",), request(logprobs=0)) for one in chunk.choices]
    told = [token for one in deltas if one.logprobs is not None for token in one.logprobs.tokens]
    assert ("".join(one.text for one in deltas), told) == ("a", ["a"])


def test_a_token_that_was_held_back_for_nothing_is_told_later() -> None:
    pair = Logprobs(("a", "b"), (-1.0, -2.0), (None, None), (0, 1))
    last = Logprobs(("Y",), (-3.0,), (None,), (2,))
    chunks = [delta("ab", logprobs=pair), delta("Y", LENGTH, logprobs=last)]
    deltas = [one for chunk in cut_at_stops(chunks, ("bX",), request(logprobs=0)) for one in chunk.choices]
    assert [one.logprobs.tokens for one in deltas if one.logprobs is not None] == [("a",), ("b", "Y")]
