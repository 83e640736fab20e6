"""The running local stack's environment, left in a file for the other commands and for ``sam local``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

FOLDER: Final = Path(".local")
ENVIRONMENT_FILE: Final = FOLDER / "env.json"
SAM_ENV_VARS_FILE: Final = FOLDER / "sam-env.json"
_CONTAINER_HOST: Final = "host.docker.internal"


class FolderTakenError(Exception):
    """Another local stack runs from this folder."""


class NoStackError(Exception):
    """No local stack runs from this folder."""


def require_free_folder() -> None:
    """Raises ``FolderTakenError``; what a killed stack left behind does not count."""
    if (pid := _running_pid()) is not None:
        raise FolderTakenError(f"another local stack (process {pid}) runs from this folder; stop it first")


@contextmanager
def published_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """While this lasts: ``env.json`` for ``--local``, and ``sam-env.json`` for ``sam local invoke --env-vars``."""
    FOLDER.mkdir(exist_ok=True)
    ENVIRONMENT_FILE.write_text(json.dumps({"pid": os.getpid(), "environment": dict(environment)}, indent=2) + "\n")
    SAM_ENV_VARS_FILE.write_text(json.dumps(sam_env_vars(environment), indent=2) + "\n")
    try:
        yield
    finally:
        ENVIRONMENT_FILE.unlink(missing_ok=True)
        SAM_ENV_VARS_FILE.unlink(missing_ok=True)


def sam_env_vars(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The environment for every function in a container, where this machine has another name."""
    return {"Parameters": {name: value.replace("127.0.0.1", _CONTAINER_HOST) for name, value in environment.items()}}


def use_local_environment() -> None:
    """Take the running stack's environment for this process. Raises ``NoStackError``."""
    if _running_pid() is None:
        raise NoStackError("no local stack runs from this folder; start one with `make serve`")
    os.environ.update(json.loads(ENVIRONMENT_FILE.read_text())["environment"])


def _running_pid() -> int | None:
    try:
        pid: int = json.loads(ENVIRONMENT_FILE.read_text())["pid"]
        os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return pid
