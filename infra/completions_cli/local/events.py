"""API Gateway REST proxy events (payload version 1.0) and Lambda's context, as a function receives them.

Source: API Gateway developer guide, "Input format of a Lambda function for proxy integration". Without binary media
types a body travels as text.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs

STAGE: Final = "local"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """An HTTP request with its route already found."""

    method: str
    path: str
    query: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    source_ip: str
    resource: str
    path_parameters: Mapping[str, str]

    @property
    def media_type(self) -> str:
        """Of its body, without parameters."""
        return dict(self.headers).get("content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What a proxy integration's result becomes."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class LambdaContext:
    """The attributes of Lambda's context object that a handler may read."""

    function_name: str
    timeout_seconds: int
    aws_request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    started: float = field(default_factory=time.time)
    function_version: str = "$LATEST"
    memory_limit_in_mb: str = "512"
    log_group_name: str = "/aws/lambda/local"
    log_stream_name: str = "local"
    identity: None = None
    client_context: None = None

    @property
    def invoked_function_arn(self) -> str:
        return f"arn:aws:lambda:us-east-1:123456789012:function:{self.function_name}"

    def get_remaining_time_in_millis(self) -> int:
        """Milliseconds until Lambda would end the invocation."""
        return max(0, int((self.started + self.timeout_seconds - time.time()) * 1000))

    def to_header(self) -> str:
        """``x-amzn-lambda-context``, as Lambda Web Adapter writes it; ``deadline`` is Unix milliseconds."""
        return json.dumps(
            {
                "request_id": self.aws_request_id,
                "deadline": int((self.started + self.timeout_seconds) * 1000),
                "invoked_function_arn": self.invoked_function_arn,
                "env_config": {"function_name": self.function_name, "memory": 512, "version": "$LATEST"},
            }
        )


def request_context(request: HttpRequest) -> dict[str, Any]:
    """The event's ``requestContext``; the streamed form gets it as ``x-amzn-request-context``."""
    return {
        "accountId": "123456789012",
        "apiId": "local",
        "httpMethod": request.method,
        "path": f"/{STAGE}{request.path}",
        "protocol": "HTTP/1.1",
        "requestId": str(uuid.uuid4()),
        "requestTimeEpoch": int(time.time() * 1000),
        "resourcePath": request.resource,
        "stage": STAGE,
        "identity": {"sourceIp": request.source_ip, "userAgent": dict(request.headers).get("user-agent")},
    }


def proxy_event(request: HttpRequest, binary_media_types: Collection[str] = ()) -> dict[str, Any]:
    """The event of a buffered function. A body of a binary type travels as base64, any other one as text."""
    binary = request.media_type in binary_media_types
    headers: dict[str, list[str]] = {}
    for name, value in request.headers:
        headers.setdefault(name, []).append(value)
    query = parse_qs(request.query, keep_blank_values=True)
    return {
        "resource": request.resource,
        "path": request.path,
        "httpMethod": request.method,
        "headers": {name: values[-1] for name, values in headers.items()},
        "multiValueHeaders": headers,
        "queryStringParameters": {name: values[-1] for name, values in query.items()} or None,
        "multiValueQueryStringParameters": query or None,
        "pathParameters": dict(request.path_parameters) or None,
        "stageVariables": None,
        "requestContext": request_context(request),
        "body": _body(request.body, binary=binary) if request.body else None,
        "isBase64Encoded": binary,
    }


def _body(body: bytes, *, binary: bool) -> str:
    return base64.b64encode(body).decode() if binary else body.decode(errors="replace")


def proxy_reply(result: Mapping[str, Any]) -> HttpReply:
    """A handler's result as HTTP. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for one API Gateway refuses."""
    headers = [(name, str(value)) for name, value in (result.get("headers") or {}).items()]
    for name, values in (result.get("multiValueHeaders") or {}).items():
        headers = [(known, value) for known, value in headers if known.lower() != name.lower()]
        headers += [(name, str(value)) for value in values]
    text = result.get("body") or ""
    if not isinstance(text, str):
        raise TypeError(f"body is {type(text).__name__}, not a string")
    body = base64.b64decode(text) if result.get("isBase64Encoded") else text.encode()
    return HttpReply(int(result["statusCode"]), headers, body)
