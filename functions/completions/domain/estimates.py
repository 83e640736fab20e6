"""Counts for answers whose container has not told its own yet; usage that rests on them is marked as estimated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from completions.domain.completion import Prompt

_BYTES_A_TOKEN: Final = 4
"""What common tokenizers come to for English text and source code."""


def estimated_prompt_tokens(prompts: Iterable[Prompt]) -> int:
    """Token ids count themselves; of text, every four bytes of UTF-8 are taken for a token."""
    return sum(
        -(-len(prompt.encode()) // _BYTES_A_TOKEN) if isinstance(prompt, str) else len(prompt) for prompt in prompts
    )
