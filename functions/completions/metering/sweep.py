"""The sweeper: finishes what functions that died left open in the usage table.

Every step is one conditional write that finds its own work done when it is repeated, so a sweep may be cut short, run
twice, or run beside another one. What it looks for:

- a hold older than any function lives: its record is settled as lost if it is open, then the hold is closed with what
  the record says;
- a ``closed`` entry: its record is settled from it if it is open, then the entry is dropped;
- a claim that is open and has no hold: it is settled as lost;
- counters of periods that are over.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from completions.domain.completion import Usage
from completions.domain.errors import CompletionError
from completions.domain.limits import Charge, LimitKind
from completions.domain.metering import Outcome
from completions.domain.ports import Clock
from completions.metering.items import SettlementFields, day_shards
from completions.metering.limit_items import (
    CLOSED,
    OPEN,
    Hold,
    Result,
    closed_results,
    limits_partition,
    open_holds,
)
from completions.metering.recovery_table import RecoveryTable
from completions.metering.usage_table import UsageTable
from completions.observability import logger

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_FAULTS: Final = (CompletionError, ClientError, BotoCoreError, KeyError, TypeError, ValueError)
"""What one item can fail with: the table, or an item that is not as it should be."""
_FORGET_AFTER: Final = timedelta(minutes=5)
"""Until then an entry is left to the process that made it, which drops it with its next hold, for nothing."""
_CLAIMS_AT_FIRST: Final = timedelta(hours=1)
"""What is looked through before progress is noted, twice as much each time: a run that is late must get ahead in the
time it has, and an empty day must not take it."""
_AHEAD: Final = timedelta(hours=1)
"""Progress that is further on than this was noted by a clock that was wrong."""
_KEYS_AT_A_TIME: Final = 100
_KINDS: Final = frozenset(kind.value for kind in LimitKind)
_PERIODS: Final = {"minute": "%Y%m%dT%H%M", "day": "%Y%m%d", "month": "%Y%m"}
_COUNTERS_KEPT: Final = {"minute": timedelta(minutes=15), "day": timedelta(days=4), "month": timedelta(days=93)}
"""Since their period began."""


class LostCharge(StrEnum):
    """What a request costs whose function died."""

    NOTHING = "nothing"
    ESTIMATE = "estimate"
    """All that was held for it."""


@dataclass(frozen=True, slots=True)
class SweepPolicy:
    """``after`` is longer than any function runs, plus what clocks differ by; ``seconds`` bounds one run."""

    after: timedelta = timedelta(seconds=960)
    charge: LostCharge = LostCharge.NOTHING
    seconds: float = 45


@dataclass(frozen=True, slots=True)
class SweepCounts:
    """Holds closed, records settled as lost, records settled from what was left of their hold, entries and counters
    dropped, and steps that failed. A run that ended before it had seen everything is not ``complete``."""

    released: int = 0
    lost: int = 0
    repaired: int = 0
    forgotten: int = 0
    dropped: int = 0
    failed: int = 0
    complete: bool = True


class SweepError(Exception):
    """Something could not be swept; the log says what, and everything else was. The next run tries again."""

    def __init__(self, counts: SweepCounts) -> None:
        super().__init__(f"{counts.failed} steps failed; the log names them")
        self.counts = counts


class UsageSweeper:
    """``limited_keys`` lists the ids of the keys that have limits."""

    def __init__(
        self,
        client: DynamoDBClient,
        table: str,
        retention_days: int,
        clock: Clock,
        *,
        limited_keys: Callable[[], Iterable[str]],
        policy: SweepPolicy = SweepPolicy(),
    ) -> None:
        self._usage = UsageTable(client, table, retention_days)
        self._table = RecoveryTable(client, table, retention_days)
        self._clock = clock
        self._limited_keys = limited_keys
        self._policy = policy

    def sweep(self, *, everything: bool = False) -> SweepCounts:
        """One run. Claims are looked for from where the last run came to; ``everything`` begins with yesterday's.

        Raises ``SweepError`` at the end when a step failed.
        """
        ends = self._clock.monotonic() + self._policy.seconds
        run = _Run(self._usage, self._table, self._policy, self._clock.now(), lambda: self._clock.monotonic() >= ends)
        with run.guarded("keys"):
            run.sweep_keys(self._limited_keys())
        with run.guarded("claims"):
            run.sweep_claims(everything)
        counts = SweepCounts(**run.counts, complete=not run.cut_short)
        logger.info("usage_swept", **asdict(counts))
        if counts.failed:
            raise SweepError(counts)
        return counts


@dataclass(slots=True)
class _Run:
    usage: UsageTable
    table: RecoveryTable
    policy: SweepPolicy
    now: datetime
    out_of_time: Callable[[], bool]
    counts: Counter[str] = field(default_factory=Counter)
    cut_short: bool = False

    @contextmanager
    def guarded(self, step: str, **names: Any) -> Iterator[None]:
        """What fails in here is counted and named in the log, and goes no further."""
        try:
            yield
        except _FAULTS as error:
            self.counts["failed"] += 1
            detail = error.detail if isinstance(error, CompletionError) else None
            if isinstance(error, ClientError):
                detail = error.response.get("Error", {}).get("Code")
            logger.error("sweep_step_failed", step=step, error=type(error).__name__, detail=detail, **names)

    # Keys

    def sweep_keys(self, key_ids: Iterable[str]) -> None:
        """Every key's limits, in another order each time: a run that is cut short begins elsewhere the next time."""
        keys = list(key_ids)
        random.shuffle(keys)
        for start in range(0, len(keys), _KEYS_AT_A_TIME):
            for item in self.table.all_limits(keys[start : start + _KEYS_AT_A_TIME]):
                if self._must_stop():
                    return
                key_id = item["pk"].removeprefix(limits_partition(""))
                with self.guarded("key", key_id=key_id):
                    self._sweep_key(key_id, item)

    def _sweep_key(self, key_id: str, item: Mapping[str, Any]) -> None:
        opened = {name: value for name, value in item.items() if name.startswith(OPEN)}
        closed = {name: value for name, value in item.items() if name.startswith(CLOSED)}
        holds: list[Hold] = []
        for name, value in opened.items():
            with self.guarded("hold", key_id=key_id, attribute=name):
                holds += [hold for hold in open_holds({name: value}) if self._is_over(hold.at, hold.until)]
        wanted = [hold.record_id for hold in holds] + [name.removeprefix(CLOSED) for name in closed]
        records = self.table.records(wanted) if wanted else {}
        for hold in holds:
            if self._must_stop():
                break
            with self.guarded("hold", key_id=key_id, record_id=hold.record_id):
                self._release(key_id, hold, records.get(hold.record_id))
        done = []
        for name, value in closed.items():
            if self._must_stop():
                break
            with self.guarded("closed", key_id=key_id, attribute=name):
                done += [
                    CLOSED + record_id
                    for record_id, (claim_id, at, result) in closed_results({name: value}).items()
                    if self._has_done_its_work(record_id, claim_id, at, result, records.get(record_id))
                ]
        old = past_counters(item, self.now)
        if done or old:
            self.table.drop_limits_attributes(key_id, [*done, *old])
            self.counts["forgotten"] += len(done)
            self.counts["dropped"] += len(old)

    def _release(self, key_id: str, hold: Hold, record: Mapping[str, Any] | None) -> None:
        """Close a hold with what its record says; one whose record is missing, or another claim's, with nothing."""
        if record is not None and record["claim_id"] != hold.claim_id:
            record = None
        if record is not None and record["state"] == "RESERVED":
            kept = hold.estimate if self.policy.charge is LostCharge.ESTIMATE else Charge()
            self._lose(record, hold.record_id, kept)
            record = self.table.record(hold.record_id)  # its own function may have come first after all
        result = _NOTHING if record is None else _result(record)
        if result.outcome is Outcome.LOST:
            self.table.mark_swept(hold, result.charge)
        self.usage.close_hold(key_id, hold, result, self.now, keep=False)
        self.counts["released"] += 1

    def _has_done_its_work(
        self, record_id: str, claim_id: str, at: datetime, result: Result, record: Mapping[str, Any] | None
    ) -> bool:
        """Whether a ``closed`` entry can go; its record is settled from it first, when that is due."""
        if record is None or record["claim_id"] != claim_id:
            # with a mark a replay was cut short, and would count again without the entry
            return self._is_old(at) and self.table.swept(record_id) is None
        if record["state"] == "SETTLED" and record["outcome"] != Outcome.LOST:
            return self.now - at > _FORGET_AFTER
        if not self._is_old(at):
            return False
        self.counts["repaired"] += self.table.settle(record_id, claim_id, _settlement(record, result))
        return True

    # Claims

    def sweep_claims(self, everything: bool) -> None:
        """Claims whose key has no limits, or whose hold was never taken, from where the last run came to."""
        end = self.now - self.policy.after
        midnight = self.now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        start = midnight - timedelta(days=1)
        seen = None if everything else self.table.looked_through()
        if seen is not None and seen - end < _AHEAD:
            start = max(start, seen)
        span = _CLAIMS_AT_FIRST
        while start < end:
            next_midnight = start.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
            stop = min(start + span, end, next_midnight)
            failed = self.counts["failed"]
            for shard in day_shards(start.date()):
                for item in self.table.open_claims(shard, start, stop):
                    if self._must_stop():
                        return
                    with self.guarded("claim", pk=item["pk"]):
                        self._sweep_claim(item["pk"].removeprefix("REQ#"))
            if self._must_stop():
                return
            if failed == self.counts["failed"]:
                self.table.note_looked_through(stop)
            start, span = stop, 2 * span

    def _sweep_claim(self, record_id: str) -> None:
        record = self.table.record(record_id)
        if record is None or record["state"] != "RESERVED":
            return
        if "lasts_until" in record and not self._is_over(
            datetime.fromisoformat(record["created_at"]), datetime.fromisoformat(record["lasts_until"])
        ):
            return  # its answer comes by an event; what expects that settles it also when none comes
        key_id, kept = record["key_id"], Charge()
        if record.get("limited"):
            item = self.table.limits(key_id)  # its key may be gone, or may have lost its limits
            names = {OPEN + record_id, CLOSED + record_id}
            left = {name: item[name] for name in names & item.keys() if item[name]["claim"] == record["claim_id"]}
            if left:
                self._sweep_key(key_id, left)
                return
            # it was never held, so the model was not asked, or its function gave back the hold and logged the record
        elif self.policy.charge is LostCharge.ESTIMATE:
            kept = Charge(int(record.get("estimated_tokens", 0)), int(record.get("estimated_nanos", 0)))
        self._lose(record, record_id, kept)

    def _lose(self, record: Mapping[str, Any], record_id: str, kept: Charge) -> None:
        usage = Usage(0, kept.tokens, estimated=kept.tokens > 0)
        settlement = _settlement(record, Result(Outcome.LOST, usage, kept.nanos))
        self.counts["lost"] += self.table.settle(record_id, record["claim_id"], settlement)

    def _is_old(self, at: datetime) -> bool:
        return self.now - at > self.policy.after

    def _is_over(self, at: datetime, until: datetime | None) -> bool:
        return self._is_old(at) and (until is None or until < self.now)

    def _must_stop(self) -> bool:
        self.cut_short = self.cut_short or self.out_of_time()
        return self.cut_short


