"""The keys and models that every contender is measured with."""

from __future__ import annotations

from completions.domain.catalog import ModelRoute
from completions.domain.limits import KeyLimits
from completions.domain.metering import Principal

KEY, LIMITED_KEY = "sk-local", "sk-limited"
AMPLE = KeyLimits(requests_per_minute=10**9, tokens_per_minute=10**9, tokens_per_day=10**12, nanos_per_month=10**15)
PRINCIPALS = {KEY: Principal("bench", "bench", admin=True), LIMITED_KEY: Principal("limited", "bench", limits=AMPLE)}
PACES = (5, 20, 100)
"""Milliseconds between two events, of the models ``bench-5ms`` and so on."""


def routes() -> list[ModelRoute]:
    """One at full speed of each family, and the paced ones."""

    def route(name: str, endpoint: str, family: str, *aliases: str) -> ModelRoute:
        return ModelRoute(
            model_id=name, endpoint_name=endpoint, family=family, context_length=1_000_000, created=1, aliases=aliases
        )

    paced = [route(f"bench-{pace}ms", f"bench-{pace}ms", "vllm") for pace in PACES]
    return [
        route("bench", "bench", "vllm", "demo"),  # what events/ ask for
        route("bench-tgi", "bench", "tgi"),
        *paced,
    ]
