"""Fixtures that run the real thing: one local stack a session, handlers and clients against it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

# Before anything creates a client: no test may ever find a developer's own credentials, region or endpoints.
for name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[name]
os.environ |= {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "POWERTOOLS_LOG_LEVEL": "CRITICAL",
}

import boto3  # noqa: E402

from completions_cli.local.gateway import Gateway  # noqa: E402
from completions_cli.local.server import bind, serving  # noqa: E402
from completions_cli.local.stack import LocalStack, StackOptions, running_stack  # noqa: E402
from completions_cli.local.template import read_gateway  # noqa: E402
from dynamodb_local import dynamodb_local  # noqa: E402, F401 - a fixture
from ledger_reader import LedgerReader  # noqa: E402
from served import Served, served  # noqa: E402

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop that uvicorn and Mangum run; anyio would try each that is installed."""
    return "asyncio"


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """The whole service, streamed form, unpaced, on a free port."""
    # every fault is scripted, so no circuit may open on the sum of what the tests do to one endpoint
    settings = {"CIRCUIT_FAILURES": "1000000", "START_POLL_SECONDS": "0.05"}
    # what runs behind the usage table's stream is work for every record, and the business of a few tests (served_stack)
    options = StackOptions(port=0, template=ROOT / "template.yaml", settings=settings, triggers=False)
    with running_stack(options) as running:
        yield running


@pytest.fixture(scope="session")
def served_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A whole service of its own, with everything that runs behind it."""
    with served(tmp_path_factory.mktemp("served"), ROOT / "template.yaml") as running:
        yield running


@pytest.fixture(scope="session")
def ledger(stack: LocalStack) -> Iterator[LedgerReader]:
    """The stack's usage table."""
    with closing(boto3.client("dynamodb")) as client:
        yield LedgerReader(client, stack.environment["USAGE_TABLE"])


@pytest.fixture(scope="session")
def buffered_url(stack: LocalStack) -> Iterator[str]:
    """The same functions behind the template's buffered form: proxy events through Mangum."""
    gateway = Gateway(read_gateway(ROOT / "template.yaml", {"ResponseMode": "buffered"}))
    with serving(gateway, bind(0)) as url:
        yield url
    gateway.close()


@pytest.fixture(params=["streamed", "buffered"])
def base_url(request: pytest.FixtureRequest, stack: LocalStack) -> str:
    """Each response mode's base URL in turn."""
    url: str = stack.base_url if request.param == "streamed" else request.getfixturevalue("buffered_url")
    return url


@pytest.fixture
def faults(stack: LocalStack) -> Iterator[LocalStack]:
    """The stack, its fault scripts cleared afterwards."""
    yield stack
    for endpoint in stack.sagemaker.containers:
        stack.sagemaker.faults.replace(endpoint, [])
