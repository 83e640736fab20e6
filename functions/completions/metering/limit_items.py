"""A key's limits in one item: what is used of each, and what is held for requests in progress.

``pk`` is ``LIMITS#<key id>``, ``sk`` is ``LIMITS``. Its attributes:

- ``tokens_per_day#20261130`` and the like: what the period has used, holds included.
- ``parallel_requests#``: how many requests are in progress.
- ``open#<record id>``: a hold, with the claim it belongs to, its estimate and its time.
- ``closed#<record id>``: what a hold came to. It outlives the hold until the record is known to be settled, so that a
  function that dies between the two writes loses nothing.

One conditional update takes a hold and checks every limit: ``used <= limit - estimate``, the right side a number that
is known here, since a condition cannot add. Another one closes the hold. Neither needs a transaction, so no two of them
can cancel each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from completions.domain.completion import Usage
from completions.domain.errors import LimitStatus
from completions.domain.limits import Charge, KeyLimits, LimitKind, period, reset_at
from completions.domain.metering import Outcome

LIMITS_SORT: Final = "LIMITS"
OPEN: Final = "open#"
CLOSED: Final = "closed#"
_STALE_MINUTES: Final = range(10, 15)
"""Minutes whose counters are dropped on the way. Clocks may differ by five minutes, so younger ones may still count."""
_ADJUSTABLE: Final = timedelta(minutes=8)


@dataclass(frozen=True, slots=True)
class Hold:
    """What is held of a key's limits for one request since ``at``. ``claim_id`` tells this claim from a rival's.

    With ``until`` it is not given up for lost before then.
    """

    record_id: str
    claim_id: str
    at: datetime
    estimate: Charge
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a hold came to, in the fewest words: the item they stand in is written with every request."""

    outcome: Outcome
    usage: Usage
    nanos: int

    @property
    def charge(self) -> Charge:
        """What is taken off the limits for good."""
        return Charge(self.usage.total_tokens, self.nanos)


def limits_partition(key_id: str) -> str:
    """The partition key of a key's limits."""
    return f"LIMITS#{key_id}"


def counter(kind: LimitKind, moment: datetime) -> str:
    """The attribute that counts ``kind`` in the period of ``moment``."""
    return f"{kind}#{period(kind, moment)}"


def amount(kind: LimitKind, charge: Charge) -> int:
    """What a request of this charge takes of a limit."""
    if "tokens" in kind:
        return charge.tokens
    return charge.nanos if "nanos" in kind else 1


def fits(limits: KeyLimits, estimate: Charge) -> bool:
    """Whether a request of this estimate has room in limits of which nothing is used."""
    return all((limit := limits.of(kind)) is None or amount(kind, estimate) <= limit for kind in LimitKind)


def hold_update(limits: KeyLimits, hold: Hold, forget: Sequence[str]) -> dict[str, Any]:
    """Arguments of the ``UpdateItem`` that takes a hold. ``forget`` are record ids whose ``closed`` entries have done
    their work. Every kind is counted, so that a limit that is set later knows the period's past."""
    expression = _Expression()
    opened, closed = expression.name(OPEN + hold.record_id), expression.name(CLOSED + hold.record_id)
    conditions = [f"attribute_not_exists({opened})", f"attribute_not_exists({closed})"]
    added = []
    for kind in LimitKind:
        name = expression.name(counter(kind, hold.at))
        taken = amount(kind, hold.estimate)
        added.append(f"{name} {expression.number(taken)}")
        limit = limits.of(kind)
        if limit is not None:
            conditions.append(f"(attribute_not_exists({name}) OR {name} <= {expression.number(limit - taken)})")
    stale = [
        counter(kind, hold.at - timedelta(minutes=age))
        for kind in (LimitKind.REQUESTS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE)
        for age in _STALE_MINUTES
    ]
    done = [CLOSED + record_id for record_id in dict.fromkeys(forget) if record_id != hold.record_id]
    removed = [expression.name(name) for name in (*stale, *done)]
    value = {
        "claim": {"S": hold.claim_id},
        "at": {"S": hold.at.isoformat()},
        "tokens": {"N": str(hold.estimate.tokens)},
        "nanos": {"N": str(hold.estimate.nanos)},
    }
    if hold.until is not None:
        value["until"] = {"S": hold.until.isoformat()}
    return {
        "UpdateExpression": f"SET {opened} = {expression.value({'M': value})} ADD {', '.join(added)} "
        f"REMOVE {', '.join(removed)}",
        "ConditionExpression": " AND ".join(conditions),
        **expression.arguments,
    }


