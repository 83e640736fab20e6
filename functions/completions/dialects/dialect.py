"""What a public API dialect must be able to say, and the HTTP shapes it is said in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from completions.domain.catalog import ModelRoute
from completions.domain.completion import Completion, CompletionChunk, CompletionRequest
from completions.domain.errors import CompletionError, LimitStatus
from completions.domain.metering import Principal

CALLER_REFUSED: Final = "caller_refused"
"""The code of an ``AuthenticationError`` or ``PermissionDeniedError`` about who signed a request, where no key counts.

Its message says what the operator must do, so every dialect passes it on, whatever else it hides.
"""


@dataclass(frozen=True, slots=True)
class WireRequest:
    """An HTTP request as the client sent it; header names are lower case, ``path_parameters`` are the route's own.

    Of a name that comes several times ``query`` has the last value, ``query_items`` all of them.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    path_parameters: Mapping[str, str] = field(default_factory=dict)
    query_items: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class WireReply:
    """An HTTP response."""

    status: int
    body: bytes
    media_type: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The facts every form of an answer repeats. ``created`` is Unix seconds, ``elapsed_ms`` the time until now,
    ``limits`` what the key has left."""

    request_id: str
    created: int
    model: str
    elapsed_ms: int
    limits: tuple[LimitStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorHead:
    """The facts of a refusal or failure. ``now`` is Unix seconds; ``request`` is ``None`` if it was not understood."""

    request_id: str
    now: float
    request: CompletionRequest | None = None


class StreamEncoder(Protocol):
    """Canonical events to server-sent-event bytes, for one answer."""

    media_type: str
    headers: Mapping[str, str]

    def chunk(self, chunk: CompletionChunk) -> bytes:
        """The frames of one chunk; empty when it says nothing in this dialect."""
        ...

    def done(self) -> bytes:
        """The frames after the last chunk of a whole answer."""
        ...

    def error(self, error: CompletionError) -> bytes:
        """The frames that end a broken answer."""
        ...


class Dialect(Protocol):
    """One public API. ``keepalive`` is the frame its streams may send while nothing is there, ``None`` for none."""

    name: str
    keepalive: bytes | None

    def credential(self, wire: WireRequest) -> str | None:
        """The API key the client sent, ``None`` for none. Raises ``AuthenticationError`` for a malformed one."""
        ...

    def decode(self, wire: WireRequest) -> CompletionRequest:
        """The canonical request. Raises ``InvalidRequestError`` naming the field at fault."""
        ...

    def encode(self, completion: Completion, request: CompletionRequest, head: AnswerHead) -> WireReply:
        """A whole answer."""
        ...

    def stream_encoder(self, request: CompletionRequest, head: AnswerHead) -> StreamEncoder:
        """The encoder of a streamed answer."""
        ...

    def encode_error(self, error: CompletionError, head: ErrorHead) -> WireReply:
        """A refusal or failure, before any byte of an answer was sent."""
        ...


@dataclass(frozen=True, slots=True)
class Resource:
    """A route beside the completions: what ``reply`` makes of the request, its caller and the models that one may use.

    ``path`` is FastAPI's. ``reply`` raises any ``CompletionError``. One for ``admins`` refuses every other key.
    """

    method: str
    path: str
    reply: Callable[[WireRequest, Principal, Sequence[ModelRoute]], WireReply]
    admins: bool = False
