"""The catalogue file: what it becomes, and every rule it can break, with the line it is broken on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from openapi_schema_validator import OAS31Validator
from typer.testing import CliRunner

from completions.domain.catalog import Capability, ModelLimits, ModelPrice, ModelRoute, Parameter
from completions_cli.catalogue import CatalogueError, read_catalogue
from completions_cli.catalogue_file import ModelEntry, brief_values, dollars, schema_text
from completions_cli.main import app

FULL = """\
models:
  - id: coder
    aliases: [acme/coder, coder-latest]
    endpoint: coder-endpoint
    inference_component: coder-component
    adapter: sql
    served_model: base
    family: vllm
    family_version: "0.10"
    context_length: 32768
    owned_by: acme
    created: 2026-09-01
    limits: {output_tokens: 4096, stops: 2, logprobs: 3}
    fim_family: qwen
    stop_tokens: ["<|endoftext|>"]
    document_start: "<|endoftext|>"
    custom_attributes: accept_eula=true
    timeout_seconds: 120.5
    read_timeout_seconds: 30
    start_seconds: 420
    wait_for_start: true
    isolate_prefix_cache: false
    price:
      version: "2026-09"
      input_dollars_per_million: 0.15
      cached_input_dollars_per_million: 0.075
      output_dollars_per_million: 2
    fallbacks: [small]
    capabilities: {logprobs: refused}
  - id: small
    endpoint: small
    family: tgi
    context_length: 4096
    created: 1700000000
    target_variant: AllTraffic
    price: {version: a, input_dollars_per_million: 0.001, output_dollars_per_million: 0}
"""
FULL_ROUTES = (
    ModelRoute(
        model_id="coder",
        aliases=("acme/coder", "coder-latest"),
        endpoint_name="coder-endpoint",
        inference_component="coder-component",
        adapter="sql",
        served_model="base",
        family="vllm",
        family_version="0.10",
        context_length=32768,
        owned_by="acme",
        created=1_788_220_800,  # 2026-09-01T00:00:00Z
        limits=ModelLimits(4096, 2, 3),
        fim_family="qwen",
        stop_tokens=("<|endoftext|>",),
        document_start="<|endoftext|>",
        custom_attributes="accept_eula=true",
        timeout_seconds=120.5,
        read_timeout_seconds=30.0,
        start_seconds=420,
        wait_for_start=True,
        isolate_prefix_cache=False,
        price=ModelPrice("2026-09", 150, 75, 2000),
        fallbacks=("small",),
        capabilities={Parameter.LOGPROBS: Capability.REFUSED},
    ),
    ModelRoute(
        model_id="small",
        endpoint_name="small",
        family="tgi",
        context_length=4096,
        created=1_700_000_000,
        target_variant="AllTraffic",
        price=ModelPrice("a", 1, 1, 0),
    ),
)
ENTRY = """\
models:
  - id: one
    endpoint: one
    family: vllm
    context_length: 4096
    created: 2026-01-01
