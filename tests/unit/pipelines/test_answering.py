"""One event's request, delivered any number of times: answered once, paid once, whatever happens in between."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from completions.domain.completion import CompletionChunk, FinishReason, Usage
from completions.domain.errors import (
    BackendError,
    BackendUnavailableError,
    InvalidRequestError,
    LimitStatus,
    MeteringError,
    QuotaExceededError,
    RateLimitError,
    Recourse,
)
from completions.domain.events import EventReply, EventRequest, KeptReply, RetryLaterError
from completions.domain.metering import Outcome, plain_record
from completions.pipelines.answering import EventAnswering
from completions.service.complete import CompletionService
from completions.service.dispatch import RetryPolicy
from completions.service_bootstrap import every_dialects_endpoints
from completions.settings import Settings
from event_fakes import MemoryBooks, MemoryReplies
from fakes import Attempt, InMemoryRegistry, ManualClock, ScriptItem, SequencedBackend, delta, principal, route

NAME = "msg-1"
BODY = {"model": "demo", "prompt": "def f(", "max_tokens": 4}
ANSWER: Sequence[CompletionChunk] = [delta("c"), delta("d", FinishReason.STOP, usage=Usage(3, 2, 1))]
FAILURE = BackendError("The model failed to answer.")
MESSAGES = [{"speaker": "human", "text": "def f("}]


class Bench:
    """The service over fakes; ``attempts`` are what the model does, call by call, at one call a try."""

    def __init__(
        self, *attempts: Attempt, books: MemoryBooks | None = None, clock: ManualClock | None = None, **key: Any
    ) -> None:
        self.clock = clock or ManualClock()
        self.books = books or MemoryBooks()
        self.replies = MemoryReplies()
        self.backend = SequencedBackend(attempts)
        self.registry = InMemoryRegistry({"": principal(**key)}, [route()])
        self.answering = self.another()

    def another(self) -> EventAnswering:
        service = CompletionService(self.registry, self.backend, self.books, self.clock, RetryPolicy(1))
        endpoints = every_dialects_endpoints(Settings(registry_table="registry", usage_table="usage"))
        return EventAnswering(
            endpoints, service, self.registry, replies=self.replies, records=self.books, clock=self.clock
        )

    def answer(self, body: Any = BODY, url: str = "/v1/completions", **fields: Any) -> EventReply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.answering.answer(EventRequest(NAME, fields.pop("key_id", "key-1"), url, content), **fields)

    def later(self, **fields: Any) -> RetryLaterError:
        with pytest.raises(RetryLaterError) as raised:
            self.answer(**fields)
        return raised.value

    @property
    def calls(self) -> int:
        return len(self.backend.calls)


# Once


def test_an_answer_is_the_dialects_own_with_model_usage_and_price() -> None:
    bench = Bench(ANSWER)
    reply = bench.answer()
    body = json.loads(reply.body)
    assert (reply.request_id, reply.status, reply.model, reply.usage) == (NAME, 200, "demo", Usage(3, 2, 1))
    assert reply.succeeded
    assert (reply.error, reply.message) == (None, None)
    assert (body["object"], body["choices"][0]["text"], body["usage"]["total_tokens"]) == ("text_completion", "cd", 5)
    assert bench.books.ends == {NAME: Outcome.SUCCEEDED}


def test_a_delivery_that_comes_again_gets_the_kept_reply_and_asks_nobody() -> None:
    bench = Bench(ANSWER)
    first = bench.answer()
    assert bench.answer() == first
    assert (bench.calls, bench.books.ends) == (1, {NAME: Outcome.SUCCEEDED})


def test_a_reply_whose_function_died_before_it_was_paid_is_given_and_paid() -> None:
    bench = Bench(ANSWER, books=MemoryBooks(dies=True))
    first = bench.answer()
    assert bench.books.ends == {NAME: None}
    again = bench.answer()
    assert again == first
    assert (bench.calls, bench.books.ends) == (1, {NAME: Outcome.SUCCEEDED})
    settled: Any = bench.books.records[NAME]
    assert (settled["prompt_tokens"], settled["completion_tokens"], settled["cached_tokens"]) == (3, 2, 1)


def test_so_it_is_when_the_sweeper_came_first() -> None:
    bench = Bench(ANSWER, books=MemoryBooks(dies=True))
    bench.answer()
    bench.books.ends[NAME] = Outcome.LOST
    assert bench.answer().status == 200
    assert bench.books.ends == {NAME: Outcome.SUCCEEDED}


def test_while_another_delivery_is_being_answered_it_is_to_come_later() -> None:
    bench = Bench(ANSWER)
    bench.answer()
    bench.replies.kept.clear()
    bench.books.ends[NAME] = None
    assert bench.later().seconds == 15
    assert bench.calls == 1


def test_what_a_dead_function_left_is_tried_anew_once_the_sweeper_has_closed_it() -> None:
    bench = Bench(ANSWER, ANSWER)
    bench.answer()
    bench.replies.kept.clear()  # it died before
    bench.books.ends[NAME] = Outcome.LOST
    assert bench.answer().status == 200
    assert bench.books.ends == {NAME: Outcome.LOST, f"{NAME}-2": Outcome.SUCCEEDED}
    assert bench.replies.kept[NAME].record == plain_record(bench.books.records[f"{NAME}-2"])  # type: ignore[arg-type]


# Failures


def test_a_failure_is_tried_again_at_once_under_a_record_of_its_own() -> None:
    bench = Bench(FAILURE, ANSWER)
    assert bench.answer().status == 200
    assert bench.books.ends == {NAME: Outcome.FAILED, f"{NAME}-2": Outcome.SUCCEEDED}


def test_three_failures_are_the_reply_and_stay_it() -> None:
    bench = Bench(FAILURE, FAILURE, FAILURE)
    reply = bench.answer()
    assert (reply.status, reply.error, reply.message) == (500, "BackendError", "The model failed to answer.")
    assert reply.usage is None
    assert bench.replies.kept == {NAME: KeptReply(reply, None)}
    assert bench.answer() == reply
    assert bench.calls == 3


def test_failures_of_other_deliveries_count() -> None:
    clock = ManualClock()
    slow: list[ScriptItem] = [lambda: clock.advance(100), FAILURE]
    bench = Bench(slow, slow, clock=clock)
    for _ in range(2):
        assert bench.later(deadline=bench.clock.monotonic() + 100).seconds == 2
    bench.books.claims[f"{NAME}-3"] = bench.books.claims[NAME]
    bench.books.ends[f"{NAME}-3"] = Outcome.LOST
    reply = bench.answer()
    assert (reply.status, reply.message) == (500, "The request failed 3 times.")
    assert bench.calls == 2


def test_nothing_is_claimed_when_there_is_no_time_left() -> None:
    bench = Bench(ANSWER)
    for _ in range(4):
        assert bench.later(deadline=bench.clock.monotonic()).seconds == 2
    assert bench.books.claims == {}
    assert bench.answer(deadline=bench.clock.monotonic() + 1).status == 200


@pytest.mark.parametrize(
    "busy",
    [
        RateLimitError("The model is busy.", retry_after=7, recourse=Recourse.AGAIN),
        BackendUnavailableError("It is not there.", retry_after=7, recourse=Recourse.WHEN_STARTED),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_model_that_is_busy_or_not_there_is_asked_later(busy: Any) -> None:
    bench = Bench(busy, ANSWER)
    assert bench.later().seconds == 7
    assert bench.calls == 1
    assert bench.replies.kept == {}
    bench.books.ends[NAME] = Outcome.REFUSED  # as the record book says of both
    assert bench.answer().status == 200


def test_being_turned_away_is_no_failure_however_often() -> None:
    busy = RateLimitError("The model is busy.", recourse=Recourse.AGAIN)
    bench = Bench(*[busy] * 6, FAILURE, ANSWER)
    for _ in range(6):
        assert bench.later().seconds == 2
    assert bench.answer().status == 200
    assert set(bench.books.ends.values()) == {Outcome.REFUSED, Outcome.FAILED, Outcome.SUCCEEDED}


def test_books_that_cannot_be_written_are_tried_later() -> None:
    bench = Bench(books=MemoryBooks(refusal=MeteringError("not metered", retry_after=1)))
    assert bench.later().seconds == 1
    assert bench.calls == 0


def test_an_answer_that_cannot_be_kept_is_not_given_and_counts_as_a_failure() -> None:
    bench = Bench(ANSWER, ANSWER, ANSWER)
    bench.replies.failure = BackendUnavailableError("no storage", retry_after=1)
    assert [bench.later().seconds for _ in range(3)] == [1, 1, 1]
    assert set(bench.books.ends.values()) == {Outcome.FAILED}
    assert {record.error for record in bench.books.records.values()} == {"ReplyUnkeptError"}  # type: ignore[union-attr]
    bench.replies.failure = None
    assert bench.answer().message == "The request failed 3 times."


def test_a_used_up_budget_is_the_reply() -> None:
    spent = QuotaExceededError("used up", status=LimitStatus("tokens", 10, 0, 60, "tokens_per_day"))
    bench = Bench(books=MemoryBooks(refusal=spent))
    reply = bench.answer()
    assert (reply.status, reply.error) == (429, "QuotaExceededError")


def test_what_the_model_refuses_is_the_reply() -> None:
    bench = Bench(InvalidRequestError("too long"))
    reply = bench.answer()
    assert (reply.status, reply.error, reply.message) == (400, "InvalidRequestError", "too long")
    assert bench.calls == 1


# The request itself


def test_another_request_under_one_name_is_refused_and_the_kept_reply_stays() -> None:
    bench = Bench(ANSWER)
    first = bench.answer()
    other = bench.answer({**BODY, "prompt": "another"})
    assert (other.status, other.error) == (400, "InvalidRequestError")
    assert bench.replies.kept[NAME].reply == first
    assert bench.answer() == first


def test_so_is_the_same_body_for_another_url() -> None:
    bench = Bench(ANSWER)
    bench.answer()
    assert bench.answer(url="/v2/completions").status == 400
    assert bench.calls == 1


def test_an_event_is_answered_whole() -> None:
    bench = Bench()
    reply = bench.answer({**BODY, "stream": True})
    assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, "stream")
    assert bench.books.claims == {}


ANSWERS = {
    "/v1/completions": (BODY, ("choices", 0, "text")),
    "/completions": (BODY, ("choices", 0, "text")),
    "/v2/completions": (BODY, ("choices", 0, "text")),
    "/v1/llm/completions-sync?model_endpoint_name=demo": (
        {"prompt": "def f(", "max_new_tokens": 4, "temperature": 0.5},
        ("output", "text"),
    ),
    "/v1/llm/completions-stream?model_endpoint_name=demo": (
        {"prompt": "def f(", "max_new_tokens": 4, "temperature": 0.5},
        ("output", "text"),
    ),
    "/.api/completions/code": ({"model": "demo", "messages": MESSAGES}, ("completion",)),
    "/.api/completions/stream": ({"model": "demo", "messages": MESSAGES}, ("completion",)),
    "/.api/completions/stream?api-version=2": (
        {"model": "demo", "messages": MESSAGES, "stream": True},
        ("completion",),
    ),
}


@pytest.mark.parametrize("url", ANSWERS)
def test_each_dialects_url_is_answered_in_its_own_words(url: str) -> None:
    body, path = ANSWERS[url]
    reply = Bench(ANSWER).answer(body, url)
    assert reply.status == 200
    found = json.loads(reply.body)
    for step in path:
        found = found[step]
    assert found == "cd"


def test_the_first_scale_dialect_needs_its_model_in_the_query() -> None:
    reply = Bench().answer({"prompt": "def f(", "max_new_tokens": 4, "temperature": 0}, "/v1/llm/completions-sync")
    assert reply.status == 422


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/", "", "no path", "//[half"])
def test_a_url_that_is_no_completions_is_refused_with_those_that_are(url: str) -> None:
    reply = Bench().answer(url=url)
    assert (reply.status, reply.error) == (404, "UnknownPathError")
    assert reply.message is not None
    assert "/v2/completions" in reply.message


UNANSWERABLE: dict[str, tuple[Any, str, int]] = {
    "no JSON": (b"{", "/v1/completions", 400),
    "no model": ({"prompt": "x"}, "/v1/completions", 400),
    "an unknown model": ({**BODY, "model": "damo"}, "/v1/completions", 404),
    "Sourcegraph's text": ({"model": "demo", "messages": []}, "/.api/completions/code", 400),
    "Sourcegraph's stream": ({"model": "demo", "messages": []}, "/.api/completions/stream", 400),
    "Sourcegraph's unknown model": ({"model": "damo", "messages": MESSAGES}, "/.api/completions/stream", 400),
}


@pytest.mark.parametrize("case", UNANSWERABLE)
def test_a_refusal_is_json_with_an_error_status_whatever_the_dialect(case: str) -> None:
    body, url, status = UNANSWERABLE[case]
    reply = Bench().answer(body, url)
    assert reply.status == status
    assert not reply.succeeded
    assert isinstance(json.loads(reply.body), dict)
    assert reply.message


def test_a_failure_of_a_dialect_that_would_have_streamed_has_a_status_too() -> None:
    reply = Bench(FAILURE, FAILURE, FAILURE).answer({"model": "demo", "messages": MESSAGES}, "/.api/completions/stream")
    assert reply.status == 500
    assert json.loads(reply.body)["error"]["message"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ({"disabled": True}, "The key 'key-1' is disabled."),
        ({"expires_at": ManualClock().now()}, "The key 'key-1' has expired."),
        ({"key_id": "key-2"}, "There is no key 'key-1'."),
    ],
)
def test_a_key_that_may_not_pay_is_named_in_the_refusal(key: dict[str, Any], words: str) -> None:
    reply = Bench(**key).answer()
    assert (reply.status, reply.error, reply.message) == (401, "AuthenticationError", words)


def test_a_key_counts_until_it_ends() -> None:
    bench = Bench(ANSWER, expires_at=ManualClock().now() + timedelta(seconds=1))
    assert bench.answer().status == 200


def test_a_registry_that_cannot_be_read_is_asked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def fail(_: str) -> None:
        raise BackendUnavailableError("no registry", retry_after=3, detail="Throttling")

    monkeypatch.setattr(bench.registry, "principal_of", fail)
    later = bench.later()
    assert (later.seconds, later.reason) == (3, "BackendUnavailableError: Throttling")


def test_the_record_says_who_pays_and_in_which_dialect() -> None:
    bench = Bench(ANSWER)
    bench.answer(BODY, "/v2/completions")
    claim = bench.books.claims[NAME]
    assert (claim.principal, claim.dialect, claim.caller_named, claim.streamed) == (principal(), "scale", True, False)
    assert replace(claim, fingerprint=None) != claim
