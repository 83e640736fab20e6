"""The definition that is deployed: its form, its ways, and how long it keeps trying."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from completions.pipelines.batch_assemble import BatchAssembler
from completions.pipelines.batch_split import BatchSplitter, SplitLimits
from completions.pipelines.batch_work import BatchWorker, UnfinishedError
from fakes import ManualClock
from in_memory_batches import BATCH_ID, INPUT, NOON, MemoryBatches, MemoryObjects, batch, jsonl, line

DEFINITION = Path(__file__).parents[3] / "infra" / "batch.asl.json"
FUNCTIONS = {"Split": BatchSplitter, "Answer": BatchWorker, "Assemble": BatchAssembler}
WINDOW = 24 * 3600
LONGEST_CALL = 900
SWEPT_AFTER = 960


@pytest.fixture(scope="module")
def definition() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DEFINITION.read_text())
    return found


@pytest.fixture(scope="module")
def worker(definition: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = definition["States"]["Parts"]["ItemProcessor"]["States"]["Answer"]
    return found


def test_cfn_lint_finds_nothing_wrong_with_it(tmp_path: Path) -> None:
    text = DEFINITION.read_text().replace("${Partition}", "aws")
    text = re.sub(r"\$\{(\w+)Arn\}", r"arn:aws:lambda:us-east-1:123456789012:function:\1", text)
    assert "${" not in text
    properties = {"RoleArn": "arn:aws:iam::123456789012:role/batch", "DefinitionString": text}
    resources = {"Batch": {"Type": "AWS::StepFunctions::StateMachine", "Properties": properties}}
    template = tmp_path / "template.json"
    template.write_text(json.dumps({"AWSTemplateFormatVersion": "2010-09-09", "Resources": resources}))
    run = subprocess.run(
        [Path(sys.executable).with_name("cfn-lint"), template], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_whatever_fails_the_batch_is_assembled(definition: dict[str, Any]) -> None:
    for name in ("Split", "Parts"):
        (catch,) = definition["States"][name]["Catch"]
        assert catch == {"ErrorEquals": ["States.ALL"], "ResultPath": "$.failure", "Next": "Assemble"}
    assert definition["States"]["AnyParts"]["Default"] == "Assemble"
    assert definition["States"]["Parts"]["Next"] == "Assemble"
    assert definition["States"]["Parts"]["ResultPath"] is None


def test_what_it_takes_from_the_splitters_words_is_there(definition: dict[str, Any]) -> None:
    objects, store = MemoryObjects(), MemoryBatches(batch())
    objects.put(INPUT, jsonl(line(1)))
    limits = SplitLimits(["/v1/completions"], 10, 10, "b", 3, 50)
    plan = BatchSplitter(objects, store, ManualClock(NOON), limits).split("owner:ada", BATCH_ID)
    states = definition["States"]
    texts = list(_texts({name: states[name] for name in ("AnyParts", "Parts")}))
    wanted = {text.removeprefix("$.") for text in texts if text.startswith("$.")} - {"failure"}
    assert wanted == set(plan)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _waits(retry: Mapping[str, Any]) -> list[float]:
    longest = retry.get("MaxDelaySeconds", WINDOW)
    return [
        min(retry["IntervalSeconds"] * retry["BackoffRate"] ** number, longest)
        for number in range(retry["MaxAttempts"])
    ]


def test_a_part_with_lines_left_is_tried_for_hours_but_not_beyond_the_window(worker: dict[str, Any]) -> None:
    unfinished = worker["Retry"][0]
    assert unfinished["ErrorEquals"] == [UnfinishedError.__name__]
    waits = _waits(unfinished)
    assert sum(waits) > 4 * 3600
    assert sum(waits) + LONGEST_CALL * (len(waits) + 1) < WINDOW


def test_a_worker_that_died_is_replaced_until_its_lines_are_free_again(worker: dict[str, Any]) -> None:
    _, other = worker["Retry"]
    assert other["ErrorEquals"] == ["States.ALL"]
    assert sum(_waits(other)) > 40 * 60 > 2 * (SWEPT_AFTER + 60)


def test_only_functions_of_the_stack_are_called(definition: dict[str, Any], worker: dict[str, Any]) -> None:
    called = {name: state["Resource"] for name, state in definition["States"].items() if state["Type"] == "Task"}
    called["Answer"] = worker["Resource"]
    assert called == {name: f"${{{function.__name__}FunctionArn}}" for name, function in FUNCTIONS.items()}
