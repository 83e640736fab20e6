"""A SageMaker runtime that boto3 cannot tell from the real one, in front of model containers on this machine.

It answers ``InvokeEndpoint``, ``InvokeEndpointWithResponseStream`` and, for endpoints with a queue,
``InvokeEndpointAsync``; it hands the body and SageMaker's own headers to the container (and nothing else, as SageMaker
does), frames what comes back, and misbehaves as scripted. Source: the service model of ``sagemaker-runtime`` and the
observed wire.

``PUT /faults/{endpoint}`` with a JSON list of ``Fault`` sets an endpoint's script.
"""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from threading import Thread
from typing import Any, Final
from urllib.parse import unquote

import urllib3
from pydantic import TypeAdapter, ValidationError

from completions_cli.local import async_inference, event_stream
from completions_cli.local.faults import Fault, FaultScript, Refusal, Replacement
from completions_cli.local.refusals import refusal_reply

VARIANT: Final = "AllTraffic"
MAX_BODY_BYTES: Final = 6_291_456
_INVOKE: Final = re.compile(r"/endpoints/([^/]+)/(invocations|invocations-response-stream|async-invocations)")
_FAULTS: Final = re.compile(r"/faults/([^/]+)")
_FORWARDED: Final = (
    "Content-Type",
    "Accept",
    "X-Amzn-SageMaker-Custom-Attributes",
    "X-Amzn-SageMaker-Inference-Id",
    "X-Amzn-SageMaker-Session-Id",
)
_FAULT_LIST: Final = TypeAdapter(list[Fault])


@dataclass(frozen=True, slots=True)
class Call:
    """One invocation as it arrived; header names are lower case."""

    endpoint: str
    operation: str
    headers: Mapping[str, str]
    body: bytes


class SageMakerRuntime:
    """The running stand-in. ``containers`` maps an endpoint's name to the URL its requests are posted to, with
    ``headers`` added; those of ``queues`` are asynchronous, and no other.

    ``call_count`` counts an endpoint's calls, ``hang_ups`` those whose caller left before the end."""

    def __init__(self, containers: Mapping[str, str], headers: Mapping[str, str] | None = None) -> None:
        self.containers = dict(containers)
        self.headers = dict(headers or {})
        self.queues: dict[str, async_inference.AsyncInference] = {}
        self.faults = FaultScript()
        self.call_count: Counter[str] = Counter()
        self.hang_ups: Counter[str] = Counter()
        self._stopping = False
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
        self._stopping = True
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()
        self.pool.clear()

    def record(self, call: Call) -> Fault:
        """Note a call and take its fault from the script."""
        self.call_count[call.endpoint] += 1
        self.recent_calls.append(call)
        return self.faults.take(call.endpoint)

    def note_hang_up(self, endpoint: str) -> None:
        """Count a caller who left before its answer was complete."""
        if not self._stopping:
            self.hang_ups[endpoint] += 1


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
            return self._refuse(*refusal_reply("not_found", endpoint))
        fault = self._runtime.record(call)
        try:
            return self._carry_out(call, fault)
        except ConnectionError:
            self._runtime.note_hang_up(endpoint)
            raise

    def _carry_out(self, call: Call, fault: Fault) -> None:
        self._wait(fault.head_delay_ms)
        if call.operation == async_inference.OPERATION and (
            fault.refusal is None or fault.refusal.kind == "model_error"
        ):
            return self._submit(call, fault)
        if fault.refusal is not None:
            return self._scripted_refusal(call.endpoint, fault.refusal)
        if len(call.body) > MAX_BODY_BYTES:
            return self._refuse(413, "RequestEntityTooLarge", "Request body is larger than the limit.")
        if fault.replacement is not None:
            return self._replace(call, fault, fault.replacement)
        return self._invoke(call, fault)

    def _submit(self, call: Call, fault: Fault) -> None:
        queue = self._runtime.queues.get(call.endpoint)
        if queue is None:
            return self._refuse(400, "ValidationError", f"Endpoint {call.endpoint} is not asynchronous.")
        url = self._runtime.containers[call.endpoint]
        try:
            accepted = queue.submit(url, call.headers, call.body, self._runtime.headers, fault)
        except async_inference.InvalidInvocationError as error:
            return self._refuse(400, "ValidationError", str(error))
        return self._json(202, {"InferenceId": accepted.inference_id}, headers=accepted.headers)

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
            return self._refuse(*refusal_reply("unavailable", call.endpoint))
        try:
            if reply.status >= 400:
                self._model_error(reply.status, reply.read(2048, decode_content=True).decode(errors="replace"))
            elif call.operation == "invocations":
                self._answer(reply.headers.get("Content-Type", ""), reply.read())
            else:
                self._stream(reply.headers.get("Content-Type", ""), reply.stream(65536, decode_content=True), fault)
        finally:
            reply.close()

    def _answer(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("X-Amzn-Invoked-Production-Variant", VARIANT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _replace(self, call: Call, fault: Fault, replacement: Replacement) -> None:
        if call.operation == "invocations":
            return self._answer(replacement.content_type, replacement.body * replacement.repeat)
        return self._stream(replacement.content_type, repeat(replacement.body, replacement.repeat), fault)

    def _stream(self, content_type: str, data: Iterable[bytes], fault: Fault) -> None:
        self.send_response(200)
        self.send_header("Content-Type", event_stream.MEDIA_TYPE)
        self.send_header("X-Amzn-SageMaker-Content-Type", content_type)
        self.send_header("X-Amzn-Invoked-Production-Variant", VARIANT)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in fault.parts(data, self._wait):
            self._chunk(event_stream.payload_part(part))
        if fault.cut_after is not None:
            self.close_connection = True  # no last chunk: the reader sees a broken transfer
            return
        if fault.exception_after is not None:
            fields = {"Message": "The stream was interrupted."}
            if fault.exception_kind == "ModelStreamError":
                fields["ErrorCode"] = fault.exception_code
            self._chunk(event_stream.exception(fault.exception_kind, fields))
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _wait(self, milliseconds: int) -> None:
        """Do nothing for so long. Raises ``ConnectionAbortedError`` as soon as the caller is gone."""
        if milliseconds == 0:
            return
        deadline = time.monotonic() + milliseconds / 1000
        readable, _, _ = select.select([self.connection], [], [], milliseconds / 1000)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError
        time.sleep(max(0.0, deadline - time.monotonic()))

    def _scripted_refusal(self, endpoint: str, refusal: Refusal) -> None:
        if refusal.kind == "connection_reset":
            self.close_connection = True
            return None
        if refusal.kind == "model_error":
            return self._model_error(refusal.status, refusal.message)
        return self._refuse(*refusal_reply(refusal.kind, endpoint))

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

    def _json(
        self,
        status: int,
        fields: Mapping[str, Any],
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        body = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if kind is not None:
            self.send_header("x-amzn-ErrorType", kind)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))
