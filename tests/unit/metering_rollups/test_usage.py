"""Buckets of time, sums, and percentiles from histograms."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from completions.domain.usage import Granularity, Totals, latency_bucket, percentile

MOMENT = datetime(2026, 11, 30, 23, 59, 59, 999_999, tzinfo=UTC)


@pytest.mark.parametrize(
    ("granularity", "start", "end"),
    [
        (Granularity.MINUTE, datetime(2026, 11, 30, 23, 59, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)),
        (Granularity.HOUR, datetime(2026, 11, 30, 23, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)),
        (Granularity.DAY, datetime(2026, 11, 30, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)),
    ],
)
def test_a_moment_is_in_its_own_bucket(granularity: Granularity, start: datetime, end: datetime) -> None:
    assert granularity.floor(MOMENT) == start
    assert granularity.ceiling(MOMENT) == end
    assert granularity.floor(start) == granularity.ceiling(start) == start


def test_buckets_are_utc_s_own_in_every_zone() -> None:
    from zoneinfo import ZoneInfo  # noqa: PLC0415

    local = datetime(2026, 11, 30, 1, 0, tzinfo=ZoneInfo("Asia/Kolkata"))  # half past seven the evening before, in UTC
    assert Granularity.DAY.floor(local) == datetime(2026, 11, 29, tzinfo=UTC)
    assert Granularity.HOUR.floor(local) == datetime(2026, 11, 29, 19, tzinfo=UTC)


def test_minutes_are_kept_three_days_hours_a_hundred_and_days_eight_hundred() -> None:
    assert [one.kept for one in Granularity] == [timedelta(days=days) for days in (3, 100, 800)]


def test_sums_add_and_take_away() -> None:
    one = Totals(1, 7, 2, 11, 1_234, 1, {20: 1}, {10: 1})
    other = Totals(1, 3, 0, 4, 66, 0, {20: 1, 25: 1}, {})
    both = one + other
    assert both == Totals(2, 10, 2, 15, 1_300, 1, {20: 2, 25: 1}, {10: 1})
    assert both - other == one
    assert (one - one).any is False
    assert one.any is True


# Each doubling is four buckets: a bucket's end is at most 2 ** 0.25 = 1.19 times its begin


@pytest.mark.parametrize(("milliseconds", "bucket"), [(0, 0), (1, 1), (2, 5), (4, 9), (1024, 41), (1023, 40)])
def test_a_doubling_is_four_buckets(milliseconds: int, bucket: int) -> None:
    assert latency_bucket(milliseconds) == bucket


@settings(deadline=None)
@given(st.lists(st.integers(1, 900_000), min_size=1, max_size=300), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_is_within_a_fifth_of_the_true_one(times: list[int], share: float) -> None:
    """The true one by the nearest-rank definition."""
    rank = max(1, -int(-share * len(times) // 1))
    true = sorted(times)[rank - 1]
    found = percentile(Counter(map(latency_bucket, times)), share)
    assert found is not None
    assert true / 1.2 <= found <= true * 1.2


def test_longer_than_any_function_runs_is_the_last_bucket() -> None:
    assert latency_bucket(10**9) == latency_bucket(10**7)
    assert percentile({latency_bucket(10**9): 1}, 0.99) is not None


def test_nothing_has_no_percentile() -> None:
    assert percentile({}, 0.5) is None
    assert percentile({20: 0}, 0.5) is None


def test_a_count_that_was_taken_back_does_not_count() -> None:
    assert percentile({1: 0, 41: 2}, 1.0) == percentile({41: 2}, 1.0)
