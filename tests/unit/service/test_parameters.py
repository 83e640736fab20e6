"""Which parameters a request uses, and the refusal of those a model cannot carry."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from completions.domain.catalog import Abilities, Capability, ModelLimits, Parameter
from completions.domain.completion import (
    BeamSearch,
    CompletionRequest,
    Constraint,
    ConstraintKind,
    Prompt,
    SamplingParams,
)
from completions.domain.errors import ContextLengthError, InvalidRequestError, UnsupportedParameterError
from completions.service.parameters import check_parameters, used_parameters
from fakes import request, route

ALL_REFUSED = Abilities(dict.fromkeys(Parameter, Capability.REFUSED))
USES: Mapping[Parameter, CompletionRequest] = {
    Parameter.TOKEN_PROMPT: request(prompts=((1, 2),)),
    Parameter.PROMPT_BATCH: request(prompts=("a", "b")),
    Parameter.SUFFIX: request(suffix="x"),
    Parameter.ECHO: request(echo=True),
    Parameter.LOGPROBS: request(logprobs=0),
    Parameter.N: request(n=2, best_of=2),
    Parameter.BEST_OF: request(best_of=2),
    Parameter.STOP: request(stop=("x",)),
    Parameter.INCLUDE_STOP: request(include_stop=True),
    Parameter.STOP_TOKEN_IDS: request(sampling=SamplingParams(stop_token_ids=(0,))),
    Parameter.TEMPERATURE: request(sampling=SamplingParams(temperature=0)),
    Parameter.TOP_P: request(sampling=SamplingParams(top_p=0)),
    Parameter.TOP_K: request(sampling=SamplingParams(top_k=1)),
    Parameter.MIN_P: request(sampling=SamplingParams(min_p=0.1)),
    Parameter.SEED: request(sampling=SamplingParams(seed=0)),
    Parameter.PRESENCE_PENALTY: request(sampling=SamplingParams(presence_penalty=-1)),
    Parameter.FREQUENCY_PENALTY: request(sampling=SamplingParams(frequency_penalty=-1)),
    Parameter.REPETITION_PENALTY: request(sampling=SamplingParams(repetition_penalty=1.1)),
    Parameter.LOGIT_BIAS: request(sampling=SamplingParams(logit_bias={0: 0})),
    Parameter.MIN_TOKENS: request(sampling=SamplingParams(min_tokens=1)),
    Parameter.IGNORE_EOS: request(sampling=SamplingParams(ignore_eos=True)),
    Parameter.SKIP_SPECIAL_TOKENS: request(skip_special_tokens=False),
    Parameter.SPACES_BETWEEN_SPECIAL_TOKENS: request(spaces_between_special_tokens=False),
    Parameter.ADD_SPECIAL_TOKENS: request(add_special_tokens=False),
    Parameter.JSON_OBJECT: request(constraint=Constraint(ConstraintKind.JSON_OBJECT)),
    Parameter.JSON_SCHEMA: request(constraint=Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
    Parameter.REGEX: request(constraint=Constraint(ConstraintKind.REGEX, "a+")),
    Parameter.CHOICE: request(constraint=Constraint(ConstraintKind.CHOICE, choices=("a", "b"))),
    Parameter.GRAMMAR: request(constraint=Constraint(ConstraintKind.GRAMMAR, "root ::= x")),
    Parameter.WHITESPACE_PATTERN: request(constraint=Constraint(ConstraintKind.REGEX, "a+", whitespace_pattern="[ ]?")),
    Parameter.BEAM: request(beam=BeamSearch()),
}


HONOURED = Abilities(dict.fromkeys(Parameter, Capability.HONOURED))


def test_a_plain_request_uses_none() -> None:
    assert used_parameters(request()) == frozenset()


@pytest.mark.parametrize(
    "canonical", [request(suffix=""), request(max_tokens=0), request(stop=()), request(end_user="u")]
)
def test_a_value_that_changes_nothing_is_no_use(canonical: CompletionRequest) -> None:
    assert used_parameters(canonical) == frozenset()


@pytest.mark.parametrize("parameter", Parameter)
def test_each_parameter_alone_is_noticed(parameter: Parameter) -> None:
    also = {Parameter.REGEX} if parameter is Parameter.WHITESPACE_PATTERN else set()
    assert used_parameters(USES[parameter]) == {parameter} | also


@pytest.mark.parametrize("parameter", Parameter)
def test_a_refused_parameter_is_named(parameter: Parameter) -> None:
    alone = Abilities({**HONOURED.capabilities, parameter: Capability.REFUSED})
    with pytest.raises(UnsupportedParameterError) as caught:
        check_parameters(USES[parameter], route(), alone)
    assert (caught.value.param, caught.value.code) == (parameter.value, "unsupported_parameter")
    assert parameter.value in caught.value.message


@pytest.mark.parametrize("capability", [Capability.HONOURED, Capability.EMULATED])
def test_a_parameter_that_can_be_carried_passes(capability: Capability) -> None:
    for canonical in USES.values():
        check_parameters(canonical, route(), Abilities(dict.fromkeys(Parameter, capability)))


def test_parameters_that_are_not_used_may_be_refused() -> None:
    check_parameters(request(), route(), ALL_REFUSED)


def test_a_refusal_names_what_the_caller_wrote() -> None:
    canonical = request(sampling=SamplingParams(top_k=5), param_names={"top_k": "topK"})
    with pytest.raises(UnsupportedParameterError) as caught:
        check_parameters(canonical, route(), ALL_REFUSED)
    assert caught.value.param == "topK"
    assert "topK" in caught.value.message


def test_candidates_cannot_be_ranked_without_their_logprobs() -> None:
    blind = Abilities({**HONOURED.capabilities, Parameter.LOGPROBS: Capability.REFUSED})
    with pytest.raises(UnsupportedParameterError) as caught:
        check_parameters(request(best_of=2), route(), blind)
    assert caught.value.param == "best_of"


def test_a_refused_constraint_is_named_by_the_field_that_asked_for_it() -> None:
    canonical = request(constraint=Constraint(ConstraintKind.REGEX, "a+"), param_names={"constraint": "guided_regex"})
    with pytest.raises(UnsupportedParameterError) as caught:
        check_parameters(canonical, route(), ALL_REFUSED)
    assert caught.value.param == "guided_regex"


@pytest.mark.parametrize(("asked", "allowed"), [(5, True), (6, False)])
def test_more_alternatives_than_the_container_names_are_refused(asked: int, allowed: bool) -> None:
    abilities = Abilities(HONOURED.capabilities, max_logprobs=5)
    if allowed:
        check_parameters(request(logprobs=asked), route(), abilities)
    else:
        with pytest.raises(InvalidRequestError, match="at most 5") as caught:
            check_parameters(request(logprobs=asked), route(), abilities)
        assert caught.value.param == "logprobs"


@pytest.mark.parametrize(("asked", "allowed"), [(64, True), (65, False)])
def test_a_models_own_limit_on_new_tokens_holds(asked: int, allowed: bool) -> None:
    target = route(limits=ModelLimits(output_tokens=64))
    if allowed:
        check_parameters(request(max_tokens=asked), target, HONOURED)
    else:
        with pytest.raises(InvalidRequestError, match="at most 64 tokens") as caught:
            check_parameters(request(max_tokens=asked), target, HONOURED)
        assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    "canonical",
    [
        request(echo=True, logprobs=0),
        request(echo=True, max_tokens=0),
        request(echo=True, prompts=((1, 2),)),
    ],
    ids=["with-logprobs", "alone", "of-tokens"],
)
def test_an_echo_of_ours_knows_the_prompts_text_alone(canonical: CompletionRequest) -> None:
    emulated = Abilities({**HONOURED.capabilities, Parameter.ECHO: Capability.EMULATED})
    with pytest.raises(UnsupportedParameterError) as caught:
        check_parameters(canonical, route(), emulated)
    assert caught.value.param == "echo"
    check_parameters(request(echo=True), route(), emulated)


def test_an_empty_prompt_needs_a_start_of_a_document() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_parameters(request(prompts=("a", "")), route(document_start=None), HONOURED)
    assert caught.value.param == "prompt"


def test_an_empty_prompt_cannot_be_echoed() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_parameters(request(prompts=("",), echo=True), route(document_start="<s>"), HONOURED)
    assert caught.value.param == "prompt"


def test_an_empty_prompt_starts_a_document() -> None:
    check_parameters(request(prompts=("",)), route(document_start="<s>"), HONOURED)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [("x" * 500, 100, True), ("x", 101, False), ((1,) * 60, 40, True), ((1,) * 60, 41, False)],
)
def test_tokens_that_are_known_to_outgrow_the_context_are_refused(prompt: Prompt, max_tokens: int, fits: bool) -> None:
    canonical = request(prompts=(prompt,), max_tokens=max_tokens)
    if fits:
        check_parameters(canonical, route(context_length=100), HONOURED)
    else:
        with pytest.raises(ContextLengthError, match="maximum context length is 100 tokens") as caught:
            check_parameters(canonical, route(context_length=100), HONOURED)
        assert caught.value.param == "max_tokens"


def test_no_tokens_at_all_are_for_scoring_an_echoed_prompt() -> None:
    check_parameters(request(max_tokens=0, echo=True), route(), HONOURED)
    with pytest.raises(InvalidRequestError) as caught:
        check_parameters(request(max_tokens=0, param_names={"max_tokens": "max_new_tokens"}), route(), HONOURED)
    assert caught.value.param == "max_new_tokens"
