"""A function in its streamed form, as Lambda starts it: the adapter as an extension, and the function's own process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adapter.runtime_api import RuntimeAPI
from built_artifact import PYTHON, build_for_this_machine
from completions_cli.local.server import bind
from completions_cli.local.stack import LocalStack
from completions_cli.local.template import Function, read_gateway


@dataclass
class Environment:
    """An execution environment. ``log`` is where both of its processes write."""

    api: RuntimeAPI
    adapter_binary: str
    variables: dict[str, str]
    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_adapter(self) -> subprocess.Popen[bytes]:
        """As Lambda starts what it finds in a layer's ``extensions/``."""
        return self._start(self.adapter_binary)

    def start_app(self) -> subprocess.Popen[bytes]:
        """As the layer's ``bootstrap`` does in place of the runtime: the handler is a program in the task root."""
        return self._start(str(Path(self.variables["LAMBDA_TASK_ROOT"], self.variables["_HANDLER"])))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _start(self, program: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [program], cwd=self.variables["LAMBDA_TASK_ROOT"], env=self.variables, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process


@pytest.fixture(scope="session")
def adapter_binary() -> str:
    """Lambda Web Adapter, which ``make adapter`` builds."""
    binary = os.environ["LAMBDA_ADAPTER"]
    if not os.access(binary, os.X_OK):
        pytest.fail(f"LAMBDA_ADAPTER: {binary} is no program; `make adapter` builds one")
    return binary


@pytest.fixture(scope="session")
def task_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact, for this machine."""
    return build_for_this_machine(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def python_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``PATH`` in which ``python3`` is the interpreter without the tests' own packages."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "python3").symlink_to(PYTHON)
    return folder


class Functions:
    """The streamed functions of the template, each started when it is first asked for."""

    def __init__(self, cleanup: ExitStack, binary: str, shared: Mapping[str, str], template: Path, folder: Path):
        self._cleanup = cleanup
        self._binary = binary
        self._shared = shared
        self._routes = read_gateway(template, {"ResponseMode": "streamed"}).routes
        self._folder = folder
        self._started: dict[str, Environment] = {}

    def behind(self, path: str) -> Environment:
        """The running environment of the function that answers ``POST path``."""
        (function,) = {
            route.function.name: route.function
            for route in self._routes
            if (route.method, route.path) == ("POST", path)
        }.values()
        if function.name not in self._started:
            environment = self._cleanup.enter_context(self.environment(function))
            environment.start_adapter()
            environment.start_app()
            assert environment.api.polled.wait(30), environment.log.read_text()
            self._started[function.name] = environment
        return self._started[function.name]

    @contextmanager
    def environment(self, function: Function | None = None) -> Iterator[Environment]:
        """One in which nothing runs yet; without ``function``, of OpenAI's completions."""
        chosen = function or next(route.function for route in self._routes if route.path == "/v1/completions")
        listener = bind(0)
        port = listener.getsockname()[1]
        listener.close()
        with RuntimeAPI() as api:
            variables = {
                **chosen.variables,
                **self._shared,
                "AWS_LAMBDA_RUNTIME_API": api.address,
                "AWS_LAMBDA_FUNCTION_NAME": chosen.name,
                "_HANDLER": chosen.handler,
                "AWS_LWA_PORT": str(port),
            }
            environment = Environment(api, self._binary, variables, self._folder / f"{chosen.name}-{port}.log")
            try:
                yield environment
            finally:
                environment.stop()


@pytest.fixture(scope="session")
def functions(
    stack: LocalStack,
    project_root: Path,
    adapter_binary: str,
    task_root: Path,
    python_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Functions]:
    """Every streamed function, against the tests' stack."""
    shared = {
        **stack.environment,
        "PATH": f"{python_folder}:/usr/bin:/bin",
        "LAMBDA_TASK_ROOT": str(task_root),
        "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "512",
        "AWS_LAMBDA_LOG_GROUP_NAME": "/aws/lambda/function",
        "AWS_LAMBDA_LOG_STREAM_NAME": "2026/11/29/[$LATEST]0",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with ExitStack() as cleanup:
        folder = tmp_path_factory.mktemp("logs")
        yield Functions(cleanup, adapter_binary, shared, project_root / "template.yaml", folder)
