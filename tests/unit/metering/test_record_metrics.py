"""What settled records come to as metrics, and the lines CloudWatch reads them from."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from completions.domain.metering import Outcome
from completions.metering.record_metrics import RecordMetric, measurements, write_metrics
from completions.metering.rollup_items import Facts, RolledRecord
from completions.metering.sweep import SweepCounts
from completions.metering.sweep_metrics import SWEEP_METRICS

LOST: dict[str, Any] = {
    "outcome": "lost",
    "prompt_tokens": 0,
    "completion_tokens": 0,
    "cached_tokens": 0,
    "nanos": 0,
    "total_ms": 0,
    "first_token_ms": None,
}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's environment says."""
    monkeypatch.delenv("POWERTOOLS_METRICS_DISABLED", raising=False)
    monkeypatch.delenv("POWERTOOLS_DEV", raising=False)


def record(**changes: Any) -> RolledRecord:
    """One that succeeded: 7 tokens in, 16 out, the first after 95 ms, the last after 415."""
    return RolledRecord.model_validate(
        {
            "pk": "REQ#r-1",
            "state": "SETTLED",
            "claim_id": "c-1",
            "day_shard": "2026-11-30#5",
            "created_at": "2026-11-30T12:00:30Z",
            "expires_at": 1830600030,
            "request_id": "r-1",
            "key_id": "key_5f2a9c01b7de",
            "owner": "ada@example.com",
            "team": "compilers",
            "dialect": "openai",
            "requested_model": "demo",
            "model": "demo",
            "endpoint": "demo",
            "streamed": True,
            "outcome": "succeeded",
            "prompt_tokens": 7,
            "completion_tokens": 16,
            "cached_tokens": 2,
            "estimated": False,
            "queue_ms": 3,
            "first_token_ms": 95,
            "total_ms": 415,
            "attempts": 1,
            "nanos": 10_500,
            **changes,
        }
    )


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_request_is_measured_under_its_model() -> None:
    assert measurements([record()]) == {
        "demo": {
            RecordMetric.REQUESTS: [1],
            RecordMetric.PROMPT_TOKENS: [7],
            RecordMetric.COMPLETION_TOKENS: [16],
            RecordMetric.COST_DOLLARS: [0.000_010_5],
            RecordMetric.FIRST_TOKEN_MILLISECONDS: [95.0],
            RecordMetric.TOKENS_PER_SECOND: [50.0],  # 16 in 320 ms
        }
    }


def test_counts_are_added_up_and_times_are_kept_apart() -> None:
    records = [record(), record(first_token_ms=15, nanos=4_500), record(model="coder", completion_tokens=32)]
    found = measurements(records)
    assert found["demo"][RecordMetric.REQUESTS] == [2]
    assert found["demo"][RecordMetric.COST_DOLLARS] == [0.000_015]
    assert found["demo"][RecordMetric.FIRST_TOKEN_MILLISECONDS] == [95.0, 15.0]
    assert found["demo"][RecordMetric.TOKENS_PER_SECOND] == [50.0, 40.0]
    assert found["coder"][RecordMetric.REQUESTS] == [1]
    assert found["coder"][RecordMetric.TOKENS_PER_SECOND] == [100.0]


def test_money_adds_up_exactly() -> None:
    many = [record(nanos=100_000_000) for _ in range(30)]
    assert measurements(many)["demo"][RecordMetric.COST_DOLLARS] == [3.0]


@pytest.mark.parametrize(
    ("outcome", "metric"),
    [
        (Outcome.REFUSED, RecordMetric.REFUSED),
        (Outcome.FAILED, RecordMetric.FAILED),
        (Outcome.ABORTED, RecordMetric.ABORTED),
        (Outcome.LOST, RecordMetric.LOST),
    ],
)
def test_every_class_of_failure_is_counted_beside_the_requests(outcome: Outcome, metric: RecordMetric) -> None:
    found = measurements([record(outcome=outcome.value), record()])["demo"]
    assert (found[metric], found[RecordMetric.REQUESTS]) == ([1], [2])
    classes = {RecordMetric.REFUSED, RecordMetric.FAILED, RecordMetric.ABORTED, RecordMetric.LOST}
    assert classes & set(found) == {metric}


def test_what_comes_to_nothing_is_left_out() -> None:
    assert measurements([record(**LOST)]) == {"demo": {RecordMetric.REQUESTS: [1], RecordMetric.LOST: [1]}}


def test_estimates_are_counted() -> None:
    assert measurements([record(), record(estimated=True)])["demo"][RecordMetric.ESTIMATED] == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"first_token_ms": None},  # no answer
        {"total_ms": 95},  # all of it at once
        {"completion_tokens": 1},  # one token has no speed
        {"completion_tokens": 0},
    ],
)
def test_a_speed_needs_two_tokens_and_a_time_between(changes: dict[str, Any]) -> None:
    assert RecordMetric.TOKENS_PER_SECOND not in measurements([record(**changes)])["demo"]


def test_a_lost_request_that_turns_up_brings_its_tokens_and_is_no_second_request() -> None:
    mark = Facts.of(record(**LOST)).mark
    assert measurements([record(rolled_up=mark)]) == {
        "demo": {
            RecordMetric.PROMPT_TOKENS: [7],
            RecordMetric.COMPLETION_TOKENS: [16],
            RecordMetric.COST_DOLLARS: [0.000_010_5],
            RecordMetric.FIRST_TOKEN_MILLISECONDS: [95.0],
            RecordMetric.TOKENS_PER_SECOND: [50.0],
        }
    }


