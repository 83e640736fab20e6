"""The alarms and the dashboard, as CloudFormation would make them of ``infra/observability.yaml``.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from completions.metering.record_metrics import MODEL_DIMENSION, RecordMetric
from completions.metering.sweep_metrics import SWEEP_METRICS
from completions.observability import NAMESPACE
from completions_cli.local.template import load_template
from moto_services import moto_services
from observability_stack import ALL_GIVEN, ENDPOINT, GIVEN, TOPIC, Resolved

STATE_MACHINE = "arn:aws:states:eu-west-1:123456789012:stateMachine:gateway-batches"

COMPLETIONS = {
    "OpenAICompletions": "openai-fn",
    "ScaleCompletions": "scale-fn",
    "ScaleV1Completions": "scale-v1-fn",
    "SourcegraphCompletions": "sourcegraph-fn",
}
BY_EVENTS = {"QueuedCompletions": "queue-fn", "BatchWorker": "worker-fn"}
ALWAYS = {
    "ApiErrorsAlarm",
    *(f"{name}{kind}Alarm" for name in COMPLETIONS for kind in ("Errors", "Throttles")),
    *("FirstTokenAlarm", "LostRequestsAlarm", "ReservationLeaksAlarm", "SweeperErrorsAlarm", "SweeperMissingAlarm"),
    *("RollupErrorsAlarm", "RollupAgeAlarm", "RollupFailuresAlarm"),
    *(f"{name}ErrorsAlarm" for name in BY_EVENTS),
    *("CompletionRequestFailuresAlarm", "CompletionRequestsAgeAlarm", "BatchStartFailuresAlarm", "BatchFailuresAlarm"),
    *(f"{table}{kind}Alarm" for table in ("UsageTable", "RegistryTable") for kind in ("Errors", "Throttles")),
}
WITH_ENDPOINT = {"EndpointErrorsAlarm", "EndpointLatencyAlarm"}
OWN = {metric.value for metric in RecordMetric} | set(SWEEP_METRICS.values())
AMAZONS = {
    "AWS/ApiGateway": {"Count", "4XXError", "5XXError", "Latency"},
    "AWS/Lambda": {"Invocations", "Errors", "Throttles", "ConcurrentExecutions", "IteratorAge"},
    "AWS/DynamoDB": {"ThrottledRequests", "SystemErrors", "ReadThrottleEvents", "WriteThrottleEvents"},
    "AWS/SQS": {
        "ApproximateAgeOfOldestMessage",
        "ApproximateNumberOfMessagesNotVisible",
        "ApproximateNumberOfMessagesVisible",
    },
    "AWS/States": {
        "ExecutionsAborted",
        "ExecutionsFailed",
        "ExecutionsStarted",
        "ExecutionsSucceeded",
        "ExecutionsTimedOut",
    },
    "AWS/SageMaker": {"ModelLatency", "Invocation4XXErrors", "Invocation5XXErrors"},
    "/aws/sagemaker/Endpoints": {"GPUUtilization", "GPUMemoryUtilization"},
}
"""Those that the services document, as far as they are of use here."""


@pytest.fixture(scope="module")
def template(project_root: Path) -> dict[str, Any]:
    return load_template(project_root / "infra" / "observability.yaml")


@pytest.fixture(scope="module")
def everything(template: dict[str, Any]) -> Resolved:
    return Resolved(template, ALL_GIVEN)


def dimensions(metric: Mapping[str, Any]) -> dict[str, str]:
    return {one["Name"]: one["Value"] for one in metric["Dimensions"]}


def stated(alarm: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The metrics an alarm names outright."""
    if "MetricName" in alarm:
        return [alarm]
    return [one["MetricStat"]["Metric"] for one in alarm["Metrics"] if "MetricStat" in one]


def queried(alarm: Mapping[str, Any]) -> list[re.Match[str]]:
    """The queries of an alarm: metric, namespace, where, value."""
    pattern = re.compile(r"SELECT \w+\((\w+)\) FROM SCHEMA\(\"([^\"]+)\", [^)]+\) WHERE (\w+) = '([^']+)'")
    return [
        found
        for one in alarm.get("Metrics", ())
        if one.get("Expression", "").startswith("SELECT")
        for found in [pattern.fullmatch(one["Expression"])]
        if found is not None
    ]


