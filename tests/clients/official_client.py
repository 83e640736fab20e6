"""Official clients that the project does not depend on, each run as a script in an environment of its own.

``requirements/`` holds one fully resolved file a client, the only place with versions. Its first lines name the client
and the command that renews the file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# How uv says that the index is out of reach; whatever else keeps a client from being installed is a failure.
UNREACHABLE = ("error sending request", "client error (connect)", "http status server error", "network was disabled")
# Not for the client to see: what leads to the project's own packages, or to another service and its key.
FOREIGN = ("AWS_", "HF_", "LANGCHAIN_", "LANGSMITH_", "LLM_ENGINE_", "OPENAI_", "PYTHON", "SCALE_", "VIRTUAL_ENV")


class OfficialClient:
    """One client in its environment, which is in uv's cache from the first time on."""

    def __init__(self, name: str) -> None:
        """``name`` is that of its requirements and of its script. Skips the test where the index is out of reach."""
        installed = _install(name)
        if installed.returncode != 0:
            reason = f"the {name} client cannot be installed: {installed.stderr.strip()}"
            if not any(sign in reason.lower() for sign in UNREACHABLE):
                raise AssertionError(reason)
            pytest.skip(reason)
        self._command = [installed.stdout.strip(), str(HERE / "scripts" / f"run_{name}.py")]

    def report(self, environment: Mapping[str, str], *arguments: str) -> Any:
        """The JSON document that the client's script prints, seeing ``environment``."""
        run = _run([*self._command, *arguments], 300, environment)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)


@cache
def _install(name: str) -> subprocess.CompletedProcess[str]:
    """Has the environment's interpreter as its output. Asking uv for every run would cost a resolution each time."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not on the path")
    requirements = str(HERE / "requirements" / f"{name}.txt")
    uv = ["uv", "tool", "run", "--quiet", "--python", sys.executable, "--with-requirements", requirements]
    return _run([*uv, "python", "-c", "import sys; print(sys.executable)"], 600)


def _run(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return subprocess.run(
        command,
        cwd=HERE,
        env={**outer, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
