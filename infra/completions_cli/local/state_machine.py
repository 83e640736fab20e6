"""Step Functions on a loopback port: executions of the template's state machine, by the definition that is deployed.

``StartExecution``, ``DescribeExecution`` and ``StopExecution`` as boto3 speaks them (JSON 1.0). A task's function is
called in this process, and fails as it does behind Lambda: its exception's name is the error's.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Final

from completions.observability import logger
from completions_cli.local.pipeline_template import ACCOUNT, REGION
from completions_cli.local.state_language import Clockwork, Machine, StateError, StoppedError
from completions_cli.local.template import Resolver, TemplateError, load_template
from completions_cli.local.triggers import Target, function_name, functions

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_TARGET: Final = "AWSStepFunctions."
_MACHINE: Final = "AWS::Serverless::StateMachine"
_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class StateMachine:
    """One of the template's; ``functions`` are those its tasks call, by ARN."""

    name: str
    definition: Mapping[str, Any]
    functions: Mapping[str, Target]

    @property
    def arn(self) -> str:
        return machine_arn(self.name)


def machine_arn(name: str) -> str:
    """A state machine's ARN by its logical id."""
    return f"arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:{name}"


def read_state_machines(template: Path) -> list[StateMachine]:
    """The template's, their definitions filled in. Raises ``TemplateError``."""
    resources = Resolver(load_template(template), {}).resources()
    machines = {name: one["Properties"] for name, one in resources.items() if one["Type"] == _MACHINE}
    targets = functions(template) if machines else {}
    return [_machine(name, properties, template.parent, targets) for name, properties in machines.items()]


def _machine(name: str, properties: Mapping[str, Any], folder: Path, targets: Mapping[str, Target]) -> StateMachine:
    path = folder / properties["DefinitionUri"]
    called: dict[str, Target] = {}
    values: dict[str, str] = {}
    for variable, value in properties.get("DefinitionSubstitutions", {}).items():
        if value == {"Ref": "AWS::Partition"}:
            values[variable] = "aws"
            continue
        target = targets.get(function_name(value))
        if target is None:
            raise TemplateError(f"{name}: {variable} is no function of this template")
        called[target.arn] = target
        values[variable] = target.arn
    try:
        text = path.read_text()
        if unknown := sorted(set(_VARIABLE.findall(text)) - values.keys()):
            raise TemplateError(f"{path}: {name} has no substitution {', '.join(unknown)}")
        definition = json.loads(_VARIABLE.sub(lambda match: values[match[1]], text))
    except (OSError, ValueError) as error:
        raise TemplateError(f"{path}: {error}") from None
    return StateMachine(name, definition, called)


