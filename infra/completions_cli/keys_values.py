"""What is typed about a key, as values: counts, US dollars, days and durations. Every fault is a ``ValueFault``."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from completions.domain.limits import KeyLimits, LimitKind
from completions.web.callers import EXAMPLE, caller_arn

NONE: Final = "none"
PREFIX_CHARACTERS: Final = 7
OPTIONS: Final = {
    LimitKind.REQUESTS_PER_MINUTE: "--rpm",
    LimitKind.TOKENS_PER_MINUTE: "--tpm",
    LimitKind.PARALLEL_REQUESTS: "--parallel",
    LimitKind.TOKENS_PER_DAY: "--tokens-per-day",
    LimitKind.TOKENS_PER_MONTH: "--tokens-per-month",
    LimitKind.NANOS_PER_DAY: "--budget-per-day",
    LimitKind.NANOS_PER_MONTH: "--budget-per-month",
}
_MOST: Final = 10**15
"""Requests, tokens or nano-dollars: a million dollars. More is a slip of the hand."""
_DECIMALS: Final = 9
_NANOS_PER_DOLLAR: Final = 10**_DECIMALS
_MOST_NAME: Final = 128
_MOST_DAYS: Final = 36_500
_SECRET_BYTES: Final = 32
_NUMBER: Final = re.compile(r"[0-9]{1,30}")
_MONEY: Final = re.compile(r"\$?([0-9]{1,30})(?:\.([0-9]{1,30}))?")
_NEGATIVE: Final = re.compile(r"\$?-\$?[0-9.]+")
_DURATION: Final = re.compile(r"([0-9]{1,12})([smhd])")
_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class ValueFault(ValueError):
    """What is wrong with a value, in words that follow the option's name."""


def new_secret() -> str:
    """An API key: 256 random bits."""
    return "sk-" + secrets.token_urlsafe(_SECRET_BYTES)


def new_key_id() -> str:
    """A key's public name."""
    return "key_" + secrets.token_hex(6)


def display_prefix(secret: str) -> str:
    """The part of a key that may be shown."""
    return secret[:PREFIX_CHARACTERS]


def may_be_secret(text: str) -> bool:
    """Whether more is given than may be shown, or what a secret's characters could be."""
    return (text.startswith("sk-") and len(text) > PREFIX_CHARACTERS) or len(text) > _SECRET_BYTES


def name(text: str) -> str:
    """An owner or a team. Raises ``ValueFault``."""
    if not text or text != text.strip() or not text.isprintable() or len(text) > _MOST_NAME:
        raise ValueFault(f"must be 1 to {_MOST_NAME} printable characters, without a blank at either end")
    return text


def caller(text: str) -> str:
    """A caller's ARN, in the form that its key is kept under. Raises ``ValueFault``."""
    arn = caller_arn(text)
    if arn is None:
        raise ValueFault(f"must be the ARN of an IAM role, user, root, or of a session, such as {EXAMPLE}")
    return arn


def limits_given(options: Mapping[LimitKind, str | None]) -> dict[LimitKind, int | None]:
    """The limits that were named at all; ``none`` takes one away. Raises ``ValueFault``, which names the option."""
    given = {kind: text for kind, text in options.items() if text is not None}
    limits: dict[LimitKind, int | None] = {}
    for kind, text in given.items():
        try:
            limits[kind] = None if text == NONE else nanos(text) if "nanos" in kind else count(text)
        except ValueFault as fault:
            raise ValueFault(f"{OPTIONS[kind]}: {fault}") from None
    return limits


def changed(limits: KeyLimits, given: Mapping[LimitKind, int | None]) -> KeyLimits:
    """``limits`` with those that were given in the place of the old ones."""
    return KeyLimits(**{**asdict(limits), **{kind.value: limit for kind, limit in given.items()}})


def count(text: str) -> int:
    """Requests or tokens. Raises ``ValueFault``."""
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= _MOST:
        raise ValueFault(f"must be a whole number from 1 to {_MOST}, or '{NONE}'")
    return int(text)


def nanos(text: str) -> int:
    """US dollars as nano-dollars, exactly. Raises ``ValueFault``."""
    if _NEGATIVE.fullmatch(text):
        raise ValueFault("must not be negative")
    match = _MONEY.fullmatch(text)
    if match is None:
        raise ValueFault(f"must be US dollars such as 5, 0.25 or '$5', or '{NONE}'")
    whole, fraction = match[1], match[2] or ""
    if len(fraction) > _DECIMALS:
        raise ValueFault(f"has more than {_DECIMALS} decimals: the smallest amount is a nano-dollar")
    amount = int(whole) * _NANOS_PER_DOLLAR + int(fraction.ljust(_DECIMALS, "0"))
    if amount == 0:
        raise ValueFault("must be more than 0; to stop a key, disable it")
    if amount > _MOST:
        raise ValueFault(f"must not exceed {_MOST // _NANOS_PER_DOLLAR} dollars")
    return amount


def dollars(amount: int) -> str:
    """Nano-dollars as dollars, exactly, with at least two decimals."""
    whole, fraction = divmod(amount, _NANOS_PER_DOLLAR)
    return f"${whole:,}.{f'{fraction:09}'.rstrip('0').ljust(2, '0')}"


def expiry(text: str, now: datetime) -> datetime:
    """A day's first moment in UTC, or so much time from now. Raises ``ValueFault``."""
    if _DAY.fullmatch(text):
        try:
            ends = datetime.combine(date.fromisoformat(text), time(), UTC)
        except ValueError:
            raise ValueFault("is no day of the calendar") from None
    else:
        ends = now + _span(text, "must be a day such as 2027-01-31, or a time from now such as 90d or 12h")
    if ends <= now:
        raise ValueFault("must lie in the future")
    if ends > now + timedelta(days=_MOST_DAYS):
        raise ValueFault(f"must lie within the next {_MOST_DAYS} days; leave it out for a key that never expires")
    return ends


def grace(text: str) -> timedelta:
    """How long, such as ``24h``; ``0`` is not at all. Raises ``ValueFault``."""
    return timedelta() if text == "0" else _span(text, "must be 0, or a time such as 30m, 24h or 7d")


def _span(text: str, otherwise: str) -> timedelta:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueFault(otherwise)
    try:
        span = timedelta(**{_UNITS[match[2]]: int(match[1])})
    except OverflowError:
        span = timedelta.max
    if span > timedelta(days=_MOST_DAYS):
        raise ValueFault(f"must not exceed {_MOST_DAYS} days")
    return span
