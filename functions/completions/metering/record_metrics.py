"""What the functions behind the usage table tell CloudWatch, as lines of their log in its embedded metric format.

Records are measured by model and over all models. No key, team or owner is a dimension: every value of a dimension is a
metric to pay for, and who reads metrics need not learn who asked. A metric's time is when its record was added and not
when the request began, so that an alarm sees what comes late: a lost request is found a quarter of an hour after.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.metrics.functions import is_metrics_disabled

from completions.domain.metering import Outcome
from completions.metering.rollup_items import Facts, RolledRecord
from completions.observability import SERVICE, new_metrics

MODEL_DIMENSION: Final = "Model"
_NANOS_PER_DOLLAR: Final = 1_000_000_000
_LONGEST_DIMENSION: Final = 1024


class RecordMetric(StrEnum):
    """What is measured of settled records; one that comes to nothing is left out."""

    REQUESTS = "Requests"
    REFUSED = "Refused"
    FAILED = "Failed"
    ABORTED = "Aborted"
    LOST = "Lost"
    ESTIMATED = "Estimated"
    """Requests whose tokens are an estimate."""
    PROMPT_TOKENS = "PromptTokens"
    COMPLETION_TOKENS = "CompletionTokens"
    COST_DOLLARS = "CostDollars"
    """By the models' own prices, in whatever currency these are; a dollar is 10^9 nanos."""
    FIRST_TOKEN_MILLISECONDS = "FirstTokenMilliseconds"  # noqa: S105 - a language model's token
    """From arrival to the model's first record."""
    TOKENS_PER_SECOND = "TokensPerSecond"
    """Of each request with two tokens or more, from its first record to its end."""


_UNITS: Final = {
    RecordMetric.COST_DOLLARS: MetricUnit.NoUnit,
    RecordMetric.FIRST_TOKEN_MILLISECONDS: MetricUnit.Milliseconds,
    RecordMetric.TOKENS_PER_SECOND: MetricUnit.CountPerSecond,
}
_OUTCOMES: Final = {
    Outcome.REFUSED: RecordMetric.REFUSED,
    Outcome.FAILED: RecordMetric.FAILED,
    Outcome.ABORTED: RecordMetric.ABORTED,
    Outcome.LOST: RecordMetric.LOST,
}

Measurements = dict[RecordMetric, list[float]]


def write_metrics(records: Iterable[RolledRecord]) -> None:
    """One line a model, or more where a line is full, of records that were added just now."""
    if is_metrics_disabled():  # the library itself looks only when it flushes, and a full line goes before that
        return
    for model, measured in measurements(records).items():
        metrics = new_metrics()
        metrics.add_dimensions(**{"service": SERVICE, MODEL_DIMENSION: _dimension_value(model)})
        for metric, values in measured.items():
            for value in values:
                metrics.add_metric(metric.value, _UNITS.get(metric, MetricUnit.Count), value)
        if metrics.metric_set:
            metrics.flush_metrics()


def measurements(records: Iterable[RolledRecord]) -> dict[str, Measurements]:
    """What records add, by model: counts as one sum, times and speeds each by itself.

    One that was added before, as lost, is no further request; its tokens and cost are made what they should be.
    """
    counts: defaultdict[str, Counter[RecordMetric]] = defaultdict(Counter)
    samples: defaultdict[str, Measurements] = defaultdict(lambda: defaultdict(list))
    for record in records:
        facts = Facts.of(record)
        counts[facts.model].update(_amounts(facts))
        for metric, value in _samples(facts).items():
            samples[facts.model][metric].append(value)
        if record.rolled_up is None:
            counts[facts.model].update(_occurrences(facts))
        else:
            before = Facts.parse(record.rolled_up)
            counts[before.model].subtract(_amounts(before))
    return {model: {**_sums(count), **samples[model]} for model, count in counts.items()}


def _occurrences(facts: Facts) -> dict[RecordMetric, int]:
    ended = _OUTCOMES.get(facts.outcome)
    return {RecordMetric.REQUESTS: 1} if ended is None else {RecordMetric.REQUESTS: 1, ended: 1}


def _amounts(facts: Facts) -> dict[RecordMetric, int]:
    """Money in nanos, which add up exactly."""
    return {
        RecordMetric.ESTIMATED: facts.estimated,
        RecordMetric.PROMPT_TOKENS: facts.prompt_tokens,
        RecordMetric.COMPLETION_TOKENS: facts.completion_tokens,
        RecordMetric.COST_DOLLARS: facts.nanos,
    }


def _samples(facts: Facts) -> dict[RecordMetric, float]:
    if facts.first_token_ms is None:
        return {}
    samples = {RecordMetric.FIRST_TOKEN_MILLISECONDS: float(facts.first_token_ms)}
    milliseconds = facts.total_ms - facts.first_token_ms
    if milliseconds > 0 and facts.completion_tokens > 1:
        samples[RecordMetric.TOKENS_PER_SECOND] = round(1000 * facts.completion_tokens / milliseconds, 3)
    return samples


def _sums(counts: Mapping[RecordMetric, int]) -> Measurements:
    scale = {RecordMetric.COST_DOLLARS: _NANOS_PER_DOLLAR}
    return {metric: [count / scale.get(metric, 1)] for metric, count in counts.items() if count}


def _dimension_value(model: str) -> str:
    """CloudWatch drops a metric whose dimension is not ASCII, or is too long."""
    return model.encode("ascii", "backslashreplace").decode()[:_LONGEST_DIMENSION]
