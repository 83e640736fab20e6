"""What a request costs, and the most it can come to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions.domain.catalog import ModelPrice
from completions.domain.completion import Usage
from completions.domain.limits import Charge
from completions.service.pricing import charge, most
from fakes import request, route

PRICE = ModelPrice("2026-11", input_nanos=150, cached_input_nanos=75, output_nanos=600)


def test_each_kind_of_token_has_its_own_price() -> None:
    assert charge(Usage(100, 10, cached_tokens=40), PRICE) == Charge(110, 60 * 150 + 40 * 75 + 10 * 600)


def test_a_model_without_a_price_counts_tokens_and_costs_nothing() -> None:
    assert charge(Usage(100, 10), None) == Charge(110, 0)
    assert most(request(prompts=((1, 2),), max_tokens=5), route()).nanos == 0


@pytest.mark.parametrize(
    ("fields", "prompt", "completion"),
    [
        ({"prompts": ((1, 2, 3),), "max_tokens": 5}, 3 + 8, 5),
        ({"prompts": ("abc",), "max_tokens": 5}, 3 + 8, 5),
        ({"prompts": ("é€",), "max_tokens": 5}, 5 + 8, 5),
        ({"prompts": ("a", "b"), "n": 3, "best_of": 3, "max_tokens": 5}, 2 * 9, 6 * 5),
        ({"prompts": ("a",), "max_tokens": 0, "echo": True}, 9, 1),  # vLLM generates one and hides it
        ({"prompts": ("a" * 9_000,), "max_tokens": 9_000}, 4096, 4096),
    ],
)
def test_the_most_is_every_byte_a_token_and_every_token_generated(
    fields: dict[str, object], prompt: int, completion: int
) -> None:
    assert most(request(**fields), route(price=PRICE)) == Charge(prompt + completion, prompt * 150 + completion * 600)


@given(
    text=st.text(min_size=1, max_size=200),
    n=st.integers(1, 4),
    max_tokens=st.integers(1, 64),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
)
def test_no_usage_the_request_allows_costs_more_than_was_reserved(
    text: str, n: int, max_tokens: int, shares: tuple[float, float, float]
) -> None:
    canonical = request(prompts=(text,), n=n, best_of=n, max_tokens=max_tokens)
    prompt = int(shares[0] * len(text.encode()))
    usage = Usage(prompt, int(shares[1] * n * max_tokens), cached_tokens=int(shares[2] * prompt))
    reserved, cost = most(canonical, route(price=PRICE)), charge(usage, PRICE)
    assert cost.tokens <= reserved.tokens
    assert cost.nanos <= reserved.nanos
