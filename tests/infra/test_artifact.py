"""What is deployed, built and run with nothing beside it: size, contents, imports, and an answer."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from samcli.lib.utils.hash import dir_checksum

from built_artifact import PYTHON, VERSION, build, build_for_this_machine
from completions_cli.local.stack import LocalStack
from completions_cli.local.template import load_template
from ledger_reader import LedgerReader

ROOT = Path(__file__).parents[2]
MAX_BYTES = 40_000_000
AARCH64 = 183  # e_machine in an ELF header
FUNCTION = "AWS::Serverless::Function"


def template_functions() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Name, entry point as ``module:name``, and variables of every function, whatever its condition.

    A function that knows only the streamed form is entered by its app."""
    for path in (ROOT / "template.yaml", *sorted((ROOT / "infra").glob("*.yaml"))):
        if path.name == "models.yaml":
            continue
        template = load_template(path)
        shared = template.get("Globals", {}).get("Function", {}).get("Environment", {}).get("Variables", {})
        for name, resource in template["Resources"].items():
            if resource["Type"] == FUNCTION:
                properties = resource["Properties"]
                declared = {**shared, **properties.get("Environment", {}).get("Variables", {})}
                plain = {key: _plain(value, template.get("Parameters", {})) for key, value in declared.items()}
                handlers = re.findall(r"(completions\.handlers\.\w+)\.(\w+)", json.dumps(properties["Handler"]))
                entry_point = ":".join(handlers[0]) if handlers else declared["APP_MODULE"]
                yield name, entry_point, {key: value for key, value in plain.items() if value}


def _plain(value: Any, parameters: Mapping[str, Any]) -> str:
    """A variable's value as far as the template tells it: its own text, or a parameter's default."""
    if isinstance(value, dict):
        value = parameters.get(str(value.get("Ref")), {}).get("Default", "")
    return str(value)


FUNCTIONS = {name: (entry_point, variables) for name, entry_point, variables in template_functions()}


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree, for this machine."""
    return build_for_this_machine(tmp_path_factory.mktemp("artifact"))


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as the template's defaults deploy it."""
    target = tmp_path_factory.mktemp("deployed")
    made = build(target, "arm64", "3.13")
    assert made.returncode == 0, made.stdout + made.stderr
    return target


