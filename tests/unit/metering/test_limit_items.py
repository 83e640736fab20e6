"""Expressions of the limits item, as DynamoDB wants them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from completions.domain.limits import Charge, KeyLimits
from completions.metering.limit_items import Hold, hold_update

HOLD = Hold("r-1", "claim-1", datetime(2026, 11, 30, 12, tzinfo=UTC), Charge(100, 1_000))


def removed(forget: list[str]) -> list[str]:
    """The attributes an update removes, as often as it names them."""
    update = hold_update(KeyLimits(nanos_per_day=5), HOLD, forget)
    placeholders = re.findall(r"#n\d+", update["UpdateExpression"].partition("REMOVE ")[2])
    return [update["ExpressionAttributeNames"][placeholder] for placeholder in placeholders]


def test_an_entry_that_is_done_twice_is_forgotten_once() -> None:
    """DynamoDB refuses an update that names an attribute twice, and with it every further request of the key."""
    names = removed(["a", "b", "a"])
    assert names.count("closed#a") == names.count("closed#b") == 1


def test_a_hold_never_forgets_an_entry_of_its_own_id() -> None:
    assert "closed#r-1" not in removed(["r-1", "a"])
