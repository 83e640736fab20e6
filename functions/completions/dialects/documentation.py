"""What a dialect publishes about its routes, in OpenAPI 3.1's terms. No function imports this or the ``*_schema``
modules: they are read when the document and the tables are generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pydantic import BaseModel

from completions.dialects.dialect import Dialect, ErrorHead
from completions.domain.errors import (
    AuthenticationError,
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CompletionError,
    ContextLengthError,
    DuplicateRequestError,
    InvalidRequestError,
    MeteringError,
    ModelNotFoundError,
    PermissionDeniedError,
    QuotaExceededError,
    RateLimitError,
    RequestTooLargeError,
    ServiceError,
    UnsupportedParameterError,
)

JsonObject: TypeAlias = dict[str, Any]
Content: TypeAlias = Mapping[str, JsonObject]
"""Media type to OpenAPI's media type object."""
Errors: TypeAlias = Iterable[tuple[CompletionError, str]]
"""An error and when it happens."""

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
TEXT: Final = "text/plain"
HTML: Final = "text/html"
END: Final = "[DONE]"
"""The data of the event behind a whole answer, where there is one."""

STRING: Final[JsonObject] = {"type": "string"}
INTEGER: Final[JsonObject] = {"type": "integer"}
COUNT: Final[JsonObject] = {"type": "integer", "minimum": 0}
NUMBER: Final[JsonObject] = {"type": "number"}
BOOLEAN: Final[JsonObject] = {"type": "boolean"}
NULL: Final[JsonObject] = {"type": "null"}

REFUSED_KEY: Final = (AuthenticationError(""), "no key, a malformed one, or one nobody knows")
OUT_OF_ORDER: Final = (
    (BackendUnavailableError(""), "not ready, overloaded, or out of reach"),
    (ServiceError(""), "a fault of the service"),
)
COMPLETION_ERRORS: Final[Errors] = (
    (InvalidRequestError(""), "a field is wrong, or fields contradict each other"),
    (UnsupportedParameterError(""), "the model cannot honour a parameter"),
    (ContextLengthError(""), "prompt and answer do not fit the model"),
    (RequestTooLargeError(""), "more bytes than the platform carries"),
    REFUSED_KEY,
    (PermissionDeniedError(""), "the key may not use this model"),
    (ModelNotFoundError(""), "no such model"),
    (DuplicateRequestError(""), "the logical request was answered before"),
    (RateLimitError(""), "too many requests or tokens for now"),
    (QuotaExceededError(""), "the budget is used up"),
    (BackendError(""), "the model failed"),
    (BackendTimeoutError(""), "the model did not answer in time"),
    (MeteringError(""), "the request could not be metered"),
    *OUT_OF_ORDER,
)
RESOURCE_ERRORS: Final[Errors] = (REFUSED_KEY, *OUT_OF_ORDER)


@dataclass(frozen=True, slots=True)
class Reply:
    """One status of a route."""

    description: str
    content: Content


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. ``request`` is the component of its body, of ``request_media``, and ``example`` a body it takes."""

    operation_id: str
    summary: str
    replies: Mapping[int, Reply]
    request: str | None = None
    example: JsonObject | None = None
    parameters: tuple[JsonObject, ...] = ()
    request_media: str = JSON


@dataclass(frozen=True, slots=True)
class Documentation:
    """All of one dialect.

    ``endpoints`` are its completion routes. ``schemas`` are components, their names unique among all dialects.
    ``security`` has the schemes of which any one will do. ``fields`` names the body fields and parameters behind a
    canonical parameter where ``CompletionRequest.param_names`` does not tell. ``on_request`` are further body fields,
    which the operator has to let through.
    """

    title: str
    endpoints: Mapping[str, Dialect]
    schemas: Mapping[str, JsonObject]
    security: Mapping[str, JsonObject]
    operations: Mapping[tuple[str, str], Operation]
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    on_request: Mapping[str, JsonObject] = field(default_factory=dict)


def ref(name: str) -> JsonObject:
    """A reference to a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: JsonObject) -> JsonObject:
    """``schema`` or null."""
    return {"anyOf": [schema, NULL]}


def array(items: JsonObject) -> JsonObject:
    """A list."""
    return {"type": "array", "items": items}


def record(properties: Mapping[str, JsonObject], optional: Iterable[str] = ()) -> JsonObject:
    """An object with exactly these fields."""
    left_out = frozenset(optional)
    required = [name for name in properties if name not in left_out]
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}


