"""A worker that ends itself with SIGKILL between two metering steps. Reads scenarios as JSON from standard input.

Each scenario runs in a process of its own, forked from this one, which has imported everything once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import boto3

from completions.domain.errors import CompletionError
from completions.domain.limits import KeyLimits
from completions.domain.metering import Principal
from completions.metering.dynamodb import DynamoUsageLedger
from completions.metering.usage_table import UsageTable
from fakes import ManualClock
from metered import NOON, record, reservation

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


@dataclass(frozen=True, slots=True)
class Scenario:
    """The process dies when the request has made the writes in ``done``; further ones are never made.

    With ``redelivered`` the request was settled and forgotten before; a ``full`` key has no room for it.
    """

    name: str
    key_id: str
    limits: dict[str, int]
    done: list[str]
    caller_named: bool = False
    redelivered: bool = False
    full: bool = False


class MortalTable(UsageTable):
    """Makes the writes it is allowed, and dies with the last of them."""

    def __init__(self, done: list[str], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._allowed = done
        self._made: set[str] = set()
        self._lock = Lock()

    def _step(self, name: str, write: Any) -> Any:
        if name not in self._allowed:
            if not self._allowed:
                _die()
            Event().wait()
        try:
            return write()
        finally:
            with self._lock:
                self._made.add(name)
                if self._made == set(self._allowed):
                    _die()

    def put_claim(self, *arguments: Any) -> None:
        self._step("put_claim", lambda: super(MortalTable, self).put_claim(*arguments))

    def take_hold(self, *arguments: Any) -> Any:
        return self._step("take_hold", lambda: super(MortalTable, self).take_hold(*arguments))

    def drop_claim(self, *arguments: Any) -> None:
        self._step("drop_claim", lambda: super(MortalTable, self).drop_claim(*arguments))

    def settle_record(self, *arguments: Any) -> None:
        self._step("settle_record", lambda: super(MortalTable, self).settle_record(*arguments))

    def close_hold(self, *arguments: Any, **options: Any) -> None:
        self._step("close_hold", lambda: super(MortalTable, self).close_hold(*arguments, **options))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(scenario: Scenario, client: DynamoDBClient, table: str) -> None:
    """The requests before, whole, then the one that dies."""
    ledger = DynamoUsageLedger(client, table, 400, ManualClock(now=NOON))
    principal = Principal(scenario.key_id, "ada", limits=KeyLimits(**scenario.limits))
    request = reservation(principal, name=scenario.name, caller_named=scenario.caller_named)
    before = [reservation(principal) for _ in range(2)]
    if scenario.full:
        running = ledger.reserve(reservation(principal, name=f"{scenario.name}-running"))
        running.confirm()
        before = []
    elif scenario.redelivered:
        before = [request, *before]
    for other in before:
        ledger.reserve(other).settle(record(other))
    ledger._table = MortalTable(scenario.done, client, table, 400)
    with suppress(CompletionError):
        claim = ledger.reserve(request)
        claim.settle(record(request))


def main() -> None:
    """One line of JSON: each scenario's name and the signal its process died of."""
    told = json.load(sys.stdin)
    client = boto3.client("dynamodb", endpoint_url=told["url"])  # its connections are made after the fork
    ended: dict[str, int] = {}
    for fields in told["scenarios"]:
        scenario = Scenario(**fields)
        child = os.fork()
        if child == 0:
            work(scenario, client, told["table"])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        ended[scenario.name] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    print(json.dumps(ended))  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
