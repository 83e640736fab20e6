"""Offsets count characters of the text, whatever a token looks like by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from completions.backends.token_offsets import TokenOffsets


def escaped(data: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_offsets_rise_by_the_length_of_each_token() -> None:
    assert TokenOffsets().place(("ab", " ", "c")) == (0, 2, 3)


def test_offsets_go_on_from_one_record_to_the_next() -> None:
    offsets = TokenOffsets()
    assert (offsets.place(("ab",)), offsets.place(("c", "d"))) == ((0,), (2, 3))


def test_tokens_that_share_a_character_share_its_offset() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert TokenOffsets().place(("a", escaped(first), escaped(second), "b")) == (0, 1, 1, 2)


def test_a_text_that_only_looks_like_bytes_is_text() -> None:
    assert TokenOffsets().place(("bytes:", "x")) == (0, 6)


@given(text=st.text(alphabet="aé日😀", max_size=20))
def test_a_text_cut_into_single_bytes_has_the_offset_of_each_bytes_character(text: str) -> None:
    tokens = tuple(escaped(bytes([byte])) for byte in text.encode())
    expected = tuple(position for position, char in enumerate(text) for _ in char.encode())
    assert TokenOffsets().place(tokens) == expected