def run(artifact: Path, code: str, variables: Mapping[str, str]) -> str:
    """What ``code`` prints in a Python that finds the standard library and the artifact, and nothing else."""
    start = f"import sys; sys.path.insert(0, {str(artifact)!r})\n"
    done = subprocess.run(
        [PYTHON, "-I", "-S", "-W", "error", "-c", start + code],
        env={"PATH": "/usr/bin:/bin", "AWS_EC2_METADATA_DISABLED": "true", **variables},
        cwd=artifact,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_handler_is_imported_from_the_artifact_alone(artifact: Path, stack: LocalStack, name: str) -> None:
    entry_point, variables = FUNCTIONS[name]
    module, attribute = entry_point.split(":")
    code = f"import {module} as m; print(callable(m.{attribute}), m.__file__)"

    called, file = run(artifact, code, {**variables, **stack.environment}).split()

    assert called == "True"
    assert Path(file).is_relative_to(artifact)


def test_the_artifact_answers_an_event(artifact: Path, stack: LocalStack, ledger: LedgerReader) -> None:
    event = json.loads((ROOT / "events" / "openai_completions.json").read_text())
    event["requestContext"]["requestId"] = "artifact"
    entry_point, variables = FUNCTIONS["OpenAICompletionsFunction"]
    module, attribute = entry_point.split(":")
    code = f"""
import asyncio, json
class Context:
    aws_request_id = "artifact"
    def get_remaining_time_in_millis(self): return 29_000
asyncio.set_event_loop(asyncio.new_event_loop())  # as Lambda's main thread has one
import {module} as m
print(json.dumps(m.{attribute}(json.loads({json.dumps(event)!r}), Context())))
asyncio.get_event_loop().close()
"""
    reply = json.loads(run(artifact, code, {**variables, **stack.environment}).splitlines()[-1])

    assert reply["statusCode"] == 200
    answer = json.loads(reply["body"])
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    assert ledger.settled("artifact").completion_tokens == answer["usage"]["completion_tokens"]


HANDED_ON = "session().client(service, config=config)"
"""Where all of them are made, of the service that each one's own function names."""


def services_called() -> set[str]:
    """The services that the code makes clients of."""
    called = set()
    for path in (ROOT / "functions" / "completions").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or ast.unparse(node) == HANDED_ON:
                continue
            name = ast.unparse(node.func)
            if name == "_client" or name.endswith((".client", ".create_client", ".resource")):
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: a service without a plain name"
                called.add(str(node.args[0].value))
    return called


def services_kept() -> set[str]:
    makefile = (ROOT / "functions" / "Makefile").read_text()
    found = re.search(r"^AWS_SERVICES := (.*)$", makefile, re.MULTILINE)
    assert found is not None
    return set(found[1].split())


def test_the_services_kept_are_those_the_code_calls() -> None:
    assert "dynamodb" in services_called()
    assert services_kept() == services_called()


@pytest.mark.parametrize("service", sorted(services_kept()))
def test_a_client_is_made_of_each_service_that_is_kept(artifact: Path, service: str) -> None:
    code = f"import boto3; print(boto3.client({service!r}, region_name='eu-west-1').meta.endpoint_url)"
    # the prefix of a service's endpoint, where it is not its name in boto3
    prefix = {"sagemaker-runtime": "runtime.sagemaker", "stepfunctions": "states"}.get(service, service)
    assert run(artifact, code, {}).strip() == f"https://{prefix}.eu-west-1.amazonaws.com"


def test_a_client_of_any_other_service_is_refused_by_name(artifact: Path) -> None:
    code = """
import boto3, botocore.exceptions
try:
    boto3.client("ec2", region_name="eu-west-1")
except botocore.exceptions.UnknownServiceError as error:
    print(error)
"""
    assert "Unknown service: 'ec2'" in run(artifact, code, {})


def locked_packages() -> dict[str, str]:
    """What ``requirements.txt`` installs on Lambda, by name."""
    text = (ROOT / "functions" / "requirements.txt").read_text()
    pinned = re.findall(r"^([\w.-]+)==(\S+)(?: ; (.*?))? \\$", text, re.MULTILINE)
    return {name: version for name, version, marker in pinned if "win32" not in marker}


def test_the_artifact_holds_the_locked_packages_and_no_other(artifact: Path) -> None:
    found = {
        re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower(): distribution.version
        for distribution in metadata.distributions(path=[str(artifact)])
    }
    assert found == locked_packages()


@pytest.mark.parametrize("tree", ["artifact", "deployed"])
def test_the_artifact_is_small_and_holds_no_scripts_and_no_tests(request: pytest.FixtureRequest, tree: str) -> None:
    root: Path = request.getfixturevalue(tree)
    files = [path for path in root.rglob("*") if path.is_file()]

    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert not {"bin", "tests", "test"} & {path.name for path in root.rglob("*") if path.is_dir()}
    assert (root / "run.sh").stat().st_mode & 0o111
    assert (root / "completions" / "dashboard" / "page.html").is_file()  # what is not a module is there, too


def test_the_deployed_form_holds_binaries_for_its_processor_and_python_alone(deployed: Path) -> None:
    binaries = list(deployed.rglob("*.so*"))
    assert binaries
    for binary in binaries:
        header = binary.read_bytes()[:20]
        assert header[:4] == b"\x7fELF"
        assert int.from_bytes(header[18:20], "little") == AARCH64, binary
        assert "cpython-313-aarch64" in binary.name or "abi3" in binary.name


def test_only_the_deployed_version_of_python_compiles(artifact: Path, deployed: Path) -> None:
    here = {path.name.split(".")[-2] for path in artifact.rglob("*.pyc")}
    assert here == {f"cpython-{VERSION.replace('.', '')}"}

    there = {path.name.split(".")[-2] for path in deployed.rglob("*.pyc")}
    found = subprocess.run(["uv", "python", "find", "cpython@3.13"], capture_output=True, check=False)
    assert there == ({"cpython-313"} if found.returncode == 0 else set())


def test_a_compiled_module_is_not_compared_with_its_source(artifact: Path) -> None:
    compiled = next((artifact / "completions" / "__pycache__").glob("settings.*.pyc")).read_bytes()
    assert int.from_bytes(compiled[4:8], "little") == 0b01  # PEP 552: by hash, unchecked


def test_a_build_without_the_deployed_python_compiles_nothing_and_says_what_that_costs(tmp_path: Path) -> None:
    target = tmp_path / "target"
    made = build(target, "arm64", "3.13", BYTECODE_PYTHON="", TREES=str(tmp_path / "trees"))

    assert made.returncode == 0
    assert not list(target.rglob("*.pyc"))
    assert "not byte-compiled" in made.stdout
    assert "uv python install 3.13" in made.stdout


def test_an_unknown_architecture_is_no_build(tmp_path: Path) -> None:
    made = build(tmp_path / "target", "riscv", "3.13")

    assert made.returncode != 0
    assert 'there is no architecture "riscv"; it is arm64 or x86_64' in made.stderr


def test_an_artifact_that_is_too_large_is_no_build(tmp_path: Path) -> None:
    target = tmp_path / "target"
    made = build(target, "arm64", "3.13", MAX_ARTIFACT_BYTES="1000000", TREES=str(tmp_path / "trees"))

    assert made.returncode != 0
    assert "more than the 1000000 it may be" in made.stderr
    assert not target.exists() or not list(target.iterdir())


def test_the_same_sources_make_the_same_bytes_which_are_uploaded_once(artifact: Path, tmp_path: Path) -> None:
    other = build_for_this_machine(tmp_path / "other", TREES=str(tmp_path / "trees"))

    assert dir_checksum(str(other)) == dir_checksum(str(artifact))  # what the SAM CLI names an upload by
