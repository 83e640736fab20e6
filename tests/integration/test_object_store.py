"""The pipeline's bucket, over moto's S3 and over servers that break off."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from threading import Thread
from typing import Any
from unittest.mock import ANY

import boto3
import pytest
from botocore.config import Config

from completions.domain.errors import BackendUnavailableError
from completions.stores.objects import PART_BYTES, PIECE_BYTES, S3ObjectStore
from moto_services import moto_services
from scripted_http import Reply, scripted_server

BUCKET = "object-store"


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with moto_services("eu-west-3") as client:
        made = client("s3")
        made.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-3"})
        yield made


@pytest.fixture
def store(s3: Any) -> S3ObjectStore:
    return S3ObjectStore(s3, BUCKET)


def test_what_was_put_is_there_until_it_is_deleted(store: S3ObjectStore) -> None:
    store.put("a/b", b"content")
    assert (store.get("a/b"), store.size("a/b"), list(store.pieces("a/b"))) == (b"content", 7, [b"content"])
    store.delete("a/b")
    for look in (store.get, store.size, lambda key: list(store.pieces(key)), lambda key: store.read_range(key, 0, 1)):
        with pytest.raises(LookupError, match="a/b"):
            look("a/b")


def test_an_object_is_put_once(store: S3ObjectStore) -> None:
    assert store.put_new("once", b"first")
    assert not store.put_new("once", b"second")
    assert store.get("once") == b"first"


def test_a_range_is_its_bytes_and_ends_where_the_object_ends(store: S3ObjectStore) -> None:
    store.put("range", b"0123456789")
    assert store.read_range("range", 2, 5) == b"234"
    assert store.read_range("range", 8, 50) == b"89"
    assert store.read_range("range", 3, 3) == b""
    assert store.read_range("range", 10, 20) == b""


def test_an_empty_object_has_no_pieces(store: S3ObjectStore) -> None:
    assert store.write_stream("empty", iter(())) == 0
    assert list(store.pieces("empty")) == []


def test_keys_are_in_order_and_those_of_the_prefix_alone(store: S3ObjectStore) -> None:
    for name in ("list/b", "list/a", "other"):
        store.put(name, b"")
    assert list(store.keys("list/")) == ["list/a", "list/b"]


def test_a_url_gives_the_object_to_whoever_has_it(store: S3ObjectStore) -> None:
    store.put("shared", b"for you")
    with closing(urllib.request.urlopen(store.download_url("shared", 60))) as reply:  # noqa: S310 - loopback
        assert reply.read() == b"for you"


@pytest.mark.parametrize("size", [PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 5])
def test_a_stream_of_any_size_is_one_object(store: S3ObjectStore, s3: Any, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]
    pieces = (content[start : start + 1_000_003] for start in range(0, size, 1_000_003))
    assert store.write_stream("stream", pieces, "application/x-ndjson") == size
    assert b"".join(store.pieces("stream")) == content
    head = s3.head_object(Bucket=BUCKET, Key="stream")
    assert (head["ContentLength"], head["ContentType"]) == (size, "application/x-ndjson")
    assert ("-" in head["ETag"]) == (size > PART_BYTES)


def test_pieces_are_of_a_megabyte(store: S3ObjectStore) -> None:
    store.put("pieces", b"x" * (2 * PIECE_BYTES + 1))
    assert [len(piece) for piece in store.pieces("pieces")] == [PIECE_BYTES, PIECE_BYTES, 1]


def test_a_stream_that_fails_leaves_nothing_behind(store: S3ObjectStore, s3: Any) -> None:
    def pieces() -> Iterator[bytes]:
        yield from repeat(b"x" * PART_BYTES, 3)
        raise ValueError("the source failed")

    with pytest.raises(ValueError, match="the source failed"):
        store.write_stream("unfinished", pieces())
    with pytest.raises(LookupError):
        store.size("unfinished")
    assert s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []


def _client(url: str) -> Any:
    """One attempt for each call, so that what is repeated is what the store repeats."""
    config = Config(retries={"total_max_attempts": 1}, read_timeout=2, s3={"addressing_style": "path"})
    make: Any = boto3.client
    return make("s3", region_name="us-east-1", endpoint_url=url, config=config)


CONTENT = bytes(range(256)) * 40_000
"""Ten pieces."""


class Breaking:
    """S3 that sends ``most`` bytes of each reply and then hangs up, unless that is all. ``asked`` are the ranges and
    conditions."""

    def __init__(self, most: int, etags: Iterator[str]) -> None:
        self.asked: list[tuple[str | None, str | None]] = []
        self._most = most
        self._etags = etags

    @contextmanager
    def client(self) -> Iterator[S3ObjectStore]:
        """A store over it."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.reply(self)

            def log_message(self, format: str, *args: Any) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
            thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                with closing(_client(f"http://127.0.0.1:{http.server_port}")) as client:
                    yield S3ObjectStore(client, BUCKET)
            finally:
                http.shutdown()
                thread.join()

    def reply(self, request: BaseHTTPRequestHandler) -> None:
        """One answer."""
        wanted, condition = request.headers.get("Range"), request.headers.get("If-Match")
        self.asked.append((wanted, condition))
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        etag, rest = next(self._etags), CONTENT[start:]
        replaced = condition not in (None, etag)
        rest = b"<Error><Code>PreconditionFailed</Code></Error>" if replaced else rest
        request.send_response(412 if replaced else 206 if wanted else 200)
        request.send_header("ETag", etag)
        request.send_header("Content-Length", str(len(rest)))
        request.end_headers()
        request.wfile.write(rest[: self._most])
        request.close_connection = len(rest) > self._most


