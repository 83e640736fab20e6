"""Reading a batch's file line by line, and what a line has to be."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions.domain.batches import LineError
from completions.domain.events import EventReply
from completions.pipelines.batch_lines import (
    LineFaultError,
    RawLine,
    RequestLine,
    fault_line,
    parse_line,
    read_lines,
    reply_line,
)
from in_memory_batches import line


def contents(*pieces: bytes, most_bytes: int = 100) -> list[bytes | None]:
    return [raw.content for raw in read_lines(pieces, most_bytes=most_bytes)]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (b"", []),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"a\n\n \r\nb", [b"a", b"", b" ", b"b"]),
        (b"\xef\xbb\xbfa\nb", [b"a", b"b"]),
        (b"a\n\xef\xbb\xbfb", [b"a", b"\xef\xbb\xbfb"]),
        (b"a\rb\n", [b"a\rb"]),
    ],
    ids=["empty", "lf", "no last newline", "crlf", "blank lines", "bom", "bom that is not the first", "lone cr"],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_file_is_its_lines_wherever_its_pieces_end(file: bytes, expected: list[bytes], size: int) -> None:
    assert contents(*(file[start : start + size] for start in range(0, len(file), size))) == expected


@given(file=st.binary(max_size=60).map(lambda some: some.replace(b"\x00", b"\n")), cuts=st.lists(st.integers(0, 60)))
def test_each_line_stands_where_it_says(file: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(file), *(cut for cut in cuts if cut < len(file))})
    pieces = [file[start:end] for start, end in pairwise(edges)]
    lines = list(read_lines(pieces))
    assert [raw.number for raw in lines] == list(range(1, len(lines) + 1))
    for raw in lines:
        assert raw.content == file[raw.start : raw.end].removesuffix(b"\r")
        assert list(read_lines([file[raw.start : raw.end]], raw.number, raw.start)) in ([raw], [])


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""], ids=["lf", "crlf", "end of file"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_line_that_is_too_long_is_refused_and_the_next_one_read(end: bytes, size: int) -> None:
    file = b"x" * 10 + b"\n" + b"x" * 11 + end + (b"y" if end else b"")
    pieces = [file[start : start + size] for start in range(0, len(file), size)]
    assert contents(*pieces, most_bytes=10) == [b"x" * 10, None, *([b"y"] if end else [])]


def test_a_line_without_end_is_not_held() -> None:
    piece = b"x" * (1 << 20)
    tracemalloc.start()
    try:
        lines = list(read_lines(repeat(piece, 64), most_bytes=2 << 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(raw.content, raw.end) for raw in lines] == [(None, 64 << 20)]
    assert peak < 8 << 20


def parsed(content: object) -> RequestLine:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return parse_line(RawLine(7, 0, len(text), text))


def test_a_request_is_read_with_its_body_as_it_is() -> None:
    body = {"model": "demo", "prompt": "é\u2028", "max_tokens": 3, "logit_bias": {"50256": -100}, "n": 10**30}
    found = parsed(line(1, url="/v1/completions?a=b", body=body))
    assert (found.number, found.custom_id, found.url) == (7, "id-1", "/v1/completions?a=b")
    assert (found.path, found.model) == ("/v1/completions", "demo")
    assert json.loads(found.body) == body


def test_a_model_that_stands_in_the_url_is_found() -> None:
    found = parsed(line(1, url="/v1/llm/completions-sync?model_endpoint_name=llama&x=1", body={"prompt": "a"}))
    assert found.model == "llama"


@pytest.mark.parametrize("model", [None, "", 5, ["a"]])
def test_what_is_no_name_of_a_model_is_left_to_the_dialect(model: object) -> None:
    assert parsed(line(1, body={"model": model})).model is None


@pytest.mark.parametrize(
    ("content", "code", "param", "custom_id"),
    [
        (b"{", "invalid_json_line", None, None),
        (b"\xff\xfe{\x00", "invalid_json_line", None, None),
        (b'{"custom_id": NaN}', "invalid_json_line", None, None),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", None, None),
        (b"[" * 1000, "invalid_json_line", None, None),
        (b"[]", "invalid_json_line", None, None),
        (b'"text"', "invalid_json_line", None, None),
        (line(1, custom_id=None), "invalid_request", "custom_id", None),
        (line(1, custom_id=5), "invalid_request", "custom_id", None),
        (line(1, custom_id=""), "invalid_request", "custom_id", None),
        (line(1, custom_id="x" * 513), "invalid_request", "custom_id", None),
        (line(1, method=None), "invalid_request", "method", "id-1"),
        (line(1, method="GET"), "invalid_request", "method", "id-1"),
        (line(1, url=None), "invalid_request", "url", "id-1"),
        (line(1, url="https://api.example.com/v1/completions"), "invalid_request", "url", "id-1"),
        (line(1, url="//[example.com/v1/completions"), "invalid_request", "url", "id-1"),
        (line(1, url=7), "invalid_request", "url", "id-1"),
        (line(1, body=None), "invalid_request", "body", "id-1"),
        (line(1, body="text"), "invalid_request", "body", "id-1"),
        (line(1, headers={}), "invalid_request", "headers", "id-1"),
    ],
)
def test_what_is_no_request_says_why_and_where(
    content: object, code: str, param: str | None, custom_id: str | None
) -> None:
    with pytest.raises(LineFaultError) as caught:
        parsed(content)
    fault = caught.value.fault
    assert (fault.code, fault.param, fault.line, caught.value.custom_id) == (code, param, 7, custom_id)


def test_a_custom_id_may_have_512_characters() -> None:
    assert parsed(line(1, custom_id="é" * 512)).custom_id == "é" * 512


def test_a_line_too_long_names_the_limit() -> None:
    with pytest.raises(LineFaultError) as caught:
        parse_line(RawLine(3, 0, 7_000_000, None))
    assert caught.value.fault == LineError("invalid_request", "The line is longer than 6000000 bytes.", None, 3)


def test_a_fault_is_a_line_in_the_published_form() -> None:
    written = json.loads(fault_line("batch_1", LineError("invalid_request", "No.", "url", 4), "é"))
    assert written.pop("id").startswith("batch_req_")
    error = {"code": "invalid_request", "message": "No.", "param": "url", "line": 4}
    assert written == {"custom_id": "é", "response": None, "error": error}


REQUEST = RequestLine(4, 'a "quoted" id', "/v1/completions", "/v1/completions", "demo", b"{}")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":"b"}', {"a": "b"}),
        (b'{\n  "a": "b",\r\n "c": 1\n}\n', {"a": "b", "c": 1}),
        (b"model not found\n", "model not found\n"),
        (b"\xff", "\ufffd"),
    ],
    ids=["json", "json of several lines", "text", "no text"],
)
def test_a_reply_is_one_line_whatever_its_body_is(body: bytes, expected: object) -> None:
    written = reply_line("batch_1", REQUEST, EventReply("batch_1-4", 200, body))
    assert written.count(b"\n") == 1
    assert written.endswith(b"\n")
    fields = json.loads(written)
    assert fields.pop("id") == json.loads(fault_line("batch_1", LineError("x", "y", line=4), None))["id"]
    response = {"status_code": 200, "request_id": "batch_1-4", "body": expected}
    assert fields == {"custom_id": 'a "quoted" id', "response": response, "error": None}
