"""The running local stack's environment, left in a file for the other commands and for ``sam local``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path(".local")
ENVIRONMENT_FILE: Final = FOLDER / "env.json"
SAM_ENV_VARS_FILE: Final = FOLDER / "sam-env.json"
_CONTAINER_HOST: Final = "host.docker.internal"


def write_environment(environment: Mapping[str, str]) -> None:
    """``env.json`` as it stands, and ``sam-env.json`` for ``sam local invoke --env-vars``."""
    FOLDER.mkdir(exist_ok=True)
    ENVIRONMENT_FILE.write_text(json.dumps(environment, indent=2) + "\n")
    SAM_ENV_VARS_FILE.write_text(json.dumps(sam_env_vars(environment), indent=2) + "\n")


def sam_env_vars(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The environment for every function in a container, where this machine has another name."""
    return {"Parameters": {name: value.replace("127.0.0.1", _CONTAINER_HOST) for name, value in environment.items()}}


def remove_environment() -> None:
    """Nothing runs any more."""
    ENVIRONMENT_FILE.unlink(missing_ok=True)
    SAM_ENV_VARS_FILE.unlink(missing_ok=True)


def use_local_environment() -> None:
    """Take the running stack's environment for this process. Raises ``FileNotFoundError`` when none runs."""
    os.environ.update(json.loads(ENVIRONMENT_FILE.read_text()))