"""
"""Five keys, on lines 2 to 6."""


def file_of(folder: Path, text: str) -> Path:
    path = folder / "models.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(folder: Path, text: str) -> list[tuple[int, str]]:
    """Line and message of each problem, the place included."""
    with pytest.raises(CatalogueError) as caught:
        read_catalogue(file_of(folder, text))
    return [
        (problem.line, f"{problem.place}: {problem.message}" if problem.place else problem.message)
        for problem in caught.value.problems
    ]


def test_every_key_reaches_the_route(tmp_path: Path) -> None:
    assert read_catalogue(file_of(tmp_path, FULL)) == FULL_ROUTES


def test_every_key_of_an_entry_stands_in_the_example_above() -> None:
    written = {name for entry in yaml.safe_load(FULL)["models"] for name in entry}
    assert written == set(ModelEntry.model_fields) - {"asynchronous"}


def test_what_is_shown_of_a_model_reads_as_the_same_model(tmp_path: Path) -> None:
    shown = yaml.safe_dump({"models": [brief_values(route) for route in FULL_ROUTES]})
    assert read_catalogue(file_of(tmp_path, shown)) == FULL_ROUTES


def test_what_is_shown_leaves_defaults_out() -> None:
    assert brief_values(ModelRoute("one", "endpoint", "vllm", 4096, 1_767_225_601)) == {
        "id": "one",
        "endpoint": "endpoint",
        "family": "vllm",
        "context_length": 4096,
        "created": 1_767_225_601,  # no day's first second
    }


@pytest.mark.parametrize(
    ("nanos", "text"), [(150, "0.15"), (75, "0.075"), (2000, "2.00"), (1, "0.001"), (0, "0.00"), (12_345, "12.345")]
)
def test_a_price_is_said_in_dollars_per_million_tokens(nanos: int, text: str) -> None:
    assert dollars(nanos) == text


@pytest.mark.parametrize(
    ("added", "line", "message"),
    [
        ("contextlength: 1", 7, "one: contextlength: unknown key; did you mean 'context_length'?"),
        ("zzz: 1", 7, "one: zzz: unknown key"),
        ("limits: {stop: 1}", 7, "one: limits.stop: unknown key; did you mean 'stops'?"),
        ("owned_by: 7", 7, "one: owned_by: input should be a valid string"),
        ("asynchronous: 'yes'", 7, "one: asynchronous: input should be a valid boolean"),
        ("aliases: x", 7, "one: aliases: input should be a valid list"),
        ("stop_tokens: [a, '']", 7, "one: stop_tokens[1]: string should have at least 1 character"),
        ("family_version: 0.10", 7, 'one: family_version: must stand in quotes ("0.10"), or YAML reads a number'),
        ("family_version: latest", 7, 'one: family_version: must be a version such as "0.27.1"'),
        ("family_version: '0.12rc1'", 7, 'one: family_version: must be a version such as "0.27.1"'),
        (
            "fim_family: cobol",
            7,
            "one: fim_family: there is no infill family 'cobol'; there are codegemma, codellama, codestral, deepseek, "
            "qwen, starcoder",
        ),
        ("limits: {output_tokens: -1}", 7, "one: limits.output_tokens: input should be greater than or equal to 1"),
        ("limits: {stops: -1}", 7, "one: limits.stops: input should be greater than or equal to 0"),
        ("limits: {logprobs: -1}", 7, "one: limits.logprobs: input should be greater than or equal to 0"),
        ("limits: {output_tokens: 4097}", 7, "one: limits.output_tokens: is more than the context_length of 4096"),
        ("timeout_seconds: 0", 7, "one: timeout_seconds: input should be greater than 0"),
        ("read_timeout_seconds: .inf", 7, "one: read_timeout_seconds: input should be a finite number"),
        ("start_seconds: 0", 7, "one: start_seconds: input should be greater than or equal to 1"),
        (
            "inference_component: a_b",
            7,
            "one: inference_component: must be at most 63 letters, digits and inner hyphens, as SageMaker names things",
        ),
        (
            "target_variant: -a",
            7,
            "one: target_variant: must be at most 63 letters, digits and inner hyphens, as SageMaker names things",
        ),
        (
            "custom_attributes: 'ü=1'",
            7,
            "one: custom_attributes: must be visible ASCII characters: it travels in a header",
        ),
        ("custom_attributes: " + "x" * 1025, 7, "one: custom_attributes: string should have at most 1024 characters"),
        # ",route=/v1/completions" is 22 characters
        (
            "custom_attributes: " + "x" * 1003,
            7,
            "one: custom_attributes: is 1025 characters with what the family adds; SageMaker's header holds 1024",
        ),
        ("capabilities: {topk: refused}", 7, "one: capabilities.topk: there is no parameter 'topk'"),
        (
            "capabilities: {top_k: maybe}",
            7,
            "one: capabilities.top_k: input should be 'honoured', 'emulated' or 'refused'",
        ),
        (
            "capabilities:\n      top_k: refused\n      beam: honoured",
            9,
            "one: capabilities.beam: beam cannot be honoured: the family has it refused",
        ),
        (
            "capabilities: {suffix: honoured}",
            7,
            "one: capabilities.suffix: cannot be honoured: family 'vllm' never sends it to the container",
        ),
        (
            "capabilities: {top_k: emulated}",
            7,
            "one: capabilities.top_k: cannot be emulated: the service has no way to do it in the container's place",
        ),
        ("aliases: [one]", 7, "one: aliases[0]: 'one' is the id of this model"),
        ("aliases: [x, y, x]", 7, "one: aliases[2]: 'x' is already an alias on line 7"),
        ("fallbacks: [one]", 7, "one: fallbacks[0]: the model falls back to itself"),
        ("fallbacks: [two]", 7, "one: fallbacks[0]: there is no model 'two' in this file"),
        (
            "aliases: [uno]\n    fallbacks: [uno]",
            8,
            "one: fallbacks[0]: 'uno' is an alias; name the model by its id, 'one'",
        ),
        (
            "asynchronous: true\n    wait_for_start: true",
            8,
            "one: wait_for_start: means nothing on an asynchronous endpoint, which queues",
        ),
        (
            "target_variant: a\n    inference_component: b",
            7,
            "one: target_variant: cannot be combined with inference_component",
        ),
        ("family: vllm", 7, "models[0].family: stands twice, first on line 4"),
        ("7: x", 7, "models[0]: a key must be text; put it in quotes"),
        ("owned_by: !secret x", 7, "models[0].owned_by: unknown tag !secret"),
    ],
)
def test_a_broken_rule_is_told_with_its_line(tmp_path: Path, added: str, line: int, message: str) -> None:
    assert (line, message) in problems(tmp_path, f"{ENTRY}    {added}\n")


@pytest.mark.parametrize(
    ("price", "message"),
    [
        ("input_dollars_per_million: -0.1", "must not be negative"),
        ("input_dollars_per_million: 1000000000001", "must not exceed 1000000000000 dollars"),
        (
            "input_dollars_per_million: 0.1501",
            "has more than three decimals: the smallest price is 0.001, a nano-dollar a token",
        ),
        (
            # a float would have taken it for 0.15
            "input_dollars_per_million: 0.15000000000000000001",
            "has more than three decimals: the smallest price is 0.001, a nano-dollar a token",
        ),
        ("input_dollars_per_million: cheap", "must be a number of US dollars"),
        ("input_dollars_per_million: .nan", "must be a number of US dollars"),
        ("input_dollars_per_million: true", "must be a number of US dollars"),
    ],
)
def test_a_price_is_exact_or_refused(tmp_path: Path, price: str, message: str) -> None:
    text = f"{ENTRY}    price:\n      version: a\n      {price}\n      output_dollars_per_million: 1\n"
    assert problems(tmp_path, text) == [(9, f"one: price.input_dollars_per_million: {message}")]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("id: one", "id: ''", 2, "models[0].id: string should have at least 1 character"),
        (
            "id: one",
            f"id: {'é' * 513}",
            2,
            "models[0].id: is longer than 1024 bytes, which is what a key of the table may have",
        ),
        ("id: one", 'id: "a\\tb"', 2, "models[0].id: must be printable characters, without a blank at either end"),
        ("id: one", "id: 1", 2, "models[0].id: input should be a valid string"),
        (
            "family: vllm",
            "family: vlm",
            4,
            "one: family: there is no family 'vlm'; there are lmi, lmi-inputs, lmi-rolling, openai, tgi, tgi-openai, "
            "vllm, vllm-invocations",
        ),
        (
            "endpoint: one",
            f"endpoint: {'a' * 64}",
            3,
            "one: endpoint: must be at most 63 letters, digits and inner hyphens, as SageMaker names things",
        ),
        ("    endpoint: one\n", "", 2, "one: endpoint: is required"),
        ("context_length: 4096", "context_length: '4096'", 5, "one: context_length: input should be a valid integer"),
        (
            "context_length: 4096",
            "context_length: 0",
            5,
            "one: context_length: input should be greater than or equal to 1",
        ),
        (
            "created: 2026-01-01",
            "created: 2026-02-30",
            6,
            "one: created: must be a day such as 2026-11-30, or Unix seconds",
        ),
        ("created: 2026-01-01", "created: soon", 6, "one: created: must be a day such as 2026-11-30, or Unix seconds"),
        (
            "created: 2026-01-01",
            "created: 2026-01-01 10:00:00",
            6,
            "one: created: must be a day without a time, or Unix seconds",
        ),
        ("created: 2026-01-01", "created: -1", 6, "one: created: input should be greater than or equal to 0"),
    ],
)
def test_a_required_key_has_its_rules(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert problems(tmp_path, ENTRY.replace(old, new, 1)) == [(line, message)]


def test_a_family_may_refuse_more_than_its_capabilities(tmp_path: Path) -> None:
    text = ENTRY.replace("family: vllm", "family: vllm-invocations") + "    adapter: sql\n"
    assert problems(tmp_path, text) == [
        (7, "one: adapter: /invocations reads no model name; use the adapter's own inference component")
    ]


def entries(**fallbacks: str) -> str:
    """A model of six lines for each name, its fallbacks on the sixth."""
    return "models:\n" + "".join(
        f"  - id: {name}\n    endpoint: {name}\n    family: vllm\n    context_length: 1\n    created: 0\n"
        f"    fallbacks: [{names}]\n"
        for name, names in fallbacks.items()
    )


def test_fallbacks_may_meet_again_but_not_run_in_a_circle(tmp_path: Path) -> None:
    assert len(read_catalogue(file_of(tmp_path, entries(a="b, c", b="d", c="d", d="")))) == 4
    assert problems(tmp_path, entries(a="b", b="c", c="a")) == [
        (19, "c: fallbacks[0]: fallbacks run in a circle: c → a → b → c")
    ]


def test_each_circle_is_told(tmp_path: Path) -> None:
    assert [line for line, _ in problems(tmp_path, entries(a="b", b="a", c="d", d="c"))] == [13, 25]


def test_a_fallback_stands_once(tmp_path: Path) -> None:
    assert problems(tmp_path, entries(a="b, b", b="")) == [(7, "a: fallbacks[1]: 'b' stands twice")]


def test_a_name_means_one_model(tmp_path: Path) -> None:
    text = (
        entries(a="", b="") + "  - {id: a, aliases: [b, x], endpoint: c, family: vllm, context_length: 1, created: 0}\n"
    )
    text += "  - {id: d, aliases: [x], endpoint: d, family: vllm, context_length: 1, created: 0}\n"
    assert problems(tmp_path, text) == [
        (14, "a: aliases[0]: 'b' is the id of the model on line 8"),
        (14, "a: id: 'a' is already the id of the model on line 2"),
        (15, "d: aliases[0]: 'x' is already an alias on line 14"),
    ]


def test_all_problems_are_told_at_once_and_none_that_another_one_causes(tmp_path: Path) -> None:
    text = """\
