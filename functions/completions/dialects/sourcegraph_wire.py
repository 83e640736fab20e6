"""What Sourcegraph's completion routes are sent: query, body and messages, and the prompt they come to.

The original is a Go program that checks nothing but JSON types, so bodies are read as Go's ``encoding/json`` reads
them: field names in any case, the last of two equal names wins, null is the zero value, unknown fields are skipped,
broken text is replaced by U+FFFD, and what follows the first JSON value is never looked at.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from completions.dialects.dialect import WireRequest
from completions.dialects.text_completion import to_json
from completions.domain.completion import SamplingParams
from completions.domain.errors import InvalidRequestError

LEGACY_VERSION: Final = 0
HUMAN_TURN: Final = "\n\nHuman:"
ASSISTANT_TURN: Final = "\n\nAssistant:"
SLASH: Final = "__"
"""Stands for the slash of a model id in a model reference, whose own parts may hold none."""

_UNDECODABLE: Final = "could not decode request body"
_LEGACY_SYSTEM_START: Final = "You are Cody, an"
_MOST_LOGPROBS: Final = 5
_TURNS: Final = {"user": HUMAN_TURN, "assistant": ASSISTANT_TURN}

_VERSION: Final = re.compile(r"[0-9]{1,18}")
_MILLISECONDS: Final = re.compile(r"[0-9]{1,15}")
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
_UNSIGNED: Final = re.compile(r"[0-9]{1,3}")
_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
_GO_ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class UnsupportedVersionError(InvalidRequestError):
    """``api-version`` is one that was never served."""


class MessagesError(InvalidRequestError):
    """The messages are well-formed and make no prompt.

    The original finds that out only when it asks the model, and then fails as it does when the model does: ``streamed``
    tells whether that is an event or a status.
    """

    streamed = False


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. ``role`` is ``user``, ``assistant``, ``system``, or whatever else was sent."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Body:
    """The fields that mean something here; ``None`` and empty are unset."""

    model: str
    messages: tuple[Message, ...]
    max_tokens: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    stream: bool | None
    logprobs: int | None
    timeout_ms: int | None


def go_json(value: object) -> str:
    """Compact JSON with the characters escaped that Go escapes."""
    return go_escaped(to_json(value))


def go_escaped(text: str) -> str:
    """``text``, which is JSON, with those characters escaped that Go escapes for the sake of HTML and JavaScript."""
    for character, escape in _GO_ESCAPES.items():
        text = text.replace(character, escape)
    return text


# The query and the headers


def api_version(wire: WireRequest) -> int:
    """``LEGACY_VERSION`` when there is none. The literal ``0`` is refused, as is all that is no number."""
    text = wire.query.get("api-version", "")
    if not text:
        return LEGACY_VERSION
    version = int(text) if _VERSION.fullmatch(text) else 0
    if version < 1:
        raise UnsupportedVersionError("Unsupported API Version (Please update your client)", param="api-version")
    return version


def deadline_ms(wire: WireRequest, body: Body) -> int | None:
    """``X-Timeout-Ms``, or else the body's ``timeoutMs``; neither is an error when it makes no sense."""
    return _milliseconds(wire.headers.get("x-timeout-ms", "").strip()) or body.timeout_ms


def model_names(spelled: str) -> tuple[str, ...]:
    """The registry names that ``provider::apiVersion::modelId``, ``provider/model`` or a plain name may stand for.

    The likeliest comes first; ``SLASH`` in the model's own part is tried as a slash last.
    """
    parts = spelled.split("::", 2)
    if len(parts) == 3 and all(parts):
        names = [parts[2], spelled]
        own = parts[2]
    else:
        own = spelled.rpartition("/")[2]
        names = [spelled, spelled.partition("/")[2], own]
    if SLASH in own:
        names.append(own.replace(SLASH, "/"))
    return tuple(dict.fromkeys(name for name in names if name))


# The prompt


