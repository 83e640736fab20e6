"""What a container family must be able to say: request to bytes, record to chunk, failure to error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionChunk, CompletionRequest
from completions.domain.errors import CompletionError


@dataclass(frozen=True, slots=True)
class Invocation:
    """What goes to ``/invocations``: the body, its media types, and the attributes header if the family uses one."""

    body: bytes
    content_type: str = "application/json"
    accept: str = "application/json"
    custom_attributes: str | None = None


class StreamDecoder(Protocol):
    """Stateful for one answer: records in, canonical chunks out."""

    def decode(self, record: bytes) -> CompletionChunk | None:
        """The chunk a record holds, ``None`` for one without content. Raises the error a failure record stands for."""
        ...

    def finish(self) -> None:
        """Called at the end of the bytes. Raises ``TruncatedStreamError`` unless the terminal record was seen."""
        ...


class Codec(Protocol):
    """One container family's wire format. Pure: no clients, no clocks.

    ``max_stops`` is how many stop texts the container takes, ``None`` for any number.
    """

    max_stops: int | None

    def capabilities(self, route: ModelRoute) -> Mapping[Parameter, Capability]:
        """The family's table; every parameter has an entry."""
        ...

    def encode(self, request: CompletionRequest, route: ModelRoute) -> Invocation:
        """The call that asks for ``request``, always streamed, usage included."""
        ...

    def decoder(self, request: CompletionRequest) -> StreamDecoder:
        """A fresh decoder for one answer."""
        ...

    def decode_error(self, status: int, body: str) -> CompletionError:
        """What the container meant by an HTTP failure. ``body`` may be cut off (SageMaker keeps 2048 characters)."""
        ...
