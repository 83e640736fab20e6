"""The real `sam local invoke` against the local stack. It needs a Docker engine and the runtime's base image."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from completions_cli.local.environment import sam_env_vars
from completions_cli.local.stack import LocalStack
from ledger_reader import LedgerReader

pytestmark = pytest.mark.skipif(
    "SAM_LOCAL_READY" not in os.environ,
    reason="needs a Docker engine with the Lambda base image; `make sam-local` runs it where both are there",
)
# a prepared engine has the image, and names the address under which containers reach this machine
GATEWAY = os.environ.get("SAM_LOCAL_GATEWAY")
PREPARED = ("--skip-pull-image", "--add-host", f"host.docker.internal:{GATEWAY}") if GATEWAY else ()
SAM = str(Path(sys.executable).with_name("sam"))
ARCHITECTURE = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())


def sam(root: Path, *arguments: str) -> str:
    """The command's standard output."""
    environment = {**os.environ, "SAM_CLI_TELEMETRY": "0", "ARCHITECTURE": ARCHITECTURE}
    done = subprocess.run(
        [SAM, *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    sam(project_root, "build", "--build-dir", str(folder), "--parameter-overrides", f"Architecture={ARCHITECTURE}")
    return folder


@pytest.mark.parametrize(
    ("function", "event"),
    [
        ("OpenAICompletionsFunction", "openai_completions.json"),
        ("OpenAICompletionsFunction", "openai_completions_stream.json"),
        ("OpenAIModelsFunction", "openai_models.json"),
        ("OpenAIModelsFunction", "openai_models_retrieve.json"),
        ("HealthFunction", "health.json"),
    ],
)
def test_sam_local_invokes_the_function_on_its_event(
    stack: LocalStack, ledger: LedgerReader, project_root: Path, built: Path, tmp_path: Path, function: str, event: str
) -> None:
    request = json.loads((project_root / "events" / event).read_text())
    request["requestContext"]["requestId"] = f"sam-{event}"
    (tmp_path / "event.json").write_text(json.dumps(request))
    (tmp_path / "env.json").write_text(json.dumps(sam_env_vars(stack.environment)))

    output = sam(
        project_root,
        *("local", "invoke", function, "--template", str(built / "template.yaml")),
        *("--event", str(tmp_path / "event.json"), "--env-vars", str(tmp_path / "env.json")),
        *("--parameter-overrides", f"ResponseMode=buffered Architecture={ARCHITECTURE}"),
        *PREPARED,
    )
    reply = json.loads(output.strip().splitlines()[-1])

    assert reply["statusCode"] == 200
    if "completions" in event:
        record = ledger.settled(f"sam-{event}")
        assert record.completion_tokens == 24
        assert record.streamed == ("stream" in event)
