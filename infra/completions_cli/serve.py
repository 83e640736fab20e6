"""``completions serve``: the whole service on this machine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from completions_cli.local.environment import remove_environment, write_environment


class ResponseMode(StrEnum):
    """The template's ``ResponseMode``."""

    STREAMED = "streamed"
    BUFFERED = "buffered"


def serve(  # noqa: PLR0917 - every argument is an option of the command
    port: Annotated[
        int, typer.Option(envvar="PORT", min=0, max=65535, help="The gateway's port; 0 for a free one.")
    ] = 8080,
    response_mode: Annotated[ResponseMode, typer.Option(help="Which of the template's forms to run.")] = (
        ResponseMode.STREAMED
    ),
    tokens_per_second: Annotated[float, typer.Option(min=0, help="Pace of the embedded model; 0 is unpaced.")] = 100,
    upstream: Annotated[
        str | None, typer.Option(help="Base URL of an OpenAI-compatible server to ask instead of the embedded model.")
    ] = None,
    upstream_model: Annotated[str | None, typer.Option(help="The model name that server wants.")] = None,
    gguf: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A GGUF file for llama.cpp (extra: llama).")
    ] = None,
    dynamodb_url: Annotated[
        str | None, typer.Option(help="A DynamoDB to use instead of moto's, as http://127.0.0.1:8000.")
    ] = None,
    template: Annotated[Path, typer.Option(help="The SAM template whose routes are served.")] = Path("template.yaml"),
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every request, as Lambda would.")] = False,
) -> None:
    """Run gateway, handlers, SageMaker stand-in, model and DynamoDB here, until Ctrl-C."""
    started = time.monotonic()
    if sum(value is not None for value in (upstream, gguf)) > 1:
        raise typer.BadParameter("--upstream and --gguf exclude each other")
    os.environ["POWERTOOLS_LOG_LEVEL"] = "INFO" if verbose else "CRITICAL"
    # imported here: the handlers behind it read the environment, and --help should not pay for them
    from completions_cli.local.gguf import LlamaMissingError  # noqa: PLC0415
    from completions_cli.local.server import PortTakenError  # noqa: PLC0415
    from completions_cli.local.stack import StackOptions, running_stack  # noqa: PLC0415
    from completions_cli.local.template import TemplateError  # noqa: PLC0415

    options = StackOptions(
        port=port,
        template=template,
        response_mode=response_mode,
        tokens_per_second=tokens_per_second,
        dynamodb_url=dynamodb_url,
        upstream=upstream,
        upstream_model=upstream_model,
        gguf=gguf,
    )

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        with running_stack(options) as stack:
            write_environment(stack.environment)
            typer.echo(_banner(stack.base_url, stack.key, stack.models, stack.sagemaker.url))
            typer.echo(f"Ready in {time.monotonic() - started:.1f} s. Ctrl-C stops everything.")
            stopped.wait()
            remove_environment()
    except (PortTakenError, TemplateError, LlamaMissingError) as error:
        typer.echo(f"completions serve: {error}", err=True)
        raise typer.Exit(1) from None


def _banner(base_url: str, key: str, models: tuple[str, ...], sagemaker_url: str) -> str:
    body = json.dumps({"model": models[0], "prompt": "def main():\n", "max_tokens": 48, "temperature": 0})
    return f"""
Completions gateway, local: the model is a small n-gram stand-in for a GPU.

  base URL  {base_url}/v1
  API key   {key}
  models    {", ".join(models)}
  faults    PUT {sagemaker_url}/faults/{models[0]}

curl -sN {base_url}/v1/completions -H 'Authorization: Bearer {key}' \\
  -d '{body[:-1]}, "stream": true}}'

from openai import OpenAI
client = OpenAI(base_url="{base_url}/v1", api_key="{key}")
for chunk in client.completions.create(model="{models[0]}", prompt="def main():\\n", max_tokens=48, stream=True):
    print(chunk.choices[0].text, end="", flush=True)
"""
