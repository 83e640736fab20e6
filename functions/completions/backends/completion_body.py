"""The OpenAI-compatible completion body as vLLM reads it; other servers that embed vLLM take the same.

Transcribes vLLM 0.27: ``vllm/entrypoints/openai/completion/protocol.py``.
"""

from __future__ import annotations

import json
from typing import Any, Final

from completions.domain.catalog import ModelRoute
from completions.domain.completion import CompletionRequest, Constraint, ConstraintKind, Prompt, SamplingParams

SMALLEST_TOP_P: Final = 1e-6
"""Stands for 0, which servers exclude and which means: the likeliest token alone."""
_STRUCTURED_KEYS: Final = {
    ConstraintKind.JSON_OBJECT: "json_object",
    ConstraintKind.JSON_SCHEMA: "json",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.CHOICE: "choice",
    ConstraintKind.GRAMMAR: "grammar",
}


def vllm_body(
    request: CompletionRequest, route: ModelRoute, *, model: str | None, structured_outputs: bool
) -> dict[str, Any]:
    """Every field of ``request``, ``prompt`` first: SageMaker's prefix-aware routing compares the body's first bytes.

    ``structured_outputs`` names constraints as vLLM does since 0.12, to which the older ``guided_*`` mean nothing.
    """
    body: dict[str, Any] = {"prompt": prompt_value(request.prompts, route)}
    if model is not None:
        body["model"] = model
    body |= {
        "max_tokens": request.max_tokens,
        "n": request.n,
        "echo": request.echo,
        "skip_special_tokens": request.skip_special_tokens,
        "spaces_between_special_tokens": request.spaces_between_special_tokens,
        "add_special_tokens": request.add_special_tokens,
        "include_stop_str_in_output": request.include_stop,
        **_sampling_values(request.sampling, request.n),
    }
    if request.stop:
        body["stop"] = request.stop
    if request.logprobs is not None:
        body["logprobs"] = request.logprobs
    if request.constraint is not None:
        body |= _constraint_values(request.constraint, structured_outputs=structured_outputs)
    return body


def prompt_value(prompts: tuple[Prompt, ...], route: ModelRoute) -> object:
    """One prompt as itself, several as a list. An empty one means the start of a document, which must be spelled
    out."""
    values = [prompt or route.document_start or "" for prompt in prompts]
    return values[0] if len(values) == 1 else values


def body_bytes(body: dict[str, Any]) -> bytes:
    """Compact JSON in the body's own order."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def version_numbers(text: str) -> tuple[int, ...]:
    """``"0.12.1"`` as ``(0, 12)``: what a threshold is compared with."""
    return tuple(int(part) for part in text.split(".")[:2])


def _sampling_values(sampling: SamplingParams, n: int) -> dict[str, Any]:
    """Every value explicit: an absent one would fall back to the model's generation_config.json."""
    values: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or SMALLEST_TOP_P,  # vLLM excludes 0, which means: the likeliest token alone
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.temperature == 0 and n > 1:
        # vLLM refuses several greedy candidates; sampling from the likeliest token alone is the same thing
        values |= {"temperature": 1.0, "top_k": 1}
    if sampling.seed is not None:
        values["seed"] = sampling.seed
    if sampling.logit_bias:
        values["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.stop_token_ids:
        values["stop_token_ids"] = sampling.stop_token_ids
    return values


def _constraint_values(constraint: Constraint, *, structured_outputs: bool) -> dict[str, Any]:
    value: Any = constraint.choices if constraint.kind is ConstraintKind.CHOICE else constraint.value
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        value = json.loads(constraint.value or "{}")
    spacing = constraint.whitespace_pattern
    if structured_outputs:
        if constraint.kind is ConstraintKind.JSON_OBJECT:
            value = True
        values = {_STRUCTURED_KEYS[constraint.kind]: value}
        return {"structured_outputs": values if spacing is None else {**values, "whitespace_pattern": spacing}}
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"response_format": {"type": "json_object"}}
    guided = {f"guided_{_STRUCTURED_KEYS[constraint.kind]}": value}
    return guided if spacing is None else {**guided, "guided_whitespace_pattern": spacing}
