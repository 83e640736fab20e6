"""The deployment in moto, made once for all who look at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from completions_cli.local.moto_server import moto_dynamodb
from completions_cli.local.stack import LocalStack
from moto_deployment import Deployment, deploy


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    with moto_dynamodb() as url:
        yield url


@pytest.fixture(scope="session")
def deployments(moto: str, stack: LocalStack, project_root: Path) -> dict[str, Deployment]:
    """Both forms, side by side in one account and region."""
    urls = {
        "DynamoDBEndpointUrl": moto,
        "PipelineEndpointUrl": moto,
        "SageMakerRuntimeEndpointUrl": stack.environment["AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME"],
    }
    return {
        mode: deploy(project_root, moto, f"completions-{mode}", ResponseMode=mode, **urls)
        for mode in ("streamed", "buffered")
    }


@pytest.fixture(params=["streamed", "buffered"])
def deployment(request: pytest.FixtureRequest, deployments: dict[str, Deployment]) -> Deployment:
    return deployments[request.param]


@pytest.fixture
def streamed(deployment: Deployment) -> bool:
    return deployment.name.endswith("streamed")
