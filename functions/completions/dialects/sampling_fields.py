"""Request fields beyond OpenAI's that users of open models send: Scale's API has them, and OpenAI's can be told to.

Names and ranges are vLLM's, from which Scale took them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from completions.dialects.completion_fields import TokenId


class SamplingFields(BaseModel, defer_build=True):
    """``top_k`` 0 and -1 mean off."""

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None

    def more_sampling_values(self) -> dict[str, Any]:
        """Further arguments of ``SamplingParams``."""
        return {
            "top_k": self.top_k if self.top_k and self.top_k > 0 else None,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": 1.0 if self.repetition_penalty is None else self.repetition_penalty,
            "min_tokens": self.min_tokens or 0,
            "ignore_eos": self.ignore_eos or False,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
        }

    def output_values(self) -> dict[str, Any]:
        """Arguments of ``CompletionRequest`` beside the sampling."""
        return {
            "include_stop": self.include_stop_str_in_output or False,
            "skip_special_tokens": self.skip_special_tokens is not False,
            "spaces_between_special_tokens": self.spaces_between_special_tokens is not False,
            "add_special_tokens": self.add_special_tokens is not False,
        }
