"""Fill in the middle, in each model family's own markers.

Right values: the families' tokenizers and the templates that Cody, Continue and Tabby send.
"""

from __future__ import annotations

from typing import Any

import pytest

from completions.domain.errors import InvalidRequestError, UnsupportedParameterError
from completions.service.infill import with_infill
from fakes import request, route

FAMILIES = {
    "starcoder": "<fim_prefix>P<fim_suffix>S<fim_middle>",
    "codellama": "<PRE> P <SUF>S <MID>",
    "deepseek": "<\uff5cfim\u2581begin\uff5c>P<\uff5cfim\u2581hole\uff5c>S<\uff5cfim\u2581end\uff5c>",
    "qwen": "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
    "codegemma": "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
    "codestral": "[SUFFIX]S[PREFIX]P",
}
MARKERS = {
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>"),
    "codellama": ("<PRE>", "<SUF>", "<MID>", "<EOT>"),
    "deepseek": (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    "qwen": (
        "<|endoftext|>",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|im_start|>",
        "<|im_end|>",
    ),
    "codegemma": (
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|file_separator|>",
        "<end_of_turn>",
        "<eos>",
    ),
    "codestral": ("[PREFIX]", "[SUFFIX]"),
}
EVERY_MARKER = [(family, marker) for family, markers in MARKERS.items() for marker in markers]


def infilled(family: str | None, **overrides: Any) -> Any:
    return with_infill(request(**{"prompts": ("P",), "suffix": "S", **overrides}), route(fim_family=family))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_own_template(family: str) -> None:
    folded = infilled(family)
    assert (folded.prompts, folded.suffix) == ((FAMILIES[family],), None)


@pytest.mark.parametrize("suffix", [None, ""])
@pytest.mark.parametrize("family", [None, "qwen"])
def test_without_a_suffix_the_prompt_stays_as_it_is(family: str | None, suffix: str | None) -> None:
    assert infilled(family, suffix=suffix).prompts == ("P",)


def test_without_a_suffix_markers_and_echo_and_tokens_pass() -> None:
    prompts = ("<|fim_prefix|>a", (1, 2))
    assert infilled("qwen", prompts=prompts, suffix=None, echo=True).prompts == prompts


def test_each_prompt_of_a_batch_is_folded() -> None:
    assert infilled("codestral", prompts=("a", "b")).prompts == ("[SUFFIX]S[PREFIX]a", "[SUFFIX]S[PREFIX]b")


@pytest.mark.parametrize("text", ["{prefix}{suffix}", "{0}", "{", "\r\n\t \u20ac", "%s"])
def test_text_is_folded_verbatim(text: str) -> None:
    assert infilled("codestral", prompts=(text,), suffix=text).prompts == (f"[SUFFIX]{text}[PREFIX]{text}",)


def test_an_empty_prompt_before_a_suffix_is_folded() -> None:
    assert infilled("codestral", prompts=("",)).prompts == ("[SUFFIX]S[PREFIX]",)


@pytest.mark.parametrize("family", [None, "", "unheard-of"])
def test_a_model_without_infill_refuses_the_suffix(family: str | None) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        infilled(family)
    assert caught.value.param == "suffix"


def test_a_suffix_with_echo_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        infilled("qwen", echo=True)
    assert caught.value.param == "suffix"


def test_a_suffix_behind_token_ids_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        infilled("qwen", prompts=((1, 2),))
    assert caught.value.param == "suffix"


@pytest.mark.parametrize(("family", "marker"), EVERY_MARKER)
@pytest.mark.parametrize("place", ["prompt", "suffix"])
def test_a_marker_in_the_callers_text_is_refused(family: str, marker: str, place: str) -> None:
    text = f"a{marker}b"
    with pytest.raises(InvalidRequestError):
        infilled(family, **({"prompts": (text,)} if place == "prompt" else {"suffix": text}))


def test_a_marker_of_another_family_is_text() -> None:
    assert infilled("codestral", prompts=("<PRE>",)).prompts == ("[SUFFIX]S[PREFIX]<PRE>",)


def test_a_refusal_names_what_the_caller_wrote() -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        infilled(None, param_names={"suffix": "after"})
    assert caught.value.param == "after"
