"""Text to ids and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions_cli.local.tokenizer import Special, Tokenizer

DOCUMENTS = ("def add(first, second):\n    return first + second\n", "def first():\n    return 1\n")
TOKENIZER = Tokenizer.train(DOCUMENTS)
TEXTS = st.text()


@given(TEXTS)
def test_every_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.sampled_from([special.spelling for special in Special]) | TEXTS))
def test_texts_with_special_tokens_round_trip(parts: list[str]) -> None:
    text = "".join(parts)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_the_special_tokens_have_the_spelling_of_qwen() -> None:
    assert [special.spelling for special in Special] == [
        "<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>",
        "<|file_sep|>",
    ]  # fmt: skip


@pytest.mark.parametrize("special", list(Special))
def test_a_special_token_in_text_is_one_id(special: Special) -> None:
    ids = TOKENIZER.encode(f"def{special.spelling}first")
    assert ids == [*TOKENIZER.encode("def"), special, *TOKENIZER.encode("first")]
    assert TOKENIZER.is_special(special)


def test_a_frequent_word_is_one_token_together_with_the_space_before_it() -> None:
    assert [TOKENIZER.token_bytes(token) for token in TOKENIZER.encode("return first")] == [b"return", b" first"]


def test_a_newline_and_its_indent_are_one_token() -> None:
    assert [TOKENIZER.token_bytes(token) for token in TOKENIZER.encode("\n    return")] == [b"\n    ", b"return"]


def test_an_unknown_word_is_covered_by_its_longest_known_prefixes() -> None:
    assert [TOKENIZER.token_bytes(token) for token in TOKENIZER.encode("returnfirstx")] == [b"return", b"first", b"x"]


def test_an_unknown_character_spans_its_utf8_bytes() -> None:
    assert TOKENIZER.encode("\u20ac") == [0xE2, 0x82, 0xAC]


def test_a_token_that_is_not_utf8_by_itself_is_shown_as_escaped_bytes() -> None:
    assert TOKENIZER.token_text(0xE2) == "bytes:\\xe2"
    assert TOKENIZER.token_text(0x41) == "A"


def test_bytes_that_are_no_character_decode_to_the_replacement_character() -> None:
    assert TOKENIZER.decode([0xE2, 0x41]) == "\ufffdA"


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a?b"


def test_the_same_documents_give_the_same_ids() -> None:
    assert Tokenizer.train(DOCUMENTS).encode(DOCUMENTS[0]) == TOKENIZER.encode(DOCUMENTS[0])


def test_no_two_ids_stand_for_the_same_bytes() -> None:
    pieces = [TOKENIZER.token_bytes(token) for token in range(TOKENIZER.size)]
    assert len(set(pieces)) == TOKENIZER.size


def test_the_vocabulary_stops_at_the_size_asked_for() -> None:
    assert Tokenizer.train(DOCUMENTS, size=266).size == 266


def test_documents_are_encoded_as_text_is_and_end_with_end_of_text() -> None:
    expected = [token for text in DOCUMENTS for token in (*TOKENIZER.encode(text), Special.END_OF_TEXT)]
    assert TOKENIZER.encode_documents(DOCUMENTS) == expected
