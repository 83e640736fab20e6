"""Two ways to reserve, side by side on DynamoDB Local: one update of one item, or a transaction over two.

The first is what the service does. The second exists here alone: the claim and the budget in one
``TransactWriteItems``, and both settled in another. Prints a table: who got through a budget for 20, write units,
latency, and what it comes to on paper.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from threading import Barrier, Lock
from typing import TYPE_CHECKING, Any, Protocol

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from completions.domain.errors import CompletionError
from completions.domain.limits import KeyLimits, LimitKind
from completions.domain.metering import Principal, Reservation
from completions.dynamodb_json import serialized
from completions.metering.items import reserved_item, settlement_fields
from completions.metering.limit_items import amount, counter

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own helpers

from dynamodb_local import new_table, running_dynamodb_local
from fakes import ManualClock
from metered import AMPLE, NOON, USED, Books, record, reservation

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

AT_ONCE = 64
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}
PARTITION_UNITS = 1_000
"""Write units a second that one partition, and so one item, takes."""
PAPER = ((1, 2.0), (4, 2.0), (10, 2.0), (32, 2.0), (50, 0.5), (50, 2.0), (250, 0.5), (1_000, 0.5), (1_000, 2.0))
"""Requests a second, and how long each takes."""
DOLLARS_PER_MILLION = 0.625
"""On-demand write units, us-east-1, 2026."""


class Form(Protocol):
    """One of the two."""

    def reserve(self, wanted: Reservation) -> Callable[[], None] | None:
        """What settles it; ``None`` when it does not fit."""
        ...


class SingleItem:
    """As the service does it."""

    def __init__(self, books: Books) -> None:
        self._ledger = books.ledger()

    def reserve(self, wanted: Reservation) -> Callable[[], None] | None:
        try:
            claim = self._ledger.reserve(wanted)
        except CompletionError:
            return None

        def settle() -> None:
            claim.confirm()
            claim.settle(record(wanted))

        return settle


class Transactional:
    """Claim and counters in one transaction, settled in another. The limits item holds counters and nothing else."""

    def __init__(self, books: Books) -> None:
        self._client, self._table = books.client, books.table
        self.conflicts = 0

    def reserve(self, wanted: Reservation) -> Callable[[], None] | None:
        limits = wanted.principal.limits
        estimate = {kind: amount(kind, wanted.estimate) for kind in LimitKind}
        bounds = {kind: limit - estimate[kind] for kind in LimitKind if (limit := limits.of(kind)) is not None}
        claim: dict[str, Any] = {
            "Item": serialized(reserved_item(wanted, str(uuid.uuid4()), 400)),
            "ConditionExpression": "attribute_not_exists(pk)",
        }
        if not self._write({"Put": claim}, {"Update": self._count(wanted, estimate, bounds)}):
            return None
        return lambda: self._settle(wanted)

    def _settle(self, wanted: Reservation) -> None:
        fields = serialized(settlement_fields(record(wanted)))
        back: dict[LimitKind, int] = {
            kind: (-1 if kind is LimitKind.PARALLEL_REQUESTS else amount(kind, USED) - amount(kind, wanted.estimate))
            for kind in LimitKind
            if kind is not LimitKind.REQUESTS_PER_MINUTE
        }
        settle = {
            "Key": {"pk": {"S": f"REQ#{wanted.record_id}"}, "sk": {"S": "RECORD"}},
            "UpdateExpression": "SET #state = :settled, " + ", ".join(f"#{name} = :{name}" for name in fields),
            "ConditionExpression": "#state = :reserved",
            "ExpressionAttributeNames": {"#state": "state", **{f"#{name}": name for name in fields}},
            "ExpressionAttributeValues": {
                ":settled": {"S": "SETTLED"},
                ":reserved": {"S": "RESERVED"},
                **{f":{name}": value for name, value in fields.items()},
            },
        }
        if not self._write({"Update": settle}, {"Update": self._count(wanted, back, {})}):
            raise AssertionError("it was settled before")

    def _count(
        self, wanted: Reservation, added: Mapping[LimitKind, int], bounds: Mapping[LimitKind, int]
    ) -> dict[str, Any]:
        names = {f"#{kind}": counter(kind, NOON) for kind in added}
        values = {f":{kind}": {"N": str(number)} for kind, number in added.items()}
        values |= {f":bound_{kind}": {"N": str(bound)} for kind, bound in bounds.items()}
        conditions = [f"(attribute_not_exists(#{kind}) OR #{kind} <= :bound_{kind})" for kind in bounds]
        return {
            "Key": {"pk": {"S": f"LIMITS#{wanted.principal.key_id}"}, "sk": {"S": "LIMITS"}},
            "UpdateExpression": "ADD " + ", ".join(f"#{kind} :{kind}" for kind in added),
            "ExpressionAttributeNames": names,
            "ExpressionAttributeValues": values,
            **({"ConditionExpression": " AND ".join(conditions)} if conditions else {}),
        }

    def _write(self, *actions: dict[str, Any]) -> bool:
        items: Any = [{kind: {"TableName": self._table, **fields}} for one in actions for kind, fields in one.items()]
        while True:
            try:
                self._client.transact_write_items(TransactItems=items)
            except ClientError as error:
                response: Any = error.response
                codes = [reason.get("Code") for reason in response.get("CancellationReasons", ())]
                if "ConditionalCheckFailed" in codes:
                    return False
                if "TransactionConflict" not in codes:
                    raise
                self.conflicts += 1
                time.sleep(0.01)
                continue
            return True


class Meter:
    """Sums the write units that every reply tells, by what they were for."""

    def __init__(self, client: DynamoDBClient) -> None:
        self.table: Counter[str] = Counter()
        self.index: Counter[str] = Counter()
        self._lock = Lock()
        events: Any = client.meta.events
        for name in ("PutItem", "UpdateItem", "TransactWriteItems"):
            events.register(f"provide-client-params.dynamodb.{name}", self._ask)
            events.register(f"after-call.dynamodb.{name}", self._count)

    def _ask(self, params: dict[str, Any], **_: Any) -> None:
        params["ReturnConsumedCapacity"] = "INDEXES"

    def _count(self, parsed: dict[str, Any], **_: Any) -> None:
        told = parsed.get("ConsumedCapacity", [])
        with self._lock:
            for one in told if isinstance(told, list) else [told]:
                self.table["units"] += one.get("Table", {}).get("CapacityUnits", 0)
                self.index["units"] += sum(
                    part.get("CapacityUnits", 0) for part in one.get("GlobalSecondaryIndexes", {}).values()
                )


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one form. Latencies are milliseconds: what the model waits for, and a request's metering in all."""

    passed: int
    units: float
    index_units: float
    wait_alone: float
    median_alone: float
    median: float
    slowest: float
    conflicts: int


