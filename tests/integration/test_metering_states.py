"""Requests, deliveries, deaths and sweeps in any order, against a model of what the books must say after each.

``MORE_EXAMPLES`` is how many such stories are played; a check plays few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar

import boto3
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from completions.domain.errors import CompletionError, RateLimitError
from completions.domain.limits import Charge, LimitKind
from completions.domain.metering import Principal, Reservation
from completions.domain.ports import Claim
from completions.metering.limit_items import amount, counter
from completions.metering.recovery_table import RecoveryTable
from completions.metering.sweep import LostCharge
from completions.metering.usage_table import UsageTable
from dynamodb_local import new_table
from fakes import ManualClock
from metered import COUNTED, LONG_AGO, Books, DiedError, key, record, reservation

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

STORIES = int(os.environ.get("MORE_EXAMPLES", "5"))
BEFORE_MIDNIGHT = datetime(2026, 11, 30, 23, 20, tzinfo=UTC)  # of a day, and of a month
LONGEST = timedelta(minutes=10)
NAMES = st.integers(0, 10**6)
WRITES = ("put_claim", "take_hold", "drop_claim", "settle_record", "close_hold")


class MortalTable(UsageTable):
    """``dead`` are the writes that are not made any more."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.dead: frozenset[str] = frozenset()

    def __getattribute__(self, name: str) -> Any:
        if name in WRITES and name in super().__getattribute__("dead"):

            def die(*_: object, **__: object) -> None:
                raise DiedError

            return die
        return super().__getattribute__(name)


class Left(Enum):
    """What a request has in the table beside its hold."""

    NO_RECORD = auto()
    CLAIM = auto()
    RECORD = auto()
    CLAIM_AND_RESULT = auto()


@dataclass(slots=True)
class Request:
    """A request, and what the books must say of it. ``held`` is whether its hold is open."""

    reservation: Reservation
    claim: Claim | None
    table: MortalTable
    held: bool = True
    left: Left = Left.CLAIM
    counted: Charge = field(default_factory=Charge)
    final: tuple[str, Charge] | None = None
    dead: bool = False

    @property
    def stands_for(self) -> Charge:
        return self.reservation.estimate if self.held else self.counted


