"""A SageMaker runtime that boto3 cannot tell from the real one, in front of model containers on this machine.

It answers ``InvokeEndpoint`` and ``InvokeEndpointWithResponseStream``, hands the body and SageMaker's own headers to
the container (and nothing else, as SageMaker does), frames what comes back, and misbehaves as scripted. Source: the
service model of ``sagemaker-runtime`` and the observed wire.

``PUT /faults/{endpoint}`` with a JSON list of ``Fault`` sets an endpoint's script.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final
from urllib.parse import unquote

import urllib3
from pydantic import TypeAdapter, ValidationError

from completions_cli.local import event_stream
from completions_cli.local.faults import Fault, FaultScript, Refusal

VARIANT: Final = "AllTraffic"
MAX_BODY_BYTES: Final = 6_291_456
_INVOKE: Final = re.compile(r"/endpoints/([^/]+)/(invocations|invocations-response-stream)")
_FAULTS: Final = re.compile(r"/faults/([^/]+)")
_FORWARDED: Final = (
    "Content-Type",
    "Accept",
    "X-Amzn-SageMaker-Custom-Attributes",
    "X-Amzn-SageMaker-Inference-Id",
    "X-Amzn-SageMaker-Session-Id",
)
_FAULT_LIST: Final = TypeAdapter(list[Fault])
_REFUSALS: Final[Mapping[str, tuple[int, str, str | None]]] = {
    "throttled": (400, "ThrottlingException", None),
    "not_ready": (429, "ModelNotReadyException", "The model is not ready to serve inference requests."),
    "no_capacity": (
        400,
        "ValidationError",
        "Inference Component has no capacity to process this request. ApplicationAutoScaling may be in-progress "
        "(if configured) or try to increase the capacity by invoking UpdateInferenceComponentRuntimeConfig API.",
    ),
    "unavailable": (503, "ServiceUnavailable", "The service is currently unavailable."),
    "internal": (500, "InternalFailure", "An internal failure occurred."),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One invocation as it arrived; header names are lower case."""

    endpoint: str
    operation: str
    headers: Mapping[str, str]
    body: bytes


