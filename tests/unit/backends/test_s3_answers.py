"""What S3 says about an object, and what is made of it, through a real boto3 client over HTTP.

Source: S3's error responses. Of a missing key, who may list the bucket hears ``NoSuchKey``, everybody else
``AccessDenied``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import NoCredentialsError

from completions.backends.s3_answers import AnswerBox, Found, S3Location, upload
from completions.domain.errors import BackendError, BackendUnavailableError, Recourse
from scripted_http import Received, Reply, scripted_server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ANSWERS = S3Location("output", "answers/1.out")
FAILURES = S3Location("output", "failures/1-error.out")
NOBODY = "http://127.0.0.1:1"

Connect = Callable[[str], "S3Client"]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Clients that try once, so that a look is one request."""
    with ExitStack() as cleanup:

        def connected(url: str) -> S3Client:
            config = Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=1)
            return cleanup.enter_context(closing(boto3.client("s3", endpoint_url=url, config=config)))

        yield connected


def refusal(status: int, code: str) -> Reply:
    text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>m</Message></Error>'
    return Reply(status, text.encode(), {"Content-Type": "application/xml"})


MISSING = refusal(404, "NoSuchKey")
HIDDEN = refusal(403, "AccessDenied")
NOT_YET = {
    "missing": MISSING,
    "missing, for who may not list": HIDDEN,
    "slow down": refusal(503, "SlowDown"),
    "S3's own failure": refusal(500, "InternalError"),
}
FINAL = {
    "NoSuchBucket": refusal(404, "NoSuchBucket"),
    "ExpiredToken": refusal(400, "ExpiredToken"),
    "InvalidAccessKeyId": refusal(403, "InvalidAccessKeyId"),
}


def look(connect: Connect, answer: Reply, failure: Reply | None) -> tuple[Found | None, str]:
    """What one look finds, and what the log would hear of it."""

    def reply(request: Received) -> Reply:
        if "failures" not in request.path:
            return answer
        assert failure is not None
        return failure

    with scripted_server(reply) as s3:
        box = AnswerBox(connect(s3.url), ANSWERS, None if failure is None else FAILURES)
        return box.look(), box.last_seen


@pytest.mark.parametrize("uri", ["s3://bucket/key", "s3://bucket/a/b?c=d#e%20f", "s3://bucket/"])
def test_an_address_survives_reading_and_writing(uri: str) -> None:
    assert S3Location.parse(uri).uri == uri


def test_a_key_keeps_every_character() -> None:
    assert S3Location.parse("s3://bucket/a/b?c=d#e%20f") == S3Location("bucket", "a/b?c=d#e%20f")


@pytest.mark.parametrize("uri", ["", "s3://", "s3:///key", "https://bucket.s3.amazonaws.com/key", "bucket/key"])
def test_anything_else_is_no_address(uri: str) -> None:
    with pytest.raises(ValueError, match="not an S3 address"):
        S3Location.parse(uri)


@pytest.mark.parametrize(
    ("prefix", "key"), [("s3://b", "n"), ("s3://b/", "n"), ("s3://b/in", "in/n"), ("s3://b/in/", "in/n")]
)
def test_a_name_goes_below_a_prefix_with_or_without_its_slash(prefix: str, key: str) -> None:
    assert S3Location.parse(prefix).below("n") == S3Location("b", key)


def test_an_output_is_found_as_it_stands(connect: Connect) -> None:
    assert look(connect, Reply(200, b'{"a": 1}\n'), MISSING) == (Found(b'{"a": 1}\n', failed=False), "")


def test_a_failure_is_found_beside_a_missing_output(connect: Connect) -> None:
    found, _ = look(connect, MISSING, Reply(200, b"it failed"))
    assert found == Found(b"it failed", failed=True)


def test_an_empty_output_is_there_all_the_same(connect: Connect) -> None:
    found, _ = look(connect, Reply(200), MISSING)
    assert found == Found(b"", failed=False)