def code_prompt(messages: Sequence[Message]) -> str:
    """The text of the only message, verbatim."""
    if len(messages) != 1:
        raise MessagesError(f"expected exactly one message, got {len(messages)}", param="messages")
    if not messages[0].text:
        raise MessagesError("the message has no text", param="messages")
    return messages[0].text


def chat_prompt(messages: Sequence[Message], version: int) -> str:
    """The turns in Claude's text form, open for the assistant to go on."""
    turns = _without_legacy_forms(messages) if version == LEGACY_VERSION else list(messages)
    system = ""
    if turns and turns[0].role == "system":
        system = turns.pop(0).text
        if not system:
            raise MessagesError("the system message has no text", param="messages")
    _check_turns(turns)
    rendered = system + "".join(_rendered(turn) for turn in turns)
    return rendered if turns[-1].role == "assistant" else rendered + ASSISTANT_TURN


def _rendered(turn: Message) -> str:
    return f"{_TURNS[turn.role]} {turn.text}" if turn.text else _TURNS[turn.role]


def _check_turns(turns: Sequence[Message]) -> None:
    if not turns:
        raise MessagesError("expected at least one message from a human", param="messages")
    for place, turn in enumerate(turns):
        if turn.role == "system":
            raise MessagesError("a system message may only come first", param="messages")
        if turn.role not in _TURNS:
            raise MessagesError("expected the speaker of a message to be 'human' or 'assistant'", param="messages")
        if place and turn.role == turns[place - 1].role:
            raise MessagesError("found consecutive messages with the same speaker", param="messages")
        is_cue = turn.role == "assistant" and place == len(turns) - 1
        if not turn.text and not is_cue:
            raise MessagesError("found a message without text", param="messages")


def _without_legacy_forms(messages: Sequence[Message]) -> list[Message]:
    """Before version 1 the system's words were a human's, which the assistant then acknowledged."""
    turns = list(messages)
    if turns and turns[0].role == "user" and turns[0].text.startswith(_LEGACY_SYSTEM_START):
        acknowledged = len(turns) > 1 and turns[1].role == "assistant"
        turns[: 2 if acknowledged else 1] = [Message("system", turns[0].text)]
    if turns and turns[-1].role == "assistant":
        text = turns[-1].text.rstrip()
        turns[-1:] = [Message("assistant", text)] if text else []
    kept: list[Message] = []
    for turn in turns:
        if turn.role != "assistant" or turn.text:
            kept.append(turn)
        elif kept and kept[-1].role == "user":  # a question that was never answered
            kept.pop()
    return kept


# The body


@dataclass(frozen=True, slots=True)
class _Number:
    """As it was written: what it means depends on the field that it is for."""

    text: str


@dataclass(frozen=True, slots=True)
class _Object:
    pairs: Sequence[tuple[str, Any]]


_Reader = Callable[[Any], Any]


def _refuse(_: object = None) -> NoReturn:
    raise InvalidRequestError(_UNDECODABLE)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_Object, parse_int=_Number, parse_float=_Number, parse_constant=_refuse
)


def parse_body(body: bytes) -> Body:
    """Raises ``InvalidRequestError``, in the original's words where it has some."""
    fields = _fields(_first_value(body), _BODY)
    logprobs = fields.get("logprobs")
    return Body(
        model=fields.get("model", ""),
        messages=fields.get("messages", ()),
        max_tokens=fields.get("maxtokenstosample", 0),
        sampling=_sampling(fields),
        # an empty text would end every answer before it began
        stops=tuple(text for text in fields.get("stopsequences", ()) if text),
        stream=fields.get("stream"),
        logprobs=None if logprobs is None else min(logprobs, _MOST_LOGPROBS),
        timeout_ms=fields.get("timeoutms"),
    )


def _sampling(fields: Mapping[str, Any]) -> SamplingParams:
    """Out of range is brought into it, and what the original's providers take for unset is unset."""
    top_k = fields.get("topk", 0)
    top_p = fields.get("topp", 0.0)
    return SamplingParams(
        temperature=min(max(fields.get("temperature", 1.0), 0.0), 1.0),
        top_p=min(top_p, 1.0) if top_p > 0 else 1.0,
        top_k=top_k if top_k > 0 else None,
    )


