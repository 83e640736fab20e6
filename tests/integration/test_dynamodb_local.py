"""What only a real DynamoDB can prove: nothing is overspent, doubled or lost, whoever meets and whoever dies."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import datetime, timedelta
from io import BytesIO
from itertools import cycle
from threading import Barrier, Lock
from typing import TYPE_CHECKING, Any

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config

from completions.clients import build_dynamodb_client
from completions.domain.completion import CompletionChunk, FinishReason, Usage
from completions.domain.errors import CompletionError, DuplicateRequestError, QuotaExceededError
from completions.domain.limits import Charge, LimitKind
from completions.domain.metering import Principal, Reservation
from completions.domain.ports import Claim
from completions.service.complete import CallContext, CompletionService
from fakes import InMemoryRegistry, ManualClock, ScriptedBackend, delta, request, route
from metered import AMPLE, LONG_AGO, NOON, Books, key, recent_table, record, reservation

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

AT_ONCE = 64
PROCESSES = 8
SEEDS = range(10)
SKEW = timedelta(minutes=5)


def _patient(**settings: Any) -> Config:
    return Config(**{**settings, "connect_timeout": 30, "read_timeout": 30})


@pytest.fixture(scope="module")
def clients(dynamodb_local: str) -> Iterator[list[DynamoDBClient]]:
    """As deployed functions have them, each with an allowance of retries of its own."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setenv("AWS_ENDPOINT_URL_DYNAMODB", dynamodb_local)
        patch.setattr("completions.clients.Config", _patient)  # with this machine, however busy it is
        yield [opened.enter_context(closing(build_dynamodb_client())) for _ in range(PROCESSES)]


@pytest.fixture(scope="module")
def client(clients: list[DynamoDBClient]) -> DynamoDBClient:
    return clients[0]


@pytest.fixture
def books(client: DynamoDBClient) -> Books:
    return Books(client, recent_table(client))


def at_once(books: Books, requests: list[Reservation], *more: Books) -> list[Claim | CompletionError]:
    """Reserve all of them at the same moment, each from a worker of its own."""
    start = Barrier(len(requests))
    ledgers = [one.ledger() for one, _ in zip(cycle([books, *more]), requests, strict=False)]

    def reserve(number: int) -> Claim | CompletionError:
        start.wait()
        try:
            claim = ledgers[number].reserve(requests[number])
            claim.confirm()
        except CompletionError as error:
            return error
        return claim

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(reserve, range(len(requests))))


def passed(results: list[Claim | CompletionError]) -> list[Claim]:
    return [result for result in results if not isinstance(result, CompletionError)]


# Budgets


def test_of_64_parallel_requests_those_pass_that_the_budget_fits(books: Books) -> None:
    principal = key(nanos_per_day=20_000)
    results = at_once(books, [reservation(principal) for _ in range(AT_ONCE)])
    assert len(passed(results)) == 20
    assert sum(isinstance(result, QuotaExceededError) for result in results) == 44
    assert books.used(principal, LimitKind.NANOS_PER_DAY) == 20_000


@pytest.mark.parametrize("seed", SEEDS)
def test_no_nano_dollar_is_overspent_whatever_the_estimates_are(books: Books, seed: int) -> None:
    numbers = random.Random(seed)  # noqa: S311 - not cryptography
    limit = 20_000
    principal = key(nanos_per_month=limit)
    requests = [
        reservation(principal, estimate=Charge(numbers.randint(1, 99), numbers.randint(1, 2_000)))
        for _ in range(AT_ONCE)
    ]
    results = at_once(books, requests)
    refused = [one for one, result in zip(requests, results, strict=True) if isinstance(result, QuotaExceededError)]
    assert len(passed(results)) + len(refused) == AT_ONCE
    spent = sum(one.estimate.nanos for one in requests if one not in refused)
    assert books.used(principal, LimitKind.NANOS_PER_MONTH) == spent <= limit
    # and nobody was refused who would still fit: what is used only grew
    assert all(spent + one.estimate.nanos > limit for one in refused)


@pytest.mark.parametrize("kind", [LimitKind.PARALLEL_REQUESTS, LimitKind.REQUESTS_PER_MINUTE])
def test_no_more_than_the_limit_are_in_progress_or_begin(books: Books, kind: LimitKind) -> None:
    principal = key(**{kind.value: 20})
    results = at_once(books, [reservation(principal) for _ in range(AT_ONCE)])
    assert len(passed(results)) == 20
    assert books.used(principal, kind) == 20


