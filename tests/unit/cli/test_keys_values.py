"""What is typed about a key, and what of it is taken."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from completions.domain.limits import KeyLimits, LimitKind
from completions_cli import keys_values as values
from completions_cli.keys_values import ValueFault

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "nanos"),
    [
        ("5", 5_000_000_000),
        ("$5", 5_000_000_000),
        ("$0.25", 250_000_000),
        ("0.1", 100_000_000),
        ("0.000000001", 1),
        ("1234.567890123", 1_234_567_890_123),
        ("999999.999999999", 999_999_999_999_999),
        ("1000000", 10**15),
        ("05.50", 5_500_000_000),
    ],
)
def test_dollars_become_nano_dollars_exactly(text: str, nanos: int) -> None:
    assert values.nanos(text) == nanos


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0", "more than 0"),
        ("$0.000", "more than 0"),
        ("-5", "must not be negative"),
        ("$-5", "must not be negative"),
        ("-$0.5", "must not be negative"),
        ("0.0000000001", "more than 9 decimals"),
        ("5.0000000000", "more than 9 decimals"),
        ("1000000.000000001", "must not exceed 1000000 dollars"),
        ("9" * 30, "must not exceed 1000000 dollars"),
        ("9" * 5_000, "must be US dollars"),
        ("", "must be US dollars"),
        ("$", "must be US dollars"),
        ("5.", "must be US dollars"),
        (".5", "must be US dollars"),
        ("1e3", "must be US dollars"),
        ("1,000", "must be US dollars"),
        ("1_000", "must be US dollars"),
        ("nan", "must be US dollars"),
        ("inf", "must be US dollars"),
        ("5 ", "must be US dollars"),
        ("5\n", "must be US dollars"),
        ("€5", "must be US dollars"),
        ("\u0665", "must be US dollars"),
    ],
)
def test_what_is_no_budget_is_told(text: str, fault: str) -> None:
    with pytest.raises(ValueFault, match=fault):
        values.nanos(text)


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("60", 60), ("1000000000000000", 10**15)])
def test_a_count_is_a_whole_number(text: str, count: int) -> None:
    assert values.count(text) == count


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "1.5", "1e3", "", " 1", "1\n", "1_000", "\u0663", "\u00b2", "1000000000000001", "9" * 5_000, "many"],
)
def test_what_is_no_count_is_told(text: str) -> None:
    with pytest.raises(ValueFault, match="must be a whole number from 1 to 1000000000000000, or 'none'"):
        values.count(text)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("2027-01-31", datetime(2027, 1, 31, tzinfo=UTC)),
        ("2028-02-29", datetime(2028, 2, 29, tzinfo=UTC)),
        ("90d", datetime(2027, 2, 28, 12, tzinfo=UTC)),
        ("12h", datetime(2026, 12, 1, 0, tzinfo=UTC)),
        ("1s", datetime(2026, 11, 30, 12, 0, 1, tzinfo=UTC)),
    ],
)
def test_a_key_ends_on_a_day_or_after_a_time(text: str, ends: datetime) -> None:
    assert values.expiry(text, NOON) == ends


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("2026-11-30", "must lie in the future"),
        ("2020-01-01", "must lie in the future"),
        ("0d", "must lie in the future"),
        ("2027-02-29", "is no day of the calendar"),
        ("2027-13-01", "is no day of the calendar"),
        ("0000-01-01", "is no day of the calendar"),
        ("2127-01-01", "must lie within the next 36500 days"),
        ("9999-12-31", "must lie within the next 36500 days"),
        ("36501d", "must not exceed 36500 days"),
        ("999999999999d", "must not exceed 36500 days"),
        ("999999999999h", "must not exceed 36500 days"),
        ("90", "must be a day such as 2027-01-31, or a time from now"),
        ("-90d", "must be a day such as 2027-01-31, or a time from now"),
        ("tomorrow", "must be a day such as 2027-01-31, or a time from now"),
        ("2027-01-31T10:00", "must be a day such as 2027-01-31, or a time from now"),
        ("20270131", "must be a day such as 2027-01-31, or a time from now"),
        ("\u06622027-01-31", "must be a day such as 2027-01-31, or a time from now"),
        ("", "must be a day such as 2027-01-31, or a time from now"),
    ],
)
def test_what_is_no_expiry_is_told(text: str, fault: str) -> None:
    with pytest.raises(ValueFault, match=fault):
        values.expiry(text, NOON)


@pytest.mark.parametrize(
    ("text", "span"),
    [("0", timedelta()), ("0d", timedelta()), ("30m", timedelta(minutes=30)), ("7d", timedelta(days=7))],
)
def test_a_grace_is_a_time_or_none(text: str, span: timedelta) -> None:
    assert values.grace(text) == span


@pytest.mark.parametrize("text", ["", "1", "-1h", "1w", "1.5h", "h", "2027-01-31", "36501d"])
def test_what_is_no_grace_is_told(text: str) -> None:
    with pytest.raises(ValueFault):
        values.grace(text)


@pytest.mark.parametrize("text", ["", " ada", "ada ", "a\nb", "\x1b[31m", "a" * 129])
def test_what_is_no_name_is_told(text: str) -> None:
    with pytest.raises(ValueFault, match="must be 1 to 128 printable characters"):
        values.name(text)


def test_limits_that_are_not_named_stay() -> None:
    options = dict.fromkeys(LimitKind) | {
        LimitKind.REQUESTS_PER_MINUTE: "60",
        LimitKind.NANOS_PER_DAY: "none",
        LimitKind.NANOS_PER_MONTH: "$2.50",
    }
    old = KeyLimits(tokens_per_day=7, nanos_per_day=8)
    assert values.changed(old, values.limits_given(options)) == KeyLimits(
        requests_per_minute=60, tokens_per_day=7, nanos_per_month=2_500_000_000
    )


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (LimitKind.REQUESTS_PER_MINUTE, "--rpm"),
        (LimitKind.TOKENS_PER_MINUTE, "--tpm"),
        (LimitKind.PARALLEL_REQUESTS, "--parallel"),
        (LimitKind.TOKENS_PER_DAY, "--tokens-per-day"),
        (LimitKind.TOKENS_PER_MONTH, "--tokens-per-month"),
        (LimitKind.NANOS_PER_DAY, "--budget-per-day"),
        (LimitKind.NANOS_PER_MONTH, "--budget-per-month"),
    ],
)
def test_a_wrong_limit_is_named_by_its_option(kind: LimitKind, option: str) -> None:
    with pytest.raises(ValueFault, match=f"^{option}: must "):
        values.limits_given({kind: "0"})


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (1, "$0.000000001"),
        (250_000_000, "$0.25"),
        (5_000_000_000, "$5.00"),
        (5_100_000_000, "$5.10"),
        (10**15, "$1,000,000.00"),
    ],
)
def test_money_is_shown_exactly(nanos: int, text: str) -> None:
    assert values.dollars(nanos) == text


def test_a_secret_is_43_random_characters_that_a_url_may_hold() -> None:
    secrets = {values.new_secret() for _ in range(200)}
    assert len(secrets) == 200
    assert all(re.fullmatch(r"sk-[A-Za-z0-9_-]{43}", secret) for secret in secrets)
    assert all(re.fullmatch(r"key_[0-9a-f]{12}", values.new_key_id()) for _ in range(20))


def test_seven_characters_of_a_secret_may_be_shown() -> None:
    assert values.display_prefix("sk-abcdefghijk") == "sk-abcd"


def test_the_options_stand_in_the_order_of_the_limits() -> None:
    """The command hands its arguments over in this order."""
    options: Any = values.OPTIONS
    assert list(options) == list(LimitKind)
