"""The usage table: a claim for each logical request, a hold on its key's limits, and both settled once.

The hold is one conditional update, and what the model waits for; the claim is a conditional put that only has to be
there before any of the answer is given away. A caller who named the request may be repeating it, so then the claim
comes first. In the end the record and the hold are settled side by side, each on its own condition; whatever a
function that dies leaves behind is a state the sweeper can finish from.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from completions.domain.completion import Usage
from completions.domain.errors import CompletionError, DuplicateRequestError, LimitStatus, MeteringError
from completions.domain.metering import Outcome, Reservation, UsageRecord
from completions.domain.ports import Claim, Clock, UsageLedger
from completions.metering.items import settlement_fields
from completions.metering.limit_items import Hold, Result
from completions.metering.usage_table import UsageTable
from completions.observability import logger

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_MOST_FORGOTTEN: Final = 8
"""``closed`` entries one update drops; an update's expression has a size limit, too."""
_SIDE_BY_SIDE: Final = 64


class FailOpen(StrEnum):
    """Whose requests are served when the usage table cannot be written; their records then go to the log."""

    NOBODY = "nobody"
    UNLIMITED = "unlimited"
    """Keys without limits."""
    EVERYBODY = "everybody"


class DynamoUsageLedger(UsageLedger):
    """``retention_days`` is how long records are kept before the table's TTL removes them.

    The client may retry after a lost reply: a put or update that meets its own claim has succeeded, and the settling
    updates' conditions hold once.
    """

    def __init__(
        self,
        client: DynamoDBClient,
        table: str,
        retention_days: int,
        clock: Clock,
        fail_open: FailOpen = FailOpen.UNLIMITED,
    ) -> None:
        self._table = UsageTable(client, table, retention_days)
        self._clock = clock
        self._fail_open = fail_open
        self._pool = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="metering")
        # ids whose record and hold are both settled, by key: the next hold of that key drops their entries
        self._done: defaultdict[str, deque[str]] = defaultdict(deque)

    def reserve(self, reservation: Reservation) -> Claim:
        limited = reservation.principal.limits.any
        claim = _DynamoClaim(self._table, reservation, self._clock, self._pool, self._done)
        try:
            if reservation.caller_named:
                claim.put_now()
            if limited:
                claim.hold()
            if not reservation.caller_named:
                claim.put_meanwhile()
        except MeteringError as error:
            if self._fail_open is FailOpen.EVERYBODY or (self._fail_open is FailOpen.UNLIMITED and not limited):
                logger.warning("metering_failed_open", record_id=reservation.record_id, detail=error.detail)
                return _UnwrittenClaim(error)
            raise
        claim.tolerant = self._fail_open is FailOpen.EVERYBODY or (
            self._fail_open is FailOpen.UNLIMITED and not limited
        )
        return claim


class _DynamoClaim(Claim):
    """``tolerant`` claims let the answer go when they could not be written; settling then raises."""

    def __init__(
        self,
        table: UsageTable,
        reservation: Reservation,
        clock: Clock,
        pool: ThreadPoolExecutor,
        done: defaultdict[str, deque[str]],
    ) -> None:
        self.tolerant = False
        self.limits: Sequence[LimitStatus] = ()
        self._table = table
        self._reservation = reservation
        self._clock = clock
        self._pool = pool
        self._done = done
        self._claim_id = str(uuid4())
        self._put: Future[None] | None = None
        self._hold: Hold | None = None

    def put_now(self) -> None:
        """The claim, before anything else."""
        self._table.put_claim(self._reservation, self._claim_id)

    def put_meanwhile(self) -> None:
        """The claim, while the model is asked."""
        self._put = self._pool.submit(self._table.put_claim, self._reservation, self._claim_id)

    def hold(self) -> None:
        """The hold. A claim that was put before and finds no room is taken back."""
        reservation = self._reservation
        done = self._done[reservation.principal.key_id]
        forget: list[str] = []
        with suppress(IndexError):  # there are no more; another thread may have taken the last
            while len(forget) < _MOST_FORGOTTEN:
                forget.append(done.popleft())
        hold = Hold(
            reservation.record_id,
            self._claim_id,
            reservation.created_at,
            reservation.estimate,
            reservation.lasts_until,
        )
        try:
            self.limits = self._table.take_hold(reservation, hold, forget)
        except CompletionError:
            done.extend(forget)
            if reservation.caller_named:
                self._table.drop_claim(reservation, self._claim_id)
            raise
        self._hold = hold

    def confirm(self) -> None:
        if self._put is None:
            return
        try:
            self._put.result()
        except MeteringError:
            if not self.tolerant:
                raise

    def settle(self, record: UsageRecord) -> None:
        result = Result(record.outcome, record.usage, record.charge.nanos)
        try:
            if self._put is not None:
                self._put.result()
        except DuplicateRequestError:
            # the record is another's; only what is held here is given back
            self._close(Result(Outcome.REFUSED, Usage(0, 0), 0), keep=False)
            return
        except MeteringError:
            self._close(result, keep=True)  # the claim may have landed after all: the sweeper settles it from this
            raise
        if self._hold is None:
            self._table.settle_record(record.reservation.record_id, self._claim_id, settlement_fields(record))
            return
        closing = self._pool.submit(self._close, result, keep=True)
        try:
            self._table.settle_record(record.reservation.record_id, self._claim_id, settlement_fields(record))
        finally:
            closing.result()
        self._done[record.reservation.principal.key_id].append(record.reservation.record_id)

    def _close(self, result: Result, *, keep: bool) -> None:
        if self._hold is not None:
            key_id = self._reservation.principal.key_id
            self._table.close_hold(key_id, self._hold, result, self._clock.now(), keep=keep)


class _UnwrittenClaim(Claim):
    """The answer is given although nothing was written; the record is the log's."""

    limits: Sequence[LimitStatus] = ()

    def __init__(self, error: MeteringError) -> None:
        self._error = error

    def confirm(self) -> None:
        """There is nothing to wait for."""

    def settle(self, record: UsageRecord) -> None:
        raise MeteringError(self._error.message, detail=self._error.detail)
