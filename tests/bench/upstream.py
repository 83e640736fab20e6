"""A process of its own for what the benchmark calls: the SageMaker stand-in over canned answers, and DynamoDB.

Prints the two URLs and waits for its standard input to end. An answer has as many records as ``max_tokens`` asks for.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import boto3

from completions_cli.local.sagemaker_runtime import SageMakerRuntime
from completions_cli.local.tables import create_tables, moto_dynamodb

RECORD = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}


def answer(tokens: int) -> bytes:
    """A vLLM stream of ``tokens`` records, usage on each, as one block of bytes."""
    lines = []
    for number in range(1, tokens + 1):
        finish = "length" if number == tokens else None
        choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": finish, "stop_reason": None}
        usage = {"prompt_tokens": 8, "completion_tokens": number, "total_tokens": 8 + number}
        lines.append(f"data: {json.dumps({**RECORD, 'choices': [choice], 'usage': usage})}\n\n")
    usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
    lines.append(f"data: {json.dumps({**RECORD, 'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n")
    return "".join(lines).encode()


class CannedContainer(BaseHTTPRequestHandler):
    """One HTTP chunk a record, as a container that generates would write them, but without the wait."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        records = answer(body["max_tokens"]).split(b"\n\n")[:-1]
        self.wfile.write(b"".join(b"%x\r\n%s\n\n\r\n" % (len(record) + 2, record) for record in records) + b"0\r\n\r\n")


def main() -> None:
    """Serve until the parent closes our standard input."""
    container = ThreadingHTTPServer(("127.0.0.1", 0), CannedContainer)
    Thread(target=container.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{container.server_port}/invocations"
    with SageMakerRuntime({"bench": url}) as sagemaker, moto_dynamodb() as dynamodb:
        create_tables(boto3.client("dynamodb", endpoint_url=dynamodb), Path("infra/tables.yaml"))
        print(json.dumps({"sagemaker": sagemaker.url, "dynamodb": dynamodb}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
