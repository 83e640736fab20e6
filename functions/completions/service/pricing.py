"""What a request costs, and the most it can come to. Integer nano-dollars; never a float."""

from __future__ import annotations

from typing import Final

from completions.domain.catalog import ModelPrice, ModelRoute
from completions.domain.completion import CompletionRequest, Prompt, Usage
from completions.domain.limits import Charge

_SPECIAL_TOKENS: Final = 8
"""Tokens a container may put around a prompt."""


def charge(usage: Usage, price: ModelPrice | None) -> Charge:
    """What ``usage`` costs: cached input apart, every generated token, nothing for a model without a price."""
    if price is None:
        return Charge(usage.total_tokens, 0)
    fresh = usage.prompt_tokens - usage.cached_tokens
    nanos = (
        fresh * price.input_nanos
        + usage.cached_tokens * price.cached_input_nanos
        + usage.completion_tokens * price.output_nanos
    )
    return Charge(usage.total_tokens, nanos)


def most(request: CompletionRequest, route: ModelRoute) -> Charge:
    """The most ``request``, as it is sent to ``route``, can come to: what is reserved.

    No tokenizer makes more tokens of a text than it has bytes.
    """
    prompt = sum(min(_most_tokens(prompt), route.context_length) for prompt in request.prompts)
    completion = max(1, min(request.max_tokens, route.context_length)) * request.choice_count
    if route.price is None:
        return Charge(prompt + completion, 0)
    dearest = max(route.price.input_nanos, route.price.cached_input_nanos)
    return Charge(prompt + completion, prompt * dearest + completion * route.price.output_nanos)


def _most_tokens(prompt: Prompt) -> int:
    return _SPECIAL_TOKENS + (len(prompt.encode()) if isinstance(prompt, str) else len(prompt))
