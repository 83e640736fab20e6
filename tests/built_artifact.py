"""The tree that every function is deployed as, made by the same target that ``sam build`` calls."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
MACHINE: Final = {"x86_64": "x86_64", "aarch64": "arm64"}.get(platform.machine())
VERSION: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON: Final = str(getattr(sys, "_base_executable", sys.executable))
"""The interpreter itself, which sees nothing of the virtual environment that the tests run in."""


def build(target: Path, architecture: str, version: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build into ``target``; what make said."""
    if shutil.which("uv") is None or shutil.which("make") is None:
        pytest.skip("the functions are built with make and uv, and one of them is missing")
    chosen = {"ARTIFACTS_DIR": str(target), "ARCHITECTURE": architecture, "PYTHON_VERSION": version, **variables}
    return subprocess.run(
        ["make", "build-AnyFunction"],
        cwd=ROOT / "functions",
        env={**os.environ, **chosen},
        capture_output=True,
        text=True,
        check=False,
    )


def build_for_this_machine(target: Path, **variables: str) -> Path:
    """``target``, holding what this machine's Python can run."""
    if MACHINE is None or sys.platform != "linux":
        pytest.skip("a function's wheels are for Linux on x86_64 and arm64")
    made = build(target, MACHINE, VERSION, **variables)
    assert made.returncode == 0, made.stdout + made.stderr
    return target
