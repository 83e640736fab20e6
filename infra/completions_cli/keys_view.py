"""How keys are shown. Secrets and their digests never are; a key without a secret shows whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from completions.domain.limits import KeyLimits, LimitKind
from completions.registry.items import KeyEntry
from completions_cli.keys_values import dollars

_WORDS: Final = {
    LimitKind.REQUESTS_PER_MINUTE: "requests a minute",
    LimitKind.TOKENS_PER_MINUTE: "tokens a minute",
    LimitKind.PARALLEL_REQUESTS: "requests at a time",
    LimitKind.TOKENS_PER_DAY: "tokens a day",
    LimitKind.TOKENS_PER_MONTH: "tokens a month",
    LimitKind.NANOS_PER_DAY: "a day",
    LimitKind.NANOS_PER_MONTH: "a month",
}
_COLOURS: Final = {"active": "green", "disabled": "red", "expired": "yellow"}


def state(entry: KeyEntry, now: datetime) -> str:
    """``active``, ``disabled`` or ``expired``."""
    if entry.principal.disabled:
        return "disabled"
    ends = entry.principal.expires_at
    return "active" if ends is None or ends > now else "expired"


def entry_values(entry: KeyEntry, now: datetime) -> dict[str, Any]:
    """All about a key but its secret, in JSON's types."""
    principal = entry.principal
    return {
        "key_id": principal.key_id,
        "prefix": entry.prefix,
        "arn": entry.arn,
        "owner": principal.owner,
        "team": principal.team,
        "admin": principal.admin,
        "allowed_models": None if principal.allowed_models is None else sorted(principal.allowed_models),
        "state": state(entry, now),
        "disabled": principal.disabled,
        "created_at": _moment(entry.created_at),
        "expires_at": _moment(principal.expires_at),
        "limits": asdict(principal.limits),
        "retired": [{"prefix": one.prefix, "until": _moment(one.until)} for one in entry.retired if one.until > now],
    }


def entry_lines(entry: KeyEntry, now: datetime) -> list[str]:
    """The same for people, a line each."""
    values = entry_values(entry, now)
    models = values["allowed_models"]
    rows = {
        "id": values["key_id"],
        **({"begins with": values["prefix"] or "unknown"} if entry.arn is None else {"caller": entry.arn}),
        "owner": values["owner"],
        "team": values["team"] or "none",
        "admin": "yes" if values["admin"] else "no",
        "models": "all" if models is None else ", ".join(models) or "none",
        "state": values["state"],
        "created": values["created_at"] or "unknown",
        "expires": values["expires_at"] or "never",
        "limits": ", ".join(limit_words(entry.principal.limits)) or "none",
    }
    lines = [f"{name:<13}{value}" for name, value in rows.items()]
    return lines + [f"{'old secret':<13}{one['prefix']} until {one['until']}" for one in values["retired"]]


def caller_words(entry: KeyEntry, given: str) -> list[str]:
    """What to know of a key that is a caller's, a sentence a line; ``given`` is the ARN as it was typed."""
    lines = [
        f"{entry.principal.key_id} for {entry.principal.owner}. {entry.arn} signs its requests: there is no secret.",
        "It counts where functions run with AUTH_MODE iam, as the template's AuthMode sets it.",
    ]
    if entry.arn != given:
        lines.append(f"{given} is kept as its role without a path, for that is all a session's ARN tells.")
    if given.endswith(":root"):
        lines.append("Meant is the account's root user alone, not everybody in the account.")
    return lines


def limit_words(limits: KeyLimits) -> list[str]:
    """Each limit there is, as ``60 requests a minute``."""
    return [f"{_amount(kind, limit)} {_WORDS[kind]}" for kind in LimitKind if (limit := limits.of(kind)) is not None]


def limit_changes(old: KeyLimits, new: KeyLimits) -> list[str]:
    """A line for each limit that differs."""
    return [
        f"{kind.replace('nanos', 'dollars').replace('_', ' ')}: {_said(kind, old)} → {_said(kind, new)}"
        for kind in LimitKind
        if old.of(kind) != new.of(kind)
    ]


def keys_table(entries: Sequence[KeyEntry], now: datetime) -> Table:
    """One row a key."""
    table = Table("id", "begins with, or caller", "owner", "team", "models", "limits", "expires", "state")
    for column in table.columns:
        column.overflow = "fold"
    table.columns[0].no_wrap = True
    for entry in entries:
        principal, standing = entry.principal, state(entry, now)
        models = principal.allowed_models
        cells = (
            principal.key_id,
            entry.arn or entry.prefix or "",
            principal.owner + (" (admin)" if principal.admin else ""),
            principal.team or "",
            "all" if models is None else "\n".join(sorted(models)),
            "\n".join(limit_words(principal.limits)),
            _moment(principal.expires_at) or "",
        )
        table.add_row(*map(Text, cells), Text(standing, style=_COLOURS[standing]))
    return table


def _amount(kind: LimitKind, limit: int) -> str:
    return dollars(limit) if "nanos" in kind else f"{limit:,}"


def _said(kind: LimitKind, limits: KeyLimits) -> str:
    limit = limits.of(kind)
    return "none" if limit is None else _amount(kind, limit)


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