class Faults:
    """Answers the first attempts of writes with errors, or lets them through and loses their replies."""

    def __init__(self, clients: list[DynamoDBClient]) -> None:
        self.retries = 0
        self.injected: Counter[str] = Counter()
        self._events: list[Any] = [client.meta.events for client in clients]
        self._lock = Lock()
        self._registered: list[tuple[str, Any]] = []
        self._on("after-call.dynamodb", self._count, last=True)

    def refuse(self, *codes: str) -> None:
        """Every write is refused at first, for one of these reasons in turn."""
        seen: set[str] = set()

        def before_send(request: AWSPreparedRequest, **_: Any) -> AWSResponse | None:
            target = str(request.headers.get("X-Amz-Target"))
            if not any(name in target for name in ("PutItem", "UpdateItem")):
                return None
            invocation = str(request.headers.get("amz-sdk-invocation-id"))
            with self._lock:
                if invocation in seen:
                    return None
                seen.add(invocation)
                code = codes[len(seen) % len(codes)]
                self.injected[code] += 1
            return _refusal(request.url, code)

        self._on("before-send.dynamodb", before_send)

    def lose_replies(self, *operations: str) -> None:
        """The first reply to each such write is lost after the write was made; the SDK sends it again."""

        def needs_retry(attempts: int, **_: Any) -> float | None:
            if attempts > 1:
                return None
            with self._lock:
                self.injected["lost"] += 1
            return 0.0

        for operation in operations:
            self._on(f"needs-retry.dynamodb.{operation}", needs_retry)

    def stop(self) -> None:
        """No more of it."""
        for events in self._events:
            for event, handler in self._registered:
                events.unregister(event, handler)

    def _count(self, parsed: Any, **_: Any) -> None:
        with self._lock:
            self.retries += parsed["ResponseMetadata"].get("RetryAttempts", 0)

    def _on(self, event: str, handler: Any, *, last: bool = False) -> None:
        for events in self._events:
            (events.register_last if last else events.register_first)(event, handler)
        self._registered.append((event, handler))


class _Raw(BytesIO):
    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()


def _refusal(url: str, code: str) -> AWSResponse:
    body = json.dumps({"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": "injected"}).encode()
    headers: Any = {"content-type": "application/x-amz-json-1.0"}
    return AWSResponse(url, 400, headers, _Raw(body))


@pytest.fixture
def faults(clients: list[DynamoDBClient]) -> Iterator[Faults]:
    made = Faults(clients)
    yield made
    made.stop()


def settle_all(requests: list[Reservation], claims: list[Claim]) -> None:
    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(lambda pair: pair[0].settle(record(pair[1])), zip(claims, requests, strict=True)))


THROTTLES = ("ThrottlingException", "ProvisionedThroughputExceededException", "TransactionConflictException")