def test_a_connection_that_breaks_is_taken_up_where_it_broke() -> None:
    server = Breaking(3_000_000, repeat('"one"'))
    with server.client() as store:
        assert b"".join(store.pieces("big")) == CONTENT
    assert server.asked[0] == (None, None)
    assert [match for _, match in server.asked[1:]] == ['"one"'] * 3
    starts = [int((wanted or "").removeprefix("bytes=").removesuffix("-")) for wanted, _ in server.asked[1:]]
    assert starts == sorted(starts)
    assert 0 < starts[0] <= 3_000_000


def test_an_object_that_was_replaced_on_the_way_is_not_two_halves_of_two() -> None:
    server = Breaking(3_000_000, iter(['"one"', '"two"']))
    with server.client() as store, pytest.raises(BackendUnavailableError, match="replaced"):
        list(store.pieces("big"))


def test_a_connection_that_breaks_again_and_again_is_given_up() -> None:
    server = Breaking(10, repeat('"one"'))
    with server.client() as store, pytest.raises(BackendUnavailableError):
        list(store.pieces("big"))
    assert len(server.asked) == 6


@pytest.mark.parametrize("status", [403, 500, 503])
def test_what_s3_refuses_is_told_with_its_code_and_without_the_key(status: int) -> None:
    reply = Reply(status, b"<Error><Code>Whatever</Code></Error>")
    with scripted_server(lambda _: reply) as http, closing(_client(http.url)) as client:
        store = S3ObjectStore(client, BUCKET)
        for call in (
            lambda: store.get("k"),
            lambda: store.put("k", b""),
            lambda: store.put_new("k", b""),
            lambda: list(store.pieces("k")),
            lambda: list(store.keys("k")),
            lambda: store.write_stream("k", repeat(b"x" * PART_BYTES, 2)),
        ):
            with pytest.raises(BackendUnavailableError) as caught:
                call()
            assert (caught.value.detail, caught.value.retry_after) == ("Whatever", ANY)


def test_s3_that_is_not_there_is_unavailable() -> None:
    with closing(_client("http://127.0.0.1:9")) as client, pytest.raises(BackendUnavailableError):
        S3ObjectStore(client, BUCKET).get("k")