def _first_value(body: bytes) -> object:
    try:
        value, _ = _DECODER.raw_decode(body.decode("utf-8", "surrogateescape").lstrip(" \t\r\n"))
    except (ValueError, RecursionError):
        _refuse()
    return value


def _fields(value: object, readers: Mapping[str, _Reader]) -> dict[str, Any]:
    """The fields of an object that have a reader, by lower-case name; null leaves none."""
    if value is None:
        return {}
    if not isinstance(value, _Object):
        _refuse()
    found: dict[str, Any] = {}
    for name, item in value.pairs:
        key = name.replace("\u017f", "s").lower()  # Go folds the long s and the Kelvin sign, too
        reader = readers.get(key)
        if reader is not None and item is None:
            found.pop(key, None)
        elif reader is not None:
            found[key] = reader(item)
    return found


def _string(value: object) -> str:
    if not isinstance(value, str):
        _refuse()
    return _HALF_PAIR.sub("\ufffd", value)


def _integer(value: object) -> int:
    if not isinstance(value, _Number) or not _INTEGER.fullmatch(value.text):
        _refuse()
    number = int(value.text)
    return number if -(2**63) <= number < 2**63 else _refuse()


def _byte(value: object) -> int:
    if not isinstance(value, _Number) or not _UNSIGNED.fullmatch(value.text):
        _refuse()
    number = int(value.text)
    return number if number < 256 else _refuse()


def _float(value: object) -> float:
    if not isinstance(value, _Number):
        _refuse()
    number = float(value.text)
    return number if math.isfinite(number) else _refuse()


def _boolean(value: object) -> bool:
    return value if isinstance(value, bool) else _refuse()


def _strings(value: object) -> list[str]:
    if not isinstance(value, list):
        _refuse()
    return ["" if item is None else _string(item) for item in value]


def _timeout(value: object) -> int | None:
    """Unknown to the original, so nothing is wrong for it."""
    return _milliseconds(value.text) if isinstance(value, _Number) else None


def _milliseconds(text: str) -> int | None:
    return int(text) or None if _MILLISECONDS.fullmatch(text) else None


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        _refuse()
    return tuple(_message(_fields(item, _MESSAGE)) for item in value)


def _message(fields: Mapping[str, str]) -> Message:
    """Both spellings are in use: ``role`` and ``content``, and the older ``speaker`` and ``text``."""
    role = fields.get("role") or fields.get("speaker", "")
    return Message("user" if role == "human" else role, fields.get("content") or fields.get("text", ""))


def _content(value: object) -> str:
    if isinstance(value, list):
        return "".join(_part_text(_fields(item, _PART)) for item in value)
    return _string(value)


def _part_text(fields: Mapping[str, Any]) -> str:
    kind = fields.get("type", "")
    if kind == "text":
        return str(fields.get("text", ""))
    if kind == "file" and "content" in fields.get("file", {}):
        return str(fields["file"]["content"])
    if kind == "file":
        raise InvalidRequestError("a message part of type 'file' needs its 'content' inline", param="messages")
    if kind in ("image_url", "repo"):
        raise InvalidRequestError(f"message parts of type '{kind}' are not supported", param="messages")
    raise InvalidRequestError("the type of a message part must be 'text' or 'file'", param="messages")


def _file(value: object) -> dict[str, Any]:
    return _fields(value, _FILE)


_BODY: Final[Mapping[str, _Reader]] = {
    "model": _string,
    "messages": _messages,
    "maxtokenstosample": _integer,
    "temperature": _float,
    "stopsequences": _strings,
    "topk": _integer,
    "topp": _float,
    "stream": _boolean,
    "logprobs": _byte,
    "timeoutms": _timeout,
}
_MESSAGE: Final[Mapping[str, _Reader]] = {"role": _string, "speaker": _string, "content": _content, "text": _string}
_PART: Final[Mapping[str, _Reader]] = {"type": _string, "text": _string, "file": _file}
_FILE: Final[Mapping[str, _Reader]] = {"content": _string}
