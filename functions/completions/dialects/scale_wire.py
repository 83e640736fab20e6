"""What the two versions of Scale's API share: how a body is read and refused, constraints, credentials, error bodies.

Sources: scaleapi/llm-engine (``api/dependencies.py``, ``api/app.py``, ``common/dtos/llms``) and the 422 lists FastAPI
makes of pydantic's faults.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Annotated, Any, Final, TypeAlias, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from completions.dialects.completion_fields import Filled
from completions.dialects.dialect import CALLER_REFUSED, ErrorHead, WireReply, WireRequest
from completions.dialects.text_completion import to_json
from completions.domain.completion import Constraint, ConstraintKind
from completions.domain.errors import (
    AuthenticationError,
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    DuplicateRequestError,
    InvalidRequestError,
    MeteringError,
    MethodNotAllowedError,
    ModelNotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestTooLargeError,
    UnknownPathError,
)

JSON: Final = "application/json"
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
STREAM_HEADERS: Final[Mapping[str, str]] = {"cache-control": "no-cache", "x-accel-buffering": "no"}
FRAME_END: Final = "\r\n\r\n"
"""The original's server-sent-event library ends lines with CRLF."""

Fault: TypeAlias = Mapping[str, Any]
Body = TypeVar("Body", bound=BaseModel)

_MOST_FAULTS: Final = 64
_MOST_INPUT_BYTES: Final = 1024
_MOST_NAME: Final = 256
_UNREADABLE: Final = "There was an error parsing the body"
_NOT_FINITE: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"|(NaN|-?Infinity|-?\d+[.eE][\d.eE+-]*)')
_LONE_SURROGATE: Final = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)")

_HIDDEN: Final = "The specified endpoint could not be found."
_INTERNAL: Final = "Internal error occurred. Our team has been notified."
# the nearest class in the error's own line of descent decides; a text of None is the error's own message
_ERRORS: Final[Mapping[type[CompletionError], tuple[int, str | None]]] = {
    InvalidRequestError: (400, None),
    RequestTooLargeError: (413, None),
    UnknownPathError: (404, "Not Found"),
    MethodNotAllowedError: (405, "Method Not Allowed"),
    AuthenticationError: (401, "Could not authenticate user"),
    PermissionDeniedError: (404, _HIDDEN),
    ModelNotFoundError: (404, _HIDDEN),
    RateLimitError: (429, None),
    DuplicateRequestError: (409, None),
    BackendError: (500, "Upstream service error for request_id {request_id}"),
    BackendTimeoutError: (504, "Upstream service error for request_id {request_id}: {message}"),
    BackendUnavailableError: (503, "Upstream service error for request_id {request_id}: {message}"),
    MeteringError: (503, None),
    CompletionError: (500, _INTERNAL),
}


class SchemaError(InvalidRequestError):
    """The body does not have the published form: a 422 with one entry a fault.

    ``faults`` are FastAPI's, but bounded, so that a small body cannot make a large reply: at most 64 entries, names in
    ``loc`` cut to 256 characters, and no ``input`` whose JSON is longer than 1 KiB.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults[:_MOST_FAULTS])
        first = self.faults[0]
        place = ".".join(str(part) for part in first["loc"])
        super().__init__(f"{place}: {first['msg']}", param=str(first["loc"][-1]) if len(first["loc"]) > 1 else None)


class GuidedFields(BaseModel, defer_build=True):
    """The constraints both versions know, read as leniently as pydantic does by default."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)

    guided_json: dict[str, Any] | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: Annotated[list[str], Filled] | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None

    def constraints(self) -> dict[str, Constraint]:
        """Every constraint that was sent, by its field."""
        found: dict[str, Constraint] = {}
        if self.guided_json is not None:
            found["guided_json"] = Constraint(ConstraintKind.JSON_SCHEMA, schema_text(self.guided_json, "guided_json"))
        if self.guided_regex is not None:
            found["guided_regex"] = Constraint(ConstraintKind.REGEX, self.guided_regex)
        if self.guided_choice is not None:
            found["guided_choice"] = Constraint(ConstraintKind.CHOICE, choices=tuple(self.guided_choice))
        if self.guided_grammar is not None:
            found["guided_grammar"] = Constraint(ConstraintKind.GRAMMAR, self.guided_grammar)
        return found


