"""What a model id leads to: the endpoint, the container family behind it, and what that container can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Capability(StrEnum):
    """How a canonical parameter reaches the model. Nothing is dropped: what is neither of the first two is a 400."""

    HONOURED = "honoured"
    EMULATED = "emulated"
    REFUSED = "refused"


class Parameter(StrEnum):
    """What a container may or may not honour. ``max_tokens``, a single choice and one text prompt always work."""

    TOKEN_PROMPT = "token_prompt"
    PROMPT_BATCH = "prompt_batch"
    SUFFIX = "suffix"
    ECHO = "echo"
    LOGPROBS = "logprobs"
    N = "n"
    BEST_OF = "best_of"
    STOP = "stop"
    INCLUDE_STOP = "include_stop"
    STOP_TOKEN_IDS = "stop_token_ids"
    TEMPERATURE = "temperature"
    TOP_P = "top_p"
    TOP_K = "top_k"
    MIN_P = "min_p"
    SEED = "seed"
    PRESENCE_PENALTY = "presence_penalty"
    FREQUENCY_PENALTY = "frequency_penalty"
    REPETITION_PENALTY = "repetition_penalty"
    LOGIT_BIAS = "logit_bias"
    MIN_TOKENS = "min_tokens"
    IGNORE_EOS = "ignore_eos"
    SKIP_SPECIAL_TOKENS = "skip_special_tokens"
    SPACES_BETWEEN_SPECIAL_TOKENS = "spaces_between_special_tokens"
    ADD_SPECIAL_TOKENS = "add_special_tokens"
    CONSTRAINT = "constraint"
    BEAM = "beam"


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """Nano-dollars per token; ``version`` is recorded with every charge, so that an old bill can be explained."""

    version: str
    input_nanos: int
    cached_input_nanos: int
    output_nanos: int


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """One row of the registry.

    ``family`` names the codec and ``family_version`` the container's own version. ``capabilities`` overrides the
    family's table where this endpoint differs. ``served_model`` is sent as the body's ``model`` (a LoRA adapter on a
    multi-adapter server); ``None`` leaves it out. ``document_start`` stands in for an empty prompt, which containers
    refuse. ``context_length`` is tokens. ``fallbacks`` are model ids, tried in order.
    """

    model_id: str
    endpoint_name: str
    family: str
    context_length: int
    created: int
    owned_by: str = "organization"
    family_version: str | None = None
    aliases: tuple[str, ...] = ()
    served_model: str | None = None
    inference_component: str | None = None
    target_variant: str | None = None
    custom_attributes: str | None = None
    document_start: str | None = None
    fim_family: str | None = None
    asynchronous: bool = False
    price: ModelPrice | None = None
    fallbacks: tuple[str, ...] = ()
    capabilities: Mapping[Parameter, Capability] = field(default_factory=dict)