@contextmanager
def prepared() -> Iterator[DynamoDBClient]:
    os.environ.update(ENVIRONMENT)
    config = Config(max_pool_connections=AT_ONCE * 2, retries={"total_max_attempts": 1})
    with running_dynamodb_local() as url, closing(boto3.client("dynamodb", endpoint_url=url, config=config)) as client:
        yield client


def key(**limits: int) -> Principal:
    return Principal(f"key_{uuid.uuid4().hex[:12]}", "ada", limits=KeyLimits(**limits))


def cycle(form: Form, principal: Principal) -> tuple[float, float]:
    """One request; milliseconds until the model may be asked, and in all."""
    began = time.perf_counter()
    settle = form.reserve(reservation(principal))
    reserved = time.perf_counter()
    assert settle is not None
    settle()
    return (reserved - began) * 1000, (time.perf_counter() - began) * 1000


def measure(client: DynamoDBClient, make: Callable[[Books], Form], meter: Meter, rounds: int) -> Measured:
    books = Books(client, new_table(client))
    form, tight, ample = make(books), key(nanos_per_day=20_000), key(**AMPLE)
    start = Barrier(AT_ONCE)

    def together(_: int) -> Callable[[], None] | None:
        start.wait()
        return form.reserve(reservation(tight))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        passed = [settle for settle in pool.map(together, range(AT_ONCE)) if settle is not None]
        for _ in range(50):
            cycle(form, ample)
        alone = [cycle(form, ample) for _ in range(200)]
        meter.table.clear()
        meter.index.clear()
        many = [whole for _, whole in pool.map(lambda _: cycle(form, ample), range(AT_ONCE * rounds))]
    requests = AT_ONCE * rounds
    return Measured(
        passed=len(passed),
        units=meter.table["units"] / requests,
        index_units=meter.index["units"] / requests,
        wait_alone=statistics.median(wait for wait, _ in alone),
        median_alone=statistics.median(whole for _, whole in alone),
        median=statistics.median(many),
        slowest=statistics.quantiles(many, n=100)[98],
        conflicts=form.conflicts if isinstance(form, Transactional) else 0,
    )