def test_what_a_lost_request_was_charged_by_estimate_is_taken_back() -> None:
    lost = record(**{**LOST, "completion_tokens": 500, "nanos": 90_500, "estimated": True})
    found = measurements([record(rolled_up=Facts.of(lost).mark, model="coder")])
    assert found["demo"] == {
        RecordMetric.ESTIMATED: [-1],
        RecordMetric.COMPLETION_TOKENS: [-500],
        RecordMetric.COST_DOLLARS: [-0.000_090_5],
    }
    assert found["coder"][RecordMetric.COMPLETION_TOKENS] == [16]


# The lines


def test_a_line_is_cloudwatchs_embedded_metric_format(capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics([record(), record(outcome="failed", estimated=True)])
    (line,) = lines(capsys.readouterr().out)
    ((told),) = line["_aws"]["CloudWatchMetrics"]
    assert told["Namespace"] == "completions"
    assert sorted(map(sorted, told["Dimensions"])) == [["Model", "service"], ["service"]]
    assert (line["service"], line["Model"]) == ("completions", "demo")
    units = {metric["Name"]: metric["Unit"] for metric in told["Metrics"]}
    assert units == {
        "Requests": "Count",
        "Failed": "Count",
        "Estimated": "Count",
        "PromptTokens": "Count",
        "CompletionTokens": "Count",
        "CostDollars": "None",
        "FirstTokenMilliseconds": "Milliseconds",
        "TokensPerSecond": "Count/Second",
    }
    assert line.keys() - units == {"_aws", "service", "Model"}
    assert {name: line[name] for name in units} == {
        "Requests": [2.0],
        "Failed": [1.0],
        "Estimated": [1.0],
        "PromptTokens": [14.0],
        "CompletionTokens": [32.0],
        "CostDollars": [0.000_021],
        "FirstTokenMilliseconds": [95.0, 95.0],
        "TokensPerSecond": [50.0, 50.0],
    }


@pytest.mark.parametrize("count", [99, 100, 101, 250])
def test_no_line_has_more_values_than_cloudwatch_takes_and_none_is_left_out(
    capsys: pytest.CaptureFixture[str], count: int
) -> None:
    write_metrics([record(first_token_ms=number, total_ms=2000) for number in range(count)])
    written = lines(capsys.readouterr().out)
    for line in written:
        (told,) = line["_aws"]["CloudWatchMetrics"]
        assert sorted(map(sorted, told["Dimensions"])) == [["Model", "service"], ["service"]]
        assert (line["service"], line["Model"]) == ("completions", "demo")
        assert all(len(line[metric["Name"]]) <= 100 for metric in told["Metrics"])
    together: dict[str, list[float]] = {}
    for line in written:
        for metric in line["_aws"]["CloudWatchMetrics"][0]["Metrics"]:
            together.setdefault(metric["Name"], []).extend(line[metric["Name"]])
    assert together["Requests"] == [count]
    assert sorted(together["FirstTokenMilliseconds"]) == [float(number) for number in range(count)]
    assert len(together["TokensPerSecond"]) == count


def test_nobody_who_asked_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics([record()])
    written = capsys.readouterr().out
    for name in ("key_5f2a9c01b7de", "ada@example.com", "compilers", "r-1", "c-1"):
        assert name not in written


def test_each_model_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics([record(), record(model="coder"), record()])
    assert [(line["Model"], line["Requests"]) for line in lines(capsys.readouterr().out)] == [
        ("demo", [2.0]),
        ("coder", [1.0]),
    ]


def test_a_model_s_name_is_made_what_cloudwatch_takes(capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics([record(model="modèle"), record(model="m" * 2000)])
    assert [line["Model"] for line in lines(capsys.readouterr().out)] == ["mod\\xe8le", "m" * 1024]


def test_nothing_added_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics([])
    lost = record(**LOST)
    write_metrics([record(**LOST, model="coder", rolled_up=Facts.of(lost).mark)])  # of another model, and of nothing
    assert capsys.readouterr().out == ""


def test_metrics_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("POWERTOOLS_METRICS_DISABLED", "true")
    write_metrics([record() for _ in range(250)])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("given", "wanted"), [({"POWERTOOLS_SERVICE_NAME": "gateway"}, "gateway"), ({}, "completions")]
)
def test_log_and_metrics_carry_the_deployment_s_name(given: dict[str, str], wanted: str) -> None:
    program = (
        "from completions.observability import logger, new_metrics\n"
        "logger.info('here')\n"
        "metrics = new_metrics()\n"
        "metrics.add_metric('Requests', 'Count', 1)\n"
        "metrics.flush_metrics()\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "POWERTOOLS_LOG_LEVEL": "INFO", **given}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert [line["service"] for line in lines(run.stdout)] == [wanted, wanted]


def test_the_sweeper_s_metrics_are_named_for_what_it_counts() -> None:
    assert set(SWEEP_METRICS) == {one.name for one in fields(SweepCounts)} - {"complete"}
    assert SWEEP_METRICS["released"] == "SweepReleased"
    assert SWEEP_METRICS["failed"] == "SweepFailed"