class Metering(RuleBasedStateMachine):
    client: ClassVar[DynamoDBClient]

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(self.client, new_table(self.client))
        # so that a sweep does not look through two empty days first
        RecoveryTable(self.client, self.books.table, 400).note_looked_through(BEFORE_MIDNIGHT)
        self.clock = ManualClock(now=BEFORE_MIDNIGHT)
        self.ledgers = [self.books.ledger(self.clock) for _ in range(2)]
        self.policy = LostCharge.NOTHING
        self.keys: list[Principal] = [
            key(nanos_per_day=5_000, parallel_requests=3),
            key(tokens_per_day=250, nanos_per_month=6_000),
            key(tokens_per_month=400),
        ]
        self.requests: list[Request] = []

    @initialize(policy=st.sampled_from(LostCharge))
    def begin(self, policy: LostCharge) -> None:
        self.policy = policy

    # What can happen

    @rule(
        number=st.integers(0, 2),
        worker=st.integers(0, 1),
        tokens=st.integers(1, 100),
        nanos=st.integers(0, 2_000),
        caller_named=st.booleans(),
        dies_before=st.sampled_from([None, None, None, "put_claim", "take_hold"]),
    )
    def reserve(
        self, number: int, worker: int, tokens: int, nanos: int, caller_named: bool, dies_before: str | None
    ) -> None:
        principal, now = self.keys[number], self.clock.now()
        wanted = reservation(principal, now, estimate=Charge(tokens, nanos), caller_named=caller_named)
        fits = self._fits(wanted)
        table = self._table(worker)
        if dies_before is not None:
            table.dead = frozenset(WRITES[WRITES.index(dies_before) :]) | {"put_claim"}
            if dies_before == "take_hold":
                table.dead = frozenset(WRITES) - ({"put_claim"} if caller_named else set())
            self._die_reserving(wanted, table, worker, fits)
            return
        try:
            claim = self.ledgers[worker].reserve(wanted)
        except RateLimitError:
            assert not fits
            return
        assert fits
        claim.confirm()
        self.requests.append(Request(wanted, claim, table))

    def _die_reserving(self, wanted: Reservation, table: MortalTable, worker: int, fits: bool) -> None:
        try:
            claim = self.ledgers[worker].reserve(wanted)
            claim.confirm()
        except DiedError:
            pass
        except RateLimitError:
            assert not fits
            return
        held = "take_hold" not in table.dead and not (wanted.caller_named and "put_claim" in table.dead)
        left = Left.CLAIM if "put_claim" not in table.dead else Left.NO_RECORD
        if held or left is Left.CLAIM:
            self.requests.append(Request(wanted, None, table, held=held, left=left, dead=True))

    @precondition(lambda self: self._known())
    @rule(choice=NAMES, worker=st.integers(0, 1))
    def deliver_again(self, choice: int, worker: int) -> None:
        known = self._known()
        again = replace(known[choice % len(known)].reservation, created_at=self.clock.now())
        self._table(worker)
        with pytest.raises(CompletionError):
            self._serve(again, worker)

    def _serve(self, again: Reservation, worker: int) -> None:
        claim = self.ledgers[worker].reserve(again)
        try:
            claim.confirm()
        finally:
            claim.settle(record(again, Charge(1, 1)))

    @precondition(lambda self: self._alive())
    @rule(choice=NAMES, share=st.integers(0, 4), dead=st.sampled_from([(), (), ("settle_record",), ("close_hold",)]))
    def settle(self, choice: int, share: int, dead: tuple[str, ...]) -> None:
        alive = self._alive()
        one = alive[choice % len(alive)]
        assert one.claim is not None
        estimate = one.reservation.estimate
        used = Charge(estimate.tokens * share // 4, estimate.nanos * share // 4)
        one.table.dead = frozenset(dead)
        try:
            one.claim.settle(record(one.reservation, used))
        except DiedError:
            assert dead
        one.dead = bool(dead)
        one.counted, one.final = used, ("succeeded", used)
        one.held = "close_hold" in dead
        one.left = Left.CLAIM_AND_RESULT if "settle_record" in dead else Left.RECORD

    @precondition(lambda self: self._settled())
    @rule(choice=NAMES)
    def settle_again(self, choice: int) -> None:
        settled = self._settled()
        one = settled[choice % len(settled)]
        assert one.claim is not None
        one.claim.settle(record(one.reservation, Charge(7, 7)))

    @precondition(lambda self: self._alive())
    @rule(choice=NAMES)
    def die(self, choice: int) -> None:
        alive = self._alive()
        alive[choice % len(alive)].dead = True

    @rule(minutes=st.integers(1, 17))
    def time_passes(self, minutes: int) -> None:
        self.clock.advance(minutes * 60)
        for one in self._alive():
            if self.clock.now() - one.reservation.created_at > LONGEST:
                one.dead = True

    @rule(twice=st.booleans())
    def sweep(self, twice: bool) -> None:
        for _ in range(1 + twice):
            self.books.sweeper(*self.keys, now=self.clock.now(), charge=self.policy).sweep()
        for one in self.requests:
            if self.clock.now() - one.reservation.created_at > timedelta(seconds=960):
                self._expect_swept(one)

    def _expect_swept(self, one: Request) -> None:
        if one.left is Left.CLAIM:
            kept = one.reservation.estimate if one.held and self.policy is LostCharge.ESTIMATE else Charge()
            one.counted, one.final = kept, ("lost", kept)
        elif one.left is Left.NO_RECORD:
            one.counted = Charge()
        one.held = False
        one.left = Left.NO_RECORD if one.left is Left.NO_RECORD else Left.RECORD

    # What must hold

    @invariant()
    def limits_hold_and_counters_are_what_was_used_and_what_is_held(self) -> None:
        for principal in self.keys:
            item = self.books.limits(principal)
            mine = [one for one in self.requests if one.reservation.principal == principal]
            expected = {
                counter(kind, one.reservation.created_at): self._used(principal, kind, one.reservation.created_at)
                for one in mine
                for kind in COUNTED
            }
            assert {name: int(item.get(name, 0)) for name in expected} == expected
            assert int(item.get("parallel_requests#", 0)) == sum(one.held for one in mine)
            opened = {name for name in item if name.startswith("open#")}
            assert opened == {f"open#{one.reservation.record_id}" for one in mine if one.held}
            for kind in COUNTED:
                limit = principal.limits.of(kind)
                values = [int(value) for name, value in item.items() if name.startswith(f"{kind}#")]
                assert all(value >= 0 and (limit is None or value <= limit) for value in values)

    def teardown(self) -> None:
        for one in self.requests:
            one.dead = one.dead or one.left is Left.CLAIM
        self.clock.advance(LONG_AGO.total_seconds())
        self.sweep(twice=True)
        for principal in self.keys:
            self.books.require_balance(principal)
        for one in self.requests:
            item = self.books.record(one.reservation.record_id)
            if one.final is None:
                assert item is None
                continue
            assert item is not None
            tokens = int(item["prompt_tokens"] + item["completion_tokens"])
            assert (item["outcome"], Charge(tokens, int(item["nanos"]))) == one.final

    # The model

    def _known(self) -> list[Request]:
        return [one for one in self.requests if one.left is not Left.NO_RECORD]

    def _alive(self) -> list[Request]:
        return [one for one in self.requests if not one.dead and one.left is Left.CLAIM]

    def _settled(self) -> list[Request]:
        return [one for one in self.requests if not one.dead and one.left is Left.RECORD and one.claim is not None]

    def _used(self, principal: Principal, kind: LimitKind, at: datetime) -> int:
        return sum(
            amount(kind, one.stands_for)
            for one in self.requests
            if one.reservation.principal == principal and counter(kind, one.reservation.created_at) == counter(kind, at)
        )

    def _fits(self, wanted: Reservation) -> bool:
        principal = wanted.principal
        in_progress = sum(one.held for one in self.requests if one.reservation.principal == principal)
        for kind in LimitKind:
            limit = principal.limits.of(kind)
            used = in_progress if kind is LimitKind.PARALLEL_REQUESTS else 0
            used = self._used(principal, kind, wanted.created_at) if kind in COUNTED else used
            if limit is not None and used + amount(kind, wanted.estimate) > limit:
                return False
        return True

    def _table(self, worker: int) -> MortalTable:
        """The table of the worker's next request; each request dies by itself."""
        table = MortalTable(self.books.client, self.books.table, 400)
        self.ledgers[worker]._table = table
        return table


@pytest.fixture(scope="module")
def client(dynamodb_local: str) -> Iterator[DynamoDBClient]:
    with closing(boto3.client("dynamodb", endpoint_url=dynamodb_local)) as opened:
        yield opened


def test_in_whatever_order_things_happen_the_books_are_right(client: DynamoDBClient) -> None:
    Metering.client = client
    run_state_machine_as_test(
        Metering,
        settings=settings(
            max_examples=STORIES,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # a story is short enough to be read as it is, and to shrink one takes minutes
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            print_blob=True,
        ),
    )
