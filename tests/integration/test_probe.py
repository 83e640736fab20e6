"""``completions probe`` against the stand-ins of a running stack, and against endpoints that are not what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
from typer.testing import CliRunner, Result

from completions.backends.families import CODECS
from completions.bootstrap import build_parts
from completions.clients import build_sagemaker_client
from completions.domain.catalog import ModelRoute
from completions.registry.dynamodb import put_model, write_models
from completions.settings import read_settings
from completions_cli.local.environment import published_environment
from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import LocalStack
from completions_cli.main import app
from completions_cli.probe_checks import EndpointAbsentError, Verdict, probe_endpoint
from completions_cli.probe_endpoint import Endpoint
from completions_cli.probe_promises import PROMISES

MODELS = ("demo", "demo-lmi", "demo-tgi")


@pytest.fixture
def local(stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    """The stack, found from this folder by ``--local``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    with published_environment(stack.environment):
        yield stack


def probe(model: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["probe", model, "--local", *options])


def endpoint(stack: LocalStack, name: str, family: str, **fields: object) -> Endpoint:
    """The stack's endpoint ``name``, declared as ``family``."""
    settings = read_settings(stack.environment)
    parts = build_parts(settings)
    known = parts.registry.route(name)
    assert known is not None
    route: ModelRoute = replace(known, family=family, **fields)  # type: ignore[arg-type]
    return Endpoint(route, CODECS[family], parts.backend, build_sagemaker_client(settings))


def differences(endpoint: Endpoint) -> set[str]:
    return {check.name for check in probe_endpoint(endpoint) if check.verdict is Verdict.DIFFERS}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_is_what_its_entry_says_passes(local: LocalStack, model: str) -> None:
    result = probe(model, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["matches"]) == (0, True), report
    assert [check for check in report["checks"] if check["verdict"] == "differs"] == []
    checked = {check["name"] for check in report["checks"] if check["verdict"] == "matches"}
    assert checked >= {
        "completion",
        "usage",
        "wire: content type",
        "wire: framing",
        "wire: records",
        "wire: end",
        "bad parameter",
        "unknown adapter",
        "temperature 0 twice",
        "stop inside a token",
        "stop at a token's end",
        "multibyte text",
        "logprobs",
    }


@pytest.mark.parametrize(
    ("model", "seen"),
    [
        (
            "demo",
            {
                "wire: content type": "text/event-stream",
                "wire: end": "[DONE]",
                "unknown adapter": "refused (404): The model is not available right now.",
                "stop inside a token": "cut, finish reason stop",
                "multibyte text": "undamaged",
                "n": "2 of 2",
            },
        ),
        (
            "demo-lmi",
            {
                "wire: content type": "application/jsonlines",
                "wire: framing": "bare lines",
                "wire: end": "no [DONE]",
                "bad parameter": "refused (500): frequency_penalty must be in [-2, 2], got 9.0.",
            },
        ),
        (
            "demo-tgi",
            {
                "wire: end": "no [DONE]",
                "bad parameter": "refused (200): `frequency_penalty` must be >= -2.0 and <= 2.0",
                "unknown adapter": "answered (200)",
                "stop inside a token": "missed, finish reason length",
                "stop at a token's end": "left in, finish reason stop",
                "n": "not this endpoint's to honour",
            },
        ),
    ],
)
def test_each_family_is_seen_as_it_is(local: LocalStack, model: str, seen: dict[str, str]) -> None:
    observed = {check["name"]: check["observed"] for check in json.loads(probe(model, "--json").stdout)["checks"]}
    assert {name: observed[name] for name in seen} == seen


