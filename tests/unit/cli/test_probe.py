"""What the probes make of answers that no stand-in gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from completions.backends.families import CODECS
from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionChunk, CompletionRequest, FinishReason, Logprobs, Usage
from completions.domain.errors import BackendError
from completions.domain.ports import BackendStream, UpstreamCall
from completions_cli.probe_checks import Check, Verdict, probe_endpoint
from completions_cli.probe_endpoint import Endpoint, RawAnswer, looks_like
from fakes import ScriptedBackend, delta, route

WORDS = ("    ", "return", " system", "(", ")")


def chunks(words: Sequence[str], finish: FinishReason = FinishReason.LENGTH) -> list[CompletionChunk]:
    """One word a token."""
    told = [delta(word, usage=Usage(9, number)) for number, word in enumerate(words, 1)]
    return [*told, delta("", finish, usage=Usage(9, len(words)))]


class Model(ScriptedBackend):
    """A well-behaved vLLM of one sentence; ``wrong`` has answers in place of its own, by what is asked."""

    def __init__(self, **wrong: list[CompletionChunk]) -> None:
        super().__init__()
        self._wrong = wrong
        self._greedy = 0

    def abilities(self, route: ModelRoute) -> Abilities:
        return Abilities({**dict.fromkeys(Parameter, Capability.HONOURED), **route.capabilities})

    def stream(self, request: CompletionRequest, route: ModelRoute, call: UpstreamCall) -> BackendStream:
        kind, answer = self._answer(request)
        return ScriptedBackend(self._wrong.get(kind, answer)).stream(request, route, call)

    def _answer(self, request: CompletionRequest) -> tuple[str, list[CompletionChunk]]:
        if request.stop:
            text = "".join(WORDS)
            return "stop", chunks([text[: text.index(request.stop[0])]], FinishReason.STOP)
        if request.echo:
            return "echo", chunks([str(request.prompts[0]), "é"])
        if request.logprobs is not None:
            return "logprobs", scored(-0.5)
        if request.n == 2:
            return "n", [delta("a", FinishReason.LENGTH), delta("b", FinishReason.LENGTH, index=1)]
        if request.constraint is not None:
            return "choice", chunks([request.constraint.choices[0]])
        self._greedy += 1
        return "completion" if self._greedy == 1 else "again", chunks(WORDS)


def scored(value: float) -> list[CompletionChunk]:
    """One token with its log-probability."""
    logprobs = Logprobs(("a",), (value,), ({"a": value},), (0,))
    return [delta("a", FinishReason.LENGTH, usage=Usage(9, 1), logprobs=logprobs)]


def checks(backend: Model) -> dict[str, Check]:
    """Of an asynchronous endpoint, which has no wire to look at."""
    nothing: Any = None
    endpoint = Endpoint(route(asynchronous=True), CODECS["vllm"], backend, nothing)
    return {check.name: check for check in probe_endpoint(endpoint)}


def test_a_model_that_does_all_of_it_differs_in_nothing() -> None:
    found = checks(Model())
    assert {name for name, check in found.items() if check.verdict is not Verdict.MATCHES} == {"wire"}
    assert found["wire"].verdict is Verdict.SKIPPED
    assert found["usage"].observed == "9 + 5 tokens"


@pytest.mark.parametrize(
    ("kind", "answer", "name", "observed"),
    [
        ("completion", [delta("a", FinishReason.STOP)], "usage", "none"),
        ("completion", [delta("a", usage=Usage(9, 1))], "completion", "no finish reason"),
        ("completion", [delta("a", FinishReason.STOP, usage=Usage(9, 1, estimated=True))], "usage",
         "9 + 1 tokens, estimated"),
        ("completion", [delta("a", FinishReason.STOP, usage=Usage(0, 1))], "usage", "0 + 1 tokens"),
        ("completion", [delta("a", FinishReason.STOP, usage=Usage(9, 25))], "usage", "9 + 25 tokens"),
        ("again", chunks(["other"]), "temperature 0 twice", "another text"),
        ("stop", chunks(WORDS), "stop inside a token", "missed, finish reason length"),
        ("stop", chunks(["else"]), "stop at a token's end", "another text, finish reason length"),
        ("echo", chunks(["another prompt"]), "multibyte text", "another prompt"),
        ("logprobs", scored(0.5), "logprobs", "1 for 1 tokens, above 0 or missing"),
        ("logprobs", chunks(WORDS), "logprobs", "0 for 5 tokens"),
        ("n", [delta("a", FinishReason.LENGTH)], "n", "1 of 2"),
        ("choice", chunks(["green"]), "choice", "free text"),
    ],
)  # fmt: skip
def test_a_difference_is_found_and_named(kind: str, answer: list[CompletionChunk], name: str, observed: str) -> None:
    found = checks(Model(**{kind: answer}))[name]
    assert (found.observed, found.verdict) == (observed, Verdict.DIFFERS)


def test_a_failure_in_one_check_leaves_the_others_alone() -> None:
    failing: Any = [BackendError("The model failed to answer.", detail="why")]
    found = checks(Model(n=failing))
    assert found["n"] == Check("n", "two choices", "The model failed to answer. (why)", Verdict.DIFFERS)
    assert found["choice"].verdict is Verdict.MATCHES


def test_without_a_first_answer_nothing_more_is_paid_for() -> None:
    failing: Any = [BackendError("The model failed to answer.")]
    assert checks(Model(completion=failing)).keys() == {"completion", "wire"}


def test_a_character_cut_by_the_limit_is_no_damage_but_one_before_it_is() -> None:
    prompt = "# Grüße aus Köln, 世界 🌍, naïve café\n# Grüße aus Köln, 世界"
    assert checks(Model(echo=chunks([prompt, "é\ufffd"])))["multibyte text"].verdict is Verdict.MATCHES
    found = checks(Model(echo=chunks([prompt, "\ufffdé"])))["multibyte text"]
    assert (found.observed, found.verdict) == ("damaged", Verdict.DIFFERS)


@pytest.mark.parametrize(
    ("status", "content_type", "body", "expected"),
    [
        (200, "application/jsonlines", b'{"token":{},"generated_text":null}\n', "LMI's own schema"),
        (200, "application/jsonlines", b'{"choices":[]}\n', "LMI with the OpenAI body"),
        (200, "text/event-stream", b'data:{"token":{},"generated_text":null}\n\n', "TGI's own schema"),
        (200, "text/event-stream", b'data:{"choices":[{"finish_reason":""}]}\n\n', "TGI with the OpenAI body"),
        (200, "text/event-stream", b'data: {"choices":[]}\n\n', "vLLM, or another OpenAI server"),
        (200, "text/html", b"<html>", None),
        (422, "", b'{"error":"no","error_type":"validation"}', "TGI"),
        (424, "", b'{"code":424,"error":"Input parsing failed"}', "LMI"),
        (400, "", b'{"error":{"message":"no","code":400}}', "vLLM, or another OpenAI server"),
        (400, "", b'{"object":"error","message":"no","code":400}', "vLLM, or another OpenAI server"),
        (400, "", b"no JSON", None),
        (400, "", b"[]", None),
    ],
)
def test_the_wire_tells_whose_it_is(status: int, content_type: str, body: bytes, expected: str | None) -> None:
    assert looks_like(RawAnswer(status, content_type, body, None)) == expected
