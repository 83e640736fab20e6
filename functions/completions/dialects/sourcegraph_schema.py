"""Sourcegraph's dialect as it is published. Its bodies are read as Go reads them, so no model can tell their form."""

from __future__ import annotations

from typing import Any, Final

from completions.dialects.dialect import Dialect
from completions.dialects.documentation import (
    BOOLEAN,
    COMPLETION_ERRORS,
    COUNT,
    INTEGER,
    JSON,
    RESOURCE_ERRORS,
    STRING,
    TEXT,
    Content,
    Documentation,
    JsonObject,
    Operation,
    Reply,
    array,
    error_replies,
    event,
    event_content,
    json_content,
    logprobs_schema,
    nullable,
    parameter,
    record,
    ref,
)
from completions.dialects.sourcegraph import SourcegraphDialect
from completions.dialects.sourcegraph_wire import MessagesError, UnsupportedVersionError
from completions.domain.completion import FinishReason

_REASONS: Final = [str(reason) for reason in FinishReason]
_INT64: Final[JsonObject] = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_CODE: Final = SourcegraphDialect(streamed=False)
_CHAT: Final = SourcegraphDialect(streamed=True)


def _open(properties: dict[str, JsonObject], required: tuple[str, ...] = ()) -> JsonObject:
    """Further fields are skipped, and null is the same as absent."""
    schema: JsonObject = {"type": "object", "properties": {name: nullable(one) for name, one in properties.items()}}
    if required:
        schema["required"] = list(required)
    return schema


def _described(schema: JsonObject, description: str) -> JsonObject:
    return {**schema, "description": description}


def _part(kind: str, **properties: JsonObject) -> JsonObject:
    return {"type": "object", "properties": {"type": {"const": kind}, **properties}, "required": ["type", *properties]}


_FILE: Final[JsonObject] = {"type": "object", "properties": {"content": STRING}, "required": ["content"]}
_SCHEMAS: Final[dict[str, JsonObject]] = {
    "SourcegraphCompletionRequest": {
        "description": "Field names are read in any case. What is out of range is brought into it.",
        **_open(
            {
                "model": _described(STRING, "`provider::version::model`, `provider/model`, or a plain id or alias."),
                "messages": array(ref("SourcegraphMessage")),
                "maxTokensToSample": _described(_INT64, "0 and less mean the default."),
                "temperature": {"type": "number", "minimum": 0, "maximum": 1},
                "stopSequences": array(STRING),
                "topK": _described(_INT64, "0 and less mean off."),
                "topP": _described({"type": "number", "maximum": 1}, "0 and less mean off."),
                "stream": BOOLEAN,
                "logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
                "timeoutMs": _described({}, "The caller's own limit, if it is a positive integer."),
            },
            ("model", "messages"),
        ),
    },
    "SourcegraphMessage": {
        "description": "Either spelling will do: `role` and `content`, or `speaker` and `text`.",
        **_open(
            {
                "role": {"enum": ["user", "assistant", "system"]},
                "content": {"anyOf": [STRING, array(ref("SourcegraphPart"))]},
                "speaker": {"enum": ["human", "assistant", "system"]},
                "text": STRING,
            }
        ),
    },
    "SourcegraphPart": {"anyOf": [_part("text", text=STRING), _part("file", file=_FILE)]},
    "SourcegraphCompletion": record(
        {
            "completion": STRING,
            "stopReason": {"enum": _REASONS},
            "logprobs": ref("SourcegraphLogprobs"),
            "usage": record({"completion_tokens": COUNT, "prompt_tokens": COUNT, "total_tokens": COUNT}),
        },
        ["logprobs"],
    ),
    "SourcegraphLogprobs": logprobs_schema(),
    "SourcegraphCompletionEvent": _described(
        record(
            {"completion": STRING, "stopReason": {"enum": ["", *_REASONS]}, "logprobs": ref("SourcegraphLogprobs")},
            ["logprobs"],
        ),
        "Below version 2: all there is so far.",
    ),
    "SourcegraphDeltaEvent": _described(
        record(
            {"deltaText": STRING, "stopReason": {"enum": _REASONS}, "logprobs": ref("SourcegraphLogprobs")},
            ["stopReason", "logprobs"],
        ),
        "From version 2: what is new.",
    ),
    "SourcegraphErrorEvent": record({"error": STRING}),
    "SourcegraphDoneEvent": _described(record({}), "Always the last."),
    "SourcegraphSupportedModels": record(
        {
            "schemaVersion": STRING,
            "revision": STRING,
            "providers": array(record({"id": STRING, "displayName": STRING})),
            "models": array(
                record(
                    {
                        "modelRef": STRING,
                        "displayName": STRING,
                        "modelName": STRING,
                        "capabilities": array({"enum": ["autocomplete", "chat"]}),
                        "category": STRING,
                        "status": STRING,
                        "tier": STRING,
                        "contextWindow": record({"maxInputTokens": COUNT, "maxOutputTokens": COUNT}),
                        "clientSideConfig": {"type": "object"},
                    }
                )
            ),
            "defaultModels": record(
                {"chat": STRING, "fastChat": STRING, "codeCompletion": STRING}, ["chat", "fastChat", "codeCompletion"]
            ),
        }
    ),
    "SourcegraphClientConfig": record(
        {
            "codyEnabled": BOOLEAN,
            "chatEnabled": BOOLEAN,
            "autoCompleteEnabled": BOOLEAN,
            "customCommandsEnabled": BOOLEAN,
            "attributionEnabled": BOOLEAN,
            "attribution": STRING,
            "smartContextWindowEnabled": BOOLEAN,
            "modelsAPIEnabled": BOOLEAN,
            "latestSupportedCompletionsStreamAPIVersion": INTEGER,
            "siteVersion": STRING,
            "codeSearchEnabled": BOOLEAN,
            "notices": array({"type": "object"}),
        }
    ),
    "SourcegraphGraphQLRequest": _open({"operationName": STRING, "query": STRING, "variables": {"type": "object"}}),
    "SourcegraphGraphQLAnswer": record(
        {"data": nullable({"type": "object"}), "errors": array(record({"message": STRING}))}, ["errors"]
    ),
}
_PARAMETERS: Final[tuple[dict[str, Any], ...]] = (
    parameter(
        "query",
        "api-version",
        {"type": "integer", "minimum": 1},
        "From 2 on a stream's events carry what is new, before that all the text so far; without it, the oldest form.",
    ),
    parameter("query", "client-name", STRING, "Accepted and not used."),
    parameter("query", "client-version", STRING, "Accepted and not used."),
    parameter("header", "X-Timeout-Ms", {"type": "integer", "minimum": 1}, "The caller's own limit in milliseconds."),
)
_ERRORS: Final = [
    *COMPLETION_ERRORS,
    (MessagesError(""), "the messages make no prompt"),
    (UnsupportedVersionError(""), "`api-version` was never served"),
]


