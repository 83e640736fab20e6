"""Payload parts cut anywhere give the records of the uncut stream."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions.backends.payload_stream import DONE, MAX_LINE_BYTES, RecordDecoder, records
from completions.domain.errors import BackendError

Line = tuple[bytes, bytes | None]
"""A line without its end, and the record it holds."""

_JSON = st.recursive(
    st.text() | st.integers() | st.none(), lambda inner: st.dictionaries(st.text(), inner), max_leaves=4
)
_RECORDS = st.dictionaries(st.text(), _JSON, max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False).encode()
)
_WITH_DONE = _RECORDS | st.just(DONE)
_SILENT = st.sampled_from(
    [b"", b":", b": keep-alive", b"event: completion", b"id: 7", b"retry: 10", b"data:", b"data: "]
)


def _line(prefix: bytes, record: bytes) -> Line:
    return prefix + record, record


_SSE: st.SearchStrategy[list[Line]] = st.lists(
    st.builds(_line, st.sampled_from([b"data:", b"data: "]), _WITH_DONE) | _SILENT.map(lambda line: (line, None))
)
_JSON_LINES: st.SearchStrategy[list[Line]] = st.lists(
    _RECORDS.map(lambda record: (record, record)) | st.just((b"", None))
)
_LINES: st.SearchStrategy[list[Line]] = _SSE | _JSON_LINES


@st.composite
def _streams(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """Parts, and the records they hold."""
    lines = draw(_LINES)
    ends = draw(st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=len(lines), max_size=len(lines)))
    whole = b"".join(line + end for (line, _), end in zip(lines, ends, strict=True))
    if draw(st.booleans()) and lines:
        whole = whole[: -len(ends[-1])]
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)))))
    parts = [whole[start:end] for start, end in pairwise([0, *cuts, len(whole)])]
    return parts, [record for _, record in lines if record is not None]


@given(_streams())
def test_any_split_of_a_stream_gives_the_records_of_the_whole(stream: tuple[list[bytes], list[bytes]]) -> None:
    parts, expected = stream
    assert list(records(parts)) == expected


def test_every_byte_alone_gives_the_records_of_the_whole() -> None:
    whole = ': hi\r\n\r\ndata: {"text":"é€😀"}\r\n\r\ndata:{"text":"b"}\n\ndata: [DONE]'.encode()
    assert list(records(whole[at : at + 1] for at in range(len(whole)))) == [
        '{"text":"é€😀"}'.encode(),
        b'{"text":"b"}',
        b"[DONE]",
    ]


def test_a_part_gives_every_record_it_completes() -> None:
    decoder = RecordDecoder()
    assert decoder.decode(b'data: {"a":1}\n\ndata: {"a":2}\n\ndata: {"a"') == [b'{"a":1}', b'{"a":2}']
    assert decoder.decode(b":3}\n") == [b'{"a":3}']


def test_a_record_is_given_as_soon_as_its_line_ends() -> None:
    decoder = RecordDecoder()
    assert decoder.decode(b'{"a":1}') == []
    assert decoder.decode(b"\n") == [b'{"a":1}']


def test_flushing_twice_gives_an_unterminated_record_once() -> None:
    decoder = RecordDecoder()
    decoder.decode(b'{"a":1}')
    assert [decoder.flush(), decoder.flush()] == [[b'{"a":1}'], []]


@pytest.mark.parametrize("part", [b"x" * 101, b"x" * 101 + b"\n", b"\n" + b"x" * 101, b"a\n" + b"x" * 101 + b"\nb"])
def test_a_line_above_the_limit_is_a_backend_error(part: bytes) -> None:
    with pytest.raises(BackendError):
        RecordDecoder(max_line_bytes=100).decode(part)


def test_a_line_at_the_limit_is_a_record() -> None:
    decoder = RecordDecoder(max_line_bytes=100)
    assert decoder.decode(b"x" * 99) == []
    assert decoder.decode(b"x\n") == [b"x" * 100]


def test_many_short_lines_may_add_up_to_more_than_the_limit() -> None:
    decoder = RecordDecoder(max_line_bytes=100)
    assert sum(len(decoder.decode(b"x" * 60 + b"\n")) for _ in range(50)) == 50


def test_an_endless_line_is_given_up_in_bounded_memory() -> None:
    endless: Iterator[bytes] = repeat(b"x" * 65536)
    tracemalloc.start()
    try:
        with pytest.raises(BackendError):
            list(records(endless))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * MAX_LINE_BYTES
