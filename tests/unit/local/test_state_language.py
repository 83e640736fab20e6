"""The interpreter: what the deployed definition does with parts that work, come again, fail, and are stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any

import pytest

from completions_cli.local.state_language import Clockwork, Machine, StateError, StoppedError
from completions_cli.local.template import TemplateError

SPLIT, WORK, ASSEMBLE = (f"arn:aws:lambda:us-east-1:123456789012:function:{name}" for name in ("S", "W", "A"))
PLAN = {
    "tenant": "t",
    "batch_id": "b",
    "bucket": "bucket",
    "index_key": "index",
    "map_prefix": "batches/b/map",
    "workers": 3,
    "tolerated_failure_percentage": 100,
    "parts": 4,
}
INPUT = {"tenant": "t", "batch_id": "b"}


@pytest.fixture(scope="module")
def deployed(project_root: Path) -> dict[str, Any]:
    """The definition that is deployed, its substitutions made."""
    text = (project_root / "infra" / "batch.asl.json").read_text()
    values = {"Partition": "aws", "BatchSplitterFunctionArn": SPLIT}
    values |= {"BatchWorkerFunctionArn": WORK, "BatchAssemblerFunctionArn": ASSEMBLE}
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    definition: dict[str, Any] = json.loads(text)
    return definition


class World:
    """Functions by ARN, the lines of every file, and what was asked and written."""

    def __init__(self, work: Callable[[Any], Any] | None = None, plan: Mapping[str, Any] | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.written: list[tuple[str, str, Mapping[str, Sequence[Mapping[str, Any]]]]] = []
        self.at_once = self.most_at_once = 0
        self._lock = Lock()
        self._functions: dict[str, Callable[[Any], Any]] = {
            SPLIT: lambda _: PLAN if plan is None else plan,
            WORK: work or (lambda _: None),
            ASSEMBLE: lambda data: {"assembled": data.get("failure", {}).get("Error")},
        }

    def invoke(self, function_arn: str, data: Any) -> Any:
        with self._lock:
            self.calls.append((function_arn, data))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return self._functions[function_arn](data)
        finally:
            with self._lock:
                self.at_once -= 1

    def read_lines(self, bucket: str, key: str) -> Sequence[Any]:
        assert (bucket, key) == ("bucket", "index")
        return [{"part": number} for number in range(PLAN["parts"])]  # type: ignore[call-overload]

    def write_results(self, bucket: str, prefix: str, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
        self.written.append((bucket, prefix, results))
        return "manifest.json"

    def calls_of(self, arn: str) -> list[Any]:
        return [data for called, data in self.calls if called == arn]


def run(definition: Mapping[str, Any], world: World, factor: float = 0.0) -> Any:
    return Machine(definition, world).run(INPUT, {}, Clockwork(Event(), factor))


def test_every_part_is_answered_and_then_all_is_joined(deployed: dict[str, Any]) -> None:
    world = World()
    assert run(deployed, world) == {"assembled": None}
    assert world.calls[0] == (SPLIT, INPUT)
    assert sorted(data["part"]["part"] for data in world.calls_of(WORK)) == [0, 1, 2, 3]
    assert all(data.keys() == {"tenant", "batch_id", "part"} for data in world.calls_of(WORK))
    assert world.calls[-1] == (ASSEMBLE, PLAN)
    ((bucket, prefix, results),) = world.written
    assert (bucket, prefix) == ("bucket", "batches/b/map")
    assert len(results["SUCCEEDED"]) == 4
    assert results["FAILED"] == []


def test_a_batch_without_parts_goes_straight_to_the_assembler(deployed: dict[str, Any]) -> None:
    world = World(plan={**PLAN, "parts": 0})
    run(deployed, world)
    assert [arn for arn, _ in world.calls] == [SPLIT, ASSEMBLE]


def test_no_more_parts_run_side_by_side_than_the_batch_has_workers(deployed: dict[str, Any]) -> None:
    world = World(work=lambda _: sleep(0.05), plan={**PLAN, "workers": 2})
    run(deployed, world)
    assert world.most_at_once == 2


def test_a_part_that_fails_comes_again_and_the_others_do_not(deployed: dict[str, Any]) -> None:
    failures = iter([True, True])

    def work(data: Any) -> None:
        if data["part"]["part"] == 2 and next(failures, False):
            raise StateError("UnfinishedError")

    world = World(work=work)
    assert run(deployed, world) == {"assembled": None}
    parts = sorted(data["part"]["part"] for data in world.calls_of(WORK))
    assert parts == [0, 1, 2, 2, 2, 3]


def test_attempts_end_and_a_tolerated_failure_lets_the_others_be_joined(deployed: dict[str, Any]) -> None:
    def work(data: Any) -> None:
        if data["part"]["part"] == 1:
            raise StateError("Lambda.Unknown", "gone")

    world = World(work=work)
    assert run(deployed, world) == {"assembled": None}
    (retrier,) = [one for one in deployed_retries(deployed) if one["ErrorEquals"] == ["States.ALL"]]
    assert len([1 for data in world.calls_of(WORK) if data["part"]["part"] == 1]) == 1 + retrier["MaxAttempts"]
    ((_, _, results),) = world.written
    (failed,) = results["FAILED"]
    assert (failed["Status"], failed["Error"], failed["Cause"]) == ("FAILED", "Lambda.Unknown", "gone")


def deployed_retries(definition: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    (state,) = definition["States"]["Parts"]["ItemProcessor"]["States"].values()
    retries: Sequence[Mapping[str, Any]] = state["Retry"]
    return retries


def test_more_failures_than_are_tolerated_end_the_map_and_are_told_to_the_assembler(deployed: dict[str, Any]) -> None:
    def work(data: Any) -> None:
        raise StateError("Broken")

    world = World(work=work, plan={**PLAN, "tolerated_failure_percentage": 25, "workers": 1})
    assert run(deployed, world) == {"assembled": "States.ExceedToleratedFailureThreshold"}
    # a quarter of four may fail: the second failure is one too many, and the last two parts are never begun
    assert {data["part"]["part"] for data in world.calls_of(WORK)} == {0, 1}


def test_a_splitter_that_fails_for_good_is_told_to_the_assembler(deployed: dict[str, Any]) -> None:
    class NoSplit(World):
        def invoke(self, function_arn: str, data: Any) -> Any:
            if function_arn == SPLIT:
                raise StateError("Broken", "why")
            return super().invoke(function_arn, data)

    world = NoSplit()
    assert run(deployed, world) == {"assembled": "Broken"}
    assert world.calls == [(ASSEMBLE, {**INPUT, "failure": {"Error": "Broken", "Cause": "why"}})]


def test_an_assembler_that_fails_for_good_fails_the_execution(deployed: dict[str, Any]) -> None:
    class NoAssembly(World):
        def invoke(self, function_arn: str, data: Any) -> Any:
            if function_arn == ASSEMBLE:
                raise StateError("Broken", "why")
            return super().invoke(function_arn, data)

    with pytest.raises(StateError) as caught:
        run(deployed, NoAssembly())
    assert (caught.value.error, caught.value.cause) == ("Broken", "why")


def test_a_split_without_what_the_map_needs_is_the_definitions_own_fault_and_caught_by_nothing(
    deployed: dict[str, Any],
) -> None:
    world = World(plan={"parts": 1})
    with pytest.raises(StateError, match=r"States\.Runtime: The path '\$\.bucket' leads nowhere"):
        run(deployed, world)
    assert world.calls_of(ASSEMBLE) == []


def test_the_pause_between_attempts_grows_to_its_most_and_is_shortened_by_the_factor() -> None:
    waited: list[float] = []

    class Watch(Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0)
            return False

    retry = {"ErrorEquals": ["E"], "IntervalSeconds": 30, "BackoffRate": 2, "MaxDelaySeconds": 100, "MaxAttempts": 4}
    state = {"Type": "Task", "Resource": WORK, "Retry": [retry], "End": True}

    def work(_: Any) -> None:
        raise StateError("E")

    machine = Machine({"StartAt": "T", "States": {"T": state}}, World(work=work))
    with pytest.raises(StateError, match="E"):
        machine.run({}, {}, Clockwork(Watch(), 0.1))
    assert [pause for pause in waited if pause] == pytest.approx([3, 6, 10, 10])


def test_a_stop_ends_it_while_it_waits_and_while_parts_run(deployed: dict[str, Any]) -> None:
    stop, began, release = Event(), Event(), Event()

    def work(_: Any) -> None:
        began.set()
        release.wait(10)

    machine = Machine(deployed, World(work=work))
    ended: list[BaseException] = []

    def execute() -> None:
        try:
            machine.run(INPUT, {}, Clockwork(stop))
        except StoppedError as error:
            ended.append(error)

    thread = Thread(target=execute)
    thread.start()
    assert began.wait(5)
    since = monotonic()
    stop.set()
    thread.join(5)
    release.set()
    assert ended
    assert monotonic() - since < 1


TASK = {"Type": "Task", "Resource": WORK, "End": True}


@pytest.mark.parametrize(
    ("state", "unknown"),
    [
        ({"Type": "Wait", "Seconds": 3, "End": True}, "states of type Wait"),
        ({**TASK, "TimeoutSeconds": 5}, "TimeoutSeconds"),
        ({**TASK, "Resource": "arn:aws:states:::lambda:invoke"}, "arn:aws:states:::lambda:invoke"),
        ({**TASK, "Retry": [{"ErrorEquals": ["E"], "JitterStrategy": "FULL"}]}, "JitterStrategy"),
        ({**TASK, "Parameters": {"a.$": "States.Format('{}', $.a)"}}, "States.Format"),
        ({**TASK, "ResultPath": "$.a[0]"}, r"\$\.a\[0\]"),
        ({"Type": "Choice", "Choices": [{"Variable": "$.a", "StringMatches": "x*", "Next": "T"}]}, "StringMatches"),
        ({"Type": "Task", "Resource": WORK, "Next": "Elsewhere"}, "no state Elsewhere"),
    ],
)
def test_what_is_not_known_here_is_refused_by_name(state: dict[str, Any], unknown: str) -> None:
    with pytest.raises(TemplateError, match=unknown):
        Machine({"StartAt": "T", "States": {"T": state}}, World())


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        ({"ItemReader": {"ReaderConfig": {"InputType": "CSV"}}}, "CSV"),
        ({"ItemProcessor": {"ProcessorConfig": {"Mode": "INLINE"}}}, "INLINE"),
        ({"ItemBatcher": {"MaxItemsPerBatch": 5}}, "ItemBatcher"),
    ],
)
def test_another_kind_of_map_is_refused_by_name(deployed: dict[str, Any], change: Any, unknown: str) -> None:
    parts = {**deployed["States"]["Parts"]}
    for name, value in change.items():
        parts[name] = {**parts.get(name, {}), **value}
    definition = {**deployed, "States": {**deployed["States"], "Parts": parts}}
    with pytest.raises(TemplateError, match=unknown):
        Machine(definition, World())