def past_counters(item: Iterable[str], now: datetime) -> list[str]:
    """The attributes that count what nobody asks for any more."""
    return [name for name in item if _is_past(name, now)]


def _is_past(name: str, now: datetime) -> bool:
    kind, _, period = name.partition("#")
    unit = kind.rpartition("_")[2]
    if kind not in _KINDS or unit not in _PERIODS:
        return False
    try:
        began = datetime.strptime(period, _PERIODS[unit]).replace(tzinfo=UTC)
    except ValueError:
        return False
    return now - began > _COUNTERS_KEPT[unit]


_NOTHING: Final = Result(Outcome.LOST, Usage(0, 0), 0)


def _result(record: Mapping[str, Any]) -> Result:
    usage = Usage(int(record["prompt_tokens"]), int(record["completion_tokens"]), int(record["cached_tokens"]))
    return Result(Outcome(record["outcome"]), usage, int(record["nanos"]))


def _settlement(record: Mapping[str, Any], result: Result) -> SettlementFields:
    """Timings and attempts died with the function."""
    return SettlementFields(
        model=record["model"],
        endpoint=record["endpoint"],
        outcome=result.outcome,
        prompt_tokens=result.usage.prompt_tokens,
        completion_tokens=result.usage.completion_tokens,
        cached_tokens=result.usage.cached_tokens,
        estimated=result.usage.estimated,
        queue_ms=0,
        total_ms=0,
        attempts=0,
        nanos=result.nanos,
    )
