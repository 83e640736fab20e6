"""How a fault cuts, holds up and ends an answer, and in which order a script is used up."""

from __future__ import annotations

import base64
import json

import pytest
from pydantic import TypeAdapter, ValidationError

from completions_cli.local.faults import Fault, FaultScript, Refusal

ANSWER = [b"abcd", b"efgh"]


def played(fault: Fault) -> list[bytes | int]:
    """The parts and, where they come, the waits in milliseconds."""
    found: list[bytes | int] = []

    def wait(milliseconds: int) -> None:
        if milliseconds:
            found.append(milliseconds)

    for part in fault.parts(ANSWER, wait):
        found.append(part)
    return found


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(), [b"abcd", b"efgh"]),
        (Fault(split_every=3), [b"abc", b"d", b"efg", b"h"]),
        (Fault(delay_ms=5), [5, b"abcd", 5, b"efgh"]),
        (Fault(end_after=6), [b"abcd", b"ef"]),
        (Fault(cut_after=0), []),
        (Fault(exception_after=5, split_every=2), [b"ab", b"cd", b"e"]),
        (Fault(stall_ms=7), [7, b"abcd", b"efgh"]),
        (Fault(stall_ms=7, stall_after=6), [b"abcd", b"ef", 7, b"gh"]),
        (Fault(stall_ms=7, stall_after=4), [b"abcd", 7, b"efgh"]),
        (Fault(stall_ms=7, stall_after=3, split_every=2), [b"ab", b"c", 7, b"d", b"ef", b"gh"]),
        (Fault(stall_ms=7, stall_after=3, end_after=5), [b"abc", 7, b"d", b"e"]),
        (Fault(stall_ms=7, stall_after=3, end_after=3), [b"abc"]),
        (Fault(stall_ms=7, stall_after=9), [b"abcd", b"efgh"]),
    ],
)
def test_an_answer_is_cut_held_up_and_ended_where_the_fault_says(fault: Fault, expected: list[bytes | int]) -> None:
    assert played(fault) == expected


def test_a_script_is_used_up_call_by_call() -> None:
    script = FaultScript()
    script.replace("demo", [Fault(delay_ms=1, calls=2), Fault(delay_ms=2)])
    assert [script.take("demo").delay_ms for _ in range(4)] == [1, 1, 2, 0]
    assert script.take("other") == Fault()


def test_a_fault_for_every_call_stays() -> None:
    script = FaultScript()
    script.replace("demo", [Fault(delay_ms=1, calls=None), Fault(delay_ms=2)])
    assert [script.take("demo").delay_ms for _ in range(3)] == [1, 1, 1]


def test_a_replacement_is_base64_in_json() -> None:
    body = {"body": base64.b64encode(b"\xff\n").decode(), "repeat": 3}
    fault = Fault.model_validate_json(json.dumps({"replacement": body}))
    assert fault.replacement is not None
    assert (fault.replacement.body, fault.replacement.repeat) == (b"\xff\n", 3)


@pytest.mark.parametrize(
    "fault",
    [
        {"delay": 5},
        {"refusal": {"kind": "bored"}},
        {"head_delay_ms": -1},
        {"stall_ms": -1},
        {"exception_kind": "Other"},
        {"replacement": {"body": "YQ==", "repeat": 0}},
        {"replacement": {"body": "not base64!"}},
    ],
)
def test_a_fault_that_means_nothing_is_refused(fault: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Fault).validate_json(json.dumps(fault))


def test_a_refusal_is_a_500_of_the_container_unless_it_says_otherwise() -> None:
    assert (Refusal(kind="model_error").status, Refusal(kind="model_error").message) == (500, "")
