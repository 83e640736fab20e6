"""The whole service on this machine, started in order and stopped in reverse."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Final

from botocore.exceptions import BotoCoreError, ClientError

from completions.clients import build_dynamodb_client, build_s3_client
from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import ConstraintKind
from completions_cli.local.gateway import Gateway
from completions_cli.local.gguf import serving_gguf
from completions_cli.local.lmi_container import create_lmi_container
from completions_cli.local.model_container import create_model_container
from completions_cli.local.moto_server import moto_behind
from completions_cli.local.ngram import NGramModel, standard_library
from completions_cli.local.pipeline_template import read_pipelines
from completions_cli.local.pipelines import LocalPipelines, PipelinePlan, pipeline_environment
from completions_cli.local.sagemaker_runtime import SageMakerRuntime
from completions_cli.local.schedule import running_schedules
from completions_cli.local.server import bind, serving
from completions_cli.local.state_machine import StateMachines, read_state_machines, serving_state_machines
from completions_cli.local.stream_poller import polling_streams
from completions_cli.local.tables import LOCAL_KEY, create_tables, moto_dynamodb, seed_registry
from completions_cli.local.template import read_gateway
from completions_cli.local.tgi_container import create_tgi_container
from completions_cli.local.triggers import queue_triggers, rule_triggers, schedule_triggers, stream_triggers

REGISTRY_TABLE: Final = "RegistryTable"
USAGE_TABLE: Final = "UsageTable"
_SERVED_MODEL: Final = "/opt/ml/model"
_EMBEDDED_CREATED: Final = 1_764_547_200  # any fixed moment will do; the model has no training date


_LLAMA_CPP: Final = {
    # it ignores echo without a word, refuses n, and counts a batch's first prompt alone
    **dict.fromkeys((Parameter.N, Parameter.PROMPT_BATCH, Parameter.ECHO), Capability.EMULATED),
    # beyond OpenAI's own fields
    **dict.fromkeys(
        (Parameter.TOP_K, Parameter.MIN_P, Parameter.TOKEN_PROMPT, Parameter.IGNORE_EOS), Capability.HONOURED
    ),
}


class StackError(Exception):
    """A part of the stack cannot be reached; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class StackOptions:
    """``upstream`` is the base URL of an OpenAI-compatible server that answers in place of the embedded model;
    ``gguf`` a model file for llama.cpp. ``tokens_per_second`` paces the embedded model, 0 is as fast as it can.
    ``settings`` are further environment variables of the functions. With ``triggers`` the functions behind the table's
    stream, behind schedules, queues and events run, too. ``retry_factor`` is how much of the waits between two attempts
    that a state machine and an event's function declare is waited here."""

    port: int = 8080
    template: Path = Path("template.yaml")
    response_mode: str = "streamed"
    tokens_per_second: float = 0
    dynamodb_url: str | None = None
    upstream: str | None = None
    upstream_model: str | None = None
    upstream_family: str = "openai"
    upstream_key: str | None = field(default=None, repr=False)
    gguf: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    triggers: bool = True
    retry_factor: float = 0.1


@dataclass(frozen=True, slots=True)
class LocalStack:
    """A running stack. ``environment`` is what its functions run under."""

    base_url: str
    models: tuple[str, ...]
    sagemaker: SageMakerRuntime
    environment: Mapping[str, str]
    key: str = field(default=LOCAL_KEY, repr=False)


@contextmanager
def running_stack(options: StackOptions) -> Iterator[LocalStack]:
    """Start everything; the gateway answers when this yields.

    Raises ``PortTakenError``, ``TemplateError``, ``LlamaMissingError`` or ``StackError``, and leaves nothing running.
    The functions read their environment from this process, which therefore runs one stack.
    """
    with ExitStack() as cleanup:
        listener = bind(options.port)
        cleanup.callback(listener.close)
        template = read_gateway(options.template, {"ResponseMode": options.response_mode})
        stopping = Event()
        routes = _routes(options)
        urls = cleanup.enter_context(_containers(options, stopping))
        containers = {route.endpoint_name: urls[route.family] for route in routes}
        sagemaker = cleanup.enter_context(SageMakerRuntime(containers, _upstream_headers(options)))
        moto_url = cleanup.enter_context(moto_dynamodb())
        dynamodb_url = options.dynamodb_url or moto_url
        environment = {
            **_environment(sagemaker.url, dynamodb_url),
            **cleanup.enter_context(_pipelines(options, moto_url)),
            "COMPLETIONS_BASE_URL": f"http://127.0.0.1:{listener.getsockname()[1]}",
            "COMPLETIONS_API_KEY": LOCAL_KEY,
            **options.settings,
        }
        os.environ.update(environment)
        _prepare_tables(options, routes, dynamodb_url)
        gateway = Gateway(template)
        if options.triggers:
            cleanup.enter_context(running_schedules(schedule_triggers(options.template)))
            cleanup.enter_context(polling_streams(stream_triggers(options.template), dynamodb_url))
        cleanup.callback(gateway.close)
        base_url = cleanup.enter_context(serving(gateway, listener))
        try:
            yield LocalStack(base_url, tuple(route.model_id for route in routes), sagemaker, environment)
        finally:
            # what the functions wait for ends first, so that each of them can still settle its claim
            stopping.set()
            sagemaker.stop()


