"""Paths, templates, places of results, and choices. Source: "Amazon States Language", Step Functions' guide."""

from __future__ import annotations

from typing import Any

import pytest

from completions_cli.local.state_paths import PathError, at, chosen, filled, is_path, placed

DATA: dict[str, Any] = {"a": {"b": 3}, "yes": True, "text": "x"}


@pytest.mark.parametrize(
    ("path", "value"), [("$", DATA), ("$.a", {"b": 3}), ("$.a.b", 3), ("$$", {"c": 1}), ("$$.c", 1)]
)
def test_a_path_finds_its_value_in_the_input_or_the_context(path: str, value: Any) -> None:
    assert at(path, DATA, {"c": 1}) == value


@pytest.mark.parametrize("path", ["$.c", "$.a.c", "$.a.b.c", "$$.a"])
def test_a_path_that_leads_nowhere_is_an_error_that_names_it(path: str) -> None:
    with pytest.raises(PathError, match=path.rpartition(".")[2]):
        at(path, DATA, {})


@pytest.mark.parametrize("path", ["$.a[0]", "$..a", "a", "$.a.*", "States.UUID()"])
def test_other_paths_are_not_of_the_known_kind(path: str) -> None:
    assert not is_path(path)


def test_a_template_is_filled_in_depth_and_what_is_no_path_stays() -> None:
    template = {"x.$": "$.a.b", "y": [{"z.$": "$$.c"}, "$.a"], "w": 1}
    assert filled(template, DATA, {"c": "context"}) == {"x": 3, "y": [{"z": "context"}, "$.a"], "w": 1}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("$", "result"),
        (None, {"a": {"b": 1}}),
        ("$.c", {"a": {"b": 1}, "c": "result"}),
        ("$.a.c", {"a": {"b": 1, "c": "result"}}),
        ("$.d.e", {"a": {"b": 1}, "d": {"e": "result"}}),
    ],
)
def test_a_result_is_put_in_its_place(path: str | None, expected: Any) -> None:
    data = {"a": {"b": 1}}
    assert placed(path, data, "result") == expected
    assert data == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        ({"Variable": "$.a.b", "NumericGreaterThan": 2}, True),
        ({"Variable": "$.a.b", "NumericGreaterThan": 3}, False),
        ({"Variable": "$.a.b", "NumericGreaterThanEquals": 3}, True),
        ({"Variable": "$.a.b", "NumericLessThan": 3}, False),
        ({"Variable": "$.a.b", "NumericLessThanEquals": 3}, True),
        ({"Variable": "$.a.b", "NumericEquals": 3}, True),
        ({"Variable": "$.text", "StringEquals": "x"}, True),
        ({"Variable": "$.text", "NumericEquals": 3}, False),
        ({"Variable": "$.yes", "BooleanEquals": True}, True),
        ({"Variable": "$.yes", "NumericEquals": 1}, False),
        ({"Variable": "$.none", "IsPresent": False}, True),
        ({"Variable": "$.none", "IsPresent": True}, False),
        ({"Variable": "$.yes", "IsPresent": True}, True),
    ],
)
def test_a_choice_holds_as_its_comparison_says(rule: dict[str, Any], holds: bool) -> None:
    assert chosen({**rule, "Next": "There"}, DATA, {}) is holds


def test_a_choice_of_what_is_not_there_is_an_error() -> None:
    with pytest.raises(PathError):
        chosen({"Variable": "$.none", "NumericEquals": 3, "Next": "There"}, DATA, {})
