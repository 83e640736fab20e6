"""OpenAI's dialect as it is published."""

from __future__ import annotations

from typing import Final

from completions.dialects.documentation import (
    COMPLETION_ERRORS,
    COUNT,
    INTEGER,
    RESOURCE_ERRORS,
    STRING,
    Content,
    Documentation,
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
from completions.dialects.extra_fields import EXTRA_FIELDS
from completions.dialects.openai import OpenAIDialect
from completions.dialects.openai_wire import CompletionBody
from completions.dialects.text_completion import OBJECT
from completions.domain.completion import FinishReason
from completions.domain.errors import ModelNotFoundError, PermissionDeniedError

_DIALECT: Final = OpenAIDialect()
_FINISH: Final[JsonObject] = {"enum": [str(reason) for reason in FinishReason]}
_ID: Final[JsonObject] = {"type": "string", "pattern": "^cmpl-[A-Za-z0-9]{29}$"}
_HEAD: Final[JsonObject] = {"id": _ID, "object": {"const": OBJECT}, "created": INTEGER, "model": STRING}


def _choice(finish_reason: JsonObject) -> JsonObject:
    return record(
        {
            "text": STRING,
            "index": COUNT,
            "logprobs": nullable(ref("OpenAILogprobs")),
            "finish_reason": finish_reason,
        }
    )


def _failure(status: int) -> Content:
    return json_content("OpenAIError")


_WHOLE: Final = body_schemas(CompletionBody, "Whole", "OpenAI")["Whole"]
_SCHEMAS: Final[dict[str, JsonObject]] = {
    **body_schemas(CompletionBody, "OpenAICompletionRequest", "OpenAI", EXTRA_FIELDS),
    "OpenAICompletion": record({**_HEAD, "choices": array(ref("OpenAIChoice")), "usage": ref("OpenAIUsage")}),
    "OpenAICompletionChunk": record(
        {**_HEAD, "choices": array(ref("OpenAIChoiceDelta")), "usage": nullable(ref("OpenAIUsage"))}, ["usage"]
    ),
    "OpenAIChoice": _choice(_FINISH),
    "OpenAIChoiceDelta": _choice({"enum": [*_FINISH["enum"], None]}),
    "OpenAILogprobs": logprobs_schema(),
    "OpenAIUsage": record(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": record({"cached_tokens": COUNT}),
        },
        ["prompt_tokens_details"],
    ),
    "OpenAIModel": record({"id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING}),
    "OpenAIModelList": record({"object": {"const": "list"}, "data": array(ref("OpenAIModel"))}),
    "OpenAIError": record(
        {
            "error": record(
                {"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)},
            )
        }
    ),
}
_SCHEMAS["OpenAICompletionRequest"]["description"] += (
    " An operator can let further fields through: " + ", ".join(f"`{name}`" for name in sorted(EXTRA_FIELDS)) + "."
)


def _completing(operation_id: str, summary: str) -> Operation:
    events = event_content(end_event(), event("OpenAICompletionChunk"), event("OpenAIError"))
    content = {**json_content("OpenAICompletion"), **events}
    return Operation(
        operation_id,
        summary,
        {200: Reply("The completion; with `stream`, its chunks, and `[DONE]` behind a whole answer.", content)}
        | error_replies(_DIALECT, COMPLETION_ERRORS, _failure),
        "OpenAICompletionRequest",
        {"model": "demo", "prompt": "def main():\n", "max_tokens": 16, "temperature": 0},
    )


_MODEL: Final = parameter("path", "model", {"type": "string", "minLength": 1}, "An id or alias; it may hold slashes.")
_NOT_FOUND: Final = (ModelNotFoundError(""), "no such model")
_FORBIDDEN: Final = (PermissionDeniedError(""), "models are removed by the operator, not through this API")

DOCUMENTATION: Final = Documentation(
    title="OpenAI",
    endpoints={"/v1/completions": _DIALECT, "/completions": _DIALECT},
    schemas=_SCHEMAS,
    security={"bearer": {"type": "http", "scheme": "bearer"}},
    operations={
        ("POST", "/v1/completions"): _completing("createCompletion", "Create a completion"),
        ("POST", "/completions"): _completing("createCompletionUnversioned", "The same as /v1/completions"),
        ("GET", "/v1/models"): Operation(
            "listModels",
            "List the models this key may use",
            {200: Reply("The models.", json_content("OpenAIModelList"))}
            | error_replies(_DIALECT, RESOURCE_ERRORS, _failure),
        ),
        ("GET", "/v1/models/{model}"): Operation(
            "retrieveModel",
            "Describe a model",
            {200: Reply("The model.", json_content("OpenAIModel"))}
            | error_replies(_DIALECT, [*RESOURCE_ERRORS, _NOT_FOUND], _failure),
            parameters=(_MODEL,),
        ),
        ("DELETE", "/v1/models/{model}"): Operation(
            "deleteModel",
            "Refused: there is nothing to delete here",
            error_replies(_DIALECT, [*RESOURCE_ERRORS, _FORBIDDEN], _failure),
            parameters=(_MODEL,),
        ),
    },
    fields={
        "include_stop": ("include_stop_str_in_output",),
        "include_usage": ("stream_options",),
        "end_user": ("user",),
    },
    on_request={name: _WHOLE["properties"][name] for name in EXTRA_FIELDS},
)