class LocalServices:
    """What a machine's states do: functions of this process, objects of S3. The client is made when it is needed."""

    def __init__(self, targets: Mapping[str, Target], make_s3: Callable[[], S3Client]) -> None:
        self._calls = {arn: target.when_called() for arn, target in targets.items()}
        self._make_s3 = make_s3

    def invoke(self, function_arn: str, data: Any) -> Any:
        call = self._calls.get(function_arn)
        if call is None:
            raise StateError("Lambda.ResourceNotFoundException", f"Function not found: {function_arn}")
        try:
            return json.loads(json.dumps(call(json.loads(json.dumps(data)))))
        except Exception as error:  # noqa: BLE001 - whatever a function raises
            name = type(error).__name__
            logger.warning("function_failed", function=function_arn.rpartition(":")[2], error=name)
            raise StateError(name, json.dumps({"errorMessage": str(error), "errorType": name})) from None

    def read_lines(self, bucket: str, key: str) -> Sequence[Any]:
        try:
            content = self._make_s3().get_object(Bucket=bucket, Key=key)["Body"].read()
            return [json.loads(line) for line in content.splitlines() if line.strip()]
        except Exception as error:  # noqa: BLE001 - an object that is not there, or is not JSON lines
            raise StateError("States.ItemReaderFailed", f"s3://{bucket}/{key}: {error}") from None

    def write_results(self, bucket: str, prefix: str, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
        folder = f"{prefix.rstrip('/')}/{uuid.uuid4()}".lstrip("/")
        s3 = self._make_s3()
        files: dict[str, list[dict[str, Any]]] = {"FAILED": [], "PENDING": [], "SUCCEEDED": []}
        try:
            for status, records in results.items():
                if records:
                    key, content = f"{folder}/{status}_0.json", json.dumps(list(records)).encode()
                    s3.put_object(Bucket=bucket, Key=key, Body=content)
                    files[status].append({"Key": key, "Size": len(content)})
            manifest = json.dumps({"DestinationBucket": bucket, "MapRunArn": "", "ResultFiles": files}).encode()
            s3.put_object(Bucket=bucket, Key=f"{folder}/manifest.json", Body=manifest)
        except Exception as error:  # noqa: BLE001 - S3's refusal, or its absence
            raise StateError("States.ResultWriterFailed", f"s3://{bucket}/{folder}: {error}") from None
        return f"{folder}/manifest.json"


@dataclass(slots=True)
class Execution:
    """One run. ``outcome`` holds the output, or error and cause, once it has ended."""

    arn: str
    machine: StateMachine
    name: str
    text: str
    started: float = field(default_factory=time.time)
    status: str = "RUNNING"
    stopped: float | None = None
    outcome: Mapping[str, str] = field(default_factory=dict)
    stop: Event = field(default_factory=Event)

    def described(self) -> dict[str, Any]:
        """As ``DescribeExecution`` tells it."""
        told: dict[str, Any] = {
            "executionArn": self.arn,
            "stateMachineArn": self.machine.arn,
            "name": self.name,
            "status": self.status,
            "startDate": self.started,
            "input": self.text,
            "inputDetails": {"included": True},
            **self.outcome,
        }
        return told if self.stopped is None else told | {"stopDate": self.stopped}


class RefusedError(Exception):
    """The service answers an error: its code and message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class StateMachines:
    """The service: machines, and their executions by ARN. ``retry_factor`` shortens the waits between attempts."""

    def __init__(
        self, machines: Sequence[StateMachine], make_s3: Callable[[], S3Client], *, retry_factor: float
    ) -> None:
        self._machines = {
            one.arn: (one, Machine(one.definition, LocalServices(one.functions, make_s3))) for one in machines
        }
        self._executions: dict[str, Execution] = {}
        self._retry_factor = retry_factor
        self._lock = Lock()
        self._operations: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
            "StartExecution": self._start,
            "DescribeExecution": lambda body: self._found(body).described(),
            "StopExecution": self._stop,
        }

    def answer(self, operation: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """One call's reply. Raises ``RefusedError``."""
        known = self._operations.get(operation)
        if known is None:
            names = ", ".join(self._operations)
            raise RefusedError("UnknownOperationException", f"The local stack does not know {operation}, but {names}.")
        return known(body)

    def stop(self) -> None:
        """End every execution as soon as its function returns; nobody waits for that."""
        with self._lock:
            for execution in self._executions.values():
                execution.stop.set()

    def _start(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        arn = body.get("stateMachineArn", "")
        if arn not in self._machines:
            raise RefusedError("StateMachineDoesNotExist", f"State Machine Does Not Exist: '{arn}'")
        machine, runner = self._machines[arn]
        name, text = body.get("name") or str(uuid.uuid4()), body.get("input", "{}")
        try:
            data = json.loads(text)
        except ValueError as error:
            raise RefusedError("InvalidExecutionInput", f"Invalid State Machine Execution Input: '{error}'") from None
        arn = f"arn:aws:states:{REGION}:{ACCOUNT}:execution:{machine.name}:{name}"
        with self._lock:
            known = self._executions.get(arn)
            if known is not None:
                if known.status != "RUNNING" or known.text != text:
                    raise RefusedError("ExecutionAlreadyExists", f"Execution Already Exists: '{arn}'")
                return {"executionArn": arn, "startDate": known.started}
            execution = self._executions[arn] = Execution(arn, machine, name, text)
        Thread(target=self._run, args=(execution, runner, data), name=name, daemon=True).start()
        return {"executionArn": arn, "startDate": execution.started}

    def _stop(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        execution = self._found(body)
        told = {name: body[name] for name in ("error", "cause") if name in body}
        self._end(execution, "ABORTED", told)
        execution.stop.set()
        return {"stopDate": execution.stopped}

    def _found(self, body: Mapping[str, Any]) -> Execution:
        arn = body.get("executionArn", "")
        with self._lock:
            if arn not in self._executions:
                raise RefusedError("ExecutionDoesNotExist", f"Execution Does Not Exist: '{arn}'")
            return self._executions[arn]

    def _run(self, execution: Execution, runner: Machine, data: Any) -> None:
        context = {
            "Execution": {"Id": execution.arn, "Name": execution.name, "Input": data, "StartTime": execution.started},
            "StateMachine": {"Id": execution.machine.arn, "Name": execution.machine.name},
        }
        try:
            output = runner.run(data, context, Clockwork(execution.stop, self._retry_factor))
        except StoppedError:
            self._end(execution, "ABORTED", {})
        except Exception as error:  # noqa: BLE001 - a fault of the interpreter's own ends an execution, too
            failure = error if isinstance(error, StateError) else StateError("States.Runtime", repr(error))
            self._end(execution, "FAILED", {"error": failure.error, "cause": failure.cause})
            # said at any level: who started it has long gone
            logger.critical("execution_failed", execution=execution.arn, error=failure.error)
        else:
            self._end(execution, "SUCCEEDED", {"output": json.dumps(output)})

    def _end(self, execution: Execution, status: str, outcome: Mapping[str, str]) -> None:
        with self._lock:
            if execution.status == "RUNNING":
                execution.outcome, execution.stopped = outcome, time.time()
                execution.status = status


@contextmanager
def serving_state_machines(service: StateMachines) -> Iterator[str]:
    """The service on a free loopback port, until this ends; its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, service))
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        service.stop()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, service: StateMachines, *args: Any) -> None:
        self._service = service
        super().__init__(*args)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        operation = self.headers.get("X-Amz-Target", "").removeprefix(_TARGET)
        try:
            self._reply(200, self._service.answer(operation, json.loads(body or b"{}")))
        except RefusedError as error:
            self._reply(400, {"__type": error.code, "message": str(error)})

    def _reply(self, status: int, fields: Mapping[str, Any]) -> None:
        content = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing: a request is no news."""