def schema_text(schema: Mapping[str, Any], name: str) -> str:
    """A JSON schema as text. Raises ``InvalidRequestError`` for one that is nested too deeply to be written."""
    try:
        return to_json(schema)
    except RecursionError:
        raise InvalidRequestError(f"'{name}' is nested too deeply.", param=name) from None


def one_of(constraints: Mapping[str, Constraint]) -> tuple[str, Constraint] | None:
    """The constraint that was sent, with its field. Raises ``InvalidRequestError`` for two at once."""
    if len(constraints) > 1:
        names = ", ".join(f"'{name}'" for name in constraints)
        raise InvalidRequestError(f"Only one constraint can be used at a time, not {names}.", param=[*constraints][1])
    return next(iter(constraints.items()), None)


def refuse_broken(rules: Iterable[tuple[str, bool, str]]) -> None:
    """Raises ``InvalidRequestError`` for the first rule (field, whether it is broken, what it says) that is broken."""
    for name, broken, rule in rules:
        if broken:
            raise InvalidRequestError(f"'{name}' {rule}.", param=name)


# Reading a body


def parse_body(model: type[Body], body: bytes, earlier: Sequence[Fault] = ()) -> Body:
    """The body as a ``model``; ``earlier`` are faults found outside it. Raises ``InvalidRequestError``."""
    faults = list(earlier)
    if not body:
        raise SchemaError([*faults, missing("body")])
    value = _read_json(body)
    try:
        parsed = model.model_validate(value, from_attributes=True)  # as FastAPI does, which shows in the words
    except ValidationError as error:
        faults += [
            _fault(one["type"], ("body", *one["loc"]), one["msg"], one["input"], one.get("ctx"))
            for one in error.errors(include_url=False)[:_MOST_FAULTS]
        ]
        raise SchemaError(faults) from None
    if faults:
        raise SchemaError(faults)
    return parsed


def missing(*loc: str) -> Fault:
    """The fault of a required part that is not there."""
    return _fault("missing", loc, "Field required", None)


def no_member(loc: Sequence[str], value: str, members: Sequence[str]) -> Fault:
    """The fault of a value that is none of ``members``."""
    quoted = [f"'{member}'" for member in members]
    expected = " or ".join([", ".join(quoted[:-1]), quoted[-1]])
    return _fault("enum", loc, f"Input should be {expected}", value, {"expected": expected})


def _read_json(body: bytes) -> object:
    """Python's reader would let through what is no JSON: NaN and infinities, and halves of surrogate pairs."""
    text = ""
    try:
        text = body.decode(json.detect_encoding(body))
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise _malformed(error.pos, error.msg) from None
    except _NotFiniteError:
        found = (match for match in _NOT_FINITE.finditer(text) if match[1] and not math.isfinite(float(match[1])))
        raise _malformed(next(found).start(), "Number out of range") from None
    except (ValueError, RecursionError):  # no Unicode text, an integer of thousands of digits, nested without end
        raise InvalidRequestError(_UNREADABLE) from None
    for match in _LONE_SURROGATE.finditer(text) if "\\u" in text else ():
        if match[1]:
            raise _malformed(match.start(), "Lone surrogate")
    return value


class _NotFiniteError(Exception):
    pass


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise _NotFiniteError
    return number


def _malformed(position: int, reason: str) -> SchemaError:
    return SchemaError([_fault("json_invalid", ("body", position), "JSON decode error", {}, {"error": reason})])


def _fault(
    kind: str, loc: Sequence[str | int], msg: str, value: object, ctx: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    fault: dict[str, Any] = {
        "type": kind,
        "loc": [part[:_MOST_NAME] if isinstance(part, str) else part for part in loc],
        "msg": msg,
    }
    if _is_short(value):
        fault["input"] = value
    if ctx:
        fault["ctx"] = ctx
    return fault


def _is_short(value: object) -> bool:
    """Counts the bytes of ``value`` as JSON, and stops once they are too many."""
    left = _MOST_INPUT_BYTES
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list | dict | str) and len(item) > left:
            return False
        if isinstance(item, dict):
            left -= 2 + max(2 * len(item) - 1, 0)  # braces, colons, commas
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            left -= 2 + max(len(item) - 1, 0)
            waiting += item
        else:
            left -= len(to_json(item).encode())
        if left < 0:
            return False
    return True