def _failure(status: int) -> Content:
    return {TEXT: {"schema": STRING}}


def _completing(operation_id: str, summary: str, dialect: Dialect, message: JsonObject) -> Operation:
    events = event_content(
        event("SourcegraphCompletionEvent", "completion"),
        event("SourcegraphDeltaEvent", "completion"),
        event("SourcegraphErrorEvent", "error"),
        event("SourcegraphDoneEvent", "done"),
    )
    return Operation(
        operation_id,
        summary,
        {200: Reply("The completion, whole or in events.", {**json_content("SourcegraphCompletion"), **events})}
        | error_replies(dialect, _ERRORS, _failure),
        "SourcegraphCompletionRequest",
        {"model": "demo", "messages": [message], "maxTokensToSample": 16, "temperature": 0},
        _PARAMETERS,
    )


def _document(operation_id: str, summary: str, name: str) -> Operation:
    """The original sends these as text, though they hold JSON."""
    schema = {**STRING, "contentMediaType": JSON, "contentSchema": ref(name)}
    return Operation(
        operation_id,
        summary,
        {200: Reply("The document, as indented JSON.", {TEXT: {"schema": schema}})}
        | error_replies(_CODE, RESOURCE_ERRORS, _failure),
    )


DOCUMENTATION: Final = Documentation(
    title="Sourcegraph",
    endpoints={"/.api/completions/code": _CODE, "/.api/completions/stream": _CHAT},
    schemas=_SCHEMAS,
    security={
        "sourcegraphToken": {
            "type": "apiKey",
            "in": "header",
            "name": "Authorization",
            "description": '`token YOUR_ACCESS_TOKEN`, or `token token="YOUR_ACCESS_TOKEN"`.',
        },
        "basic": {"type": "http", "scheme": "basic", "description": "The key is the user name; there is no password."},
        "sourcegraphQueryToken": {"type": "apiKey", "in": "query", "name": "token"},
    },
    operations={
        ("POST", "/.api/completions/code"): _completing(
            "createCodeCompletion",
            "Complete the text of one message, whole unless `stream`",
            _CODE,
            {"role": "user", "content": "def main():\n"},
        ),
        ("POST", "/.api/completions/stream"): _completing(
            "streamChatCompletion",
            "Continue a conversation, in events unless `stream` is false",
            _CHAT,
            {"speaker": "human", "text": "Write a function that adds two numbers."},
        ),
        ("GET", "/.api/modelconfig/supported-models.json"): _document(
            "supportedModels", "The models an editor may choose from", "SourcegraphSupportedModels"
        ),
        ("GET", "/.api/client-config"): _document(
            "clientConfig", "What an editor may do here", "SourcegraphClientConfig"
        ),
        ("POST", "/.api/graphql"): Operation(
            "graphql",
            "The few queries an editor makes first, named by `operationName`, the query or the query string",
            {200: Reply("The answer; null with errors for any other query.", json_content("SourcegraphGraphQLAnswer"))}
            | error_replies(_CODE, RESOURCE_ERRORS, _failure),
            "SourcegraphGraphQLRequest",
            {"operationName": "SiteProductVersion", "query": "query SiteProductVersion { site { productVersion } }"},
        ),
    },
    fields={"cumulative": ("api-version",), "deadline_ms": ("timeoutMs", "X-Timeout-Ms")},
)
