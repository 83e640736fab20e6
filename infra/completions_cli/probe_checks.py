"""The probes: each asks an endpoint for a few tokens, and compares what comes with what the registry entry promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from completions.domain.catalog import ModelRoute, Parameter
from completions.domain.completion import Constraint, ConstraintKind, FinishReason, SamplingParams
from completions.domain.errors import (
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    InvalidRequestError,
    RateLimitError,
)
from completions_cli.probe_endpoint import MULTIBYTE_PROMPT, Answer, Endpoint, RawAnswer, looks_like, probe_request
from completions_cli.probe_promises import PROMISES, Promise

_TOKENS: Final = 24
UNKNOWN_ADAPTER: Final = "completions-probe-no-such-adapter"
_OUT_OF_RANGE: Final = SamplingParams(temperature=0.0, frequency_penalty=9.0)
"""-2 to 2 is every family's range, and every codec sends it."""
_CHOICES: Final = ("maroon", "turquoise")
_SHORTEST_TOKEN: Final = 4


class Verdict(StrEnum):
    """What a check came to. ``SKIPPED`` is no promise to check, or nothing to check it with."""

    MATCHES = "matches"
    DIFFERS = "differs"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One promise and what became of it."""

    name: str
    expected: str
    observed: str
    verdict: Verdict


class EndpointAbsentError(Exception):
    """The endpoint did not let itself be asked, which says nothing about its wire format."""


def probe_endpoint(endpoint: Endpoint) -> Iterator[Check]:
    """Every check, in the order they are made. After a first answer that cannot be read only the wire is looked at.

    Raises ``EndpointAbsentError`` when the first call is turned away or not answered.
    """
    promise = PROMISES.get(endpoint.route.family, Promise())
    try:
        answer: Answer | None = endpoint.ask(probe_request(_TOKENS))
    except (BackendUnavailableError, BackendTimeoutError, RateLimitError) as error:
        raise EndpointAbsentError(_said(error)) from None
    except CompletionError as error:
        answer = None
        yield _failed("completion", "an answer", error)
    if answer is not None:
        yield from _answer_checks(answer, promise)
    if endpoint.route.asynchronous:
        yield Check("wire", "", "an asynchronous endpoint has no stream to look at", Verdict.SKIPPED)
    else:
        yield from _guarded("wire", "a stream", lambda: _wire_checks(endpoint, promise))
        yield from _guarded("bad parameter", "refused", lambda: _refusal_checks(endpoint, promise))
        yield from _guarded("unknown adapter", "", lambda: _adapter_checks(endpoint, promise))
    if answer is not None:
        yield from _guarded("temperature 0 twice", "the same text", lambda: _repeat_checks(endpoint, answer))
        yield from _guarded("stop", "", lambda: _stop_checks(endpoint, promise, answer))
        yield from _guarded("multibyte text", "undamaged", lambda: _multibyte_checks(endpoint))
        yield from _guarded("logprobs", "one for each token", lambda: _logprobs_checks(endpoint))
        yield from _guarded("n", "two choices", lambda: _n_checks(endpoint))
        yield from _guarded("choice", "one of the choices", lambda: _choice_checks(endpoint))


def _answer_checks(answer: Answer, promise: Promise) -> list[Check]:
    usage = answer.usage
    checks = [_check("completion", "text and a finish reason", bool(answer.text and answer.finish), _ending(answer))]
    if usage is None:
        return [*checks, _check("usage", "told by the container", False, "none")]
    counted = f"{usage.prompt_tokens} + {usage.completion_tokens} tokens{', estimated' if usage.estimated else ''}"
    sound = usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= _TOKENS
    if promise.counts_prompt:
        return [*checks, _check("usage", "told by the container", sound and not usage.estimated, counted)]
    return [*checks, _check("usage", "told, or estimated", sound, counted)]


def _wire_checks(endpoint: Endpoint, promise: Promise) -> Iterator[Check]:
    raw = endpoint.ask_raw(probe_request(4))
    resembles = looks_like(raw)
    hint = f"; it looks like {resembles}" if resembles else ""
    if raw.status != 200 or not raw.records:
        yield _check("wire: stream", "records", False, f"status {raw.status}{hint}")
        return
    kind = raw.content_type.partition(";")[0].strip()
    if promise.content_type is not None:
        same = kind == promise.content_type
        yield _check("wire: content type", promise.content_type, same, kind + ("" if same else hint))
    if promise.prefixed is not None:
        prefixed = all(line.startswith((b"data:", b":")) for line in raw.lines)
        yield _check("wire: framing", _framing(promise.prefixed), prefixed is promise.prefixed, _framing(prefixed))
    if promise.record_key is not None:
        same = all(promise.record_key in record for record in raw.records)
        keys = ", ".join(sorted(raw.records[0])[:6])
        yield _check("wire: records", f"with '{promise.record_key}'", same, keys + ("" if same else hint))
    if promise.done is not None:
        seen = "[DONE]" if raw.ends_with_done else "no [DONE]"
        yield _check("wire: end", "[DONE]" if promise.done else "no [DONE]", raw.ends_with_done is promise.done, seen)


def _refusal_checks(endpoint: Endpoint, promise: Promise) -> Iterator[Check]:
    raw = endpoint.ask_raw(probe_request(1, sampling=_OUT_OF_RANGE))
    if promise.refusal_statuses is None:
        yield Check("bad parameter", "", _outcome(raw), Verdict.SKIPPED)
        return
    statuses = _statuses(promise.refusal_statuses)
    refused = raw.status in promise.refusal_statuses and isinstance(raw.error, InvalidRequestError)
    yield _check("bad parameter", f"refused as the caller's fault ({statuses})", refused, _outcome(raw))


def _adapter_checks(endpoint: Endpoint, promise: Promise) -> Iterator[Check]:
    """With vLLM this also tells whether the route attribute arrives: the plain route reads no model name."""
    route: ModelRoute = replace(endpoint.route, adapter=UNKNOWN_ADAPTER, served_model=None)
    raw = endpoint.ask_raw(probe_request(1), route)
    if promise.adapter_statuses is None:
        yield Check("unknown adapter", "", _outcome(raw), Verdict.SKIPPED)
    elif promise.adapter_statuses == {200}:
        answered = raw.status == 200 and raw.error is None
        yield _check("unknown adapter", "answered by the base model", answered, _outcome(raw))
    else:
        refused = raw.status in promise.adapter_statuses and raw.error is not None
        yield _check("unknown adapter", f"refused ({_statuses(promise.adapter_statuses)})", refused, _outcome(raw))


def _repeat_checks(endpoint: Endpoint, answer: Answer) -> Iterator[Check]:
    again = endpoint.ask(probe_request(_TOKENS))
    same = again.text == answer.text
    yield _check("temperature 0 twice", "the same text", same, "the same" if same else "another text")


def _stop_checks(endpoint: Endpoint, promise: Promise, answer: Answer) -> Iterator[Check]:
    """Stops are taken from what the model says when it is not stopped."""
    for name, inside, cuts in (
        ("stop inside a token", True, promise.cuts_inside_token),
        ("stop at a token's end", False, promise.cuts_at_token_end),
    ):
        stop = _stop_text(answer.pieces, inside=inside)
        if cuts is None or stop is None:
            reason = "no promise" if cuts is None else "no token of the answer is long enough"
            yield Check(name, "", reason, Verdict.SKIPPED)
            continue
        got = endpoint.ask(probe_request(_TOKENS, stop=(stop,)))
        cut = answer.text[: answer.text.index(stop)]
        left = answer.text if inside else cut + stop
        seen = {cut: "cut", left: "missed" if inside else "left in"}.get(got.text, "another text")
        expected = "cut" if cuts else "missed" if inside else "left in"
        ended = seen == "missed" or got.finish.get(0) is FinishReason.STOP
        yield _check(name, expected, seen == expected and ended, f"{seen}, {_ending(got)}")


def _multibyte_checks(endpoint: Endpoint) -> Iterator[Check]:
    """An echo shows both ways; without it, the way back alone."""
    echoes = endpoint.honours(Parameter.ECHO)
    got = endpoint.ask(probe_request(8, prompts=(MULTIBYTE_PROMPT,), echo=echoes))
    generated = got.text.removeprefix(MULTIBYTE_PROMPT) if echoes else got.text
    # the limit may fall within a character
    damaged = "\N{REPLACEMENT CHARACTER}" in generated.rstrip("\N{REPLACEMENT CHARACTER}")
    if echoes and not got.text.startswith(MULTIBYTE_PROMPT):
        yield _check("multibyte text", "echoed as it was sent", False, "another prompt")
    else:
        expected = "echoed as it was sent" if echoes else "undamaged"
        yield _check("multibyte text", expected, not damaged, "damaged" if damaged else "undamaged")


def _logprobs_checks(endpoint: Endpoint) -> Iterator[Check]:
    if not endpoint.honours(Parameter.LOGPROBS):
        yield Check("logprobs", "", "not this endpoint's to honour", Verdict.SKIPPED)
        return
    most = endpoint.backend.abilities(endpoint.route).max_logprobs
    got = endpoint.ask(probe_request(8, logprobs=1 if most is None else min(1, most)))
    generated = 0 if got.usage is None else got.usage.completion_tokens
    # the token that ends the text is counted, and told by some containers only
    counted = len(got.logprobs) > 0 and generated - 1 <= len(got.logprobs) <= generated
    possible = all(value is not None and value <= 0 for value in got.logprobs)
    observed = f"{len(got.logprobs)} for {generated} tokens{'' if possible else ', above 0 or missing'}"
    yield _check("logprobs", "one for each token", counted and possible, observed)


def _n_checks(endpoint: Endpoint) -> Iterator[Check]:
    if not endpoint.honours(Parameter.N):
        yield Check("n", "", "not this endpoint's to honour", Verdict.SKIPPED)
        return
    got = endpoint.ask(probe_request(4, n=2, best_of=2, sampling=SamplingParams(temperature=0.8)))
    yield _check("n", "two choices", set(got.finish) == {0, 1}, f"{len(got.finish)} of 2")


def _choice_checks(endpoint: Endpoint) -> Iterator[Check]:
    """Also tells a wrong version: containers read a constraint by another version's name as nothing at all."""
    if not endpoint.honours(Parameter.CHOICE):
        yield Check("choice", "", "not this endpoint's to honour", Verdict.SKIPPED)
        return
    constraint = Constraint(ConstraintKind.CHOICE, choices=_CHOICES)
    got = endpoint.ask(probe_request(12, constraint=constraint))
    held = got.text.strip() in _CHOICES
    yield _check("choice", "one of the choices", held, "one of them" if held else "free text")


