"""What a failure object says, and what is made of it.

Source: it holds the model's failure response, or SageMaker's sentence about it as in a ``ModelError``; the bodies are
the containers' own error shapes.
"""

from __future__ import annotations

import json

import pytest

from completions.backends.families import CODECS
from completions.backends.sagemaker_async import failure_error
from completions.backends.vllm import VllmCodec
from completions.domain.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    InvalidRequestError,
    Recourse,
)

SECRET = "CUDA error in /opt/ml/model"


def vllm_error(status: int, message: str, param: str | None = None) -> str:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": param, "code": status}})


@pytest.mark.parametrize(
    ("content", "kind", "recourse"),
    [
        (vllm_error(500, SECRET), BackendError, Recourse.NONE),
        (vllm_error(503, SECRET), BackendUnavailableError, Recourse.AGAIN),
        (vllm_error(400, "This model's maximum context length is 512 tokens."), ContextLengthError, Recourse.NONE),
        (f'{{"code": 424, "error": "{SECRET}"}}', BackendError, Recourse.NONE),
        (f'{{"error": "{SECRET}"}}', BackendError, Recourse.NONE),
        (f'Received server error (500) from primary with message "{SECRET}".', BackendError, Recourse.NONE),
        ('Received client error (429) from primary with message "".', BackendUnavailableError, Recourse.AGAIN),
        (
            "Received server error (0) from primary with message "
            '"Your invocation timed out while waiting for a response from container primary."',
            BackendTimeoutError,
            Recourse.NONE,
        ),
        (SECRET, BackendError, Recourse.NONE),
        ("[]", BackendError, Recourse.NONE),
        ('{"code": 200}', BackendError, Recourse.NONE),
        ("[" * 100_000, BackendError, Recourse.NONE),
        ("", BackendError, Recourse.NONE),
        ("\udcff", BackendError, Recourse.NONE),
    ],
    ids=range(14),
)
def test_a_failure_object_in_any_shape_is_a_canonical_error_without_its_text(
    content: str, kind: type[CompletionError], recourse: Recourse
) -> None:
    error = failure_error(content.encode(errors="surrogateescape"), VllmCodec())
    assert (type(error), error.recourse) == (kind, recourse)
    assert SECRET not in error.message


@pytest.mark.parametrize("side", ["client", "server"])
def test_sagemakers_sentence_about_a_failure_holds_the_containers_error(side: str) -> None:
    wrapped = f'Received {side} error (400) from primary with message "{vllm_error(400, "n is too large.", "n")}".'
    error = failure_error(wrapped.encode(), VllmCodec())
    assert (type(error), error.message, error.param) == (InvalidRequestError, "n is too large.", "n")


@pytest.mark.parametrize(
    ("family", "body"),
    [
        ("vllm", vllm_error(400, "top_p must be in (0, 1].", "top_p")),
        ("tgi", '{"error": "Input validation error: `top_p` must be > 0.0 and < 1.0", "error_type": "validation"}'),
        ("lmi", '{"code": 424, "error": "Input parsing failed. 1 validation error for CompletionRequest\\ntop_p\\n"}'),
    ],
)
def test_a_refusal_without_its_http_status_is_the_callers_in_every_family(family: str, body: str) -> None:
    error = failure_error(body.encode(), CODECS[family])
    assert (type(error), error.param) == (InvalidRequestError, "top_p")
