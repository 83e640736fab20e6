"""The benchmark's other processes: started, watched through /proc, and ended by what started them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployed import deployment
from pydantic import BaseModel

from completions import settings

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 90
AWS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
AT_ONCE = 64
"""As many as a managed instance's environment serves side by side."""


@dataclass(frozen=True, slots=True)
class Urls:
    """Where what is called stands."""

    sagemaker: str
    dynamodb: str

    @property
    def variables(self) -> dict[str, str]:
        """A function's environment."""
        return {
            **dict.fromkeys(required_variables(), "bench"),
            **AWS,
            "BATCH_STATE_MACHINE": "arn:aws:states:us-east-1:123456789012:stateMachine:bench",
            "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": self.sagemaker,
            "AWS_ENDPOINT_URL_DYNAMODB": self.dynamodb,
            "AWS_ENDPOINT_URL": self.dynamodb,  # nothing ever leaves this machine
            "REGISTRY_TABLE": "RegistryTable",
            "USAGE_TABLE": "UsageTable",
            "POWERTOOLS_SERVICE_NAME": "bench",
            "POWERTOOLS_LOG_LEVEL": "INFO",
        }


def required_variables() -> set[str]:
    """What some function does not start without."""
    kinds = [kind for kind in vars(settings).values() if isinstance(kind, type) and issubclass(kind, BaseModel)]
    fields = (field for kind in kinds for field in kind.model_fields.items())
    return {name.upper() for name, field in fields if field.is_required()}


def clean_environment() -> dict[str, str]:
    """This process's own, without what would change a function's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "POWERTOOLS_", "PYTHON"))}


@contextmanager
def silenced() -> Iterator[None]:
    """Log lines are written, as they are in a function, but to nowhere."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - a device
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def helper(script: str) -> Iterator[subprocess.Popen[str]]:
    """A script of this folder that ends with its standard input."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / script)],
        cwd=ROOT,
        env={**clean_environment(), **AWS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@contextmanager
def called() -> Iterator[Urls]:
    """The model endpoint and the tables."""
    with helper("standin.py") as standin, helper("tables.py") as tables:
        assert standin.stdout is not None
        assert tables.stdout is not None
        yield Urls(standin.stdout.readline().strip(), tables.stdout.readline().strip())


class LoadGenerator:
    """The third process: it asks, and says how long each answer took."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, **plan: Any) -> dict[str, Any]:
        """See ``load.py``. Raises ``RuntimeError`` when an answer was not what was asked for."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()
        told: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "the load generator died"}')
        if error := told.get("error"):
            raise RuntimeError(error)
        return told


@contextmanager
def load_generator() -> Iterator[LoadGenerator]:
    """One for as long as this lasts."""
    with helper("load.py") as process:
        yield LoadGenerator(process)


@dataclass(frozen=True, slots=True)
class Server:
    """A gateway that runs, its children included in every figure."""

    pid: int
    port: int
    ready_seconds: float
    ready_cpu_seconds: float

    def cpu_seconds(self) -> float:
        """Of user and system, of all threads."""
        return sum(_cpu_seconds(pid) for pid in tree(self.pid))

    def megabytes(self, field: str = "VmRSS") -> float:
        """``VmRSS`` is what is resident now, ``VmHWM`` the most there ever was."""
        return sum(_kilobytes(pid, field) for pid in tree(self.pid)) / 1024


@contextmanager
def server(command: Sequence[str], port: int, variables: Mapping[str, str], ready: str, log: Path) -> Iterator[Server]:
    """The command's process from when it answers at the path ``ready``. Raises ``RuntimeError`` when it never does."""
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**clean_environment(), **variables}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}{ready}", log)
        seconds = time.perf_counter() - started
        yield Server(process.pid, port, seconds, sum(_cpu_seconds(pid) for pid in tree(process.pid)))
    finally:
        for pid in reversed(tree(process.pid)):
            with _gone():
                os.kill(pid, 15)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def ours(app: str, urls: Urls, log: Path, **variables: str) -> Iterator[Server]:
    """This service as functions/run.sh starts it, from the tree that is deployed."""
    port = free_port()
    built = deployment()
    environment = {
        **urls.variables,
        "APP_MODULE": app,
        "LAMBDA_TASK_ROOT": str(built.tree),
        "AWS_LWA_PORT": str(port),
        "AWS_LAMBDA_MAX_CONCURRENCY": str(AT_ONCE),
        "PYTHONPATH": str(HERE),
        "PATH": f"{built.python.parent}{os.pathsep}{os.environ['PATH']}",
        **variables,
    }
    with server(["sh", str(built.tree / "run.sh")], port, environment, "/healthz", log) as running:
        yield running


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def tree(pid: int) -> list[int]:
    """The process and its children, theirs too, as far as they are alive."""
    children: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with _gone():
            children += [int(child) for child in tasks.read_text().split()]
    return [pid, *(found for child in children for found in tree(child))]


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:  # noqa: S310 - a loopback address of ours
                if reply.status < 500:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-600:]
                raise RuntimeError(f"{url} never answered; its log ends: {tail}") from None
            time.sleep(0.01)


def _cpu_seconds(pid: int) -> float:
    with _gone():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0


def _kilobytes(pid: int, field: str) -> int:
    with _gone():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(field + ":")), 0)
    return 0


@contextmanager
def _gone() -> Iterator[None]:
    """A process may end while it is looked at."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError):
        return
