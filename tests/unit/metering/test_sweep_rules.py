"""What the sweeper takes for past, and what a replay adds to counters."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from completions.domain.limits import Charge, LimitKind
from completions.domain.metering import plain_record
from completions.metering.limit_items import counter
from completions.metering.replay import additions, read_logged
from completions.metering.sweep import LostCharge, past_counters
from completions.settings import SettingsError, read_settings
from metered import key, record, reservation

NOW = datetime(2026, 12, 1, 0, 20, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("name", "past"),
    [
        ("requests_per_minute#20261201T0006", False),
        ("requests_per_minute#20261201T0005", True),
        ("tokens_per_minute#20261130T2359", True),
        ("tokens_per_day#20261128", False),
        ("nanos_per_day#20261126", True),
        ("tokens_per_month#202609", False),
        ("nanos_per_month#202608", True),
        # clocks that are ahead
        ("requests_per_minute#20261201T0025", False),
        ("tokens_per_day#20261202", False),
        # what is no counter of a period
        ("parallel_requests#", False),
        ("open#requests_per_minute#20200101T0000", False),
        ("tokens_per_day#", False),
        ("tokens_per_day#long ago", False),
        ("tokens_per_year#2020", False),
        ("pk", False),
    ],
)
def test_a_counter_is_past_when_nobody_asks_for_it_any_more(name: str, past: bool) -> None:
    assert past_counters([name], NOW) == ([name] if past else [])


def test_a_replay_adds_to_days_and_months_that_are_kept() -> None:
    charge = Charge(40, 400)
    assert additions(charge, NOW - timedelta(hours=1), NOW) == {
        "tokens_per_day#20261130": 40,
        "tokens_per_month#202611": 40,
        "nanos_per_day#20261130": 400,
        "nanos_per_month#202611": 400,
    }
    assert additions(Charge(0, -600), NOW - timedelta(days=6), NOW) == {"nanos_per_month#202611": -600}
    assert additions(charge, NOW - timedelta(days=200), NOW) == {}


def test_every_limit_of_a_period_has_its_counters_dropped_some_day() -> None:
    counters = [counter(kind, NOW - timedelta(days=400)) for kind in LimitKind]
    assert set(counters) - set(past_counters(counters, NOW)) == {"parallel_requests#"}


@pytest.mark.parametrize("record", [None, [], "text", {}, {"record_id": "r"}])
def test_what_is_no_record_is_a_value_error(record: object) -> None:
    with pytest.raises(ValueError, match="validation error"):
        read_logged(record)


BAD_FIELDS: list[dict[str, Any]] = [
    {"outcome": "fine"},
    {"prompt_tokens": -1},
    {"nanos": 1.5},
    {"completion_tokens": "12"},
    {"created_at": "yesterday"},
    {"created_at": "2026-11-30T12:00:00"},
    {"record_id": ""},
    {"key_id": None},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=lambda fields: f"{next(iter(fields.items()))}")
def test_a_record_with_a_field_that_is_wrong_is_a_value_error(fields: dict[str, Any]) -> None:
    good = plain_record(record(reservation(key())))
    read_logged(good)
    with pytest.raises(ValueError, match=next(iter(fields))):
        read_logged({**good, **fields})


TABLES = {"REGISTRY_TABLE": "keys", "USAGE_TABLE": "usage"}


def test_holds_are_given_up_after_sixteen_minutes_and_cost_nothing() -> None:
    settings = read_settings(TABLES)
    assert (settings.sweep_after_seconds, settings.sweep_charge) == (960, "nothing")


@pytest.mark.parametrize("policy", LostCharge)
def test_every_policy_can_be_set(policy: LostCharge) -> None:
    assert read_settings(TABLES | {"SWEEP_CHARGE": policy.value}).sweep_charge == policy


@pytest.mark.parametrize("change", [{"SWEEP_CHARGE": "half"}, {"SWEEP_AFTER_SECONDS": "0"}])
def test_a_wrong_policy_fails_the_start(change: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=next(iter(change))):
        read_settings(TABLES | change)