def test_the_template_has_no_fault_that_cfn_lint_knows(project_root: Path) -> None:
    command = Path(sys.executable).with_name("cfn-lint")
    run = subprocess.run(
        [command, "--include-checks", "I", "--", project_root / "infra" / "observability.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_nothing_depends_on_an_alias_a_deployment_or_the_api(template: dict[str, Any]) -> None:
    """They wait for these alarms: a circle would be refused."""
    assert {resource["Type"] for resource in template["Resources"].values()} == {
        "AWS::CloudWatch::Alarm",
        "AWS::CloudWatch::Dashboard",
    }
    assert {one["Type"] for one in template["Parameters"].values()} == {"String", "Number"}
    required = {name for name, one in template["Parameters"].items() if "Default" not in one}
    assert required == set(GIVEN)


@pytest.mark.parametrize("topic", ["", TOPIC])
@pytest.mark.parametrize("spend", ["0", "12.5"])
@pytest.mark.parametrize("first_token", ["0", "10000"])
@pytest.mark.parametrize("endpoint", ["", ENDPOINT])
def test_each_parameter_adds_its_alarms_and_no_others(
    template: dict[str, Any], topic: str, spend: str, first_token: str, endpoint: str
) -> None:
    parameters = {
        **GIVEN,
        "AlarmTopicArn": topic,
        "DailySpendAlarmDollars": spend,
        "FirstTokenAlarmMilliseconds": first_token,
        "ModelEndpointName": endpoint,
    }
    resolved = Resolved(template, parameters)
    wanted = set(ALWAYS)
    wanted |= {"SpendAlarm"} if spend != "0" else set()
    wanted |= WITH_ENDPOINT if endpoint else set()
    wanted -= {"FirstTokenAlarm"} if first_token == "0" else set()
    assert set(resolved.alarms) == wanted
    for alarm in resolved.alarms.values():
        told = [topic] if topic else None
        assert alarm.get("AlarmActions") == alarm.get("OKActions") == told
    (shown,) = [one for one in resolved.dashboard["widgets"] if one["type"] == "alarm"]
    assert {arn.rpartition(":")[2] for arn in shown["properties"]["alarms"]} == wanted
    assert (f"{ENDPOINT}: GPU" in json.dumps(resolved.dashboard)) == bool(endpoint)


def test_every_alarm_says_what_it_means_and_what_to_do_first(everything: Resolved) -> None:
    for name, alarm in everything.alarms.items():
        assert "First:" in alarm["AlarmDescription"], name
        assert len(alarm["AlarmDescription"]) <= 1024
        assert "AlarmName" not in alarm, "a name of its own would keep an alarm from being replaced"


def test_silence_is_good_news_of_everything_but_the_sweeper(everything: Resolved) -> None:
    missing = {name: alarm["TreatMissingData"] for name, alarm in everything.alarms.items()}
    assert missing.pop("SweeperMissingAlarm") == "breaching"
    assert set(missing.values()) == {"notBreaching"}


def test_every_alarm_watches_a_metric_that_somebody_writes(everything: Resolved) -> None:
    for name, alarm in everything.alarms.items():
        watched = [(one["Namespace"], one["MetricName"]) for one in stated(alarm)]
        watched += [(one[2], one[1]) for one in queried(alarm)]
        assert watched, name
        for namespace, metric in watched:
            assert metric in (OWN if namespace == NAMESPACE else AMAZONS[namespace]), name


@pytest.mark.parametrize(
    ("alarm", "namespace", "metric", "where", "threshold"),
    [
        ("FirstTokenAlarm", "completions", "FirstTokenMilliseconds", {"service": "gateway"}, "10000"),
        ("SpendAlarm", "completions", "CostDollars", {"service": "gateway"}, "12.5"),
        ("LostRequestsAlarm", "completions", "Lost", {"service": "gateway"}, 0),
        ("ReservationLeaksAlarm", "completions", "SweepReleased", {"service": "gateway"}, 0),
        ("SweeperErrorsAlarm", "AWS/Lambda", "Errors", {"FunctionName": "sweeper-fn"}, 0),
        ("SweeperMissingAlarm", "AWS/Lambda", "Invocations", {"FunctionName": "sweeper-fn"}, 1),
        ("RollupErrorsAlarm", "AWS/Lambda", "Errors", {"FunctionName": "rollup-fn"}, 0),
        ("RollupAgeAlarm", "AWS/Lambda", "IteratorAge", {"FunctionName": "rollup-fn"}, 600_000),
        (
            "RollupFailuresAlarm",
            "AWS/SQS",
            "ApproximateNumberOfMessagesVisible",
            {"QueueName": "failures-queue"},
            0,
        ),
        (
            "CompletionRequestFailuresAlarm",
            "AWS/SQS",
            "ApproximateNumberOfMessagesVisible",
            {"QueueName": "given-up-queue"},
            0,
        ),
        (
            "BatchStartFailuresAlarm",
            "AWS/SQS",
            "ApproximateNumberOfMessagesVisible",
            {"QueueName": "unstarted-queue"},
            0,
        ),
        (
            "CompletionRequestsAgeAlarm",
            "AWS/SQS",
            "ApproximateAgeOfOldestMessage",
            {"QueueName": "requests-queue"},
            3600,
        ),
        *(
            (f"{name}ThrottlesAlarm", "AWS/Lambda", "Throttles", {"FunctionName": function}, 0)
            for name, function in COMPLETIONS.items()
        ),
    ],
)
def test_an_alarm_watches_its_metric(
    everything: Resolved, alarm: str, namespace: str, metric: str, where: dict[str, str], threshold: float | str
) -> None:
    found = everything.alarms[alarm]
    assert (found["Namespace"], found["MetricName"], dimensions(found)) == (namespace, metric, where)
    assert found["Threshold"] == threshold
    below = alarm == "SweeperMissingAlarm"
    assert found["ComparisonOperator"] == ("LessThanThreshold" if below else "GreaterThanThreshold")


def test_times_of_alarms(everything: Resolved) -> None:
    alarms = everything.alarms
    assert alarms["SpendAlarm"]["Period"] == 24 * 60 * 60
    assert alarms["SpendAlarm"]["Statistic"] == "Sum"
    assert alarms["SweeperMissingAlarm"]["Period"] == 5 * 60
    assert alarms["FirstTokenAlarm"]["ExtendedStatistic"] == "p95"
    assert alarms["RollupAgeAlarm"]["Statistic"] == "Maximum"
    for name, alarm in alarms.items():
        periods = [alarm["Period"]] if "Period" in alarm else []
        periods += [one["MetricStat"]["Period"] for one in alarm.get("Metrics", ()) if "MetricStat" in one]
        periods += [one["Period"] for one in alarm.get("Metrics", ()) if "Period" in one]
        assert periods, name
        assert len(set(periods)) == 1, name
        assert alarm.get("DatapointsToAlarm", 1) <= alarm["EvaluationPeriods"], name
        assert periods[0] * alarm["EvaluationPeriods"] <= 24 * 60 * 60, "CloudWatch looks back a day at most"


@pytest.mark.parametrize(
    ("name", "seconds"), [*((name, 600) for name in COMPLETIONS), *((name, 900) for name in BY_EVENTS)]
)
def test_an_alarm_looks_back_to_when_an_invocation_that_timed_out_began(
    everything: Resolved, name: str, seconds: int
) -> None:
    # Lambda dates an error there, and says it when the invocation is over
    alarm = everything.alarms[f"{name}ErrorsAlarm"]
    (period,) = {one["MetricStat"]["Period"] for one in alarm["Metrics"] if "MetricStat" in one}
    # the last period may have just begun
    assert (alarm["EvaluationPeriods"] - 1) * period >= seconds
    assert alarm["DatapointsToAlarm"] == 1


@pytest.mark.parametrize(
    ("alarm", "expression", "wanted", "where", "threshold"),
    [
        (
            "ApiErrorsAlarm",
            "IF(requests >= 20, 100 * errors / requests, 0)",
            {"errors": ("AWS/ApiGateway", "5XXError"), "requests": ("AWS/ApiGateway", "Count")},
            {"ApiName": "gateway-api", "Stage": "prod"},
            5,
        ),
        *(
            (
                f"{name}ErrorsAlarm",
                "IF(errors > 1, 100 * errors / invocations, 0)",
                {"errors": ("AWS/Lambda", "Errors"), "invocations": ("AWS/Lambda", "Invocations")},
                {"FunctionName": function},
                1,
            )
            for name, function in (COMPLETIONS | BY_EVENTS).items()
        ),
        (
            "BatchFailuresAlarm",
            "SUM([failed, timed_out, aborted])",
            {
                "failed": ("AWS/States", "ExecutionsFailed"),
                "timed_out": ("AWS/States", "ExecutionsTimedOut"),
                "aborted": ("AWS/States", "ExecutionsAborted"),
            },
            {"StateMachineArn": STATE_MACHINE},
            0,
        ),
    ],
)
def test_an_alarm_computes_what_no_metric_says(
    everything: Resolved,
    alarm: str,
    expression: str,
    wanted: dict[str, tuple[str, str]],
    where: dict[str, str],
    threshold: int,
) -> None:
    found = everything.alarms[alarm]
    computed, *parts = found["Metrics"]
    assert (computed["Expression"], computed.get("ReturnData", True)) == (expression, True)
    assert (found["Threshold"], found["ComparisonOperator"]) == (threshold, "GreaterThanThreshold")
    assert {part["Id"] for part in parts} == set(wanted)
    for part in parts:
        stat = part["MetricStat"]
        assert (stat["Metric"]["Namespace"], stat["Metric"]["MetricName"]) == wanted[part["Id"]]
        assert (dimensions(stat["Metric"]), stat["Stat"], part["ReturnData"]) == (where, "Sum", False)


@pytest.mark.parametrize(
    ("alarm", "query"),
    [
        ("UsageTableThrottlesAlarm", ("ThrottledRequests", "AWS/DynamoDB", "TableName", "usage-table")),
        ("UsageTableErrorsAlarm", ("SystemErrors", "AWS/DynamoDB", "TableName", "usage-table")),
        ("RegistryTableThrottlesAlarm", ("ThrottledRequests", "AWS/DynamoDB", "TableName", "registry-table")),
        ("RegistryTableErrorsAlarm", ("SystemErrors", "AWS/DynamoDB", "TableName", "registry-table")),
        ("EndpointErrorsAlarm", ("Invocation5XXErrors", "AWS/SageMaker", "EndpointName", ENDPOINT)),
        ("EndpointLatencyAlarm", ("ModelLatency", "AWS/SageMaker", "EndpointName", ENDPOINT)),
    ],
)
def test_operations_and_variants_are_added_up_by_a_query(
    everything: Resolved, alarm: str, query: tuple[str, ...]
) -> None:
    (found,) = queried(everything.alarms[alarm])
    assert found.groups() == query


def test_a_deployment_can_roll_back_on_the_alarms_of_its_function_and_of_the_api(everything: Resolved) -> None:
    assert everything.outputs == {
        "ApiErrorsAlarm": "ApiErrorsAlarm",
        **{f"{name}ErrorsAlarm": f"{name}ErrorsAlarm" for name in COMPLETIONS | BY_EVENTS},
        "DashboardName": "Dashboard",
    }


# The dashboard


def widgets(resolved: Resolved) -> Iterator[dict[str, Any]]:
    for widget in resolved.dashboard["widgets"]:
        if widget["type"] == "metric":
            yield widget["properties"]


def shown(widget: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Namespace, metric and dimensions of each line of a widget; a search's dimensions are those it gives a value."""
    search = re.compile(r"SEARCH\('\{([^,}]+),([^}]+)\} (\w+)=\"([^\"]+)\" MetricName=\"(\w+)\"', '\w+', (\d+)\)")
    for line in widget["metrics"]:
        *cells, last = line
        if not isinstance(last, dict):
            cells.append(last)
        elif "expression" in last:
            found = search.fullmatch(last["expression"])
            assert found is not None, last["expression"]
            names = found[2].split(",")
            if found[1] == NAMESPACE:
                assert names == [MODEL_DIMENSION, "service"]
            assert found[3] in names
            assert int(found[6]) == widget["period"]
            yield found[1], found[5], {found[3]: found[4]}
            continue
        namespace, metric, *where = cells
        assert "stat" in widget or "stat" in last
        yield namespace, metric, dict(zip(where[::2], where[1::2], strict=True))


def test_every_widget_shows_metrics_that_somebody_writes(everything: Resolved) -> None:
    for widget in widgets(everything):
        lines = list(shown(widget))
        assert lines, widget["title"]
        for namespace, metric, where in lines:
            assert metric in (OWN if namespace == NAMESPACE else AMAZONS[namespace]), widget["title"]
            if namespace == NAMESPACE:
                assert where == {"service": "gateway"}


def test_every_widget_is_of_this_region_and_covers_no_other(everything: Resolved) -> None:
    taken: set[tuple[int, int]] = set()
    for widget in everything.dashboard["widgets"]:
        area = {
            (x, y)
            for x in range(widget["x"], widget["x"] + widget["width"])
            for y in range(widget["y"], widget["y"] + widget["height"])
        }
        assert not area & taken
        assert max(x for x, _ in area) < 24
        taken |= area
    assert {widget["region"] for widget in widgets(everything)} == {"eu-west-1"}


def test_the_dashboard_shows_what_an_operator_looks_for(everything: Resolved) -> None:
    seen = {(namespace, metric) for widget in widgets(everything) for namespace, metric, _ in shown(widget)}
    own = {metric for namespace, metric in seen if namespace == NAMESPACE}
    assert own >= {metric.value for metric in RecordMetric}
    assert own >= {"SweepReleased", "SweepLost"}
    for namespace, names in AMAZONS.items():
        unseen = names - {metric for other, metric in seen if other == namespace}
        assert unseen <= {"Invocations", "ThrottledRequests", "SystemErrors"}
    throttled = next(widget for widget in widgets(everything) if widget["title"] == "Throttles")
    where = [tuple(sorted(found[2].values())) for found in shown(throttled)]
    assert where.count(("usage-table",)) == where.count(("registry-table",)) == 2
    assert {(function,) for function in (COMPLETIONS | BY_EVENTS).values()} <= set(where)


def test_labels_keep_cloudwatchs_own_variables(everything: Resolved) -> None:
    assert "${PROP('Dim.Model')}" in json.dumps(everything.dashboard)
    assert "${!" not in json.dumps(everything.resources)


def test_a_dashboard_is_named_for_stack_and_region(everything: Resolved) -> None:
    assert everything.resources["Dashboard"]["DashboardName"] == "gateway-eu-west-1"


# CloudWatch's own view of them


@pytest.fixture
def cloudwatch() -> Iterator[Any]:
    with moto_services("eu-north-1") as client:
        yield client("cloudwatch")


def test_cloudwatch_takes_every_alarm_and_the_dashboard(everything: Resolved, cloudwatch: Any) -> None:
    client = cloudwatch
    for name, alarm in everything.alarms.items():
        client.put_metric_alarm(AlarmName=name, **{**alarm, "Threshold": float(alarm["Threshold"])})
    client.put_dashboard(DashboardName="gateway", DashboardBody=everything.resources["Dashboard"]["DashboardBody"])

    found = {alarm["AlarmName"]: alarm for alarm in client.describe_alarms()["MetricAlarms"]}
    assert set(found) == set(everything.alarms)
    for name, alarm in found.items():
        assert alarm["AlarmDescription"] == everything.alarms[name]["AlarmDescription"]
        assert alarm["AlarmActions"] == alarm["OKActions"] == [TOPIC]
        assert alarm["Threshold"] == float(everything.alarms[name]["Threshold"])
    body = client.get_dashboard(DashboardName="gateway")["DashboardBody"]
    assert json.loads(body) == everything.dashboard
