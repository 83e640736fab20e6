"""Messages of a queue: a request as it stands, or an event of the bus that asks for it (``completion.requested``).

What is no such request is a ``MessageFault``: asking again would change nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from completions.domain.deliveries import PlaceKind, ReplyPlace
from completions.domain.events import EventRequest

REQUESTED: Final = "completion.requested"
REPLIED: Final = "replied/"
"""The folder of the pipeline's own bucket into which replies may be put."""
_MOST_FAULTS: Final = 5
_MOST_PLACE_BYTES: Final = 900
"""S3 takes keys of 1024 bytes, and below a prefix a reply's name of up to 62 is to come."""
_ENVELOPE: Final = ("detail-type", "detail")
_REPLY_ATTRIBUTES: Final = {f"reply_{kind}": kind for kind in PlaceKind}
_PATTERNS: Final = {
    PlaceKind.QUEUE: (r"https?://[^/\s]+/[0-9]{12}/[A-Za-z0-9_-]{1,80}(\.fifo)?", "a queue's URL, as SQS gives it"),
    PlaceKind.OBJECT: (
        r"s3://[a-z0-9.-]{3,63}/[^\x00-\x1f\ud800-\udfff]{0,900}",
        "s3://BUCKET/KEY, or s3://BUCKET/PREFIX/",
    ),
    PlaceKind.BUS: (r"[A-Za-z0-9._/:-]{1,512}", "a bus's name or ARN"),
}


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """A message as a function gets it. ``attributes`` are those of type String, ``others`` the names of the rest."""

    message_id: str
    queue_arn: str
    receipt: str
    body: str
    receive_count: int = 1
    attributes: Mapping[str, str] = field(default_factory=dict)
    others: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MessageDefaults:
    """For what a message does not say: the key that pays, if there is one for that, and the bus that is told.

    In the pipeline's ``own_bucket`` replies have a folder; elsewhere in it are others' kept replies, files and inputs.
    """

    key_id: str | None
    place: ReplyPlace
    own_bucket: str | None = None

    def allow(self, place: ReplyPlace) -> bool:
        """Whether a reply may go there."""
        outside = place.kind is not PlaceKind.OBJECT or not place.address.startswith(f"s3://{self.own_bucket}/")
        return outside or place.address.startswith(f"s3://{self.own_bucket}/{REPLIED}")


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A request that was understood. ``delivery_name`` is its reply's: that of the request, unless a caller named it,
    who may ask another thing under one name, or the same for another place."""

    event: EventRequest
    delivery_name: str
    place: ReplyPlace
    custom_id: str | None


@dataclass(frozen=True, slots=True)
class MessageFault:
    """What is wrong with a message. The fields are those that could be read all the same."""

    name: str
    place: ReplyPlace
    status: int
    code: str
    message: str
    custom_id: str | None = None
    key_id: str | None = None
    url: str | None = None


class _FaultError(Exception):
    """``status`` is HTTP's for such a fault."""

    def __init__(self, message: str, code: str = "invalid_message", status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status


def _spelled(kind: PlaceKind) -> AfterValidator:
    pattern, words = _PATTERNS[kind]

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"must be {words}")
        if kind is PlaceKind.OBJECT and len(value.split("/", 3)[3].encode()) > _MOST_PLACE_BYTES:
            raise ValueError(f"must have a key of at most {_MOST_PLACE_BYTES} bytes")
        return value

    return AfterValidator(check)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class _Reply(_Strict):
    queue_url: Annotated[str, _spelled(PlaceKind.QUEUE)] | None = None
    s3_uri: Annotated[str, _spelled(PlaceKind.OBJECT)] | None = None
    event_bus: Annotated[str, _spelled(PlaceKind.BUS)] | None = None

    @model_validator(mode="after")
    def _one(self) -> _Reply:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError(f"must be exactly one of {', '.join(PlaceKind)}")
        return self

    @property
    def place(self) -> ReplyPlace:
        ((kind, address),) = self.model_dump(exclude_none=True).items()
        return ReplyPlace(PlaceKind(kind), address)


CustomId = Annotated[str, Field(max_length=512)]
KeyId = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]


class _Detail(_Strict):
    """The request's fields, version 1."""

    version: Literal["1"]
    custom_id: CustomId | None = None
    idempotency_key: Annotated[str, Field(pattern=r"^[ -~]{1,255}$")] | None = None
    key_id: KeyId | None = None
    method: Literal["POST"] = "POST"
    url: Annotated[str, Field(pattern=r"^/[!-~]*$", max_length=2048)]
    body: dict[str, Any]
    reply: _Reply | None = None


