"""What holds for the requests to every container family alike: nothing is dropped, and nothing leaks.

The tables are by hand, from the wire formats' own words for each parameter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from completions.backends.codec import EncodeOptions
from completions.backends.families import CODECS
from completions.domain.catalog import Capability, ModelRoute, Parameter
from completions.domain.completion import (
    BeamSearch,
    CompletionRequest,
    Constraint,
    ConstraintKind,
    SamplingParams,
)
from completions.domain.errors import UnsupportedParameterError
from completions.service.parameters import check_parameters, used_parameters
from completions.service.plan import planned
from fakes import request, route

Json = dict[str, Any]
HONOURED, EMULATED, REFUSED = Capability.HONOURED, Capability.EMULATED, Capability.REFUSED
SALT = "5f" * 16
OPTIONS = EncodeOptions(cache_salt=SALT)
SALTED = {"vllm", "vllm-invocations", "lmi", "lmi-inputs"}  # TGI, the rolling batch and OpenAI have no word for it
INPUTS = {"lmi-inputs", "lmi-rolling", "tgi"}  # {"inputs": ..., "parameters": {...}}; the others take OpenAI's body


def sampled(**values: Any) -> Json:
    return {"sampling": SamplingParams(**values)}


def constrained(kind: ConstraintKind, value: str | None = None, **fields: Any) -> Json:
    return {"constraint": Constraint(kind, value, **fields)}


SCHEMA = '{"type":"object","properties":{"zq_field":{"type":"string"}}}'


@dataclass(frozen=True, slots=True)
class Use:
    """A request that uses a parameter, and what of it must stand in the body of a container that honours it."""

    fields: Json
    told: tuple[str, ...]


USES: Mapping[Parameter, Use] = {
    Parameter.TOKEN_PROMPT: Use({"prompts": ((31_415, 9_265),)}, ("[31415,9265]",)),
    Parameter.PROMPT_BATCH: Use({"prompts": ("zq-one", "zq-two")}, ('["zq-one","zq-two"]',)),
    Parameter.SUFFIX: Use({"suffix": "zq-suffix"}, ()),  # no container of these is told
    Parameter.ECHO: Use({"echo": True}, ('"echo":true',)),
    Parameter.LOGPROBS: Use({"logprobs": 3}, ('"logprobs":3', '"top_n_tokens":3')),
    Parameter.N: Use({"n": 7, "best_of": 7}, ('"n":7',)),
    Parameter.BEST_OF: Use({"best_of": 7}, ()),  # vLLM took it out, and TGI's goes with neither seeds nor streams
    Parameter.STOP: Use({"stop": ("zq-stop",)}, ('["zq-stop"]',)),
    Parameter.INCLUDE_STOP: Use({"stop": ("zq-stop",), "include_stop": True}, ('"include_stop_str_in_output":true',)),
    Parameter.STOP_TOKEN_IDS: Use(sampled(stop_token_ids=(31_415,)), ('"stop_token_ids":[31415]',)),
    Parameter.TEMPERATURE: Use(sampled(temperature=0.8125), ('"temperature":0.8125',)),
    Parameter.TOP_P: Use(sampled(top_p=0.8125), ('"top_p":0.8125',)),
    Parameter.TOP_K: Use(sampled(top_k=31_415), ('"top_k":31415',)),
    Parameter.MIN_P: Use(sampled(min_p=0.8125), ('"min_p":0.8125',)),
    Parameter.SEED: Use(sampled(seed=31_415), ('"seed":31415',)),
    Parameter.PRESENCE_PENALTY: Use(sampled(presence_penalty=0.8125), ('"presence_penalty":0.8125',)),
    Parameter.FREQUENCY_PENALTY: Use(sampled(frequency_penalty=0.8125), ('"frequency_penalty":0.8125',)),
    Parameter.REPETITION_PENALTY: Use(sampled(repetition_penalty=1.8125), ('"repetition_penalty":1.8125',)),
    Parameter.LOGIT_BIAS: Use(sampled(logit_bias={31_415: 5}), ('"logit_bias":{"31415":5}',)),
    Parameter.MIN_TOKENS: Use(sampled(min_tokens=13), ('"min_tokens":13',)),
    Parameter.IGNORE_EOS: Use(sampled(ignore_eos=True), ('"ignore_eos":true', '"ignore_eos_token":true')),
    Parameter.SKIP_SPECIAL_TOKENS: Use({"skip_special_tokens": False}, ('"skip_special_tokens":false',)),
    Parameter.SPACES_BETWEEN_SPECIAL_TOKENS: Use(
        {"spaces_between_special_tokens": False}, ('"spaces_between_special_tokens":false',)
    ),
    Parameter.ADD_SPECIAL_TOKENS: Use({"add_special_tokens": False}, ('"add_special_tokens":false',)),
    Parameter.JSON_OBJECT: Use(constrained(ConstraintKind.JSON_OBJECT), ('"json_object":true', '"json_object"}')),
    Parameter.JSON_SCHEMA: Use(constrained(ConstraintKind.JSON_SCHEMA, SCHEMA), (SCHEMA,)),
    Parameter.REGEX: Use(constrained(ConstraintKind.REGEX, "zq[0-9]"), ('"zq[0-9]"',)),
    Parameter.CHOICE: Use(
        constrained(ConstraintKind.CHOICE, choices=("zq-yes", "zq-no")), ('["zq-yes","zq-no"]', '"(zq-yes|zq-no)"')
    ),
    Parameter.GRAMMAR: Use(constrained(ConstraintKind.GRAMMAR, 'root ::= "zq"'), ('root ::= \\"zq\\"',)),
    Parameter.WHITESPACE_PATTERN: Use(
        constrained(ConstraintKind.JSON_SCHEMA, SCHEMA, whitespace_pattern="[zq ]?"), ('"whitespace_pattern":"[zq ]?"',)
    ),
    Parameter.BEAM: Use({"beam": BeamSearch(), "best_of": 4}, ("beam",)),
}

# Log-probabilities of the chosen tokens alone, which come with the details that are always asked for
ONLY_CHOSEN = {"lmi-inputs", "lmi-rolling"}


def model(family: str) -> ModelRoute:
    return route(family=family, fim_family="qwen", document_start="<|endoftext|>")


def encoded(family: str, canonical: CompletionRequest) -> bytes:
    return CODECS[family].encode(canonical, model(family), OPTIONS).body


def capability(family: str, parameter: Parameter) -> Capability:
    return CODECS[family].abilities(model(family)).capabilities[parameter]


def cells(*wanted: Capability) -> list[tuple[str, Parameter]]:
    """Every family's parameters of a kind."""
    return [(family, one) for family in CODECS for one in Parameter if capability(family, one) in wanted]