models:
  - id: wrong
    endpoint: a_b
    family: nobody's
    context_length: many
    limits: {output_tokens: 5}
    capabilities: {beam: honoured}
  - id: right
    endpoint: right
    family: vllm
    context_length: 4096
    created: 0
    adapter: ''
    capabilities: {beam: honoured}
    fallbacks: [wrong]
extra: 1
"""
    assert [(line, message.split(":")[1].strip()) for line, message in problems(tmp_path, text)] == [
        (2, "created"),
        (3, "endpoint"),
        (4, "family"),
        (5, "context_length"),
        (13, "adapter"),
        (14, "capabilities.beam"),
        (16, "unknown key; the file has only 'models'"),
    ]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file must have one key, 'models'"),
        ("- id: a\n", 1, "the file must have one key, 'models'"),
        ("\nmodel: []\n", 2, "the file must have one key, 'models'"),
        ("models: a\n", 1, "models: must be a list"),
        ("models:\n  - a\n", 2, "models[0]: must be a model: keys and values"),
        ("models:\n  - &a [*a]\n", 2, "models[0][0]: an anchor stands inside itself"),
        ("models:\n  - id: [\n", 3, "not YAML: expected the node content, but found '<stream end>'"),
        ("models: []\n---\nmodels: []\n", 2, "not YAML: but found another document"),
        ("models:\n  - id: \x01\n", 2, "not YAML: special characters are not allowed"),
    ],
)
def test_a_file_that_is_no_catalogue_says_where(tmp_path: Path, text: str, line: int, message: str) -> None:
    assert (line, message) in problems(tmp_path, text)


def test_a_file_in_another_encoding_says_where(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_bytes(b"models:\n  - id: caf\xe9\n")
    with pytest.raises(CatalogueError, match=r"models.yaml:2: not UTF-8"):
        read_catalogue(path)


def test_anchors_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    text = ENTRY + "    limits: &limits {stops: 1}\n" + ENTRY.removeprefix("models:\n").replace("one", "two")
    routes = read_catalogue(file_of(tmp_path, text + "    limits: *limits\n"))
    assert [route.limits for route in routes] == [ModelLimits(stops=1)] * 2


def test_the_command_names_file_and_line_and_fails(tmp_path: Path) -> None:
    path = file_of(tmp_path, ENTRY + "    owned_by: 7\n    zzz: 1\n")
    result = CliRunner().invoke(app, ["models", "check", str(path)])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"{path}:7: one: owned_by: input should be a valid string",
        f"{path}:8: one: zzz: unknown key",
        f"completions models: {path}: 2 problems",
    ]


def test_the_committed_catalogue_is_valid(project_root: Path) -> None:
    result = CliRunner().invoke(app, ["models", "check", str(project_root / "infra" / "models.yaml")])
    assert (result.exit_code, result.stderr) == (0, "")


def test_the_committed_schema_is_the_one_the_code_has(project_root: Path) -> None:
    assert (project_root / "infra" / "models.schema.json").read_text(encoding="utf-8") == schema_text()


def test_the_schema_takes_what_the_code_takes_and_refuses_a_wrong_key() -> None:
    validator = OAS31Validator(json.loads(schema_text()))
    catalogue = yaml.safe_load(FULL)
    catalogue["models"][0]["created"] = "2026-09-01"  # what an editor's YAML reads
    assert validator.is_valid(catalogue)
    for name, value in (("zzz", 1), ("family", "vlm"), ("fim_family", "cobol"), ("context_length", 0), ("id", "")):
        wrong = {"models": [catalogue["models"][0] | {name: value}]}
        assert not validator.is_valid(wrong), name


def test_a_stale_schema_is_told(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    assert CliRunner().invoke(app, ["models", "schema", "--check", "--output", str(path)]).exit_code == 1
    assert CliRunner().invoke(app, ["models", "schema", "--output", str(path)]).exit_code == 0
    assert CliRunner().invoke(app, ["models", "schema", "--check", "--output", str(path)]).exit_code == 0
    path.write_text(path.read_text().replace("maximum", "minimum"))
    result = CliRunner().invoke(app, ["models", "schema", "--check", "--output", str(path)])
    assert (result.exit_code, result.stderr) == (
        1,
        f"completions models: {path} is stale: run 'completions models schema'\n",
    )