def read_message(message: QueueMessage, defaults: MessageDefaults) -> MessageRequest | MessageFault:
    """What the message asks for."""
    name = _named(message.message_id, message.body)
    plain: Any = None
    try:
        plain, event_id = _opened(_parsed(message.body))
        if event_id is not None:  # a bus may deliver one event in two messages
            name = _named(event_id, json.dumps(plain))
        detail = _detail(_overridden(plain, message))
        key_id = detail.key_id or defaults.key_id
        if key_id is None:
            raise _FaultError(
                "'key_id' is missing, and this deployment has no key for such requests.", "key_missing", 401
            )
        return _request(detail, key_id, name, defaults)
    except _FaultError as fault:
        read = _readable(plain, message)
        place = read.place if read.place is not None and defaults.allow(read.place) else defaults.place
        return MessageFault(name, place, fault.status, fault.code, fault.message, read.custom_id, read.key_id, read.url)


def _request(detail: _Detail, key_id: str, name: str, defaults: MessageDefaults) -> MessageRequest:
    place = defaults.place if detail.reply is None else detail.reply.place
    if not defaults.allow(place):
        raise _FaultError(f"'reply.s3_uri': in the pipeline's own bucket it must begin with '{REPLIED}'.")
    body = json.dumps(detail.body).encode()
    delivery_name = name
    if detail.idempotency_key is not None:
        name = _named(key_id, detail.idempotency_key)
        delivery_name = f"{name}-{_digest(detail.url, body.decode(), place.kind, place.address)[:12]}"
    return MessageRequest(EventRequest(name, key_id, detail.url, body), delivery_name, place, detail.custom_id)


def _parsed(text: str) -> Any:
    try:
        plain = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        json.dumps(plain)  # what cannot be written again, for its depth, is refused here
    except RecursionError:
        raise _FaultError("The message is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise _FaultError(f"The message is not JSON: {error.msg}, line {error.lineno}, column {error.colno}.") from None
    except ValueError as error:
        raise _FaultError(f"The message is not JSON: {error}.") from None
    return plain


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _opened(plain: Any) -> tuple[Any, str | None]:
    """The request's own object, and the event's id when it came in an envelope."""
    if not isinstance(plain, dict):
        raise _FaultError("The message must be a JSON object.")
    if not all(name in plain for name in _ENVELOPE):
        return plain, None
    kind, event_id = plain["detail-type"], plain.get("id")
    if kind != REQUESTED:
        raise _FaultError(f"'detail-type' must be {REQUESTED}: the rule that sends events here lets others through.")
    if not isinstance(event_id, str) or not event_id:
        raise _FaultError("'id' of the event is missing.")
    if not isinstance(plain["detail"], dict):
        raise _FaultError("'detail' must be an object.")
    return plain["detail"], event_id


def _overridden(plain: Mapping[str, Any], message: QueueMessage) -> dict[str, Any]:
    """The fields, with what the message's attributes say in place of them."""
    if wrong := sorted(message.others & {"key_id", *_REPLY_ATTRIBUTES}):
        raise _FaultError(f"The message's attribute '{wrong[0]}' must be of type String.")
    fields = dict(plain)
    if "key_id" in message.attributes:
        fields["key_id"] = message.attributes["key_id"]
    if reply := {
        kind.value: message.attributes[name] for name, kind in _REPLY_ATTRIBUTES.items() if name in message.attributes
    }:
        fields["reply"] = reply
    return fields


def _detail(fields: Mapping[str, Any]) -> _Detail:
    try:
        return _Detail.model_validate(fields)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        texts = [f"'{'.'.join(map(str, fault['loc']))[:100]}': {fault['msg']}" for fault in faults[:_MOST_FAULTS]]
        more = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        raise _FaultError("The message is no request: " + "; ".join(texts) + more + ".") from None


class _Readable(_Strict):
    custom_id: CustomId | None = None
    key_id: KeyId | None = None
    url: Annotated[str, Field(max_length=2048)] | None = None
    reply: _Reply | None = None

    @property
    def place(self) -> ReplyPlace | None:
        return None if self.reply is None else self.reply.place


def _readable(plain: Any, message: QueueMessage) -> _Readable:
    """Whom to tell about which request, as far as that is right."""
    try:
        fields = _overridden(plain if isinstance(plain, dict) else {}, message)
    except _FaultError:
        fields = plain if isinstance(plain, dict) else {}
    right: dict[str, Any] = {}
    for name in _Readable.model_fields.keys() & fields.keys():
        try:
            right[name] = getattr(_Readable.model_validate({name: fields[name]}), name)
        except ValidationError:
            continue  # the fault names it
    return _Readable(**right)


def _named(*parts: str) -> str:
    return f"msg-{_digest(*parts)[:40]}"


def _digest(*parts: str) -> str:
    # JSON can spell half a character, which UTF-8 cannot
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