def _stop_text(pieces: Sequence[str], *, inside: bool) -> str | None:
    """A text that first occurs in the answer within one piece, up to its end or to a character before it."""
    start = 0
    text = "".join(pieces)
    for piece in pieces:
        end = start + len(piece)
        word = text[end - len(piece.lstrip()) : end]
        if len(word) >= _SHORTEST_TOKEN and word.isascii() and word.isalpha():
            stop = word[:-1] if inside else word
            if text.find(stop) == end - len(word) and start > 0:
                return stop
        start = end
    return None


def _guarded(name: str, expected: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from checks()
    except CompletionError as error:
        yield _failed(name, expected, error)


def _failed(name: str, expected: str, error: CompletionError) -> Check:
    return Check(name, expected, _said(error), Verdict.DIFFERS)


def _check(name: str, expected: str, holds: bool, observed: str) -> Check:
    return Check(name, expected, observed, Verdict.MATCHES if holds else Verdict.DIFFERS)


def _said(error: CompletionError) -> str:
    return error.message if error.detail is None else f"{error.message} ({error.detail})"


def _ending(answer: Answer) -> str:
    reason = answer.finish.get(0)
    return "no finish reason" if reason is None else f"finish reason {reason}"


def _framing(prefixed: bool) -> str:
    return "server-sent events" if prefixed else "bare lines"


def _outcome(raw: RawAnswer) -> str:
    if raw.error is None:
        return f"answered ({raw.status})"
    return f"refused ({raw.status}): {raw.error.message}"


def _statuses(statuses: frozenset[int]) -> str:
    return " or ".join("an error record" if status == 200 else str(status) for status in sorted(statuses, reverse=True))
