"""A model of every container family in a running stack, each on an endpoint of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

import boto3

from completions.backends.families import CODECS
from completions.domain.catalog import ModelRoute
from completions.registry.dynamodb import put_model
from completions_cli.local.lmi_container import create_lmi_container
from completions_cli.local.ngram import NGramModel, standard_library
from completions_cli.local.server import bind, serving
from completions_cli.local.stack import LocalStack

CONTAINERS: Final[Mapping[str, str]] = {
    "vllm": "demo",
    "vllm-invocations": "demo",
    "openai": "demo",
    "lmi": "demo-lmi",
    "lmi-inputs": "demo-lmi",
    "lmi-rolling": "rolling",
    "tgi": "demo-tgi",
    "tgi-openai": "demo-tgi",
}
"""Which container speaks a family's wire format: one of the stack's, or the older LMI that is started beside it."""

_OWN_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "lmi-rolling": {"stop_tokens": ("<|endoftext|>",)},  # the rolling batch leaves the end-of-text token in
}


@contextmanager
def family_models(stack: LocalStack, prefix: str, **fields: Any) -> Iterator[Mapping[str, str]]:
    """Model ids by family, ``<prefix>-<family>``; an endpoint is called as its model is. ``fields`` are the routes'.

    The entries stay in the registry; the older LMI ends with the context.
    """
    rolling = create_lmi_container(NGramModel.train(standard_library()), rolling_batch=True)
    with serving(rolling, bind(0)) as url, closing(boto3.client("dynamodb")) as client:
        containers = stack.sagemaker.containers
        urls = {**containers, "rolling": url + "/invocations"}
        names = {family: f"{prefix}-{family}" for family in CODECS}
        for family, name in names.items():
            containers[name] = urls[CONTAINERS[family]]
            own = {"context_length": 8192, "created": 1_700_000_000, **_OWN_FIELDS.get(family, {}), **fields}
            put_model(client, stack.environment["REGISTRY_TABLE"], ModelRoute(name, name, family, **own))
        yield names