def hold_sizes(client: DynamoDBClient) -> tuple[int, int]:
    """Bytes of a busy key's limits item without holds, a quarter of an hour's counters in it, and of each hold."""
    books, principal, clock = Books(client, new_table(client)), key(**AMPLE), ManualClock(now=NOON)
    ledger = books.ledger(clock)
    for _ in range(20):
        wanted = reservation(principal, clock.now())
        ledger.reserve(wanted).settle(record(wanted))
        clock.advance(60)
    sizes = []
    for _ in range(3):
        ledger.reserve(reservation(principal, clock.now())).confirm()
        name: Any = {"pk": {"S": f"LIMITS#{principal.key_id}"}, "sk": {"S": "LIMITS"}}
        sizes.append(item_bytes(client.get_item(TableName=books.table, Key=name)["Item"]))
    each = sizes[2] - sizes[1]
    return sizes[0] - each, each


def item_bytes(item: Any) -> int:
    """By the developer guide's rules: names and strings in UTF-8, a number about half its digits, three bytes and one
    an entry for a map."""
    return sum(len(name.encode()) + _value_bytes(value) for name, value in item.items())


def _value_bytes(value: Any) -> int:
    kind: str
    content: Any
    ((kind, content),) = value.items()
    if kind == "S":
        return len(str(content).encode())
    if kind == "N":
        return ceil(len(content.lstrip("-")) / 2) + 1 + int(content.startswith("-"))
    if kind == "M":
        return 3 + sum(1 + len(name.encode()) + _value_bytes(one) for name, one in content.items())
    return 1


def paper(base: int, each: int) -> str:
    """Write units by the developer guide's rules: one a KB begun, twice that in a transaction.

    The record's own writes are spread over the table; the key's item is what one partition must bear.
    """
    lines = [
        f"On paper. A busy key's limits item is {base} bytes, and {each} more for each request in progress.",
        "",
        "| requests/s | seconds each | in progress | item, KB | single: units a request | on the item a second "
        "| transaction: a request | a second |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for rate, seconds in PAPER:
        size = base + rate * seconds * each
        of_item = 2 * ceil(size / 1024)
        single = f"{2 + of_item:,} | {rate * of_item:,}" if size <= 400 * 1024 else "over 400 KB | impossible"
        lines.append(
            f"| {rate:,} | {seconds:g} | {rate * seconds:,.0f} | {size / 1024:,.1f} | {single} | 8 | {4 * rate:,} |"
        )
    most = {seconds: _most(base, each, seconds) for seconds in (0.5, 2.0, 10.0)}
    words = ", ".join(f"{rate} at {seconds:g} s each" for seconds, rate in most.items())
    return "\n".join(
        [
            *lines,
            "",
            f"One partition bears {PARTITION_UNITS:,} units/s. Requests/s on one key, single item: {words};",
            f"transaction: {PARTITION_UNITS // 4}, less what is cancelled where two meet on the item.",
        ]
    )


def _most(base: int, each: int, seconds: float) -> int:
    fitting = (
        rate for rate in range(1, 2_000) if 2 * rate * ceil((base + rate * seconds * each) / 1024) <= PARTITION_UNITS
    )
    return max(fitting)


def mean(runs: Sequence[Measured], field: str) -> float:
    return statistics.mean(float(getattr(one, field)) for one in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="requests of each of the 64 workers")
    rounds = parser.parse_args().rounds
    with prepared() as client:
        meter = Meter(client)
        forms: dict[str, Callable[[Books], Form]] = {"single item": SingleItem, "transaction": Transactional}
        order = deque(forms)
        runs: dict[str, list[Measured]] = {name: [] for name in forms}
        for _ in range(2):  # each comes first once
            for name in order:
                runs[name].append(measure(client, forms[name], meter, rounds))
            order.rotate()
        base, each = hold_sizes(client)
    print(f"{AT_ONCE} in parallel on one key, DynamoDB Local, {rounds * AT_ONCE} requests, two runs each\n")
    print("| form | passed, room for 20 | table units | index | ms to reserve | ms alone | at 64 | 99 % | conflicts |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, measured in runs.items():
        passed = "/".join(str(one.passed) for one in measured)
        print(
            f"| {name} | {passed} | {mean(measured, 'units'):.2f} | {mean(measured, 'index_units'):.2f} "
            f"| {mean(measured, 'wait_alone'):.1f} | {mean(measured, 'median_alone'):.1f} "
            f"| {mean(measured, 'median'):.0f} "
            f"| {mean(measured, 'slowest'):.0f} | {sum(one.conflicts for one in measured)} |"
        )
    ratio = mean(runs["transaction"], "median") / mean(runs["single item"], "median")
    print("\nDynamoDB Local counts a transaction's units twice over: on AWS it is 8 of the table, not 16.")
    print(f"A request's metering takes {ratio:.2f} times as long with transactions.\n")
    print(paper(base, each))
    print(f"\nOn demand a million units cost ${DOLLARS_PER_MILLION}.")


if __name__ == "__main__":
    main()