@pytest.mark.parametrize("codes", [(), THROTTLES[-1:], THROTTLES], ids="+".join)
def test_64_at_once_that_fit_all_pass_and_are_counted_once(
    books: Books,
    clients: list[DynamoDBClient],
    faults: Faults,
    codes: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    principal = key(**AMPLE)
    requests = [reservation(principal) for _ in range(AT_ONCE)]
    if codes:
        faults.refuse(*codes)
    results = at_once(books, requests, *(Books(client, books.table) for client in clients[1:]))
    claims = passed(results)
    assert [result for result in results if isinstance(result, CompletionError)] == []
    settle_all(requests, claims)
    with capsys.disabled():
        print(f"\n64 in parallel, {'+'.join(codes) or 'no faults'}: {faults.retries} retries by the SDK")  # noqa: T201
    assert faults.injected.total() == (4 * AT_ONCE if codes else 0)
    assert len(books.records(principal)) == AT_ONCE
    assert books.used(principal, LimitKind.NANOS_PER_DAY) == 400 * AT_ONCE
    books.require_balance(principal)


def test_replies_that_are_lost_double_nothing(books: Books, faults: Faults) -> None:
    principal = key(**AMPLE)
    requests = [reservation(principal, caller_named=number % 2 == 0) for number in range(16)]
    faults.lose_replies("PutItem", "UpdateItem")
    claims = passed(at_once(books, requests))
    assert len(claims) == 16
    settle_all(requests, claims)
    assert faults.injected["lost"] == 4 * 16
    assert len(books.records(principal)) == 16
    assert books.used(principal, LimitKind.NANOS_PER_MONTH) == 400 * 16
    books.require_balance(principal)


# One logical request


def serve(books: Books, principal: Principal, script: list[CompletionChunk], take: int) -> None:
    """Stream through the service, and hang up after ``take`` chunks."""
    service = CompletionService(
        InMemoryRegistry({}, [route()]), ScriptedBackend(script), books.ledger(), ManualClock(now=NOON)
    )
    context = CallContext(f"call-{principal.key_id}", principal, "openai", arrived=1000.0)
    stream = service.stream(request(), context)
    for _ in range(take):
        next(stream)
    stream.close()


@pytest.mark.parametrize(
    ("script", "take", "tokens"),
    [
        # the container's own running count is the bill of what was generated until then
        ([delta("a", usage=Usage(7, 1)), delta("b", usage=Usage(7, 2)), delta("c", usage=Usage(7, 3))], 2, 9),
        ([CompletionChunk(), delta("a", usage=Usage(7, 1))], 1, 0),
    ],
    ids=["in the middle", "before the first token"],
)
def test_an_aborted_stream_is_one_record_of_what_was_generated(
    books: Books, script: list[CompletionChunk], take: int, tokens: int
) -> None:
    principal = key(**AMPLE)
    serve(books, principal, script, take)
    (item,) = books.records(principal)
    assert (item["outcome"], int(item["prompt_tokens"] + item["completion_tokens"])) == ("aborted", tokens)
    assert books.used(principal, LimitKind.TOKENS_PER_DAY) == tokens
    books.require_balance(principal)


def test_a_whole_stream_is_one_record(books: Books) -> None:
    principal = key(**AMPLE)
    script = [delta("a", usage=Usage(7, 1)), delta("b", FinishReason.STOP, usage=Usage(7, 2))]
    serve(books, principal, script, 2)
    (item,) = books.records(principal)
    assert (item["outcome"], item["prompt_tokens"], item["completion_tokens"]) == ("succeeded", 7, 2)
    books.require_balance(principal)


@pytest.mark.parametrize("caller_named", [False, True])
def test_of_16_deliveries_at_once_one_is_served(books: Books, caller_named: bool) -> None:
    principal = key(**AMPLE)
    wanted = reservation(principal, caller_named=caller_named)
    results = at_once(books, [wanted] * 16)
    (claim,) = passed(results)
    assert sum(isinstance(result, DuplicateRequestError) for result in results) == 15
    claim.settle(record(wanted))
    books.sweeper(principal).sweep()
    (item,) = books.records(principal)
    assert (item["outcome"], int(item["nanos"])) == ("succeeded", 400)
    books.require_balance(principal)


@pytest.mark.parametrize("caller_named", [False, True])
@pytest.mark.parametrize(("first", "second"), [(SKEW, -SKEW), (-SKEW, SKEW)], ids=["ahead first", "behind first"])
@pytest.mark.parametrize("settled", [False, True])
def test_two_workers_whose_clocks_differ_serve_a_request_once(
    books: Books, first: timedelta, second: timedelta, settled: bool, caller_named: bool
) -> None:
    principal = key(**AMPLE)
    one, other = (
        reservation(principal, NOON + skew, name=f"skewed-{principal.key_id}", caller_named=caller_named)
        for skew in (first, second)
    )
    claim = books.ledger(ManualClock(now=NOON + first)).reserve(one)
    claim.confirm()
    if settled:
        claim.settle(record(one))
    with pytest.raises(DuplicateRequestError):
        books.ledger(ManualClock(now=NOON + second)).reserve(other).confirm()
    if not settled:
        claim.settle(record(one))
    books.sweeper(principal, now=NOON + first + LONG_AGO).sweep()
    (item,) = books.records(principal)
    assert (item["outcome"], datetime.fromisoformat(item["created_at"])) == ("succeeded", one.created_at)
    books.require_balance(principal)


def test_a_sweeper_whose_clock_is_ahead_leaves_a_running_function_its_hold(books: Books) -> None:
    """A function runs for ten minutes at most, and clocks differ by five."""
    principal = key(**AMPLE)
    running = reservation(principal)
    claim = books.ledger().reserve(running)
    claim.confirm()
    books.sweeper(principal, now=NOON + timedelta(minutes=10) + SKEW).sweep()
    claim.settle(record(running))
    books.require_balance(principal)
    assert books.used(principal, LimitKind.NANOS_PER_DAY) == 400


def test_sweeping_beside_busy_workers_disturbs_none_of_them(books: Books) -> None:
    principal = key(**AMPLE)
    for _ in range(8):  # what dead workers left
        with suppress(CompletionError):
            books.ledger().reserve(reservation(principal, NOON - LONG_AGO)).confirm()
    clock, workers = ManualClock(now=NOON), [books.ledger() for _ in range(8)]
    requests = [[reservation(principal) for _ in range(6)] for _ in workers]

    def work(number: int) -> None:
        for one in requests[number]:
            workers[number].reserve(one).settle(record(one))

    def keep_sweeping(_: int) -> None:
        for _ in range(5):
            books.sweeper(principal, now=clock.now() + timedelta(seconds=30)).sweep()

    jobs: list[Callable[[int], None]] = [*[work] * 8, keep_sweeping, keep_sweeping]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda numbered: numbered[1](numbered[0]), enumerate(jobs)))
    books.sweeper(principal).sweep()

    outcomes = Counter(item["outcome"] for item in books.records(principal))
    assert outcomes == {"succeeded": 48, "lost": 8}
    books.require_balance(principal)


def test_the_real_client_retries_a_transactions_conflict_and_gives_up_in_the_end(dynamodb_local: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_DYNAMODB", dynamodb_local)
        client = build_dynamodb_client()
    attempts: list[str] = []

    def refuse(request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        attempts.append(request.url)
        return _refusal(request.url, "TransactionConflictException")

    events: Any = client.meta.events
    events.register("before-send.dynamodb", refuse)
    with closing(client), pytest.raises(CompletionError, match="not served"):
        Books(client, "any").ledger().reserve(reservation(key(**AMPLE)))
    assert len(attempts) == 3