def parameters_of(family: str, body: bytes) -> Json:
    """Where the sampling values stand in a body."""
    value: Json = json.loads(body)
    found: Json = value["parameters"] if family in INPUTS else value
    return found


# Requests


def test_there_is_a_use_of_every_parameter() -> None:
    assert set(USES) == set(Parameter)
    for parameter, use in USES.items():
        assert parameter in used_parameters(request(**use.fields))


@pytest.mark.parametrize("family", CODECS)
def test_every_parameter_has_its_capability(family: str) -> None:
    assert set(CODECS[family].abilities(model(family)).capabilities) == set(Parameter)


@pytest.mark.parametrize("family", CODECS)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_request_of_nothing_special_is_encoded_with_its_prompt_first_and_its_sampling_said(
    family: str, streamed: bool
) -> None:
    options = EncodeOptions(cache_salt=SALT, streamed=streamed)
    body = CODECS[family].encode(request(), model(family), options).body
    key = "inputs" if family in INPUTS else "prompt"
    assert body.startswith(b'{"' + key.encode() + b'":"def f("')
    values = parameters_of(family, body)
    assert values["temperature"] == 1.0
    assert values["max_new_tokens" if family in INPUTS else "max_tokens"] == 16
    assert values.get("do_sample", True) is True
    assert ("do_sample" in values) is (family in INPUTS)  # where its default is greedy
    assert (json.loads(body).get("stream") is True) is streamed


