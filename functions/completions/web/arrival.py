"""What the platform tells about a request beside the request: its id, its signer, how long the function may still run.

Buffered form: Mangum puts API Gateway's event and Lambda's context into the ASGI scope. Streamed form: Lambda Web
Adapter sends both as headers, and overwrites any copy the client sent. Neither (a bare ASGI server): a fresh id. Such a
server would believe a client's own headers: in the streamed form it listens on the loopback alone.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from completions.domain.ports import Clock

REQUEST_CONTEXT_HEADER: Final = "x-amzn-request-context"
LAMBDA_CONTEXT_HEADER: Final = "x-amzn-lambda-context"
SETTLE_SECONDS: Final = 1.5
"""Kept back from the function's time, so that a request that runs out of it can still be answered and settled."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """``at`` and ``deadline`` are readings of ``Clock.monotonic``; ``streamed`` says that bytes leave as they come.

    ``caller`` is the ARN of who signed the request, as API Gateway's AWS_IAM authorization found it.
    """

    request_id: str
    at: float
    deadline: float | None
    streamed: bool = True
    caller: str | None = None


def arrival(scope: Mapping[str, Any], headers: Mapping[str, str], clock: Clock) -> Arrival:
    """Read the platform's facts from either form."""
    at = clock.monotonic()
    buffered = "aws.event" in scope
    if buffered:
        event, context = scope["aws.event"], scope["aws.context"]
        remaining = context.get_remaining_time_in_millis() / 1000
        request = event.get("requestContext", {})
        # `sam local start-api` gives all requests of its run one id, which would make all but the first repetitions
        given = None if "AWS_SAM_LOCAL" in os.environ else request.get("requestId")
        request_id = given or context.aws_request_id
    else:
        request = _object(headers.get(REQUEST_CONTEXT_HEADER))
        lambda_context = _object(headers.get(LAMBDA_CONTEXT_HEADER))
        remaining = None
        if isinstance(deadline_ms := lambda_context.get("deadline"), int | float):
            remaining = deadline_ms / 1000 - clock.now().timestamp()
        request_id = request.get("requestId") or lambda_context.get("request_id") or str(uuid.uuid4())
    deadline = None if remaining is None else at + remaining - SETTLE_SECONDS
    return Arrival(str(request_id), at, deadline, not buffered, _caller(request))


def _caller(request_context: Mapping[str, Any]) -> str | None:
    identity = request_context.get("identity")
    arn = identity.get("userArn") if isinstance(identity, Mapping) else None
    return arn if isinstance(arn, str) and arn else None


def _object(text: str | None) -> Mapping[str, Any]:
    """A header's JSON object. Anything else was not written by the adapter, and says nothing."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
