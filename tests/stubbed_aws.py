"""An AWS account whose answers a test gives, each checked against the service's own description."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import boto3
from botocore.stub import Stubber

from completions_cli.doctor_aws import BotoAws
from completions_cli.local.template import load_template

REGION = "eu-west-1"


@cache
def session(region: str) -> boto3.Session:
    """One for all tests, for it keeps what it has read of the services' descriptions."""
    return boto3.Session(region_name=region)


@cache
def template(path: Path) -> dict[str, Any]:
    """A template, read once: nobody changes it."""
    return load_template(path)


class StubbedAws(BotoAws):
    """Answers in the order in which they were given, per service; what was not given raises."""

    def __init__(self, region: str = REGION) -> None:
        super().__init__(session(region), region)
        self._stubbers: dict[str, Stubber] = {}

    def client(self, service: str) -> Any:
        client = super().client(service)
        if service not in self._stubbers:
            self._stubbers[service] = Stubber(client)
            self._stubbers[service].activate()
        return client

    def answers(
        self, service: str, operation: str, answer: dict[str, Any], asked: dict[str, Any] | None = None
    ) -> None:
        """The next answer; ``asked`` is what must be asked for it."""
        self.client(service)
        self._stubbers[service].add_response(operation, answer, asked)

    def refuses(self, service: str, operation: str, code: str, message: str = "") -> None:
        """The next answer is an error."""
        self.client(service)
        self._stubbers[service].add_client_error(operation, code, message)

    def denies(self, service: str, operation: str, action: str) -> None:
        """The next answer is IAM's, in its words."""
        message = f"User: arn:aws:iam::123456789012:user/ada is not authorized to perform: {action} on resource: *"
        self.refuses(service, operation, "AccessDeniedException", message)

    def all_asked(self) -> None:
        """Fails when an answer was not asked for."""
        for stubber in self._stubbers.values():
            stubber.assert_no_pending_responses()


def quotas(service: str, values: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    """An answer of Service Quotas: codes and values by name."""
    return {
        "Quotas": [
            {"ServiceCode": service, "QuotaName": name, "QuotaCode": code, "Value": value}
            for name, (code, value) in values.items()
        ]
    }