@pytest.mark.parametrize("family", CODECS)
def test_the_salt_is_sent_where_the_family_has_a_word_for_it(family: str) -> None:
    body = encoded(family, request())
    assert (SALT.encode() in body) is (family in SALTED)
    assert parameters_of(family, body).get("cache_salt") == (SALT if family in SALTED else None)


@pytest.mark.parametrize("family", CODECS)
def test_nothing_of_the_caller_but_the_prompt_reaches_the_container(family: str) -> None:
    canonical = request(end_user="zq-user-7f3a", model="zq-model", other_models=("zq-other",), deadline_ms=31_415)
    invocation = CODECS[family].encode(canonical, model(family), OPTIONS)
    assert invocation.body == encoded(family, request())
    assert "zq" not in (invocation.custom_attributes or "")
    assert b'"user"' not in invocation.body


@pytest.mark.parametrize(("family", "parameter"), cells(HONOURED))
def test_what_is_honoured_is_told_to_the_container(family: str, parameter: Parameter) -> None:
    use = USES[parameter]
    if parameter is Parameter.LOGPROBS and family in ONLY_CHOSEN:
        assert parameters_of(family, encoded(family, request(logprobs=0)))["details"] is True
        return
    body = encoded(family, request(**use.fields))
    assert any(told.encode() in body for told in use.told), body
    assert not any(told.encode() in encoded(family, request()) for told in use.told)


@pytest.mark.parametrize(("family", "parameter"), cells(EMULATED))
def test_what_is_emulated_is_never_left_to_the_container(family: str, parameter: Parameter) -> None:
    canonical = request(**USES[parameter].fields)
    target = model(family)
    plan = planned(canonical, target, CODECS[family].abilities(target))
    bodies = [encoded(family, call.request) for call in plan.calls]
    values = [parameters_of(family, body) for body in bodies]
    assert all("best_of" not in value and "suffix" not in value for value in values)
    if parameter is Parameter.N:
        assert [value.get("n", 1) for value in values] == [1] * 7
    if parameter is Parameter.BEST_OF:
        asked = [value.get("n", 1) for value in values]
        assert asked in ([7], [1] * 7)
        assert plan.ranked
        assert all(call.request.logprobs == 0 for call in plan.calls)
    if parameter is Parameter.PROMPT_BATCH:
        key = "inputs" if family in INPUTS else "prompt"
        assert [json.loads(body)[key] for body in bodies] == ["zq-one", "zq-two"]
    if parameter is Parameter.SUFFIX:
        assert all(b"<|fim_prefix|>def f(<|fim_suffix|>zq-suffix<|fim_middle|>" in body for body in bodies)
        assert "<|fim_pad|>" in plan.cut
    if parameter is Parameter.ECHO:
        assert all(not value.get("echo") and not value.get("return_full_text") for value in values)
        assert plan.echoed
    if parameter in (Parameter.STOP, Parameter.INCLUDE_STOP):
        assert plan.cut == ("zq-stop",)
        assert all(not value.get("include_stop_str_in_output") for value in values)
    if parameter is Parameter.SKIP_SPECIAL_TOKENS:
        assert all("skip_special_tokens" not in value for value in values)


@pytest.mark.parametrize(("family", "parameter"), cells(REFUSED))
def test_what_is_refused_is_a_fault_that_names_it(family: str, parameter: Parameter) -> None:
    target = model(family)
    fields = USES[parameter].fields
    if parameter is Parameter.WHITESPACE_PATTERN:
        kinds = {Parameter.JSON_SCHEMA: HONOURED}
        target = replace(target, capabilities=kinds)  # a constraint it may belong to
    if parameter is Parameter.INCLUDE_STOP:
        fields = {"include_stop": True}
    if parameter is Parameter.BEAM:
        fields = {"beam": BeamSearch()}
    abilities = CODECS[family].abilities(target)
    canonical = request(**fields, param_names={str(parameter): f"zq_{parameter}"})
    with pytest.raises(UnsupportedParameterError) as caught:
        check_parameters(canonical, target, abilities)
    assert caught.value.param == f"zq_{parameter}"
    assert f"'zq_{parameter}'" in caught.value.message
