"""Parts that meter nothing and look nothing up, so that what is left of a request is the service's own work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench_models import PRINCIPALS, routes

from completions.bootstrap import Parts, build_parts
from completions.domain.catalog import ModelRoute
from completions.domain.errors import LimitStatus
from completions.domain.metering import Principal, Reservation, UsageRecord
from completions.domain.ports import Claim, Registry, UsageLedger
from completions.web.auth import secret_digest


class MemoryRegistry(Registry):
    """The benchmark's keys and models."""

    def __init__(self) -> None:
        self._principals = {secret_digest(secret): principal for secret, principal in PRINCIPALS.items()}
        self._routes = {name: route for route in routes() for name in (route.model_id, *route.aliases)}

    def principal(self, secret_sha256: str, *, next_model: str | None = None) -> Principal | None:
        return self._principals.get(secret_sha256)

    def principal_of(self, key_id: str) -> Principal | None:
        return None

    def route(self, model: str) -> ModelRoute | None:
        return self._routes.get(model)

    def routes(self) -> Sequence[ModelRoute]:
        return routes()


class ForgetfulLedger(UsageLedger):
    """Says yes to everybody and keeps nothing."""

    def reserve(self, reservation: Reservation) -> Claim:
        return _Claim()


class _Claim(Claim):
    limits: Sequence[LimitStatus] = ()

    def confirm(self) -> None:
        """There is nothing to wait for."""

    def settle(self, record: UsageRecord) -> None:
        """Nothing is kept."""


def memory_parts() -> Parts:
    """The real parts, these two apart."""
    return replace(build_parts(), registry=MemoryRegistry(), ledger=ForgetfulLedger())