@pytest.mark.parametrize(
    ("model", "family", "found"),
    [
        ("demo", "tgi", {"completion", "wire: stream", "bad parameter", "unknown adapter"}),
        ("demo", "lmi", {"wire: content type", "wire: framing", "wire: end", "unknown adapter"}),
        ("demo", "tgi-openai", {"bad parameter", "stop inside a token", "stop at a token's end"}),
        ("demo", "lmi-inputs", {"completion", "wire: stream"}),
        ("demo-lmi", "vllm", {"completion", "wire: content type", "wire: framing", "wire: end"}),
        ("demo-lmi", "tgi", {"wire: content type", "wire: framing", "bad parameter"}),
        ("demo-lmi", "tgi-openai", {"completion", "wire: stream"}),
        ("demo-tgi", "vllm", {"completion", "wire: records"}),
        ("demo-tgi", "lmi", {"completion", "wire: content type", "wire: framing", "wire: records"}),
        ("demo-tgi", "lmi-rolling", {"completion", "wire: content type", "wire: framing", "wire: records"}),
    ],
)
def test_a_wrong_family_is_found_out(stack: LocalStack, model: str, family: str, found: set[str]) -> None:
    assert differences(endpoint(stack, model, family)) >= found


def test_the_command_fails_on_a_wrong_entry_and_says_what_the_endpoint_looks_like(local: LocalStack) -> None:
    with closing(boto3.client("dynamodb")) as client:
        table = local.environment["REGISTRY_TABLE"]
        put_model(client, table, endpoint(local, "demo", "tgi", model_id="declared-wrong").route)
        try:
            result = probe("declared-wrong")
        finally:
            write_models(client, table, {}, {"declared-wrong"})
    assert result.exit_code == 1
    assert "it looks like vLLM, or another OpenAI server" in result.stdout
    assert result.stderr == (
        "declared-wrong is not what its entry says: completion, wire: stream, bad parameter, unknown adapter\n"
    )


def test_the_cost_is_what_the_containers_counted(local: LocalStack) -> None:
    counts = {model: json.loads(probe(model, "--json").stdout)["generated_tokens"] for model in MODELS}
    assert all(0 < count <= 150 for count in counts.values()), counts
    result = probe("demo")
    assert result.exit_code == 0
    assert f"and {counts['demo']} generated tokens" in result.stdout


def test_a_truncated_stream_is_a_difference(faults: LocalStack) -> None:
    faults.sagemaker.faults.replace("demo", [Fault(end_after=600, calls=None)])
    assert {"completion", "wire: end"} <= differences(endpoint(faults, "demo", "vllm"))


def test_a_stream_cut_anywhere_is_read_all_the_same(faults: LocalStack) -> None:
    faults.sagemaker.faults.replace("demo", [Fault(split_every=3, calls=None)])
    assert differences(endpoint(faults, "demo", "vllm")) == set()


def test_an_endpoint_that_cannot_be_asked_is_told_from_one_that_answers_wrongly(
    local: LocalStack, faults: LocalStack
) -> None:
    faults.sagemaker.faults.replace("demo", [Fault(refusal=Refusal(kind="no_capacity"))])
    result = probe("demo")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "completions probe: demo cannot be asked: The model is starting; try again in a few minutes. "
        "(ValidationError)\n"
    )
    with pytest.raises(EndpointAbsentError):
        list(probe_endpoint(endpoint(faults, "demo", "vllm", endpoint_name="nowhere")))


def test_an_unknown_model_is_told(local: LocalStack) -> None:
    result = probe("nobody")
    assert (result.exit_code, result.stderr) == (1, "completions probe: RegistryTable has no model 'nobody'\n")


def test_a_wrong_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_ATTEMPTS", "0")
    result = CliRunner().invoke(app, ["probe", "demo", "--table", "RegistryTable"])
    assert result.exit_code == 1
    assert result.stderr.startswith("completions probe: environment: UPSTREAM_ATTEMPTS: ")
    monkeypatch.delenv("UPSTREAM_ATTEMPTS")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    result = CliRunner().invoke(app, ["probe", "demo", "--table", "RegistryTable"])
    assert (result.exit_code, result.stderr) == (1, "completions probe: You must specify a region.\n")


def test_every_family_has_its_promises() -> None:
    assert PROMISES.keys() == CODECS.keys()
