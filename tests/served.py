"""``completions serve`` in a process of its own: a whole service that shares nothing with the tests' stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from completions_cli.local.tables import LOCAL_KEY

COMMAND = str(Path(sys.executable).with_name("completions"))


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "POWERTOOLS_"))}


@contextmanager
def serving(folder: Path, template: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and all it printed until it was ready."""
    process = subprocess.Popen(
        [COMMAND, "serve", "--port", "0", "--template", str(template), *options],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        printed = ""
        for line in process.stdout:
            printed += line
            if line.startswith("Ready"):
                break
        yield process, printed
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass(frozen=True)
class Served:
    """A service that is up. ``folder`` is where ``--local`` finds it, ``environment`` what its functions run under."""

    base_url: str
    folder: Path
    environment: Mapping[str, str]
    key: str = field(default=LOCAL_KEY, repr=False)


@contextmanager
def served(folder: Path, template: Path) -> Iterator[Served]:
    """A service until this ends, roll-ups and sweeper at work behind it, its model as fast as it can be."""
    with serving(folder, template, "--tokens-per-second", "0") as (_, printed):
        base_url = printed.partition("base URL")[2].split()[0].removesuffix("/v1")
        environment = json.loads((folder / ".local" / "env.json").read_text())["environment"]
        yield Served(base_url, folder, environment)
