"""OpenAI's files and batches as they are published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from completions.dialects.documentation import (
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
    error_replies,
    json_content,
    nullable,
    parameter,
    record,
    ref,
)
from completions.dialects.openai import OpenAIDialect
from completions.dialects.openai_batches import LINES
from completions.dialects.openai_batches_wire import BATCHES_LISTED, MOST_BATCHES, MOST_FILES, BatchBody
from completions.domain.batches import BatchConflictError, BatchStatus
from completions.domain.errors import InvalidRequestError, RequestTooLargeError, UnknownPathError

_DIALECT: Final = OpenAIDialect()
_MOMENT: Final = nullable(INTEGER)
_BYTES: Final[JsonObject] = {"type": "string", "format": "binary"}
_WRONG: Final = (InvalidRequestError(""), "a field is wrong")
_ABSENT: Final = (UnknownPathError(""), "no such thing, or somebody else's")
_CONFLICT: Final = (BatchConflictError(""), "it has ended, is in use, or its name means something else")
_TOO_LARGE: Final = (RequestTooLargeError(""), "more bytes than the platform carries")

_SCHEMAS: Final[Mapping[str, JsonObject]] = {
    **body_schemas(BatchBody, "OpenAIBatchRequest", "OpenAIBatch"),
    "OpenAIFileUpload": record({"purpose": {"const": "batch"}, "file": _BYTES}),
    "OpenAIFile": record(
        {
            "id": STRING,
            "object": {"const": "file"},
            "bytes": COUNT,
            "created_at": INTEGER,
            "expires_at": INTEGER,
            "filename": STRING,
            "purpose": {"enum": ["batch", "batch_output"]},
            "status": {"const": "processed"},
            "status_details": NULL,
        }
    ),
    "OpenAIFileDeleted": record({"id": STRING, "object": {"const": "file"}, "deleted": {"const": True}}),
    "OpenAIBatch": record(
        {
            "id": STRING,
            "object": {"const": "batch"},
            "endpoint": STRING,
            "model": nullable(STRING),
            "errors": nullable(record({"object": {"const": "list"}, "data": array(ref("OpenAIBatchError"))})),
            "input_file_id": STRING,
            "completion_window": STRING,
            "status": {"enum": [status.value for status in BatchStatus]},
            "output_file_id": nullable(STRING),
            "error_file_id": nullable(STRING),
            "created_at": INTEGER,
            "expires_at": INTEGER,
            "in_progress_at": _MOMENT,
            "finalizing_at": _MOMENT,
            "completed_at": _MOMENT,
            "failed_at": _MOMENT,
            "expired_at": _MOMENT,
            "cancelling_at": _MOMENT,
            "cancelled_at": _MOMENT,
            "request_counts": record({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            "usage": record(
                {
                    "input_tokens": COUNT,
                    "input_tokens_details": record({"cached_tokens": COUNT}),
                    "output_tokens": COUNT,
                    "output_tokens_details": record({"reasoning_tokens": COUNT}),
                    "total_tokens": COUNT,
                }
            ),
            "cost": record({"value": NUMBER, "currency": {"const": "usd"}}),
            "metadata": {"type": "object", "additionalProperties": STRING},
        }
    ),
    "OpenAIBatchError": record(
        {"code": STRING, "message": STRING, "param": nullable(STRING), "line": nullable(INTEGER)}
    ),
    **{
        f"{name}List": record(
            {
                "object": {"const": "list"},
                "data": array(ref(name)),
                "first_id": nullable(STRING),
                "last_id": nullable(STRING),
                "has_more": {"type": "boolean"},
            }
        )
        for name in ("OpenAIFile", "OpenAIBatch")
    },
}
_AFTER: Final = parameter("query", "after", {**STRING, "minLength": 1, "maxLength": 255}, "The last one's id before.")
_NAME: Final = parameter(
    "header",
    "Idempotency-Key",
    {**STRING, "pattern": "^[ -~]{1,255}$"},
    "What is asked for again under the same name is not done again; `idempotent-replayed` then says so.",
)
_FILE_ID: Final = parameter("path", "file_id", {**STRING, "minLength": 1}, "A file's id.")
_BATCH_ID: Final = parameter("path", "batch_id", {**STRING, "minLength": 1}, "A batch's id.")


def _failure(status: int) -> Content:
    return json_content("OpenAIError")


def _limit(default: int, most: int) -> JsonObject:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return parameter("query", "limit", schema, "How many.")


def _replies(reply: Reply, *errors: tuple[Exception, str]) -> dict[int, Reply]:
    found: Errors = [*errors, *RESOURCE_ERRORS]  # type: ignore[list-item]
    return {200: reply} | error_replies(_DIALECT, found, _failure)


def _answer(description: str, name: str) -> Reply:
    return Reply(description, json_content(name))


DOCUMENTATION: Final = Documentation(
    title="OpenAI's files and batches",
    endpoints={},
    schemas=_SCHEMAS,
    security={"bearer": {"type": "http", "scheme": "bearer"}},
    operations={
        ("POST", "/v1/files"): Operation(
            "createFile",
            "Upload the lines of a batch",
            _replies(_answer("The file.", "OpenAIFile"), _WRONG, _TOO_LARGE, _CONFLICT),
            "OpenAIFileUpload",
            parameters=(_NAME,),
            request_media="multipart/form-data",
        ),
        ("GET", "/v1/files"): Operation(
            "listFiles",
            "List the files of the key's team",
            _replies(_answer("Some of them.", "OpenAIFileList"), _WRONG),
            parameters=(
                parameter("query", "purpose", {**STRING, "minLength": 1, "maxLength": 255}, "Only those of it."),
                _limit(MOST_FILES, MOST_FILES),
                parameter("query", "order", {"enum": ["asc", "desc"], "default": "desc"}, "By when they were created."),
                _AFTER,
            ),
        ),
        ("GET", "/v1/files/{file_id}"): Operation(
            "retrieveFile",
            "Describe a file",
            _replies(_answer("The file.", "OpenAIFile"), _WRONG, _ABSENT),
            parameters=(_FILE_ID,),
        ),
        ("DELETE", "/v1/files/{file_id}"): Operation(
            "deleteFile",
            "Delete a file",
            _replies(_answer("It is gone.", "OpenAIFileDeleted"), _WRONG, _ABSENT, _CONFLICT),
            parameters=(_FILE_ID,),
        ),
        ("GET", "/v1/files/{file_id}/content"): Operation(
            "downloadFile",
            "Fetch what is in a file",
            {
                **_replies(Reply("The content.", {LINES: {"schema": STRING}}), _WRONG, _ABSENT),
                302: Reply("A large file: `location` leads to it for five minutes.", {}),
            },
            parameters=(_FILE_ID,),
        ),
        ("POST", "/v1/batches"): Operation(
            "createBatch",
            "Begin a batch",
            _replies(_answer("The batch.", "OpenAIBatch"), _WRONG, _CONFLICT),
            "OpenAIBatchRequest",
            {"input_file_id": "file-abc123", "endpoint": "/v1/completions", "completion_window": "24h"},
            parameters=(_NAME,),
        ),
        ("GET", "/v1/batches"): Operation(
            "listBatches",
            "List the batches of the key's team, the newest first",
            _replies(_answer("Some of them.", "OpenAIBatchList"), _WRONG),
            parameters=(_AFTER, _limit(BATCHES_LISTED, MOST_BATCHES)),
        ),
        ("GET", "/v1/batches/{batch_id}"): Operation(
            "retrieveBatch",
            "Say how far a batch is",
            _replies(_answer("The batch.", "OpenAIBatch"), _WRONG, _ABSENT),
            parameters=(_BATCH_ID,),
        ),
        ("POST", "/v1/batches/{batch_id}/cancel"): Operation(
            "cancelBatch",
            "Answer no more of a batch's lines",
            _replies(_answer("The batch.", "OpenAIBatch"), _WRONG, _ABSENT, _CONFLICT),
            parameters=(_BATCH_ID,),
        ),
    },
)
