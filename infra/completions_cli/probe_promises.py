"""What each container family does on the wire, as data: what a probe of an endpoint is compared with.

``None`` is no promise. A family that is not here is held to what every container must do, and to no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Promise:
    """``content_type`` is a stream's, ``record_key`` what each of its records has, ``done`` whether it ends with
    ``[DONE]``. ``prefixed`` tells server-sent events from bare lines.

    ``refusal_statuses`` are the container's own for a value out of range; 200 is an error record in a stream.
    ``adapter_statuses`` are those for an adapter it does not have, where 200 is an answer from the base model.
    ``cuts_inside_token`` and ``cuts_at_token_end`` tell whether a stop text that ends there is left out of the answer;
    otherwise it is missed inside a token, and at a token's end it stays as the answer's last word.
    ``counts_prompt`` tells whether a stream's usage is all the container's own.
    """

    content_type: str | None = None
    prefixed: bool | None = None
    record_key: str | None = None
    done: bool | None = None
    refusal_statuses: frozenset[int] | None = None
    adapter_statuses: frozenset[int] | None = None
    cuts_inside_token: bool | None = None
    cuts_at_token_end: bool | None = None
    counts_prompt: bool | None = None


_SSE: Final = "text/event-stream"
_JSON_LINES: Final = "application/jsonlines"
_VLLM: Final = Promise(
    content_type=_SSE,
    prefixed=True,
    record_key="choices",
    done=True,
    refusal_statuses=frozenset({400}),
    adapter_statuses=frozenset({404}),
    cuts_inside_token=True,
    cuts_at_token_end=True,
    counts_prompt=True,
)
_LMI: Final = Promise(
    content_type=_JSON_LINES,
    prefixed=False,
    record_key="choices",
    done=False,
    # a rule that vLLM checks leaves as 500, one that the request model checks as 424; both may be put right one day
    refusal_statuses=frozenset({400, 424, 500}),
    adapter_statuses=frozenset({400, 424}),
    cuts_inside_token=True,
    cuts_at_token_end=True,
    counts_prompt=True,
)
_LMI_ROLLING: Final = Promise(
    content_type=_JSON_LINES,
    prefixed=False,
    record_key="token",
    done=False,
    refusal_statuses=frozenset({400, 424, 500}),
)
_TGI: Final = Promise(
    content_type=_SSE,
    prefixed=True,
    record_key="token",
    done=False,
    refusal_statuses=frozenset({422, 200}),
    adapter_statuses=frozenset({200}),
    cuts_inside_token=False,
    cuts_at_token_end=False,
    counts_prompt=True,
)

PROMISES: Final[Mapping[str, Promise]] = MappingProxyType(
    {
        "vllm": _VLLM,
        # the plain route throws the name away, so the base model answers
        "vllm-invocations": replace(_VLLM, adapter_statuses=frozenset({200})),
        "lmi": _LMI,
        # of a record that holds several tokens the handler tells one, so a cut text is not always whole
        "lmi-inputs": replace(_LMI, record_key="token", cuts_inside_token=None, cuts_at_token_end=None),
        "lmi-rolling": _LMI_ROLLING,
        "tgi": _TGI,
        "tgi-openai": replace(_TGI, record_key="choices", done=True),
        "openai": Promise(record_key="choices", cuts_at_token_end=True, cuts_inside_token=True),
    }
)