def logprobs_schema() -> JsonObject:
    """What ``text_completion.logprobs_object`` makes."""
    return record(
        {
            "tokens": array(STRING),
            "token_logprobs": array(nullable(NUMBER)),
            "top_logprobs": array(nullable({"type": "object", "additionalProperties": NUMBER})),
            "text_offset": array(COUNT),
        }
    )


def json_content(name: str) -> Content:
    """A component as JSON."""
    return {JSON: {"schema": ref(name)}}


def event_content(*events: JsonObject) -> Content:
    """A stream of these events. Before OpenAPI 3.2 the schema of a stream is, by convention, that of one event."""
    return {EVENTS: {"schema": events[0] if len(events) == 1 else {"anyOf": list(events)}}}


def event(data: str, name: str = "message") -> JsonObject:
    """An event that carries a component as JSON; ``message`` is the one without a name."""
    content = {**STRING, "contentMediaType": JSON, "contentSchema": ref(data)}
    return {"type": "object", "properties": {"event": {"const": name}, "data": content}, "required": ["data"]}


def end_event() -> JsonObject:
    """The event behind a whole answer."""
    return {"type": "object", "properties": {"data": {"const": END}}, "required": ["data"]}


def parameter(place: str, name: str, schema: JsonObject, description: str) -> JsonObject:
    """A parameter in the path, which is required, the query or the headers."""
    return {"in": place, "name": name, "schema": schema, "description": description, "required": place == "path"}


def body_schemas(model: type[BaseModel], name: str, prefix: str, omit: Iterable[str] = ()) -> dict[str, JsonObject]:
    """The components of the model that decodes a body: itself as ``name``, and its parts with ``prefix``.

    What pydantic cannot tell of its own validators is added here: ``stop`` may be one text, and the keys of
    ``logit_bias`` are token ids. ``omit`` are fields that are not let through.
    """
    schema = model.model_json_schema(ref_template="#/components/schemas/" + prefix + "{model}")
    parts = {prefix + part.removeprefix(prefix): value for part, value in schema.pop("$defs", {}).items()}
    for left_out in omit:
        del schema["properties"][left_out]
    for value in (schema, *parts.values()):
        _tidy(value)
    properties = schema["properties"]
    if "stop" in properties and STRING["type"] not in [branch["type"] for branch in properties["stop"]["anyOf"]]:
        properties["stop"]["anyOf"].insert(0, {**STRING, "minLength": 1})
    for branch in properties.get("logit_bias", {}).get("anyOf", ()):
        if branch["type"] == "object":
            branch["propertyNames"] = {"pattern": "^[0-9]{1,9}$"}
    return {name: _renamed(schema, prefix), **{part: _renamed(value, prefix) for part, value in parts.items()}}


def error_replies(dialect: Dialect, errors: Errors, content: Callable[[int], Content]) -> dict[int, Reply]:
    """The replies that ``dialect`` makes of these errors, by status; ``content`` tells a status's bodies."""
    reasons: dict[int, list[str]] = {}
    for error, reason in errors:
        reply = dialect.encode_error(error, ErrorHead("request-id", 0.0))
        reasons.setdefault(reply.status, []).append(reason)
        declared = {media_type.partition(";")[0] for media_type in content(reply.status)}
        if reply.media_type.partition(";")[0] not in declared:
            raise ValueError(f"{dialect.name}: {reply.status} is {reply.media_type}, not {declared}")
    return {
        status: Reply(_sentence("; ".join(dict.fromkeys(found))), content(status)) for status, found in reasons.items()
    }


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _tidy(schema: JsonObject) -> None:
    """Without pydantic's made-up titles and its nulls as defaults."""
    schema.pop("title", None)
    for value in schema.get("properties", {}).values():
        value.pop("title", None)
        if value.get("default", ...) is None:
            del value["default"]
    if "description" in schema:
        schema["description"] = schema["description"].replace("``", "`")


def _renamed(node: Any, prefix: str) -> Any:
    """References to a part whose own name began with the prefix, too, lead to where it is."""
    doubled = f"#/components/schemas/{prefix}{prefix}"
    if isinstance(node, list):
        return [_renamed(item, prefix) for item in node]
    if isinstance(node, dict):
        return {key: _renamed(value, prefix) for key, value in node.items()}
    return node.replace(doubled, f"#/components/schemas/{prefix}") if isinstance(node, str) else node