# The credential


def credential(wire: WireRequest) -> str | None:
    """Basic (the key is the user name), Bearer, or ``x-api-key``, which counts only without the other two."""
    scheme, _, value = wire.headers.get("authorization", "").strip().partition(" ")
    if not scheme:
        return wire.headers.get("x-api-key", "").strip() or None
    if scheme.lower() == "basic":
        return _user_name(value.strip())
    if scheme.lower() != "bearer":
        raise AuthenticationError("The Authorization header must be Basic or Bearer.")
    if not value.strip():
        raise _malformed_credential()
    return value.strip()


def _user_name(encoded: str) -> str:
    try:
        name, colon, _ = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise _malformed_credential() from None
    if not name or not colon:
        raise _malformed_credential()
    return name


def _malformed_credential() -> AuthenticationError:
    return AuthenticationError("The Authorization header cannot be read.", code="malformed_credential")


# Errors


def encode_error(error: CompletionError, head: ErrorHead) -> WireReply:
    """A refusal or failure as a reply. Scale's client reads ``detail``, so it stands also where the original has none.

    A forbidden model is not told from one that does not exist.
    """
    if isinstance(error, SchemaError):
        return WireReply(422, to_json({"detail": error.faults}).encode(), JSON, {})
    status, text = status_and_text(error, head.request_id)
    body: dict[str, Any] = {"detail": text}
    headers: dict[str, str] = {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 429:
        body = {"error": "Too many requests", "timestamp": pacific_time(_moment(head.now)), **body}
    if text == _INTERNAL:
        body = {"error": text, "timestamp": pacific_time(_moment(head.now)), "request_id": head.request_id, **body}
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))
    return WireReply(status, to_json(body).encode(), JSON, headers)


def stream_error(error: CompletionError, request_id: str, now: datetime) -> dict[str, Any]:
    """The ``error`` object of a stream's last frame."""
    status, text = status_and_text(error, request_id)
    return {"status_code": status, "content": {"error": text, "timestamp": pacific_time(now)}}


def status_and_text(error: CompletionError, request_id: str) -> tuple[int, str]:
    """What a caller is told."""
    status, text = next(_ERRORS[kind] for kind in type(error).__mro__ if kind in _ERRORS)
    if error.code == CALLER_REFUSED:
        return 403 if isinstance(error, PermissionDeniedError) else status, error.message
    if isinstance(error, AuthenticationError) and error.code is None:
        return status, "No authentication was passed in"
    return status, error.message if text is None else text.format(request_id=request_id, message=error.message)


# Times


def pacific_time(moment: datetime) -> str:
    """The original writes its times in the zone of its makers."""
    try:
        zone: tzinfo = ZoneInfo("America/Los_Angeles")
    except ZoneInfoNotFoundError:  # a bare image has no time zone data
        zone = pacific_zone(moment)
    return moment.astimezone(zone).strftime("%Y-%m-%d %H:%M:%S %Z")


def pacific_zone(moment: datetime) -> timezone:
    """The rule since 2007: summer time from March's second Sunday to November's first, each at 2 o'clock."""
    year = moment.astimezone(UTC).year
    starts = _sunday_from(datetime(year, 3, 8, 10, tzinfo=UTC))
    ends = _sunday_from(datetime(year, 11, 1, 9, tzinfo=UTC))
    if starts <= moment < ends:
        return timezone(timedelta(hours=-7), "PDT")
    return timezone(timedelta(hours=-8), "PST")


def _sunday_from(day: datetime) -> datetime:
    return day + timedelta(days=6 - day.weekday())


def utc_now() -> datetime:
    """The clock unless a test brings its own."""
    return datetime.now(UTC)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