@pytest.mark.parametrize("reply", NOT_YET.values(), ids=NOT_YET)
def test_what_may_pass_is_nothing_yet(connect: Connect, reply: Reply) -> None:
    assert look(connect, reply, reply)[0] is None


def test_the_log_hears_what_s3_said_of_each_place(connect: Connect) -> None:
    assert look(connect, HIDDEN, MISSING) == (None, "answer AccessDenied, failure NoSuchKey")


def test_without_a_failure_path_the_output_alone_is_looked_at(connect: Connect) -> None:
    assert look(connect, MISSING, None) == (None, "answer NoSuchKey")


def test_an_s3_that_cannot_be_reached_is_nothing_yet(connect: Connect) -> None:
    box = AnswerBox(connect(NOBODY), ANSWERS, None)
    assert box.look() is None
    assert box.last_seen == "answer EndpointConnectionError"


@pytest.mark.parametrize("code", FINAL)
@pytest.mark.parametrize("place", ["output", "failure"])
def test_what_will_not_pass_is_raised_at_once(connect: Connect, place: str, code: str) -> None:
    replies = (FINAL[code], MISSING) if place == "output" else (MISSING, FINAL[code])
    with pytest.raises(BackendError) as caught:
        look(connect, *replies)
    assert (caught.value.recourse, caught.value.detail) == (Recourse.NONE, f"S3 answered {code}")


def test_missing_credentials_are_raised_at_once(connect: Connect) -> None:
    client = connect(NOBODY)

    def without_credentials(**_: object) -> None:
        raise NoCredentialsError

    client.meta.events.register("before-sign.s3.GetObject", without_credentials)
    with pytest.raises(BackendError) as caught:
        AnswerBox(client, ANSWERS, None).look()
    assert caught.value.detail == "NoCredentialsError"


def test_an_output_above_the_documents_limit_is_refused(connect: Connect) -> None:
    with pytest.raises(BackendError) as caught:
        look(connect, Reply(200, b" " * (8 * 1024 * 1024 + 1)), MISSING)
    assert caught.value.detail == "a document exceeds the size limit"


def test_an_upload_puts_the_bytes_where_they_belong(connect: Connect) -> None:
    with scripted_server(lambda _: Reply(200)) as s3:
        upload(connect(s3.url), S3Location("input", "prompts/1.json"), b'{"prompt": "x"}', "application/json")
    (put,) = s3.received
    assert (put.method, put.path) == ("PUT", "/input/prompts/1.json")
    assert b'{"prompt": "x"}' in put.body
    assert put.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("reply", "recourse"),
    [(HIDDEN, Recourse.ELSEWHERE), (FINAL["NoSuchBucket"], Recourse.ELSEWHERE), (NOT_YET["slow down"], Recourse.AGAIN)],
    ids=["not allowed", "no bucket", "slow down"],
)
def test_a_refused_upload_says_whether_it_may_be_repeated(connect: Connect, reply: Reply, recourse: Recourse) -> None:
    with scripted_server(lambda _: reply) as s3, pytest.raises(BackendUnavailableError) as caught:
        upload(connect(s3.url), ANSWERS, b"x", "application/json")
    assert caught.value.recourse is recourse


def test_an_upload_that_reaches_nobody_may_be_repeated(connect: Connect) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        upload(connect(NOBODY), ANSWERS, b"x", "application/json")
    assert caught.value.recourse is Recourse.AGAIN


@pytest.mark.parametrize(
    ("seen", "sure"),
    [(MISSING, True), (HIDDEN, True), (refusal(503, "SlowDown"), False)],
    ids=["missing", "hidden", "busy"],
)
def test_only_s3s_own_word_that_there_is_nothing_is_sure(connect: Connect, seen: Reply, sure: bool) -> None:
    with scripted_server(lambda request: seen if "failures" in request.path else MISSING) as s3:
        box = AnswerBox(connect(s3.url), ANSWERS, FAILURES)
        assert box.look() is None
        assert box.is_sure is sure
