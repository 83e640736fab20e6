"""The query of OpenAI's usage and costs routes, read strictly: what is not understood is refused by its name.

Source: openai/openai-openapi (``/organization/usage/completions``, ``/organization/costs``) and what openai-python
sends. Lists are repeated names, with ``[]`` behind them or without.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NoReturn

from completions.dialects.dialect import WireRequest
from completions.domain.errors import InvalidRequestError
from completions.domain.usage import Dimensions, Granularity

LATEST: Final = 4_102_444_800  # the year 2100; milliseconds are far beyond
_WHOLE: Final = re.compile(r"[0-9]{1,18}")
_PAGE: Final = "page_"
_WIDTHS: Final = {"1m": Granularity.MINUTE, "1h": Granularity.HOUR, "1d": Granularity.DAY}
_FLAGS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Route:
    """What one route takes. ``limits`` are the default and the highest number of buckets, by width; ``filters`` the
    parameters that keep only some of the usage, with the field of a result they look at."""

    groups: Collection[str]
    filters: Mapping[str, str]
    limits: Mapping[str, tuple[int, int]]
    takes_batch: bool = False


USAGE: Final = Route(
    groups=("project_id", "user_id", "api_key_id", "model", "batch"),
    filters={"project_ids": "project_id", "user_ids": "user_id", "api_key_ids": "api_key_id", "models": "model"},
    limits={"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)},
    takes_batch=True,
)
# OpenAI's costs have days alone; the shorter widths are this gateway's
COSTS: Final = Route(
    groups=("project_id", "user_id", "line_item", "api_key_id"),
    filters={
        "project_ids": "project_id",
        "user_ids": "user_id",
        "api_key_ids": "api_key_id",
        "line_items": "line_item",
    },
    limits={"1m": (60, 1440), "1h": (24, 168), "1d": (7, 180)},
)
LATENCY: Final = Route(groups=("model",), filters={"models": "model"}, limits={})


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """What is asked for: the buckets from ``start`` to before ``end``, ``limit`` of them from ``first`` on."""

    granularity: Granularity
    start: datetime
    end: datetime
    first: datetime
    limit: int
    groups: Sequence[str] = ()
    only: Mapping[str, frozenset[str]] = field(default_factory=dict)
    batch: bool | None = None

    @property
    def page_end(self) -> datetime:
        """Where the page's last bucket ends."""
        return min(self.first + self.limit * self.granularity.length, self.end)

    def wants(self, dimensions: Dimensions) -> bool:
        """Whether the filters let it pass. What is counted here was never a batch job."""
        values = result_fields(dimensions)
        return self.batch is not True and all(values[name] in wanted for name, wanted in self.only.items())


def result_fields(dimensions: Dimensions) -> dict[str, str | bool | None]:
    """Whose usage it is, under OpenAI's names."""
    return {
        "project_id": dimensions.team,
        "user_id": dimensions.owner,
        "api_key_id": dimensions.key_id,
        "model": dimensions.model,
        "line_item": dimensions.model,
        "batch": False,
    }


def parse_buckets(wire: WireRequest, route: Route, now: datetime) -> UsageQuery:
    """Buckets reach from the one that ``start_time`` is in to the one ``end_time`` ends in: none of them is cut.

    Raises ``InvalidRequestError``.
    """
    values = _Values(wire, route, ("bucket_width", "limit", "page", *(["batch"] if route.takes_batch else [])))
    width = values.choice("bucket_width", route.limits, "1d")
    granularity = _WIDTHS[width]
    start, end = values.times(now)
    start, end = granularity.floor(start), granularity.ceiling(end)
    default, most = route.limits[width]
    limit = values.number("limit", default, 1, most)
    page = values.one("page")
    return UsageQuery(
        granularity=granularity,
        start=start,
        end=end,
        first=start if page is None else _page_start(page, granularity, start, end),
        limit=limit,
        groups=values.groups(),
        only=values.filters(),
        batch=values.flag("batch"),
    )


