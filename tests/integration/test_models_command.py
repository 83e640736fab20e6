"""``completions models`` against a registry table of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
import yaml
from botocore.config import Config
from typer.testing import CliRunner, Result

from completions.registry.dynamodb import DynamoRegistry, put_key, put_model, read_models, write_models
from completions_cli.local.environment import published_environment
from completions_cli.local.stack import LocalStack
from completions_cli.local.tables import create_tables, moto_dynamodb
from completions_cli.main import app
from fakes import ManualClock, principal, route

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

REGION = "eu-west-3"  # every moto server of a process has the same tables, a set for each region
TABLE = "RegistryTable"
CATALOGUE = """\
models:
  - id: coder
    aliases: [best, acme/coder]
    endpoint: coder
    family: vllm
    context_length: 4096
    created: 2026-01-01
    timeout_seconds: 0.1
    price: {version: "1", input_dollars_per_million: 0.15, output_dollars_per_million: 0.6}
    fallbacks: [small]
  - id: small
    endpoint: small
    family: tgi
    context_length: 2048
    created: 2026-01-02
"""


@pytest.fixture(scope="module")
def server(project_root: Path) -> Iterator[tuple[str, DynamoDBClient]]:
    settings = Config(region_name=REGION, retries={"total_max_attempts": 1})
    with moto_dynamodb() as url, closing(boto3.client("dynamodb", endpoint_url=url, config=settings)) as client:
        create_tables(client, project_root / "infra" / "tables.yaml")
        yield url, client


@pytest.fixture
def client(server: tuple[str, DynamoDBClient], monkeypatch: pytest.MonkeyPatch) -> DynamoDBClient:
    """The empty table, which the commands find through the environment."""
    url, client = server
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("REGISTRY_TABLE", TABLE)
    write_models(client, TABLE, {}, read_models(client, TABLE))
    return client


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(CATALOGUE)
    return path


def models(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["models", *arguments], input=answer)


def test_a_catalogue_is_shown_asked_about_and_written(client: DynamoDBClient, file: Path) -> None:
    result = models("apply", str(file), answer="y\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "+ coder\n+ small\nWrite this to RegistryTable? [y/N]: y\n2 models changed\n"

    registry = DynamoRegistry(client, TABLE, ManualClock(), cache_seconds=0)
    coder = registry.route("coder")
    assert coder is not None
    assert (coder.timeout_seconds, coder.price and coder.price.input_nanos) == (0.1, 150)
    assert registry.route("best") == registry.route("acme/coder") == coder
    assert [one.model_id for one in registry.routes()] == ["coder", "small"]


def test_a_second_time_there_is_nothing_to_do(client: DynamoDBClient, file: Path) -> None:
    models("apply", str(file), "--yes")
    result = models("apply", str(file))
    assert (result.exit_code, result.stdout) == (0, "no changes\n")


@pytest.mark.parametrize(("arguments", "answer", "code"), [(["--dry-run"], None, 0), ([], "n\n", 1), ([], "", 1)])
def test_nothing_is_written_without_consent(
    client: DynamoDBClient, file: Path, arguments: list[str], answer: str | None, code: int
) -> None:
    result = models("apply", str(file), *arguments, answer=answer)
    assert result.exit_code == code
    assert result.stdout.startswith("+ coder\n+ small\n")
    assert read_models(client, TABLE) == {}


def test_a_diff_tells_what_changes_and_the_table_follows(client: DynamoDBClient, file: Path) -> None:
    models("apply", str(file), "--yes")
    changed = CATALOGUE.replace("[best, acme/coder]", "[acme/coder]").replace("0.6}", "0.65}")
    file.write_text(changed.replace("id: small\n", "id: small\n    aliases: [best]\n"))
    result = models("apply", str(file), "--yes")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "~ coder",
        '    aliases: ["best", "acme/coder"] → ["acme/coder"]',
        "    price.output_dollars_per_million: 0.6 → 0.65",
        "~ small",
        '    aliases: [] → ["best"]',
        "2 models changed",
    ]
    found = {name: one and one.model_id for name, one in read_models(client, TABLE).items()}
    assert found == {"coder": "coder", "acme/coder": "coder", "small": "small", "best": "small"}


def test_a_model_outside_the_file_stays_until_it_is_pruned(client: DynamoDBClient, file: Path) -> None:
    put_key(client, TABLE, "digest", principal())
    put_model(client, TABLE, route(model_id="old", aliases=("ancient",)))
    result = models("apply", str(file), "--yes")
    assert "  old: in the table, not in the file; stays without --prune" in result.stdout.splitlines()
    assert {"old", "ancient"} <= read_models(client, TABLE).keys()

    result = models("apply", str(file), "--yes", "--prune")
    assert result.stdout == "- old\n1 model changed\n"
    assert read_models(client, TABLE).keys() == {"coder", "best", "acme/coder", "small"}
    assert DynamoRegistry(client, TABLE, ManualClock(), 0).principal("digest") == principal()


def test_an_alias_that_would_hide_a_model_is_refused(client: DynamoDBClient, file: Path) -> None:
    put_model(client, TABLE, route(model_id="best"))
    result = models("apply", str(file), "--yes")
    assert result.exit_code == 1
    assert "'best' is an alias of 'coder' in the file and a model's id in the table" in result.stderr
    assert read_models(client, TABLE).keys() == {"best"}


def test_more_items_than_a_transaction_holds_are_written_before_any_is_removed() -> None:
    sent: list[list[dict[str, Any]]] = []

    class Recorder:
        def transact_write_items(self, *, TransactItems: list[dict[str, Any]]) -> None:
            sent.append(TransactItems)

    recorder: Any = Recorder()
    write_models(recorder, TABLE, {f"m{number}": route() for number in range(150)}, {f"d{n}" for n in range(60)})
    assert [len(actions) for actions in sent] == [100, 100, 10]
    kinds = [kind for actions in sent for action in actions for kind in action]
    assert kinds == ["Put"] * 150 + ["Delete"] * 60


def test_a_table_that_changed_while_it_was_asked_about_is_left_alone(
    client: DynamoDBClient, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def someone_else_is_faster(*_: object) -> bool:
        put_model(client, TABLE, route(model_id="new"))
        return True

    monkeypatch.setattr("typer.confirm", someone_else_is_faster)
    result = models("apply", str(file))
    assert result.exit_code == 1
    assert "the table has changed meanwhile" in result.stderr
    assert read_models(client, TABLE).keys() == {"new"}


def test_an_invalid_file_reaches_no_table(client: DynamoDBClient, file: Path) -> None:
    file.write_text(CATALOGUE + "    zzz: 1\n")
    result = models("apply", str(file), "--yes")
    assert result.exit_code == 1
    assert f"{file}:16: small: zzz: unknown key" in result.stderr.splitlines()
    assert read_models(client, TABLE) == {}


def test_a_wrong_use_is_told_from_a_wrong_file(
    client: DynamoDBClient, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert models("apply", str(tmp_path / "none.yaml")).exit_code == 2
    assert models("apply").exit_code == 2
    monkeypatch.delenv("REGISTRY_TABLE")
    result = models("apply", str(file))
    assert result.exit_code == 2
    assert result.stderr == "completions models: no table: set REGISTRY_TABLE or --table, or use --local\n"


def test_a_table_that_is_not_there_is_told(client: DynamoDBClient, file: Path) -> None:
    result = models("apply", str(file), "--yes", "--table", "Nowhere")
    assert result.exit_code == 1
    assert "table Nowhere: " in result.stderr
    assert "ResourceNotFoundException" in result.stderr


def test_what_the_table_holds_is_listed(client: DynamoDBClient, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    models("apply", str(file), "--yes")
    result = models("list")
    assert result.exit_code == 0
    (row,) = [line for line in result.stdout.splitlines() if "vllm" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["coder", "best", "vllm", "coder", "0.15 / 0.15 / 0.60", "small"]


def test_what_the_table_holds_is_listed_as_json(client: DynamoDBClient, file: Path) -> None:
    models("apply", str(file), "--yes")
    listed = json.loads(models("list", "--json").stdout)
    assert [(one["id"], one["aliases"], one["fallbacks"]) for one in listed] == [
        ("coder", ["best", "acme/coder"], ["small"]),
        ("small", [], []),
    ]


def test_one_model_is_shown_by_any_of_its_names_as_the_file_has_it(client: DynamoDBClient, file: Path) -> None:
    models("apply", str(file), "--yes")
    shown = yaml.safe_load(models("show", "best").stdout)
    assert shown == yaml.safe_load(models("show", "coder").stdout)
    assert shown == {
        "id": "coder",
        "aliases": ["best", "acme/coder"],
        "endpoint": "coder",
        "family": "vllm",
        "context_length": 4096,
        "created": "2026-01-01",
        "timeout_seconds": 0.1,
        "price": {
            "version": "1",
            "input_dollars_per_million": 0.15,
            "cached_input_dollars_per_million": 0.15,
            "output_dollars_per_million": 0.6,
        },
        "fallbacks": ["small"],
    }
    assert json.loads(models("show", "coder", "--json").stdout)["start_seconds"] == 300


def test_an_unknown_model_is_told(client: DynamoDBClient) -> None:
    result = models("show", "nobody")
    assert (result.exit_code, result.stderr) == (1, "completions models: RegistryTable has no model 'nobody'\n")


def test_an_entry_that_cannot_be_read_is_told_and_mended(client: DynamoDBClient, file: Path) -> None:
    client.put_item(TableName=TABLE, Item={"pk": {"S": "MODEL"}, "sk": {"S": "coder"}, "family": {"S": "vllm"}})
    listed = models("list")
    assert listed.exit_code == 1
    assert listed.stderr == "completions models: the table holds entries that cannot be read: coder\n"
    assert models("show", "coder").stderr == "completions models: the table's entry 'coder' cannot be read\n"

    assert models("apply", str(file), "--yes").stdout.splitlines()[0] == (
        "~ coder (the table's entry cannot be read and is replaced)"
    )
    assert models("list").exit_code == 0


def test_the_running_stack_is_asked_with_local(
    stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with published_environment(stack.environment):
        listed = json.loads(models("list", "--local", "--json").stdout)
    assert {(one["id"], one["family"]) for one in listed} >= {
        ("demo", "vllm"),
        ("demo-lmi", "lmi"),
        ("demo-tgi", "tgi"),
    }

    without = models("list", "--local")
    assert (without.exit_code, without.stderr) == (
        1,
        "completions models: no local stack runs from this folder; start one with `make serve`\n",
    )
