"""Other gateways, each installed into a folder of its own under the cache, never beside the project.

Versions are pinned, so that a run can be repeated. What cannot be installed or started raises ``NotMeasuredError``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployed import CACHE
from processes import Server, Urls, free_port, server

LITELLM_VERSION, PORTKEY_VERSION = "1.108.7", "1.15.2"
INSTALL_SECONDS = 240
MASTER_KEY = "sk-bench"


class NotMeasuredError(Exception):
    """A contender that is not here; the message says why."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way to ask a gateway: where, as what model, with which headers besides."""

    name: str
    model: str
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    stream_model: str = ""
    """The model's name for streams, where that is another."""


def litellm_routes() -> list[Route]:
    """Its SageMaker provider (Text Generation Inference's body), and its OpenAI text completions."""
    headers = {"authorization": f"Bearer {MASTER_KEY}"}
    return [
        Route("LiteLLM, SageMaker", "sagemaker", headers=headers, stream_model="sagemaker-stream"),
        Route("LiteLLM, OpenAI", "openai", headers=headers),
    ]


def portkey_routes(urls: Urls) -> list[Route]:
    """It is told with each request where the model is."""
    headers = {
        "authorization": "Bearer none",
        "x-portkey-provider": "openai",
        "x-portkey-custom-host": f"{urls.sagemaker}/v1",
    }
    return [Route("Portkey, OpenAI", "bench", headers=headers)]


@contextmanager
def litellm(urls: Urls, log: Path) -> Iterator[Server]:
    """LiteLLM's proxy: one worker, no database. Raises ``NotMeasuredError``."""
    home = CACHE / f"litellm-{LITELLM_VERSION}"
    if not (home / "bin" / "litellm").exists():
        _install(["uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(home)], home)
        requirement = f"litellm[proxy]=={LITELLM_VERSION}"
        _install(["uv", "pip", "install", "--quiet", "--python", str(home / "bin" / "python"), requirement], home)
    port = free_port()
    config = home / f"config-{port}.yaml"
    config.write_text(json.dumps(_litellm_config(urls)))  # JSON is YAML
    command = [str(home / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    variables = {
        **urls.variables,
        "LITELLM_MASTER_KEY": MASTER_KEY,
        "LITELLM_TELEMETRY": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
    }
    try:
        with _started(command, port, variables, "/health/liveliness", log) as running:
            yield running
    finally:
        config.unlink(missing_ok=True)


def _litellm_config(urls: Urls) -> dict[str, Any]:
    endpoint = f"{urls.sagemaker}/endpoints/bench/invocations"

    def model(name: str, **params: Any) -> dict[str, Any]:
        return {"model_name": name, "litellm_params": params}

    aws = {"aws_access_key_id": "bench", "aws_secret_access_key": "bench", "aws_region_name": "us-east-1"}
    return {
        "model_list": [
            # its own base URL is one for both calls, so each gets a model
            model("sagemaker", model="sagemaker/bench", sagemaker_base_url=endpoint, **aws),
            model(
                "sagemaker-stream",
                model="sagemaker/bench",
                sagemaker_base_url=f"{endpoint}-response-stream",
                **aws,
            ),
            model("openai", model="text-completion-openai/bench", api_base=f"{urls.sagemaker}/v1", api_key="none"),
        ],
        "litellm_settings": {"telemetry": False, "num_retries": 0, "callbacks": []},
        "general_settings": {"disable_spend_logs": True},
    }


@contextmanager
def portkey(urls: Urls, log: Path) -> Iterator[Server]:
    """Portkey's gateway, one process of Node. Raises ``NotMeasuredError``."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotMeasuredError("there is no node and npm here")
    home = CACHE / f"portkey-{PORTKEY_VERSION}"
    script = home / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    if not script.exists():
        home.mkdir(parents=True, exist_ok=True)
        package = f"@portkey-ai/gateway@{PORTKEY_VERSION}"
        _install(["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(home), package], home)
    port = free_port()
    command = ["node", str(script), f"--port={port}", "--headless"]
    with _started(command, port, {"NODE_ENV": "production"}, "/", log) as running:
        yield running


@contextmanager
def _started(command: list[str], port: int, variables: Mapping[str, str], ready: str, log: Path) -> Iterator[Server]:
    try:
        starting = server(command, port, variables, ready, log)
        running = starting.__enter__()
    except RuntimeError as error:
        raise NotMeasuredError(f"it did not start: {error}") from error
    try:
        yield running
    finally:
        starting.__exit__(None, None, None)


def _install(command: list[str], home: Path) -> None:
    if shutil.which(command[0]) is None:
        raise NotMeasuredError(f"there is no {command[0]} here")
    home.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise NotMeasuredError(f"installing took longer than {INSTALL_SECONDS} s") from None
    if done.returncode != 0:
        shutil.rmtree(home, ignore_errors=True)
        raise NotMeasuredError(f"{command[0]} said: {(done.stdout + done.stderr).strip()[-400:]}")
