"""``completions serve``: the whole service on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from completions_cli.local.environment import FolderTakenError, published_environment, require_free_folder

if TYPE_CHECKING:
    from completions_cli.local.stack import LocalStack


class ResponseMode(StrEnum):
    """The template's ``ResponseMode``."""

    STREAMED = "streamed"
    BUFFERED = "buffered"


class UpstreamFamily(StrEnum):
    """Container families an OpenAI-compatible server may belong to."""

    OPENAI = "openai"
    VLLM = "vllm"


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
    upstream_family: Annotated[
        UpstreamFamily, typer.Option(help="What that server takes: OpenAI's fields alone, or vLLM's.")
    ] = UpstreamFamily.OPENAI,
    upstream_key: Annotated[
        str | None, typer.Option(envvar="UPSTREAM_KEY", help="The bearer token that server wants.")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A GGUF file for llama.cpp (extra: llama).")
    ] = None,
    dynamodb_url: Annotated[
        str | None, typer.Option(help="A DynamoDB to use instead of moto's, as http://127.0.0.1:8000.")
    ] = None,
    template: Annotated[Path, typer.Option(help="The SAM template whose routes are served.")] = Path("template.yaml"),
    retry_factor: Annotated[
        float, typer.Option(min=0, max=1, help="How much is waited here of the pipelines' waits between two attempts.")
    ] = 0.1,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every request, as Lambda would.")] = False,
) -> None:
    """Run gateway, handlers, SageMaker stand-in, model and DynamoDB here, until Ctrl-C."""
    started = time.monotonic()
    _check_options(upstream, gguf, upstream_model is not None or upstream_key is not None)
    os.environ["POWERTOOLS_LOG_LEVEL"] = "INFO" if verbose else "CRITICAL"
    os.environ.setdefault("POWERTOOLS_METRICS_DISABLED", "false" if verbose else "true")
    # imported here: the handlers behind it read the environment, and --help should not pay for them
    from completions_cli.local.gguf import LlamaMissingError  # noqa: PLC0415
    from completions_cli.local.server import PortTakenError  # noqa: PLC0415
    from completions_cli.local.stack import StackError, StackOptions, running_stack  # noqa: PLC0415
    from completions_cli.local.template import TemplateError  # noqa: PLC0415

    options = StackOptions(
        port=port,
        template=template,
        response_mode=response_mode,
        tokens_per_second=tokens_per_second,
        dynamodb_url=dynamodb_url,
        upstream=upstream,
        upstream_model=upstream_model,
        upstream_family=upstream_family,
        upstream_key=upstream_key,
        gguf=gguf,
        retry_factor=retry_factor,
    )

    stopped = threading.Event()

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        require_free_folder()
        with running_stack(options) as stack, published_environment(stack.environment):
            typer.echo(_banner(stack, _model_name(upstream, gguf)))
            typer.echo(f"Ready in {time.monotonic() - started:.1f} s. Ctrl-C stops everything.")
            stopped.wait()
    except (FolderTakenError, PortTakenError, TemplateError, LlamaMissingError, StackError) as error:
        typer.echo(f"completions serve: {error}", err=True)
        raise typer.Exit(1) from None
    _leave_what_works()


def _leave_what_works() -> None:
    """End the process now if a function is still at work: an executor's threads would hold it to their own end."""
    if threading.active_count() > 1:
        sys.stdout.flush()
        os._exit(0)


def _check_options(upstream: str | None, gguf: Path | None, names_upstream: bool) -> None:
    if upstream is not None and gguf is not None:
        raise typer.BadParameter("--upstream and --gguf exclude each other")
    if upstream is None and names_upstream:
        raise typer.BadParameter("--upstream-model and --upstream-key need --upstream")
    if upstream is not None and (urlsplit(upstream).scheme not in ("http", "https") or not urlsplit(upstream).netloc):
        raise typer.BadParameter(f"--upstream {upstream}: not an http:// or https:// URL")


def _model_name(upstream: str | None, gguf: Path | None) -> str:
    if upstream is not None:
        return f"the model is the one behind {upstream}"
    return "the model is a small n-gram stand-in for a GPU" if gguf is None else f"the model is {gguf.name}"


def _banner(stack: LocalStack, model_name: str) -> str:
    base_url, key, models, sagemaker_url = stack.base_url, stack.key, stack.models, stack.sagemaker.url
    body = json.dumps({"model": models[0], "prompt": "def main():\n", "max_tokens": 48, "temperature": 0})
    return f"""
Completions gateway, local: {model_name}.

  base URL  {base_url}/v1
  API key   {key}
  models    {", ".join(models)}
  faults    PUT {sagemaker_url}/faults/{models[0]}
{_pipelines_line(stack.environment)}
curl -sN {base_url}/v1/completions -H 'Authorization: Bearer {key}' \\
  -d '{body[:-1]}, "stream": true}}'

from openai import OpenAI
client = OpenAI(base_url="{base_url}/v1", api_key="{key}")
for chunk in client.completions.create(model="{models[0]}", prompt="def main():\\n", max_tokens=48, stream=True):
    print(chunk.choices[0].text, end="", flush=True)
"""


def _pipelines_line(environment: Mapping[str, str]) -> str:
    """Where requests come in by events; the bucket's and the queue's service is one."""
    if "PIPELINE_BUCKET" not in environment:
        return ""
    place = f"s3://{environment['PIPELINE_BUCKET']}/input/{environment['PIPELINE_KEY_ID']}/*.jsonl"
    url = environment["AWS_ENDPOINT_URL_S3"]
    return f"  pipelines {place}, queue CompletionRequests, bus {environment['PIPELINE_BUS']}, all at {url}\n"