def close_update(hold: Hold, result: Result, now: datetime, *, keep: bool) -> dict[str, Any]:
    """Arguments of the ``UpdateItem`` that closes a hold once: what the estimate was too high by is given back.

    ``keep`` leaves the result as a ``closed`` entry, for a record that is not known to be settled.
    """
    expression = _Expression()
    opened = expression.name(OPEN + hold.record_id)
    difference = Charge(result.charge.tokens - hold.estimate.tokens, result.charge.nanos - hold.estimate.nanos)
    added = [f"{expression.name(counter(LimitKind.PARALLEL_REQUESTS, hold.at))} {expression.number(-1)}"]
    for kind in LimitKind:
        is_old = kind is LimitKind.TOKENS_PER_MINUTE and abs(now - hold.at) > _ADJUSTABLE  # its counter may be gone
        if ("tokens" in kind or "nanos" in kind) and not is_old:
            added.append(f"{expression.name(counter(kind, hold.at))} {expression.number(amount(kind, difference))}")
    entry = {"M": closed_entry(hold, result)}
    kept = f"SET {expression.name(CLOSED + hold.record_id)} = {expression.value(entry)} " if keep else ""
    mine = expression.value({"S": hold.claim_id})
    return {
        "UpdateExpression": f"{kept}REMOVE {opened} ADD {', '.join(added)}",
        "ConditionExpression": f"{opened}.{expression.name('claim')} = {mine}",
        **expression.arguments,
    }


def closed_entry(hold: Hold, result: Result) -> dict[str, Any]:
    """The value of a ``closed`` attribute."""
    return {
        "claim": {"S": hold.claim_id},
        "at": {"S": hold.at.isoformat()},
        "outcome": {"S": result.outcome.value},
        "prompt": {"N": str(result.usage.prompt_tokens)},
        "completion": {"N": str(result.usage.completion_tokens)},
        "cached": {"N": str(result.usage.cached_tokens)},
        "estimated": {"BOOL": result.usage.estimated},
        "nanos": {"N": str(result.nanos)},
    }


def limit_statuses(limits: KeyLimits, used: Mapping[str, Any], moment: datetime) -> tuple[LimitStatus, ...]:
    """Each limit there is, with what ``used``, the item's plain attributes, leaves of it."""
    return tuple(
        _status(kind, limit, int(used.get(counter(kind, moment), 0)), moment)
        for kind in LimitKind
        if (limit := limits.of(kind)) is not None
    )


def _status(kind: LimitKind, limit: int, used: int, moment: datetime) -> LimitStatus:
    ends = reset_at(kind, moment)
    return LimitStatus(
        kind="tokens" if "tokens" in kind else "nano-dollars" if "nanos" in kind else "requests",
        limit=limit,
        remaining=max(0, limit - used),
        reset_seconds=1.0 if ends is None else max(0.0, (ends - moment).total_seconds()),
        name=kind.value,
    )


def open_holds(item: Mapping[str, Any]) -> list[Hold]:
    """The holds in a key's item, in plain attributes."""
    return [
        Hold(
            record_id=name.removeprefix(OPEN),
            claim_id=value["claim"],
            at=datetime.fromisoformat(value["at"]),
            estimate=Charge(int(value["tokens"]), int(value["nanos"])),
            until=datetime.fromisoformat(value["until"]) if "until" in value else None,
        )
        for name, value in item.items()
        if name.startswith(OPEN)
    ]


def closed_results(item: Mapping[str, Any]) -> dict[str, tuple[str, datetime, Result]]:
    """By record id: the claim it belongs to, when that was made, and what it came to."""
    return {
        name.removeprefix(CLOSED): (
            value["claim"],
            datetime.fromisoformat(value["at"]),
            Result(
                outcome=Outcome(value["outcome"]),
                usage=Usage(
                    int(value["prompt"]), int(value["completion"]), int(value["cached"]), bool(value["estimated"])
                ),
                nanos=int(value["nanos"]),
            ),
        )
        for name, value in item.items()
        if name.startswith(CLOSED)
    }


class _Expression:
    """Placeholders of one expression, in DynamoDB's typed JSON."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._values: list[Mapping[str, Any]] = []

    def name(self, attribute: str) -> str:
        return self._names.setdefault(attribute, f"#n{len(self._names)}")

    def value(self, value: Mapping[str, Any]) -> str:
        self._values.append(value)
        return f":v{len(self._values) - 1}"

    def number(self, number: int) -> str:
        return self.value({"N": str(number)})

    @property
    def arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "ExpressionAttributeNames": {placeholder: name for name, placeholder in self._names.items()}
        }
        if self._values:
            arguments["ExpressionAttributeValues"] = {f":v{n}": value for n, value in enumerate(self._values)}
        return arguments
