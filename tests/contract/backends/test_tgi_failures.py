"""How TGI tells of a failure, whichever of its bodies it was sent: the errors of TGI 3.3's router."""

from __future__ import annotations

import json

import pytest

from completions.backends.codec import Codec
from completions.backends.payload_stream import records
from completions.backends.tgi import TgiCodec
from completions.backends.tgi_openai import TgiOpenAICodec
from completions.domain.errors import (
    BackendError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    InvalidRequestError,
    Recourse,
)
from fakes import request

CODECS: dict[str, tuple[Codec, dict[str, object]]] = {
    "tgi": (
        TgiCodec(),
        {"index": 1, "token": {"id": 7, "text": "a", "logprob": -1.0, "special": False}, "generated_text": None},
    ),
    "tgi-openai": (TgiOpenAICodec(), {"choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": ""}]}),
}
# broken rule -> canonical error and field
RULES: dict[str, tuple[type[CompletionError], str | None]] = {
    "`temperature` must be strictly positive": (InvalidRequestError, "temperature"),
    "`top_p` must be > 0.0 and < 1.0": (InvalidRequestError, "top_p"),
    "`inputs` cannot be empty": (InvalidRequestError, "prompt"),
    "`max_new_tokens` must be strictly positive": (InvalidRequestError, "max_tokens"),
    "`top_n_tokens` must be >= 0 and <= 5. Given: 6": (InvalidRequestError, "logprobs"),
    "`stop` supports up to 4 stop sequences. Given: 5": (InvalidRequestError, "stop"),
    "`inputs` must have less than 9 tokens. Given: 10": (ContextLengthError, "prompt"),
    "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens and 200 `max_new_tokens`": (
        ContextLengthError,
        "prompt",
    ),
    "grammar is not valid: secret": (InvalidRequestError, "constraint"),
    "grammar is not supported": (InvalidRequestError, "constraint"),
    "cannot compile regex from schema: secret": (InvalidRequestError, "constraint"),
    "tokenizer error secret": (InvalidRequestError, None),
}
# (HTTP status, error_type, message) -> canonical error and field
FAILURES: dict[tuple[int, str, str], tuple[type[CompletionError], str | None]] = {
    **{(422, "validation", f"Input validation error: {rule}"): expected for rule, expected in RULES.items()},
    (429, "overloaded", "Model is overloaded"): (BackendUnavailableError, None),
    (424, "generation", "Request failed during generation: secret CUDA"): (BackendError, None),
    (500, "incomplete_generation", "Incomplete generation"): (BackendError, None),
}
# what only its status or its kind tells apart
UNWORDED: dict[tuple[int, str, str], tuple[type[CompletionError], str | None]] = {
    (422, "template_error", "Template error: secret"): (InvalidRequestError, None),
    (422, "suffix not supported", "secret"): (InvalidRequestError, None),
    (500, "a_new_type", "secret"): (BackendError, None),
}


@pytest.fixture(params=CODECS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def streamed_failure(family: str, failure: object, *, after: int = 0) -> CompletionError:
    """What a stream raises that fails after so many good records."""
    codec, good = CODECS[family]
    decoder = codec.decoder(request())
    stream = b"".join(b"data:" + json.dumps(value).encode() + b"\n\n" for value in (*[good] * after, failure))
    *before, last = records([stream])
    for record in before:
        decoder.decode(record)
    with pytest.raises(CompletionError) as caught:
        decoder.decode(last)
    return caught.value


@pytest.mark.parametrize(("failure", "expected"), (FAILURES | UNWORDED).items())
def test_an_http_failure_is_its_canonical_error(
    family: str, failure: tuple[int, str, str], expected: tuple[type[CompletionError], str | None]
) -> None:
    status, error_type, message = failure
    error = CODECS[family][0].decode_error(status, json.dumps({"error": message, "error_type": error_type}))
    assert (type(error), error.param) == expected
    assert "secret" not in error.message


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(("failure", "expected"), FAILURES.items())
def test_the_same_failure_under_http_200_is_the_same_error(
    family: str, failure: tuple[int, str, str], expected: tuple[type[CompletionError], str | None], after: int
) -> None:
    error = streamed_failure(family, {"error": failure[2], "error_type": failure[1]}, after=after)
    assert (type(error), error.param) == expected
    assert "secret" not in error.message


@pytest.mark.parametrize(("failure", "expected"), FAILURES.items())
def test_the_nested_form_whose_status_is_always_422_is_read_by_its_words(
    family: str, failure: tuple[int, str, str], expected: tuple[type[CompletionError], str | None]
) -> None:
    error = streamed_failure(family, {"error": {"message": failure[2], "http_status_code": 422}})
    assert (type(error), error.param) == expected


def test_a_kind_without_known_words_has_its_status_in_tgis_own_stream() -> None:
    error = streamed_failure("tgi", {"error": "Template error: secret", "error_type": "template_error"})
    assert type(error) is InvalidRequestError
    assert "secret" not in error.message


def test_the_callers_rule_keeps_tgis_words(family: str) -> None:
    body = {"error": "Input validation error: `temperature` must be strictly positive", "error_type": "validation"}
    error = CODECS[family][0].decode_error(422, json.dumps(body))
    assert error.message == "`temperature` must be strictly positive"


def test_a_request_beyond_the_context_says_so_in_the_words_that_clients_match(family: str) -> None:
    message = (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. "
        "Given: 4000 `inputs` tokens and 200 `max_new_tokens`"
    )
    error = CODECS[family][0].decode_error(422, json.dumps({"error": message, "error_type": "validation"}))
    assert error.message == (
        "This model's maximum context length is 4096 tokens. However, you requested 4200 tokens "
        "(4000 in the prompt; 200 for the completion)."
    )


def test_an_overloaded_container_may_be_asked_again(family: str) -> None:
    error = CODECS[family][0].decode_error(429, '{"error":"Model is overloaded","error_type":"overloaded"}')
    assert (error.recourse, error.retry_after) == (Recourse.AGAIN, 1)


@pytest.mark.parametrize("body", ["", "{", '{"error": "cut o', "<html>", "null", "[]", "{}"])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequestError),
        (413, InvalidRequestError),
        (422, InvalidRequestError),
        (424, BackendError),
        (429, BackendUnavailableError),
        (500, BackendError),
        (503, BackendUnavailableError),
        (404, BackendError),
    ],
)
def test_a_body_that_cannot_be_read_leaves_the_status(
    family: str, body: str, status: int, kind: type[CompletionError]
) -> None:
    assert type(CODECS[family][0].decode_error(status, body)) is kind


def test_axums_plain_text_report_is_not_passed_on_because_it_quotes_the_caller(family: str) -> None:
    body = 'Failed to deserialize the JSON body into the target type: invalid type: string "my secret", expected f32'
    error = CODECS[family][0].decode_error(422, body)
    assert type(error) is InvalidRequestError
    assert "secret" not in error.message
