"""Questions to an AWS account, and why one of them was not answered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

# botocore calls these services otherwise than IAM does
_IAM_NAMES: Final = {"service-quotas": "servicequotas"}
_IAM_ACTIONS: Final = {
    ("apigateway", "get_account"): "apigateway:GET",
    ("s3", "get_bucket_lifecycle_configuration"): "s3:GetLifecycleConfiguration",
}
_REFUSED_ACTION: Final = re.compile(r"not authorized to perform: ([\w-]+:\w+)")
_DENIED: Final = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedException", "UnauthorizedOperation"})
_MOST_SAID: Final = 200
# a check answers soon, or says that it was not answered
_CONFIG: Final = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard"})


class NotAnsweredError(Exception):
    """AWS did not answer: ``code`` is its own, or botocore's name for what happened; ``action`` is IAM's."""

    def __init__(self, action: str, code: str, message: str) -> None:
        said = " ".join(message.split())[:_MOST_SAID]  # what stands between may answer with a page
        super().__init__(f"needs {action}" if code in _DENIED else f"{action}: {code}: {said}")
        self.action = action
        self.code = code
        self.message = message

    @property
    def denied(self) -> bool:
        """Whether the caller may not ask."""
        return self.code in _DENIED


class Aws(Protocol):
    """What the checks need of an account and region."""

    @property
    def region(self) -> str:
        """The region that is asked."""

    @property
    def partition(self) -> str:
        """The region's partition, as in its ARNs."""

    def client(self, service: str) -> Any:
        """boto3's client of a service."""

    def ask(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """One answer. Raises ``NotAnsweredError``."""

    def each(self, service: str, operation: str, items: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """The ``items`` of all pages of an answer. Raises ``NotAnsweredError``."""


class BotoAws(Aws):
    """``Aws`` by boto3, with the endpoints and credentials that it finds."""

    def __init__(self, session: Any, region: str) -> None:
        self._session = session
        self._region = region
        self._clients: dict[str, Any] = {}

    @property
    def region(self) -> str:
        return self._region

    @property
    def partition(self) -> str:
        return str(self._session.get_partition_for_region(self._region))

    def client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self._session.client(service, region_name=self._region, config=_CONFIG)
        return self._clients[service]

    def ask(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        with asking(service, operation):
            answer: dict[str, Any] = getattr(self.client(service), operation)(**parameters)
            return answer

    def each(self, service: str, operation: str, items: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        with asking(service, operation):
            for page in self.client(service).get_paginator(operation).paginate(**parameters):
                yield from page[items]

    def close(self) -> None:
        """Give the connections back."""
        for client in self._clients.values():
            client.close()


@contextmanager
def asking(service: str, operation: str) -> Iterator[None]:
    """botocore's errors as ``NotAnsweredError``."""
    action = _iam_action(service, operation)
    try:
        yield
    except ClientError as error:
        said = error.response.get("Error", {})
        message = str(said.get("Message", ""))
        named = _REFUSED_ACTION.search(message)
        raise NotAnsweredError(named[1] if named else action, str(said.get("Code", "Unknown")), message) from None
    except BotoCoreError as error:  # no credentials, no way there, no such region
        raise NotAnsweredError(action, type(error).__name__, str(error)) from None


def _iam_action(service: str, operation: str) -> str:
    name = "".join(word.title() for word in operation.split("_"))
    return _IAM_ACTIONS.get((service, operation), f"{_IAM_NAMES.get(service, service)}:{name}")
