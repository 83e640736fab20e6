"""Both versions of Scale's API as they are published."""

from __future__ import annotations

from typing import Final

from completions.dialects.dialect import Dialect
from completions.dialects.documentation import (
    BOOLEAN,
    COMPLETION_ERRORS,
    COUNT,
    INTEGER,
    NULL,
    NUMBER,
    RESOURCE_ERRORS,
    STRING,
    Content,
    Documentation,
    Errors,
    JsonObject,
    Operation,
    Reply,
    array,
    body_schemas,
    end_event,
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
from completions.dialects.scale import ScaleBody, ScaleDialect
from completions.dialects.scale_v1 import ScaleV1Body, ScaleV1Dialect
from completions.dialects.scale_wire import GuidedFields, SchemaError, missing
from completions.dialects.text_completion import OBJECT
from completions.domain.completion import FinishReason
from completions.domain.errors import ModelNotFoundError

_FINISH: Final[JsonObject] = {"enum": [str(reason) for reason in FinishReason]}
_ID: Final[JsonObject] = {"type": "string", "pattern": "^cmpl-[A-Za-z0-9]{29}$"}
_COUNTS: Final[JsonObject] = {"completion_tokens": COUNT, "prompt_tokens": COUNT, "total_tokens": COUNT}
_CACHED: Final = record({"audio_tokens": COUNT, "cached_tokens": COUNT})
_SCHEMA_FAULT: Final = (SchemaError([missing("body")]), "the body or the query does not have the published form")
_ERRORS: Final[Errors] = [*COMPLETION_ERRORS, _SCHEMA_FAULT]
_CONSTRAINTS: Final = tuple(GuidedFields.model_fields)
_SECURITY: Final[dict[str, JsonObject]] = {
    "basic": {"type": "http", "scheme": "basic", "description": "The key is the user name; there is no password."},
    "bearer": {"type": "http", "scheme": "bearer"},
    "scaleKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _failure(status: int) -> Content:
    return json_content({422: "ScaleSchemaError", 429: "ScaleRateLimitError"}.get(status, "ScaleError"))


# Version 2

_HEAD: Final[JsonObject] = {"id": _ID, "created": INTEGER, "model": STRING, "object": {"const": OBJECT}}
_STREAM_ERROR: Final = record({"status_code": INTEGER, "content": record({"error": STRING, "timestamp": STRING})})
_SCHEMAS: Final[dict[str, JsonObject]] = {
    **body_schemas(ScaleBody, "ScaleCompletionRequest", "Scale"),
    "ScaleCompletion": record(
        {**_HEAD, "choices": array(ref("ScaleChoice")), "system_fingerprint": NULL, "usage": ref("ScaleUsage")}
    ),
    "ScaleCompletionChunk": record(
        {**_HEAD, "choices": array(ref("ScaleChoiceDelta")), "usage": ref("ScaleUsageDelta")}, ["usage"]
    ),
    "ScaleChoice": record(
        {"finish_reason": _FINISH, "index": COUNT, "logprobs": nullable(ref("ScaleLogprobs")), "text": STRING}
    ),
    "ScaleChoiceDelta": record(
        {"finish_reason": _FINISH, "index": COUNT, "logprobs": ref("ScaleLogprobs"), "text": STRING},
        ["finish_reason", "logprobs"],
    ),
    "ScaleLogprobs": logprobs_schema(),
    "ScaleUsage": record({**_COUNTS, "completion_tokens_details": NULL, "prompt_tokens_details": nullable(_CACHED)}),
    "ScaleUsageDelta": record({**_COUNTS, "prompt_tokens_details": _CACHED}, ["prompt_tokens_details"]),
    "ScaleStreamError": record({"error": _STREAM_ERROR}),
    "ScaleError": record(
        {"detail": STRING, "error": STRING, "timestamp": STRING, "request_id": STRING},
        ["error", "timestamp", "request_id"],
    ),
    "ScaleRateLimitError": record({"error": {"const": "Too many requests"}, "timestamp": STRING, "detail": STRING}),
    "ScaleSchemaError": record({"detail": {**array(ref("ScaleFault")), "minItems": 1, "maxItems": 64}}),
    "ScaleFault": record(
        {
            "type": STRING,
            "loc": array({"type": ["string", "integer"]}),
            "msg": STRING,
            "input": {},
            "ctx": {"type": "object"},
        },
        ["input", "ctx"],
    ),
}
_DIALECT: Final = ScaleDialect()
_EVENTS: Final = event_content(end_event(), event("ScaleCompletionChunk"), event("ScaleStreamError"))

SCALE: Final = Documentation(
    title="Scale v2",
    endpoints={"/v2/completions": _DIALECT},
    schemas=_SCHEMAS,
    security=_SECURITY,
    operations={
        ("POST", "/v2/completions"): Operation(
            "createScaleCompletion",
            "Create a completion",
            {
                200: Reply(
                    "The completion; with `stream`, its chunks, and `[DONE]` behind a whole answer.",
                    {**json_content("ScaleCompletion"), **_EVENTS},
                )
            }
            | error_replies(_DIALECT, _ERRORS, _failure),
            "ScaleCompletionRequest",
            {"model": "demo", "prompt": "def main():\n", "max_tokens": 16, "temperature": 0},
        )
    },
    fields={
        "beam": ("use_beam_search", "length_penalty", "early_stopping"),
        "constraint": (*_CONSTRAINTS, "response_format", "guided_whitespace_pattern", "guided_decoding_backend"),
        "include_usage": ("stream_options",),
        "end_user": ("user",),
    },
)

# Version 1

_MODEL: Final = {
    **parameter("query", "model_endpoint_name", STRING, "The model's id or an alias."),
    "required": True,
}
_ENDPOINT_NAME: Final = parameter(
    "path", "name", {"type": "string", "minLength": 1}, "An id or alias; it may hold slashes."
)
_LIST_PARAMETERS: Final = (
    parameter("query", "name", STRING, "Only the endpoint of this name."),
    parameter("query", "order_by", {"enum": ["newest", "oldest", "alphabetical"]}, "The order of the list."),
)
_TEXT: Final = nullable(STRING)
_TOKEN: Final = record({"token": STRING, "log_prob": NUMBER})
_V1_SCHEMAS: Final[dict[str, JsonObject]] = {
    **body_schemas(ScaleV1Body, "ScaleV1CompletionRequest", "ScaleV1"),
    "ScaleV1Completion": record(
        {
            "request_id": STRING,
            "output": record(
                {
                    "text": STRING,
                    "num_prompt_tokens": COUNT,
                    "num_completion_tokens": COUNT,
                    "tokens": nullable(array(_TOKEN)),
                }
            ),
        }
    ),
    "ScaleV1CompletionChunk": record(
        {
            "request_id": STRING,
            "output": nullable(
                record(
                    {
                        "text": STRING,
                        "finished": BOOLEAN,
                        "num_prompt_tokens": nullable(COUNT),
                        "num_completion_tokens": nullable(COUNT),
                        "token": _TOKEN,
                    },
                    ["num_prompt_tokens", "num_completion_tokens", "token"],
                )
            ),
            "error": nullable(_STREAM_ERROR),
        }
    ),
    "ScaleV1ModelEndpoint": record(
        {
            "id": STRING,
            "name": STRING,
            "model_name": STRING,
            "source": STRING,
            "status": STRING,
            "inference_framework": STRING,
            "inference_framework_image_tag": _TEXT,
            "num_shards": nullable(INTEGER),
            "quantize": _TEXT,
            "checkpoint_path": _TEXT,
            "chat_template_override": _TEXT,
            "spec": nullable({"type": "object"}),
        }
    ),
    "ScaleV1ModelEndpointList": record({"model_endpoints": array(ref("ScaleV1ModelEndpoint"))}),
}
_SYNC: Final = ScaleV1Dialect(streamed=False)
_STREAM: Final = ScaleV1Dialect(streamed=True)
_NOT_FOUND: Final = (ModelNotFoundError(""), "no such model endpoint")


def _completing(operation_id: str, summary: str, dialect: Dialect, description: str, content: Content) -> Operation:
    return Operation(
        operation_id,
        summary,
        {200: Reply(description, content)} | error_replies(dialect, _ERRORS, _failure),
        "ScaleV1CompletionRequest",
        {"prompt": "def main():\n", "max_new_tokens": 16, "temperature": 0},
        (_MODEL,),
    )


SCALE_V1: Final = Documentation(
    title="Scale v1",
    endpoints={"/v1/llm/completions-sync": _SYNC, "/v1/llm/completions-stream": _STREAM},
    schemas=_V1_SCHEMAS,
    security=_SECURITY,
    operations={
        ("POST", "/v1/llm/completions-sync"): _completing(
            "createScaleV1Completion",
            "Create a completion",
            _SYNC,
            "The completion.",
            json_content("ScaleV1Completion"),
        ),
        ("POST", "/v1/llm/completions-stream"): _completing(
            "streamScaleV1Completion",
            "Stream a completion",
            _STREAM,
            "Its pieces; the last one is `finished`.",
            event_content(event("ScaleV1CompletionChunk")),
        ),
        ("GET", "/v1/llm/model-endpoints"): Operation(
            "listModelEndpoints",
            "List the models this key may use",
            {200: Reply("The model endpoints.", json_content("ScaleV1ModelEndpointList"))}
            | error_replies(_SYNC, [*RESOURCE_ERRORS, _SCHEMA_FAULT], _failure),
            parameters=_LIST_PARAMETERS,
        ),
        ("GET", "/v1/llm/model-endpoints/{name}"): Operation(
            "getModelEndpoint",
            "Describe a model endpoint",
            {200: Reply("The model endpoint.", json_content("ScaleV1ModelEndpoint"))}
            | error_replies(_SYNC, [*RESOURCE_ERRORS, _NOT_FOUND], _failure),
            parameters=(_ENDPOINT_NAME,),
        ),
    },
    fields={"model": ("model_endpoint_name",), "constraint": _CONSTRAINTS},
)
