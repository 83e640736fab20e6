"""What Lambda gets: the built tree for this machine, and an interpreter that sees nothing else.

The development environment would not do: what is installed in it for the tests is found and imported by botocore, too.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "completions-gateway" / "bench"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_MACHINES = {"x86_64": "x86_64", "aarch64": "arm64"}
_RUNTIME_CLIENT = ("awslambdaric", "simplejson", "snapshot_restore_py", "runtime_client*")


@dataclass(frozen=True, slots=True)
class Deployment:
    """``python`` is an interpreter without packages; ``runtime`` holds Lambda's runtime client alone."""

    python: Path
    tree: Path
    runtime: Path


@cache
def deployment() -> Deployment:
    """Built once a run; made anew only where the sources changed. Raises ``RuntimeError`` when it cannot be built."""
    machine = _MACHINES.get(platform.machine())
    if machine is None or sys.platform != "linux":
        raise RuntimeError("the functions' wheels are for Linux on x86_64 and arm64")
    CACHE.mkdir(parents=True, exist_ok=True)
    home = CACHE / f"python-{VERSION}"
    if not (home / "bin" / "python3").exists():
        _run(["uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(home)])
    folder = Path(_folder.name)
    base = str(getattr(sys, "_base_executable", sys.executable))
    _run(
        ["make", "--no-print-directory", "-C", str(ROOT / "functions"), "build-AnyFunction"],
        ARTIFACTS_DIR=str(folder / "tree"),
        ARCHITECTURE=machine,
        PYTHON_VERSION=VERSION,
        BYTECODE_PYTHON=base,
        TREES=str(CACHE / "trees"),
    )
    runtime = folder / "runtime"
    runtime.mkdir()
    site = next(Path(sys.prefix).glob("lib/python*/site-packages"))
    for pattern in _RUNTIME_CLIENT:
        for found in site.glob(pattern):
            (runtime / found.name).symlink_to(found)
    return Deployment(home / "bin" / "python3", folder / "tree", runtime)


_folder = tempfile.TemporaryDirectory(prefix="completions-bench-")


def _run(command: list[str], **variables: str) -> None:
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} said: {(done.stdout + done.stderr).strip()[-400:]}")