def parse_span(wire: WireRequest, route: Route, now: datetime) -> UsageQuery:
    """One time as a whole, in buckets of the finest width that is kept that long and is not too many.

    Raises ``InvalidRequestError``.
    """
    values = _Values(wire, route, ())
    start, end = values.times(now)
    granularity = next(
        (
            width
            for name, width in _WIDTHS.items()
            if end - start <= USAGE.limits[name][1] * width.length and now - start <= width.kept - width.length
        ),
        Granularity.DAY,
    )
    start, end = granularity.floor(start), granularity.ceiling(end)
    return UsageQuery(granularity, start, end, start, 1, values.groups(), values.filters())


def page_token(granularity: Granularity, start: datetime) -> str:
    """The cursor of the page that begins at ``start``."""
    text = json.dumps([granularity.value, int(start.timestamp())])
    return _PAGE + base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _page_start(page: str, granularity: Granularity, start: datetime, end: datetime) -> datetime:
    text = page.removeprefix(_PAGE)
    try:
        width, seconds = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        found = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, TypeError, OverflowError, OSError, RecursionError, binascii.Error):
        _refuse("page", "is not a cursor; send the 'next_page' of the page before")
    if width != granularity or not start <= found < end or page_token(granularity, found) != page:
        _refuse("page", "belongs to another query; send it with the same times and the same 'bucket_width'")
    return found


class _Values:
    """The query's values by name, lists with and without their brackets."""

    def __init__(self, wire: WireRequest, route: Route, own: Sequence[str]) -> None:
        self._route = route
        self._values: dict[str, list[str]] = {}
        lists = ("group_by", *route.filters)
        known = ("start_time", "end_time", *own)
        for sent, value in wire.query_items:
            name = sent.removesuffix("[]")
            if name not in lists and sent not in known:
                _refuse(sent[:100], f"is not known here; there are {', '.join((*known, *lists))}")
            self._values.setdefault(name, []).append(value)

    def one(self, name: str) -> str | None:
        """A value that may come once at most."""
        values = self._values.get(name, [])
        if len(values) > 1:
            _refuse(name, "was sent more than once")
        return values[0] if values else None

    def number(self, name: str, default: int | None, low: int, high: int, unit: str = "") -> int:
        """A whole number; without a default it is required."""
        text = self.one(name)
        if text is None:
            if default is None:
                _refuse(name, "is required")
            return default
        if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
            _refuse(name, f"must be a whole number{unit} from {low} to {high}")
        return int(text)

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        """One of several texts."""
        text = self.one(name) or default
        if text not in choices:
            _refuse(name, f"must be one of {', '.join(choices)}")
        return text

    def flag(self, name: str) -> bool | None:
        """True, false, or not said."""
        text = self.one(name)
        if text is not None and text not in _FLAGS:
            _refuse(name, "must be true or false")
        return None if text is None else _FLAGS[text]

    def times(self, now: datetime) -> tuple[datetime, datetime]:
        """The range; what is yet to come has no usage, so it ends now."""
        start = self.number("start_time", None, 0, LATEST, " of Unix seconds")
        present = int(now.timestamp()) + 1
        end = self.number("end_time", max(present, start + 1), 1, LATEST, " of Unix seconds")
        if end <= start:
            _refuse("end_time", "must be after 'start_time'")
        end = max(start, min(end, present))
        return datetime.fromtimestamp(start, UTC), datetime.fromtimestamp(end, UTC)

    def groups(self) -> Sequence[str]:
        """What to tell apart."""
        names = self._values.get("group_by", [])
        for name in names:
            if name not in self._route.groups:
                _refuse("group_by", f"can be {', '.join(self._route.groups)}; not '{name[:100]}'")
        return tuple(dict.fromkeys(names))

    def filters(self) -> dict[str, frozenset[str]]:
        """By a result's field, the values that count."""
        wanted = {named: self._values.get(name) for name, named in self._route.filters.items()}
        return {named: frozenset(values) for named, values in wanted.items() if values is not None}


def _refuse(name: str, what: str) -> NoReturn:
    raise InvalidRequestError(f"'{name}' {what}.", param=name, code="invalid_value")
