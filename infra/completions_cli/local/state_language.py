"""An interpreter of exactly the states and fields that ``infra/batch.asl.json`` uses; anything else it refuses by name.

Source: Step Functions' developer guide, "Amazon States Language", and "Using Map state in Distributed mode".
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any, Final, Protocol

from completions_cli.local.state_paths import COMPARISONS, PathError, at, chosen, filled, is_path, placed
from completions_cli.local.template import TemplateError

_COMMON: Final = frozenset({"Type", "Comment", "Next", "End"})
_RESULT: Final = frozenset({"ResultPath", "Retry", "Catch"})
_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "machine": frozenset({"Comment", "StartAt", "States"}),
    "Task": _COMMON | _RESULT | {"Resource", "Parameters"},
    "Choice": frozenset({"Type", "Comment", "Choices", "Default"}),
    "Map": _COMMON
    | _RESULT
    | {
        "ItemProcessor",
        "ItemReader",
        "ItemSelector",
        "Label",
        "MaxConcurrency",
        "MaxConcurrencyPath",
        "ResultWriter",
        "ToleratedFailurePercentage",
        "ToleratedFailurePercentagePath",
    },
    "Succeed": frozenset({"Type", "Comment"}),
    "Fail": frozenset({"Type", "Comment", "Error", "Cause"}),
    "Choices": frozenset({"Variable", "Next", "Comment", *COMPARISONS}),
    "Retry": frozenset({"ErrorEquals", "IntervalSeconds", "BackoffRate", "MaxAttempts", "MaxDelaySeconds"}),
    "Catch": frozenset({"ErrorEquals", "Next", "ResultPath"}),
    "ItemProcessor": frozenset({"ProcessorConfig", "StartAt", "States"}),
    "ProcessorConfig": frozenset({"Mode", "ExecutionType"}),
    "ItemReader": frozenset({"Resource", "ReaderConfig", "Parameters"}),
    "ReaderConfig": frozenset({"InputType"}),
    "ResultWriter": frozenset({"Resource", "Parameters"}),
}
_VALUES: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    ("ProcessorConfig", "Mode"): frozenset({"DISTRIBUTED"}),
    ("ProcessorConfig", "ExecutionType"): frozenset({"STANDARD"}),
    ("ReaderConfig", "InputType"): frozenset({"JSONL"}),
    ("ItemReader", "Resource"): frozenset({"arn:aws:states:::s3:getObject"}),
    ("ResultWriter", "Resource"): frozenset({"arn:aws:states:::s3:putObject"}),
}
_LAMBDA: Final = "arn:aws:lambda:"
_RUNTIME: Final = "States.Runtime"  # the definition's own fault, which no rule retries or catches
_MOST_ATTEMPTS: Final = 3
_LOOK_SECONDS: Final = 0.02
_MOST_THREADS: Final = 40  # a distributed map may ask for 10,000, which no laptop has


class StateError(Exception):
    """What a state ends with when it fails."""

    def __init__(self, error: str, cause: str = "") -> None:
        super().__init__(f"{error}: {cause}")
        self.error = error
        self.cause = cause


class StoppedError(Exception):
    """The execution was stopped, or the stack with it."""


class Services(Protocol):
    """What states do outside of the machine. Raises ``StateError``."""

    def invoke(self, function_arn: str, data: Any) -> Any:
        """A function's result."""
        ...

    def read_lines(self, bucket: str, key: str) -> Sequence[Any]:
        """The objects of a file of JSON lines."""
        ...

    def write_results(self, bucket: str, prefix: str, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
        """Leave what a map's items came to, by their status; the key of the list of files."""
        ...


@dataclass(frozen=True, slots=True)
class Clockwork:
    """``wait`` passes seconds and is true when the machine is to stop. ``retry_factor`` shortens what the definition
    has it wait between attempts."""

    stop: Event
    retry_factor: float = 1.0

    def wait(self, seconds: float, *, exactly: bool = False) -> None:
        """Raises ``StoppedError``."""
        if self.stop.wait(seconds if exactly else seconds * self.retry_factor):
            raise StoppedError


class Machine:
    """One definition. Raises ``TemplateError`` for what is not known here."""

    def __init__(self, definition: Mapping[str, Any], services: Services) -> None:
        _check_machine("machine", definition, "the definition")
        self._definition = definition
        self._services = services

    def run(self, data: Any, context: Mapping[str, Any], clockwork: Clockwork) -> Any:
        """From the first state to an end; its output. Raises ``StateError`` or ``StoppedError``."""
        return _Run(self._services, context, clockwork).states(self._definition, data)


@dataclass(slots=True)
class _Items:
    """A distributed map at work: what is left, and what has become of the rest. ``halt`` ends what still runs."""

    left: Iterator[tuple[int, Any]]
    total: int
    tolerated: float
    done: dict[str, list[Mapping[str, Any]]] = field(default_factory=lambda: {"SUCCEEDED": [], "FAILED": []})
    outputs: dict[int, Any] = field(default_factory=dict)
    halt: Event = field(default_factory=Event)
    lock: Any = field(default_factory=Lock)

    @property
    def exceeded(self) -> bool:
        return bool(self.total) and len(self.done["FAILED"]) * 100 / self.total > self.tolerated

    def next(self) -> tuple[int, Any] | None:
        with self.lock:
            return None if self.halt.is_set() else next(self.left, None)

    def add(self, index: int, status: str, record: Mapping[str, Any], output: Any = None) -> None:
        with self.lock:
            self.done[status].append(record)
            self.outputs[index] = output
            if self.exceeded:
                self.halt.set()


@dataclass(frozen=True, slots=True)
class _Run:
    services: Services
    context: Mapping[str, Any]
    clockwork: Clockwork

    def states(self, machine: Mapping[str, Any], data: Any) -> Any:
        name: str | None = machine["StartAt"]
        while name is not None:
            self.clockwork.wait(0)
            state = machine["States"][name]
            name, data = self._state(state, data)
        return data

    def _state(self, state: Mapping[str, Any], data: Any) -> tuple[str | None, Any]:
        """The next state's name and its input."""
        try:
            match state["Type"]:
                case "Succeed":
                    return None, data
                case "Fail":
                    raise StateError(state.get("Error", ""), state.get("Cause", ""))
                case "Choice":
                    return self._choice(state, data), data
                case "Task":
                    return self._tried(state, data, self._task)
                case _:
                    return self._tried(state, data, self._map)
        except PathError as error:
            raise StateError(_RUNTIME, str(error)) from None

    def _choice(self, state: Mapping[str, Any], data: Any) -> str:
        for rule in state["Choices"]:
            if chosen(rule, data, self.context):
                return str(rule["Next"])
        if "Default" not in state:
            raise StateError("States.NoChoiceMatched", "No rule holds, and there is no Default.")
        return str(state["Default"])

    def _tried(
        self, state: Mapping[str, Any], data: Any, work: Callable[[Mapping[str, Any], Any], Any]
    ) -> tuple[str | None, Any]:
        """The work's result in its place; again, or elsewhere, as ``Retry`` and ``Catch`` say."""
        attempts = [0] * len(state.get("Retry", ()))
        while True:
            try:
                result = work(state, data)
                return state.get("Next"), placed(state.get("ResultPath", "$"), data, result)
            except StateError as error:
                failure = error
            number, retrier = _first(state.get("Retry", ()), failure.error)
            if retrier is not None and attempts[number] < retrier.get("MaxAttempts", _MOST_ATTEMPTS):
                self.clockwork.wait(_pause(retrier, attempts[number]))
                attempts[number] += 1
                continue
            _, catcher = _first(state.get("Catch", ()), failure.error)
            if catcher is None:
                raise failure
            told = {"Error": failure.error, "Cause": failure.cause}
            return catcher["Next"], placed(catcher.get("ResultPath", "$"), data, told)

    def _task(self, state: Mapping[str, Any], data: Any) -> Any:
        given = filled(state["Parameters"], data, self.context) if "Parameters" in state else data
        return self.services.invoke(state["Resource"], given)

    def _map(self, state: Mapping[str, Any], data: Any) -> Any:
        place = filled(state["ItemReader"]["Parameters"], data, self.context)
        values = self.services.read_lines(place["Bucket"], place["Key"])
        tolerated = self._given(state, "ToleratedFailurePercentage", data, 0)
        items = _Items(iter(enumerate(values)), len(values), tolerated)
        at_once = int(self._given(state, "MaxConcurrency", data, 0)) or _MOST_THREADS
        self._side_by_side(min(at_once, _MOST_THREADS, max(1, items.total)), state, data, items)
        result = self._written(state, data, items)
        if items.exceeded:
            raise StateError("States.ExceedToleratedFailureThreshold", "The specified tolerated failure was exceeded.")
        return result

    def _given(self, state: Mapping[str, Any], name: str, data: Any, default: float) -> float:
        value = at(state[f"{name}Path"], data, self.context) if f"{name}Path" in state else state.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise StateError(_RUNTIME, f"{name} is no number from 0 on.")
        return value

    def _side_by_side(self, count: int, state: Mapping[str, Any], data: Any, items: _Items) -> None:
        """Until all is done, or too much has failed: a function that runs then is left to itself, as on AWS."""
        threads = [Thread(target=self._worker, args=(state, data, items), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            while not items.halt.is_set() and any(thread.is_alive() for thread in threads):
                self.clockwork.wait(_LOOK_SECONDS, exactly=True)
        finally:
            items.halt.set()

    def _worker(self, state: Mapping[str, Any], data: Any, items: _Items) -> None:
        clockwork = Clockwork(items.halt, self.clockwork.retry_factor)
        while (item := items.next()) is not None:
            index, value = item
            context = {**self.context, "Map": {"Item": {"Index": index, "Value": value}}}
            selector = state.get("ItemSelector")
            record: dict[str, Any] = {"Name": str(uuid.uuid4())}
            try:
                given = value if selector is None else filled(selector, data, context)
                record["Input"] = json.dumps(given)
                output = _Run(self.services, context, clockwork).states(state["ItemProcessor"], given)
            except StoppedError:
                return
            except (StateError, PathError) as error:
                failure = error if isinstance(error, StateError) else StateError(_RUNTIME, str(error))
                ended = {"Status": "FAILED", "Error": failure.error, "Cause": failure.cause}
                items.add(index, "FAILED", record | ended)
            else:
                items.add(index, "SUCCEEDED", record | {"Status": "SUCCEEDED", "Output": json.dumps(output)}, output)

    def _written(self, state: Mapping[str, Any], data: Any, items: _Items) -> Any:
        if "ResultWriter" not in state:
            return [items.outputs[index] for index in sorted(items.outputs)]
        place = filled(state["ResultWriter"]["Parameters"], data, self.context)
        key = self.services.write_results(place["Bucket"], place.get("Prefix", ""), items.done)
        return {"ResultWriterDetails": {"Bucket": place["Bucket"], "Key": key}}


def _first(rules: Sequence[Mapping[str, Any]], error: str) -> tuple[int, Mapping[str, Any] | None]:
    for number, rule in enumerate(rules if error != _RUNTIME else ()):
        for name in rule["ErrorEquals"]:
            if name in (error, "States.ALL") or (name == "States.TaskFailed" and error != "States.Timeout"):
                return number, rule
    return 0, None


def _pause(retrier: Mapping[str, Any], attempt: int) -> float:
    """Seconds before the next attempt."""
    pause = retrier.get("IntervalSeconds", 1) * retrier.get("BackoffRate", 2.0) ** attempt
    return float(min(pause, retrier.get("MaxDelaySeconds", pause)))


def _check_machine(kind: str, machine: Mapping[str, Any], where: str) -> None:
    _check(kind, machine, where)
    for name, state in machine["States"].items():
        _check_state(state, f"{where}: {name}")
        following = {state.get("Next"), state.get("Default"), *(rule["Next"] for rule in state.get("Choices", ()))}
        following |= {rule["Next"] for rule in state.get("Catch", ())}
        if unknown := following - {None, *machine["States"]}:
            raise TemplateError(f"{where}: {name}: there is no state {', '.join(map(str, unknown))}")
    if machine["StartAt"] not in machine["States"]:
        raise TemplateError(f"{where}: there is no state {machine['StartAt']}")


def _check_state(state: Mapping[str, Any], where: str) -> None:
    kind = state["Type"]
    if kind not in ("Task", "Choice", "Map", "Succeed", "Fail"):
        raise TemplateError(f"{where}: the local stack does not run states of type {kind}")
    _check(kind, state, where)
    for name in ("Choices", "Retry", "Catch"):
        for rule in state.get(name, ()):
            _check(name, rule, f"{where}: {name}")
            if name == "Choices" and len(COMPARISONS & rule.keys()) != 1:
                raise TemplateError(f"{where}: a choice has one comparison")
    if kind == "Task" and not state["Resource"].startswith(_LAMBDA):
        raise TemplateError(f"{where}: the local stack runs tasks of functions alone, not {state['Resource']}")
    if kind == "Map":
        _check("ProcessorConfig", state["ItemProcessor"]["ProcessorConfig"], where)
        for name in ("ItemReader", "ResultWriter"):
            _check(name, state.get(name, {}), where)
        _check("ReaderConfig", state["ItemReader"]["ReaderConfig"], where)
        _check_machine("ItemProcessor", state["ItemProcessor"], where)


def _check(kind: str, given: Mapping[str, Any], where: str) -> None:
    if unknown := sorted(given.keys() - _FIELDS[kind]):
        raise TemplateError(f"{where}: the local stack does not know {', '.join(unknown)}")
    for name, value in given.items():
        allowed = _VALUES.get((kind, name))
        if allowed is not None and value not in allowed:
            raise TemplateError(f"{where}: {name}: the local stack does not know {value}")
    for path in _paths(given):
        if not is_path(path):
            raise TemplateError(f"{where}: the local stack does not understand the path {path}")


def _paths(given: Mapping[str, Any]) -> Iterator[str]:
    """Every path of these fields; those of states below have their own turn."""
    for name, value in given.items():
        if isinstance(value, str) and (name.endswith((".$", "Path")) or name == "Variable"):
            yield value
        elif isinstance(value, Mapping) and name != "States":
            yield from _paths(value)
