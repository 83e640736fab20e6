"""The embedded language model and its sampler."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from completions_cli.local.ngram import NGramModel, Sampler, SamplingSettings, Step, standard_library
from completions_cli.local.tokenizer import Special

EOS = Special.END_OF_TEXT
GREEDY = SamplingSettings(temperature=0)
HALF_QUARTERS = {1: 0.5, 2: 0.25, 3: 0.25}


@pytest.fixture(scope="module")
def model() -> NGramModel:
    return NGramModel.train(standard_library())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> NGramModel:
    path = tmp_path_factory.mktemp("corpus") / "tiny.txt"
    path.write_text("one two three one two four one two three\n", encoding="utf-8")
    return NGramModel.train([path])


def take(model: NGramModel, prompt: str, count: int, settings: SamplingSettings, seed: int | None = None) -> list[Step]:
    return list(islice(model.generate(model.tokenizer.encode(prompt), settings, seed), count))


def text_of(model: NGramModel, steps: Sequence[Step]) -> str:
    return model.tokenizer.decode(step.token_id for step in steps)


def draws(
    settings: SamplingSettings, probabilities: Mapping[int, float] = HALF_QUARTERS, *, count: int = 2000
) -> Counter[int]:
    """How often each token comes out of ``count`` independent draws."""
    sampler = Sampler(settings, frozenset(), 0)
    return Counter(sampler.draw(probabilities) for _ in range(count))


@pytest.mark.parametrize("context", ["", "import os\n", "\u20ac unheard of", "<|fim_pad|>"])
def test_probabilities_add_up_to_one_over_the_whole_vocabulary(model: NGramModel, context: str) -> None:
    ids = model.tokenizer.encode(context)
    total = math.fsum(math.exp(model.logprob(ids, token)) for token in range(model.tokenizer.size))
    assert total == pytest.approx(1)


def test_an_unseen_token_has_a_finite_log_probability(model: NGramModel) -> None:
    assert -30 < model.logprob([EOS], Special.FIM_PAD) < -5


def test_probabilities_are_witten_bell_estimates(tiny: NGramModel) -> None:
    # 11 tokens of 7 kinds, line break and end of text among them; after " two": " three" twice and " four" once.
    two, three = tiny.tokenizer.encode(" two three")
    unigram = (2 + 7 / tiny.tokenizer.size) / (11 + 7)
    after_two = (2 + 2 * unigram) / (3 + 2)
    assert math.exp(tiny.logprob([two], three)) == pytest.approx(after_two)


def test_the_same_files_give_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "text.py"
    path.write_text("for item in items:\n    show(item)\n", encoding="utf-8")
    first, second = NGramModel.train([path]), NGramModel.train([path])
    context = first.tokenizer.encode("for item")
    assert first.top(context, 5) == second.top(context, 5)


def test_training_without_files_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one file"):
        NGramModel.train([])


def test_greedy_generation_reports_the_likeliest_token_and_its_own_log_probability(model: NGramModel) -> None:
    settings = replace(GREEDY, top_logprobs=3)
    context = model.tokenizer.encode("import sys\n")
    for step in take(model, "import sys\n", 20, settings):
        assert step.top == model.top(context, 3)
        assert (step.token_id, step.logprob) == step.top[0]
        assert step.logprob == pytest.approx(model.logprob(context, step.token_id))
        context.append(step.token_id)


def test_the_same_seed_repeats_and_another_differs(model: NGramModel) -> None:
    outputs = [text_of(model, take(model, "def ", 50, SamplingSettings(), seed)) for seed in (5, 5, 6)]
    assert outputs[0] == outputs[1] != outputs[2]


def test_no_seed_means_random(model: NGramModel) -> None:
    outputs = {text_of(model, take(model, "def ", 50, SamplingSettings())) for _ in range(3)}
    assert len(outputs) == 3


def test_temperature_zero_ignores_the_seed_and_takes_the_lowest_id_of_a_tie() -> None:
    assert draws(GREEDY, {7: 0.4, 3: 0.4, 9: 0.2}) == {3: 2000}


def test_temperature_one_draws_by_probability() -> None:
    counts = draws(SamplingSettings())
    assert [counts[token] / 2000 for token in (1, 2, 3)] == pytest.approx([0.5, 0.25, 0.25], abs=0.04)


def test_a_tiny_temperature_is_raised_and_stays_finite() -> None:
    assert draws(SamplingSettings(temperature=1e-300)) == {1: 2000}


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        (SamplingSettings(top_k=1), {1}),
        (SamplingSettings(top_k=2), {1, 2}),
        (SamplingSettings(top_k=0), {1, 2, 3}),
        (SamplingSettings(top_k=-1), {1, 2, 3}),
        (SamplingSettings(top_p=0.5), {1}),
        (SamplingSettings(top_p=0.7), {1, 2}),
        (SamplingSettings(top_p=0.0001), {1}),
        (SamplingSettings(min_p=0.6), {1}),
        (SamplingSettings(min_p=0.5), {1, 2, 3}),
        (SamplingSettings(logit_bias={1: -100}), {2, 3}),
        (SamplingSettings(logit_bias={3: 100}), {3}),
    ],
)
def test_a_setting_leaves_these_tokens(settings: SamplingSettings, left: set[int]) -> None:
    assert draws(settings).keys() == left


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (replace(GREEDY, presence_penalty=1.0), 2),
        (replace(GREEDY, presence_penalty=0.5), 1),
        (replace(GREEDY, frequency_penalty=0.5), 2),
        (replace(GREEDY, frequency_penalty=-0.5), 1),
        (replace(GREEDY, repetition_penalty=2.5), 2),
    ],
)
def test_a_penalty_on_a_token_that_was_produced_twice(settings: SamplingSettings, expected: int) -> None:
    sampler = Sampler(settings, frozenset(), 0)
    sampler.record(1)
    sampler.record(1)
    assert sampler.draw(HALF_QUARTERS) == expected


def test_repetition_penalty_counts_the_prompt_and_presence_penalty_does_not() -> None:
    prompt = frozenset({1})
    assert Sampler(replace(GREEDY, repetition_penalty=2.5), prompt, 0).draw(HALF_QUARTERS) == 2
    assert Sampler(replace(GREEDY, presence_penalty=2), prompt, 0).draw(HALF_QUARTERS) == 1


def test_min_tokens_forbids_end_of_text_and_stop_tokens_until_reached() -> None:
    sampler = Sampler(replace(GREEDY, min_tokens=1, stop_token_ids=frozenset({1})), frozenset(), 0)
    assert sampler.draw({EOS: 0.6, 1: 0.3, 2: 0.1}) == 2
    sampler.record(2)
    assert sampler.draw({EOS: 0.6, 1: 0.3, 2: 0.1}) == EOS


def test_a_biased_token_can_be_drawn_wherever_it_never_followed(model: NGramModel) -> None:
    steps = take(model, "import sys\n", 3, SamplingSettings(logit_bias={Special.FIM_PAD: 100}), seed=1)
    assert [step.token_id for step in steps] == [Special.FIM_PAD] * 3


def test_bias_does_not_change_the_reported_log_probability(model: NGramModel) -> None:
    context = model.tokenizer.encode("import sys\n")
    (step,) = take(model, "import sys\n", 1, replace(GREEDY, logit_bias={Special.FIM_PAD: 100}))
    assert step.logprob == pytest.approx(model.logprob(context, Special.FIM_PAD))


def test_a_prompt_is_scored_token_by_token_and_its_first_token_has_no_score(model: NGramModel) -> None:
    ids = model.tokenizer.encode("import sys\nimport os\n")
    steps = model.score(ids, 2)
    assert [step.token_id for step in steps] == ids
    assert steps[0] == Step(ids[0], None)
    assert [step.logprob for step in steps[1:]] == pytest.approx(
        [model.logprob(ids[:i], ids[i]) for i in range(1, len(ids))]
    )
    assert {len(step.top) for step in steps[1:]} == {2}


@pytest.mark.parametrize("seed", range(8))
def test_an_infill_before_a_line_break_ends_with_its_line(model: NGramModel, seed: int) -> None:
    prompt = "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n\nadd(1, 2)<|fim_middle|>"
    tokens = [step.token_id for step in take(model, prompt, 200, SamplingSettings(), seed)]
    infill = model.tokenizer.decode(tokens[: tokens.index(EOS)])
    assert "\n" not in infill


@pytest.mark.parametrize("seed", range(8))
def test_an_infill_before_other_text_keeps_the_line_break_it_ends_with(model: NGramModel, seed: int) -> None:
    prompt = "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>    return c<|fim_middle|>"
    tokens = [step.token_id for step in take(model, prompt, 200, SamplingSettings(), seed)]
    infill = model.tokenizer.decode(tokens[: tokens.index(EOS)])
    assert infill.index("\n") == len(infill) - 1


def test_an_infill_continues_the_prefix_and_not_the_suffix(model: NGramModel) -> None:
    plain = take(model, "def __init__", 1, GREEDY)
    infill = take(model, "<|fim_prefix|>def __init__<|fim_suffix|>import sys<|fim_middle|>", 1, GREEDY)
    assert infill == plain


def test_min_tokens_keeps_an_infill_going_past_its_line(model: NGramModel) -> None:
    prompt = "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n<|fim_middle|>"
    tokens = [step.token_id for step in take(model, prompt, 200, SamplingSettings(min_tokens=150), seed=1)]
    assert EOS not in tokens[:150]


def test_every_file_of_the_corpus_that_exists_is_learnt_in_a_fixed_order() -> None:
    paths = standard_library()
    assert len(paths) > 30
    assert paths == sorted(paths)
