"""``samconfig.toml`` names what the template and the SAM CLI know."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from completions_cli.local.template import load_template, read_gateway
from completions_cli.parameters import check_parameters, read_samconfig


@pytest.mark.parametrize("environment", ["dev", "prod"])
def test_an_environments_parameters_are_the_templates(project_root: Path, environment: str) -> None:
    values = read_samconfig(project_root / "samconfig.toml", environment)
    release = {"ReleaseId": "0123456789"}  # new at each deployment, and so in no file
    assert values["StageName"] == environment
    assert check_parameters(load_template(project_root / "template.yaml"), values | release) == []


@pytest.mark.parametrize("environment", ["dev", "prod"])
def test_it_is_built_for_the_processor_it_is_deployed_on(project_root: Path, environment: str) -> None:
    config = tomllib.loads((project_root / "samconfig.toml").read_text())[environment]
    architecture = f"Architecture={read_samconfig(project_root / 'samconfig.toml', environment)['Architecture']}"
    assert config["build"]["parameters"]["parameter_overrides"] == [architecture]


def test_sam_local_runs_the_buffered_form_against_the_local_stack(project_root: Path) -> None:
    for command in tomllib.loads((project_root / "samconfig.toml").read_text())["local"].values():
        values = dict(pair.split("=") for pair in command["parameters"]["parameter_overrides"])
        assert not any(route.streamed for route in read_gateway(project_root / "template.yaml", values).routes)
        assert command["parameters"]["env_vars"] == ".local/sam-env.json"
