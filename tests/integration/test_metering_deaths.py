"""Workers that are killed between any two metering steps, and the books that the sweeper makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import boto3
import pytest

from completions.metering.sweep import LostCharge
from killed_worker import Scenario
from metered import AMPLE, Books, key, recent_table


@pytest.fixture
def own_books(dynamodb_local: str) -> Iterator[Books]:
    """A table in which no other test leaves anything open."""
    with closing(boto3.client("dynamodb", endpoint_url=dynamodb_local)) as client:
        yield Books(client, recent_table(client))


def prefixes(*steps: str) -> list[list[str]]:
    """What may have been written when the process dies, up to the two writes that are made side by side."""
    first = [list(steps[:count]) for count in range(len(steps) + 1)]
    ends = [["settle_record"], ["close_hold"], ["settle_record", "close_hold"]]
    return first + [[*steps, *end] for end in ends]


def scenarios() -> list[Scenario]:
    found = []

    def add(kind: str, done: list[str], limits: dict[str, int], **fields: Any) -> None:
        name = f"{kind}: {'+'.join(done) or 'nothing'}"
        found.append(Scenario(name, f"key {name}", limits, done, **fields))

    for done in prefixes("take_hold", "put_claim"):
        add("unnamed", done, AMPLE)
    for done in prefixes("put_claim", "take_hold"):
        add("named", done, AMPLE, caller_named=True)
    for done in ([], ["put_claim"], ["put_claim", "settle_record"]):
        add("unlimited", done, {})
    for done in ([], ["take_hold"], ["take_hold", "put_claim"], ["take_hold", "put_claim", "close_hold"]):
        add("redelivered", done, AMPLE, redelivered=True)
    for done in (["put_claim"], ["put_claim", "take_hold"], ["put_claim", "take_hold", "drop_claim"]):
        add("no room", done, {"parallel_requests": 1}, caller_named=True, full=True)
    return found


def expected(scenario: Scenario, policy: LostCharge) -> tuple[str, int, int] | None:
    """Outcome, tokens and nano-dollars of the record in the end."""
    done = set(scenario.done)
    if scenario.redelivered or "settle_record" in done or "close_hold" in done:
        return "succeeded", 40, 400
    if "put_claim" not in done or "drop_claim" in done:
        return None
    held = "take_hold" in done if scenario.limits and not scenario.full else not scenario.limits
    return ("lost", 100, 1_000) if policy is LostCharge.ESTIMATE and held else ("lost", 0, 0)


@pytest.mark.parametrize("policy", LostCharge)
def test_killed_between_any_two_steps_a_worker_leaves_books_that_the_sweeper_balances(
    own_books: Books, dynamodb_local: str, policy: LostCharge, project_root: Path
) -> None:
    all_of_them = scenarios()
    told = {
        "url": dynamodb_local,
        "table": own_books.table,
        "scenarios": [asdict(scenario) for scenario in all_of_them],
    }
    run = subprocess.run(
        [sys.executable, str(project_root / "tests" / "killed_worker.py")],
        input=json.dumps(told),
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, (project_root / "functions", project_root / "tests")))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {scenario.name: signal.SIGKILL for scenario in all_of_them}
    keys = {scenario.name: replace(key(**scenario.limits), key_id=scenario.key_id) for scenario in all_of_them}

    sweepers = [own_books.sweeper(*keys.values(), charge=policy) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:  # side by side, as when a run takes longer than a minute
        list(pool.map(lambda sweeper: sweeper.sweep(), sweepers))

    for scenario in all_of_them:
        item = own_books.record(scenario.name)
        ended = item and (item["outcome"], int(item["prompt_tokens"] + item["completion_tokens"]), int(item["nanos"]))
        assert ended == expected(scenario, policy), scenario
        own_books.require_balance(keys[scenario.name])
        assert [name for name in own_books.limits(keys[scenario.name]) if name.startswith("closed#")] == []
