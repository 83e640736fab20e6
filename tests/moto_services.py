"""moto's services over HTTP. Not ``mock_aws``: it empties what every other test of the process relies on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import boto3
from botocore.config import Config

from completions_cli.local.moto_server import moto_dynamodb

MakeClient = Callable[[str], Any]


@contextmanager
def moto_services(region: str) -> Iterator[MakeClient]:
    """Makes clients by their service's name. A ``region`` is one test module's own: a process has one of each."""
    settings = Config(retries={"total_max_attempts": 1})
    with moto_dynamodb() as url, ExitStack() as cleanup:

        def client(service: str) -> Any:
            made: Any = boto3.client(  # type: ignore[call-overload]
                service,
                region_name=region,
                endpoint_url=url,
                aws_access_key_id="test",
                aws_secret_access_key="test",
                config=settings,
            )
            cleanup.callback(made.close)
            return made

        yield client
