"""What Lambda SnapStart would get wrong: one started process lives on in many environments, hours later.

No request comes before the snapshot. So the registry's cache and the circuits, which remember by clocks, are empty in
it, and the clients are made but not connected; only Lambda's own source of credentials was asked. Credentials refresh
themselves: under SnapStart they are the container provider's (``AWS_CONTAINER_CREDENTIALS_FULL_URI``), and botocore's
``RefreshableCredentials`` compares their end with the wall's clock whenever a request is signed. Ids come from
``os.urandom`` (``uuid4``), which the platform seeds in each environment.

What is left to do after a restore is done here. The runtime runs it in the buffered form. Behind Lambda Web Adapter,
uvicorn stands in the place of the runtime's loop and nobody runs it, which is safe all the same: the adapter asks for
nothing but ``/healthz`` before the snapshot, which connects to nothing, so nothing is to be closed; and ``random``
decides about the pauses between attempts alone, which environments then have in common.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol


class Client(Protocol):
    """A boto3 client. ``close`` empties its pool of connections; the next call opens a new one."""

    def close(self) -> None: ...


def refresh_after_restore(clients: Sequence[Client]) -> None:
    """Have the runtime do it; where there is no such runtime, nothing is restored either."""
    try:
        hooks = import_module("snapshot_restore_py")
    except ImportError:
        return
    hooks.register_after_restore(_refresh, tuple(clients))


def _refresh(clients: Sequence[Client]) -> None:
    for client in clients:
        client.close()  # what was connected before, by whatever ran at start: the other end has long hung up
    random.seed()
