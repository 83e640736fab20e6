"""The names of what an operator may let through beside OpenAI's own fields, for those who need no model of them."""

from __future__ import annotations

from typing import Final

EXTRA_FIELDS: Final = frozenset(
    {
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "add_special_tokens",
    }
)
"""The fields of ``sampling_fields.SamplingFields``."""
