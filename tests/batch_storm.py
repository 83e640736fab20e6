"""Everything that can go wrong with a batch at once, and whether its books balance afterwards."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from batch_stage import HANG, MODEL, POISON, Driver, Stage, jsonl, killed_worker, request_line
from completions.domain.batches import Batch
from completions_cli.local.faults import Fault, Refusal

SWEPT_SECONDS: Final = 3.0
"""After which a line that a killed worker had begun is free again."""


def check_storm(stage: Stage, count: int) -> None:
    """5 % malformed, 5 % of the calls throttled, 1 % poison, every part delivered twice, and a worker killed midway."""
    stage.container.hanging.clear()
    stage.container.release.clear()
    prompts = {number: f"storm {number} of {count}" for number in range(count)}
    malformed = {number for number in prompts if number % 20 == 3}
    poison = {number for number in prompts if number % 100 == 7}
    hanging = 2
    lines: list[Any] = []
    for number, prompt in prompts.items():
        text = f"{POISON} {prompt}" if number in poison else f"{HANG} {prompt}" if number == hanging else prompt
        lines.append('{"custom_id": ' if number in malformed else request_line(number, text))
    throttled = [Fault(calls=19), Fault(refusal=Refusal(kind="throttled"), calls=1)]
    stage.sagemaker.faults.replace(MODEL, throttled * (count // 19))
    batch = stage.batch(jsonl(lines))
    driver = Driver(stage, deliveries=2)
    parts = driver.split(batch)
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(driver.work, batch, parts[1:])
        killed_worker(stage, batch, parts[0], lambda: stage.container.hanging.wait(60))
        stage.container.release.set()
        killed = pool.submit(driver.work, batch, parts[:1])
        stage.clock.sleep(SWEPT_SECONDS + 0.5)
        others.result()
        assert stage.sweep(SWEPT_SECONDS) > 0
        killed.result()

    assert driver.assemble(batch) == "completed"
    stage.sagemaker.faults.replace(MODEL, [])
    _check_books(stage, batch, malformed=malformed, poison=poison, count=count)


def _check_books(stage: Stage, batch: Batch, *, malformed: set[int], poison: set[int], count: int) -> None:
    output, errors = stage.results(batch, "output.jsonl"), stage.results(batch, "errors.jsonl")
    good = set(range(count)) - malformed - poison
    assert Counter(line["custom_id"] for line in output) == Counter({f"request-{number}": 1 for number in good})
    failed = [line["custom_id"] for line in errors if line["custom_id"] is not None]
    assert Counter(failed) == Counter({f"request-{number}": 1 for number in poison})
    numbers = [line["error"]["line"] for line in errors if line["custom_id"] is None]
    assert Counter(numbers) == Counter({number + 1: 1 for number in malformed})

    usage = [line["response"]["body"]["usage"] for line in output]
    tokens = {name: sum(one[name] for one in usage) for name in ("prompt_tokens", "completion_tokens")}
    manifest = stage.manifest(batch)
    assert manifest["counts"] == {"total": count, "completed": len(output), "failed": len(errors)}
    assert {name: manifest["usage"][name] for name in tokens} == tokens
    records = stage.records(batch)
    assert {record["state"] for record in records} == {"SETTLED"}
    paid = [record for record in records if record["outcome"] == "succeeded"]
    assert len(paid) == len(output)
    assert {name: sum(int(record[name]) for record in paid) for name in tokens} == tokens
    assert sum(int(record["nanos"]) for record in records) == manifest["cost"]["nanos"]
    assert sum(int(record["nanos"]) for record in paid) == manifest["cost"]["nanos"]
    counts = _read(stage, batch).counts
    assert (counts.completed, counts.failed, counts.nanos) == (len(output), len(errors), manifest["cost"]["nanos"])


def _read(stage: Stage, batch: Batch) -> Batch:
    found: Batch | None = stage.table.batch(batch.tenant, batch.batch_id)
    assert found is not None
    return found
