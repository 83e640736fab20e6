"""Which canonical parameters a request uses, and whether the model can carry each of them.

Containers ignore what they do not know, so the check stands before any GPU work: honoured, emulated, or a 400 that
names the parameter.
"""

from __future__ import annotations

from completions.domain.catalog import Abilities, Capability, ModelRoute, Parameter
from completions.domain.completion import CompletionRequest, ConstraintKind, SamplingParams
from completions.domain.errors import ContextLengthError, InvalidRequestError, UnsupportedParameterError

_UNSET = SamplingParams()
_SAMPLING = {
    Parameter.TEMPERATURE: "temperature",
    Parameter.TOP_P: "top_p",
    Parameter.TOP_K: "top_k",
    Parameter.MIN_P: "min_p",
    Parameter.SEED: "seed",
    Parameter.PRESENCE_PENALTY: "presence_penalty",
    Parameter.FREQUENCY_PENALTY: "frequency_penalty",
    Parameter.REPETITION_PENALTY: "repetition_penalty",
    Parameter.LOGIT_BIAS: "logit_bias",
    Parameter.MIN_TOKENS: "min_tokens",
    Parameter.IGNORE_EOS: "ignore_eos",
    Parameter.STOP_TOKEN_IDS: "stop_token_ids",
}


def used_parameters(request: CompletionRequest) -> frozenset[Parameter]:
    """The parameters whose absence would change the answer."""
    constraint = request.constraint
    used = {
        Parameter.TOKEN_PROMPT: any(not isinstance(prompt, str) for prompt in request.prompts),
        Parameter.PROMPT_BATCH: len(request.prompts) > 1,
        Parameter.SUFFIX: bool(request.suffix),
        Parameter.ECHO: request.echo,
        Parameter.LOGPROBS: request.logprobs is not None,
        Parameter.N: request.n > 1,
        Parameter.BEST_OF: request.best_of > request.n,
        Parameter.STOP: bool(request.stop),
        Parameter.INCLUDE_STOP: request.include_stop,
        Parameter.SKIP_SPECIAL_TOKENS: not request.skip_special_tokens,
        Parameter.SPACES_BETWEEN_SPECIAL_TOKENS: not request.spaces_between_special_tokens,
        Parameter.ADD_SPECIAL_TOKENS: not request.add_special_tokens,
        **{Parameter(kind): constraint is not None and constraint.kind is kind for kind in ConstraintKind},
        Parameter.WHITESPACE_PATTERN: constraint is not None and constraint.whitespace_pattern is not None,
        Parameter.BEAM: request.beam is not None,
    }
    sampling = {
        parameter: getattr(request.sampling, name) != getattr(_UNSET, name) for parameter, name in _SAMPLING.items()
    }
    return frozenset(parameter for parameter, is_used in (used | sampling).items() if is_used)


def check_parameters(request: CompletionRequest, route: ModelRoute, abilities: Abilities) -> None:
    """Raises ``UnsupportedParameterError`` for the first parameter, by name, that the model cannot carry,
    ``InvalidRequestError`` for an empty prompt it has no start of a document for, or that is to be echoed, and
    ``ContextLengthError`` for more tokens than its context holds."""
    capabilities = abilities.capabilities
    for parameter in sorted(used_parameters(request)):
        if capabilities[parameter] is Capability.REFUSED:
            name = _name(request, parameter)
            raise _unsupported(route, name, f"'{name}'")
    if request.best_of > request.n and capabilities[Parameter.LOGPROBS] is Capability.REFUSED:
        # candidates are ranked by their log-probabilities, here or in the container
        name = _name(request, Parameter.BEST_OF)
        raise _unsupported(route, name, f"'{name}'")
    if request.echo and capabilities[Parameter.ECHO] is Capability.EMULATED:
        _check_emulated_echo(request, route)
    if abilities.max_logprobs is not None and (request.logprobs or 0) > abilities.max_logprobs:
        name = _name(request, Parameter.LOGPROBS)
        raise InvalidRequestError(
            f"The model '{route.model_id}' names at most {abilities.max_logprobs} alternatives; '{name}' is "
            f"{request.logprobs}.",
            param=name,
        )
    _check_length(request, route)
    if not all(request.prompts):
        name = request.param_names.get("prompts", "prompt")
        if route.document_start is None:
            raise InvalidRequestError(f"The model '{route.model_id}' cannot complete an empty '{name}'.", param=name)
        if request.echo:
            raise InvalidRequestError(f"An empty '{name}' cannot be echoed.", param=name)


def _name(request: CompletionRequest, parameter: Parameter) -> str:
    """The caller's own spelling."""
    is_constraint = parameter in (*ConstraintKind, Parameter.WHITESPACE_PATTERN)
    default = request.param_names.get("constraint", str(parameter)) if is_constraint else str(parameter)
    return request.param_names.get(parameter, default)


def _unsupported(route: ModelRoute, name: str, what: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(
        f"The model '{route.model_id}' does not support {what}.", param=name, code="unsupported_parameter"
    )


def _check_emulated_echo(request: CompletionRequest, route: ModelRoute) -> None:
    """We have the prompt's text, but neither its tokens nor what the model thought of them."""
    echo = _name(request, Parameter.ECHO)
    if request.logprobs is not None:
        raise _unsupported(route, echo, f"'{echo}' together with '{_name(request, Parameter.LOGPROBS)}'")
    if any(not isinstance(prompt, str) for prompt in request.prompts):
        raise _unsupported(route, echo, f"'{echo}' of token ids")
    if request.max_tokens == 0:
        raise _unsupported(route, echo, f"'{echo}' alone, without a token to generate")


def _check_length(request: CompletionRequest, route: ModelRoute) -> None:
    """As far as it is known here: the tokens of a text are the container's to count."""
    name = request.param_names.get("max_tokens", "max_tokens")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequestError(f"'{name}' must be at least 1; 0 only scores an echoed prompt.", param=name)
    most = route.limits.output_tokens
    if most is not None and request.max_tokens > most:
        raise InvalidRequestError(
            f"The model '{route.model_id}' generates at most {most} tokens; '{name}' is {request.max_tokens}.",
            param=name,
        )
    longest = max((len(prompt) for prompt in request.prompts if not isinstance(prompt, str)), default=0)
    total = longest + request.max_tokens
    if total > route.context_length:
        raise ContextLengthError(
            f"This model's maximum context length is {route.context_length} tokens. However, you requested "
            f"{total} tokens ({longest} in the prompt; {request.max_tokens} for the completion).",
            param=name,
        )
