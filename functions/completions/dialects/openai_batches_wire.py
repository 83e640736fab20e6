"""What OpenAI's files and batches routes are sent, read strictly: what is not understood is refused by its name.

Source: openai/openai-openapi (``createBatch``, ``listBatches``, ``listFiles``) and what openai-python sends.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from completions.dialects.dialect import WireRequest
from completions.domain.batches import BatchOrder
from completions.domain.errors import InvalidRequestError

EVERY_ENDPOINT: Final = "*"
"""This gateway's own: each line says its own URL."""
MOST_FILES: Final = 10_000
MOST_BATCHES: Final = 100
BATCHES_LISTED: Final = 20
NAME_HEADER: Final = "idempotency-key"
_MOST_NAME: Final = 255
_WHOLE: Final = re.compile(r"[0-9]{1,9}")

MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class BatchBody(BaseModel):
    """The body of ``POST /v1/batches``."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    input_file_id: Annotated[str, Field(min_length=1, max_length=100)]
    endpoint: Annotated[
        str, Field(description="One of the completions' paths, which every line then has; `*` where each has its own.")
    ]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None


@dataclass(frozen=True, slots=True)
class FilesQuery:
    """What of the files is asked for."""

    purpose: str | None
    after: str | None
    limit: int
    newest_first: bool


@dataclass(frozen=True, slots=True)
class BatchesQuery:
    """What of the batches is asked for."""

    after: str | None
    limit: int


def parse_order(wire: WireRequest, endpoints: Collection[str]) -> BatchOrder:
    """Raises ``InvalidRequestError``."""
    refuse_query(wire)
    try:
        body = BatchBody.model_validate_json(wire.body)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False)) from None
    if body.endpoint not in (EVERY_ENDPOINT, *endpoints):
        known = ", ".join(f"'{endpoint}'" for endpoint in sorted(endpoints))
        _refuse(
            "endpoint",
            f"'{body.endpoint[:100]}' is not served in batches; there are {known}, and '*' for each line's own",
        )
    endpoint = None if body.endpoint == EVERY_ENDPOINT else body.endpoint
    return BatchOrder(body.input_file_id, endpoint, body.completion_window, body.metadata or {})


def parse_name(wire: WireRequest) -> str | None:
    """The caller's ``Idempotency-Key``. Raises ``InvalidRequestError`` for one that is none."""
    name = wire.headers.get(NAME_HEADER)
    if name is not None and not (0 < len(name) <= _MOST_NAME and name.isascii() and name.isprintable()):
        _refuse("Idempotency-Key", f"must be 1 to {_MOST_NAME} printable ASCII characters")
    return name


def parse_files_query(wire: WireRequest) -> FilesQuery:
    """Raises ``InvalidRequestError``."""
    values = _values(wire, ("purpose", "limit", "order", "after"))
    order = values.get("order", "desc")
    if order not in ("asc", "desc"):
        _refuse("order", "must be 'asc' or 'desc'")
    return FilesQuery(
        purpose=values.get("purpose"),
        after=values.get("after"),
        limit=_limit(values, MOST_FILES, MOST_FILES),
        newest_first=order == "desc",
    )


def parse_batches_query(wire: WireRequest) -> BatchesQuery:
    """Raises ``InvalidRequestError``."""
    values = _values(wire, ("after", "limit"))
    return BatchesQuery(values.get("after"), _limit(values, BATCHES_LISTED, MOST_BATCHES))


def refuse_query(wire: WireRequest) -> None:
    """For a route without parameters. Raises ``InvalidRequestError``."""
    _values(wire, ())


def _values(wire: WireRequest, known: Collection[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in wire.query_items:
        if name not in known:
            there_are = f"there are {', '.join(known)}" if known else "there are no parameters"
            _refuse(name[:100], f"is not known here; {there_are}")
        if name in values:
            _refuse(name, "was sent more than once")
        if not 0 < len(value) <= _MOST_NAME:
            _refuse(name, f"must have 1 to {_MOST_NAME} characters")
        values[name] = value
    return values


def _limit(values: dict[str, str], default: int, most: int) -> int:
    text = values.get("limit")
    if text is None:
        return default
    if not _WHOLE.fullmatch(text) or not 1 <= int(text) <= most:
        _refuse("limit", f"must be a whole number from 1 to {most}")
    return int(text)


def _invalid(faults: list[ErrorDetails]) -> InvalidRequestError:
    first = faults[0]
    if not first["loc"]:
        if first["type"] == "json_invalid":
            detail = first.get("ctx", {}).get("error", "invalid JSON")
            return InvalidRequestError(f"We could not parse the JSON body of your request: {detail}.")
        return InvalidRequestError("The body of your request must be a JSON object.")
    unknown = [str(fault["loc"][0])[:64] for fault in faults if fault["type"] == "extra_forbidden"]
    if unknown:
        argument = "argument" if len(unknown) == 1 else "arguments"
        listed = ", ".join(unknown[:16])
        return InvalidRequestError(f"Unrecognized request {argument} supplied: {listed}", param=unknown[0])
    param = str(first["loc"][0])
    path = ".".join(str(part)[:64] for part in first["loc"] if part != "[key]")
    if first["type"] == "missing":
        return InvalidRequestError(f"You must provide a {path} parameter.", param=param)
    what = first["msg"].removeprefix("Input ").removeprefix(param.capitalize() + " ")
    return InvalidRequestError(f"Invalid value for '{path}': it {what}.", param=param, code="invalid_value")


def _refuse(name: str, what: str) -> NoReturn:
    raise InvalidRequestError(f"'{name}' {what}.", param=name, code="invalid_value")
