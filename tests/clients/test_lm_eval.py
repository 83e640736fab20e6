"""lm-eval's ``local-completions`` over ten lines: its scores are the model's own log-probabilities.

The client sends token ids from a tokenizer written here in Hugging Face's form: the embedded model's own pieces and
its longest-prefix rule, for ASCII text. It asks for one token after the echoed prompt and leaves that one out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from clients.official_client import OfficialClient
from completions_cli.local.ngram import NGramModel, standard_library
from completions_cli.local.stack import LocalStack
from completions_cli.local.tokenizer import PIECE, Special

# Context, choices, the one called right, which for the zebra is the less likely. After the last two the embedded model
# ends the text: the one token lm-eval asks for is the end of text, which must be listed all the same.
LINES: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("import", ("os\n", "banana\n"), 0),
    ("def __init__(self,", ("while):", "name):"), 1),
    ("    for i in", ("range(", "range-", "import("), 0),
    ("if __name__ ==", ("'__init__':\n", "'__main__':\n"), 1),
    ("raise", ("ValueError(", "KeyboardBanana("), 0),
    ("        return", ("raise", "self."), 1),
    ("try:\n    import", ("sys\n", "else\n"), 0),
    ("class Zebra(", ("object):", "del):"), 1),
    ("else:\n    getpass =", ("win_getpass\n", "unix_getpass\n"), 1),
    ("bisect = bisect_right\ninsort =", ("insort_right\n", "insort_left\n"), 0),
)
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""
GENERATE = """
task: generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def model() -> NGramModel:
    """The model that the stack serves."""
    return NGramModel.train(standard_library())


@pytest.fixture(scope="module")
def folder(model: NGramModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ten lines, three tasks over them, and the tokenizer."""
    root = tmp_path_factory.mktemp("lm_eval")
    data = root / "lines.jsonl"
    rows = [
        {"context": context, "choices": choices, "label": label, "text": f"{context} {choices[label]}"}
        for context, choices, label in LINES
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("choice", CHOICE), ("rolling", ROLLING), ("generate", GENERATE)):
        (root / f"{name}.yaml").write_text(task.format(data=json.dumps(str(data))))
    write_tokenizer(model, root / "tokenizer")
    return root


def write_tokenizer(model: NGramModel, folder: Path) -> None:
    """WordPiece without a prefix for inner pieces is the longest-prefix rule."""
    end = Special.END_OF_TEXT.spelling
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": int(special), "content": special.spelling, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for special in Special
        ],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": PIECE.pattern},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordPiece",
            "unk_token": end,
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 1000,
            "vocab": {model.tokenizer.token_text(token): token for token in range(model.tokenizer.size)},
        },
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def score(model: NGramModel, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """The sum of the continuation's log-probabilities, and whether each token is the likeliest."""
    ids = [*context, *continuation]
    positions = range(len(context), len(ids))
    likeliest = [model.top(ids[:position], 1)[0][0] == ids[position] for position in positions]
    return math.fsum(model.logprob(ids[:position], ids[position]) for position in positions), all(likeliest)


def score_over_the_api(sdk: OpenAI, context: Sequence[int], continuation: Sequence[int]) -> float:
    """The same sum from an echoed prompt without new tokens."""
    completion = sdk.completions.create(
        model="demo", prompt=[[*context, *continuation]], echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == len(context) + len(continuation)
    return math.fsum(logprobs.token_logprobs[len(context) :])


def choice_requests(model: NGramModel) -> list[list[tuple[list[int], list[int]]]]:
    """Context and continuation ids of each choice of each line."""
    encode = model.tokenizer.encode
    return [
        [(encode(context), encode(f"{context} {choice}")[len(encode(context)) :]) for choice in choices]
        for context, choices, _ in LINES
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"tokenized_requests": True, "batch_size": 4}, id="token ids, four prompts a request"),
        pytest.param({"tokenized_requests": False, "num_concurrent": 3}, id="text, three requests at a time"),
    ],
)
def test_ten_lines_are_scored_by_the_models_own_log_probabilities(
    stack: LocalStack, model: NGramModel, folder: Path, arguments: dict[str, object]
) -> None:
    client = OfficialClient("lm_eval")
    environment = {"OPENAI_API_KEY": stack.key, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}

    report: Any = client.report(environment, str(folder), f"{stack.base_url}/v1/completions", json.dumps(arguments))

    texts = [f"{context} {choices[label]}" for context, choices, label in LINES]
    ids = [model.tokenizer.encode(text) for text in texts]
    assert report["token ids"] == ids

    expected = [[score(model, *request) for request in line] for line in choice_requests(model)]
    answers = report["answers"]["choice"]
    for line, scores in zip(answers, expected, strict=True):
        assert [value for value, _ in line] == pytest.approx([value for value, _ in scores], rel=1e-9)
        assert [greedy for _, greedy in line] == [greedy for _, greedy in scores]
    right = [
        max(line, key=lambda one: one[0]) is line[label] for line, (_, _, label) in zip(expected, LINES, strict=True)
    ]
    assert report["metrics"]["choice"]["acc,none"] == pytest.approx(sum(right) / len(LINES))
    assert 0 < sum(right) < len(LINES)

    whole = [score(model, [Special.END_OF_TEXT], tokens)[0] for tokens in ids]
    assert [answer for (answer,) in report["answers"]["rolling"]] == pytest.approx(whole, rel=1e-9)
    size = sum(len(text.encode()) for text in texts)
    assert report["metrics"]["rolling"]["byte_perplexity,none"] == pytest.approx(math.exp(-math.fsum(whole) / size))

    with OpenAI(base_url=f"{stack.base_url}/v1", api_key=stack.key) as sdk:
        generated = sdk.completions.create(
            model="demo", prompt=[context for context, _, _ in LINES], max_tokens=6, temperature=0, stop="\n"
        )
    assert [answer for (answer,) in report["answers"]["generate"]] == [choice.text for choice in generated.choices]


def test_no_new_token_gives_the_same_scores_as_the_one_that_is_left_out(stack: LocalStack, model: NGramModel) -> None:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key=stack.key) as sdk:
        for line in choice_requests(model):
            for context, continuation in line:
                over_the_api = score_over_the_api(sdk, context, continuation)
                assert over_the_api == pytest.approx(score(model, context, continuation)[0], rel=1e-9)


def test_the_last_two_lines_end_where_the_model_would_end_the_text(model: NGramModel) -> None:
    for context, choices, label in LINES[-2:]:
        ids = model.tokenizer.encode(f"{context} {choices[label]}")
        assert model.top(ids, 1)[0][0] == Special.END_OF_TEXT