class SageMakerRuntime:
    """The running stand-in. ``containers`` maps an endpoint's name to the URL its requests are posted to, with
    ``headers`` added."""

    def __init__(self, containers: Mapping[str, str], headers: Mapping[str, str] | None = None) -> None:
        self.containers = dict(containers)
        self.headers = dict(headers or {})
        self.faults = FaultScript()
        self.call_count: Counter[str] = Counter()
        self.recent_calls: deque[Call] = deque(maxlen=64)
        self.pool = urllib3.PoolManager(num_pools=8, maxsize=64)
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self))
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """What ``AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME`` is set to."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> SageMakerRuntime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening, and hang up on every caller; a second time does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()
        self.pool.clear()

    def record(self, call: Call) -> Fault:
        """Note a call and take its fault from the script."""
        self.call_count[call.endpoint] += 1
        self.recent_calls.append(call)
        return self.faults.take(call.endpoint)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *arguments: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End the connections whose calls are still in progress."""
        for connection in tuple(self._open):
            with suppress(OSError):  # it may just have ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hangs up is nothing to report."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, runtime: SageMakerRuntime, *arguments: Any) -> None:
        self._runtime = runtime
        super().__init__(*arguments)

    def log_message(self, format: str, *args: Any) -> None:
        """The service under test does the logging."""

    def do_PUT(self) -> None:
        match = _FAULTS.fullmatch(self.path)
        body = self._body()
        if match is None or unquote(match[1]) not in self._runtime.containers:
            return self._json(404, {"message": f"no such endpoint; there are {sorted(self._runtime.containers)}"})
        try:
            faults = _FAULT_LIST.validate_json(body)
        except ValidationError as error:
            return self._json(400, {"message": str(error)})
        self._runtime.faults.replace(unquote(match[1]), faults)
        return self._json(200, {"faults": len(faults)})

    def do_POST(self) -> None:
        match = _INVOKE.fullmatch(self.path)
        body = self._body()
        if match is None:
            return self._refuse(404, "UnknownOperationException", "unknown operation")
        endpoint, operation = unquote(match[1]), match[2]
        call = Call(endpoint, operation, {name.lower(): value for name, value in self.headers.items()}, body)
        if endpoint not in self._runtime.containers:
            message = f"Endpoint {endpoint} of account 123456789012 not found."
            return self._refuse(400, "ValidationError", message)
        fault = self._runtime.record(call)
        if fault.refusal is not None:
            return self._scripted_refusal(fault.refusal)
        if len(body) > MAX_BODY_BYTES:
            return self._refuse(413, "RequestEntityTooLarge", "Request body is larger than the limit.")
        return self._invoke(call, fault)

    def _invoke(self, call: Call, fault: Fault) -> None:
        accept = call.headers.get("x-amzn-sagemaker-accept") or call.headers.get("accept")
        headers = {name: self.headers[name] for name in _FORWARDED if name in self.headers} | self._runtime.headers
        if accept:
            headers["Accept"] = accept
        url = self._runtime.containers[call.endpoint]
        try:
            reply = self._runtime.pool.request(
                "POST", url, body=call.body, headers=headers, preload_content=False, retries=False, timeout=600
            )
        except urllib3.exceptions.HTTPError:  # no container behind the endpoint
            return self._refuse(*_REFUSALS["unavailable"])
        try:
            if reply.status >= 400:
                self._model_error(reply.status, reply.read(2048, decode_content=True).decode(errors="replace"))
            elif call.operation == "invocations":
                self._answer(reply.headers.get("Content-Type", ""), reply.read())
            else:
                self._stream(reply, fault)
        finally:
            reply.close()

    def _answer(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("X-Amzn-Invoked-Production-Variant", VARIANT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, reply: urllib3.BaseHTTPResponse, fault: Fault) -> None:
        self.send_response(200)
        self.send_header("Content-Type", event_stream.MEDIA_TYPE)
        self.send_header("X-Amzn-SageMaker-Content-Type", reply.headers.get("Content-Type", ""))
        self.send_header("X-Amzn-Invoked-Production-Variant", VARIANT)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in _parts(reply, fault):
            if fault.delay_ms:
                time.sleep(fault.delay_ms / 1000)
            self._chunk(event_stream.payload_part(part))
        if fault.cut_after is not None:
            self.close_connection = True  # no last chunk: the reader sees a broken transfer
            return
        if fault.exception_after is not None:
            fields = {"Message": "The stream was interrupted.", "ErrorCode": fault.exception_code}
            self._chunk(event_stream.exception("ModelStreamError", fields))
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _scripted_refusal(self, refusal: Refusal) -> None:
        if refusal.kind == "model_error":
            return self._model_error(refusal.status, refusal.message)
        return self._refuse(*_REFUSALS[refusal.kind])

    def _model_error(self, status: int, message: str) -> None:
        """The container's own failure, wrapped as SageMaker wraps it."""
        side = "client" if status < 500 else "server"
        fields = {
            "Message": f'Received {side} error ({status}) from primary with message "{message[:1024]}".',
            "OriginalStatusCode": status,
            "OriginalMessage": message[:2048],
            "LogStreamArn": "arn:aws:logs:us-east-1:123456789012:log-group:/aws/sagemaker/Endpoints/local",
        }
        self._json(424, fields, "ModelError")

    def _refuse(self, status: int, kind: str, message: str | None) -> None:
        self._json(status, {"message": message}, kind)

    def _json(self, status: int, fields: Mapping[str, Any], kind: str | None = None) -> None:
        body = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if kind is not None:
            self.send_header("x-amzn-ErrorType", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))


def _parts(reply: urllib3.BaseHTTPResponse, fault: Fault) -> Iterator[bytes]:
    """The container's bytes as they come, cut where the fault says, ended where it says."""
    limit = fault.kept_bytes
    sent = 0
    for data in reply.stream(65536, decode_content=True):
        kept = data if limit is None else data[: limit - sent]
        size = fault.split_every or max(len(kept), 1)
        for start in range(0, len(kept), size):
            yield kept[start : start + size]
        sent += len(kept)
        if limit is not None and sent >= limit:
            return