@contextmanager
def _pipelines(options: StackOptions, moto_url: str) -> Iterator[dict[str, str]]:
    """What comes by events, and the environment that leads to it."""
    declared = read_pipelines(options.template.parent / "infra" / "pipelines.yaml")
    plan = PipelinePlan(declared, retry_factor=options.retry_factor)
    if options.triggers:
        plan = replace(
            plan,
            queues=queue_triggers(options.template, declared),
            rules=rule_triggers(options.template, declared),
        )
    machines = read_state_machines(options.template)
    service = StateMachines(machines, build_s3_client, retry_factor=options.retry_factor)
    pipelines = LocalPipelines(plan, moto_url)
    with ExitStack() as cleanup:
        url = cleanup.enter_context(moto_behind(pipelines.start))
        cleanup.callback(pipelines.stop)
        states_url = cleanup.enter_context(serving_state_machines(service))
        yield pipeline_environment(declared, machines, services_url=url, states_url=states_url)


def _prepare_tables(options: StackOptions, routes: Sequence[ModelRoute], url: str) -> None:
    try:
        with closing(build_dynamodb_client()) as client:
            create_tables(client, options.template.parent / "infra" / "tables.yaml")
            seed_registry(client, REGISTRY_TABLE, routes)
    except (BotoCoreError, ClientError, ValueError) as error:
        raise StackError(f"DynamoDB at {url}: {error}") from None


def _upstream_headers(options: StackOptions) -> dict[str, str]:
    return {} if options.upstream_key is None else {"Authorization": f"Bearer {options.upstream_key}"}


def _environment(sagemaker_url: str, dynamodb_url: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_DYNAMODB": dynamodb_url,
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": sagemaker_url,
        "REGISTRY_TABLE": REGISTRY_TABLE,
        "USAGE_TABLE": USAGE_TABLE,
        "SOURCEGRAPH_DEFAULT_MODEL": "demo",
    }


@contextmanager
def _containers(options: StackOptions, stopping: Event) -> Iterator[Mapping[str, str]]:
    """Where SageMaker's requests end up, by container family: the embedded model's ``/invocations``, or another
    server's completions."""
    if options.upstream is not None:
        yield {options.upstream_family: options.upstream.rstrip("/").removesuffix("/v1") + "/v1/completions"}
    elif options.gguf is not None:
        with serving_gguf(options.gguf) as url:
            yield {"openai": url + "/v1/completions"}
    else:
        model = NGramModel.train(standard_library())
        pace, wait = options.tokens_per_second, stopping.wait
        apps = {
            "vllm": create_model_container(model, served_model=_SERVED_MODEL, tokens_per_second=pace, sleep=wait),
            "lmi": create_lmi_container(model, tokens_per_second=pace, sleep=wait),
            "tgi": create_tgi_container(model, served_model=_SERVED_MODEL, tokens_per_second=pace, sleep=wait),
        }
        with ExitStack() as cleanup:
            yield {
                family: cleanup.enter_context(serving(app, bind(0))) + "/invocations" for family, app in apps.items()
            }


def _routes(options: StackOptions) -> tuple[ModelRoute, ...]:
    demo = ModelRoute(
        model_id="demo",
        endpoint_name="demo",
        family="vllm",
        context_length=8192,
        created=_EMBEDDED_CREATED,
        owned_by="local",
    )
    if options.upstream is not None:
        return (replace(demo, family=options.upstream_family, served_model=options.upstream_model),)
    if options.gguf is not None:
        return (replace(demo, family="openai", capabilities=_LLAMA_CPP),)
    embedded = replace(
        demo,
        owned_by="local stand-in for a GPU",
        fim_family="qwen",
        document_start="<|endoftext|>",
        capabilities=dict.fromkeys(map(Parameter, ConstraintKind), Capability.REFUSED),  # it cannot be guided
    )
    named = [
        replace(embedded, model_id=f"demo-{family}", endpoint_name=f"demo-{family}", family=family)
        for family in ("vllm", "lmi", "tgi")
    ]
    return embedded, *named
