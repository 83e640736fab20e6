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
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    WHITESPACE_PATTERN = "whitespace_pattern"
    BEAM = "beam"


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a route can do. Every ``Parameter`` has a capability; a limit of ``None`` is no limit known here.

    ``max_stops`` is how many stop texts the container is told, ``max_logprobs`` how many alternatives it names.
    """

    capabilities: Mapping[Parameter, Capability]
    max_stops: int | None = None
    max_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """Nano-dollars per token; ``version`` is recorded with every charge, so that an old bill can be explained."""

    version: str
    input_nanos: int
    cached_input_nanos: int
    output_nanos: int


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What one request may ask of a model, where that is less than its container allows."""

    output_tokens: int | None = None
    stops: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """One row of the registry.

    ``family`` names the codec and ``family_version`` the container's own version. ``capabilities`` overrides the
    family's table where this endpoint differs. ``served_model`` is the name a server wants to read in the body, and
    ``adapter`` a LoRA adapter on it; ``None`` leaves either out. ``document_start`` stands in for an empty prompt,
    which containers refuse. ``stop_tokens`` are texts that end every answer and never stand in it. ``context_length``
    is tokens. ``fallbacks`` are model ids, tried in order.

    ``timeout_seconds`` bounds a whole answer and ``read_timeout_seconds`` one wait for the container. A model scaled to
    zero takes about ``start_seconds``; ``wait_for_start`` has callers wait for that instead of being sent away.
    ``isolate_prefix_cache`` keeps tenants from sharing the container's prefix cache, whose timing would tell one what
    another has asked.
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
    adapter: str | None = None
    inference_component: str | None = None
    target_variant: str | None = None
    custom_attributes: str | None = None
    document_start: str | None = None
    fim_family: str | None = None
    stop_tokens: tuple[str, ...] = ()
    asynchronous: bool = False
    limits: ModelLimits = ModelLimits()
    timeout_seconds: float | None = None
    read_timeout_seconds: float | None = None
    start_seconds: int = 300
    wait_for_start: bool = False
    isolate_prefix_cache: bool = True
    price: ModelPrice | None = None
    fallbacks: tuple[str, ...] = ()
    capabilities: Mapping[Parameter, Capability] = field(default_factory=dict)
