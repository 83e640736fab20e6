"""``completions models``: the catalogue file, and what of it the registry table holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from completions_cli.local.environment import NoStackError, use_local_environment

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

    from completions.domain.catalog import ModelRoute
    from completions_cli.catalogue_changes import CatalogueChanges, ModelChange

SCHEMA: Final = Path("infra/models.schema.json")
_INVALID: Final = 1
_USAGE: Final = 2
_COLOURS: Final = {"+": "green", "~": "yellow", "-": "red"}

models = typer.Typer(no_args_is_help=True, help=__doc__)

TableOption = Annotated[str | None, typer.Option(envvar="REGISTRY_TABLE", help="The registry table's name.")]
LocalOption = Annotated[bool, typer.Option("--local", help="Use the running `completions serve`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FileArgument = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The catalogue, as infra/models.yaml.")]


@models.command()
def apply(  # noqa: PLR0917 - every argument is an option of the command
    file: FileArgument,
    table: TableOption = None,
    local: LocalOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove the models that the file does not have.")] = False,
) -> None:
    """Make the registry table hold what the file says, after showing the difference."""
    wanted = _read(file)
    from completions.registry.dynamodb import write_models  # noqa: PLC0415 - --help should not pay for boto3
    from completions_cli.catalogue_changes import catalogue_changes  # noqa: PLC0415

    with _registry(table, local) as (client, name):
        current = _routes(client, name)
        changes = catalogue_changes(wanted, current, prune=prune)
        _print_changes(changes)
        if changes.conflicts:
            raise typer.Exit(_INVALID)
        if not changes.puts and not changes.deletes:
            typer.echo("no changes")
            return
        if dry_run:
            typer.echo("nothing was written: --dry-run")
            return
        if not yes and not typer.confirm(f"Write this to {name}?"):
            _fail("nothing was written")
        if _routes(client, name) != current:
            _fail("the table has changed meanwhile, so nothing was written; run it again")
        write_models(client, name, changes.puts, changes.deletes)
    count = len(changes.changes)
    typer.echo(f"{count} models changed" if count != 1 else "1 model changed")


@models.command()
def check(file: FileArgument) -> None:
    """Say what is wrong with a catalogue, without any table."""
    routes = _read(file)
    typer.echo(f"{file}: {len(routes)} model{'' if len(routes) == 1 else 's'}, nothing wrong")


@models.command("list")
def list_models(table: TableOption = None, local: LocalOption = False, as_json: JsonOption = False) -> None:
    """Print the models that the registry table holds."""
    with _registry(table, local) as (client, name):
        current = _routes(client, name)
    routes = sorted(
        {route.model_id: route for route in current.values() if route}.values(), key=lambda one: one.model_id
    )
    if as_json:
        from completions_cli.catalogue_file import entry_values  # noqa: PLC0415

        typer.echo(json.dumps([entry_values(route) for route in routes], indent=2, ensure_ascii=False))
    else:
        Console().print(models_table(routes))
    if unreadable := sorted(item for item, route in current.items() if route is None):
        _fail(f"the table holds entries that cannot be read: {', '.join(unreadable)}")


@models.command()
def show(
    model: Annotated[str, typer.Argument(help="An id or an alias.")],
    table: TableOption = None,
    local: LocalOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print one model as it would stand in the catalogue."""
    from completions_cli.catalogue_file import brief_values, entry_values  # noqa: PLC0415

    with _registry(table, local) as (client, name):
        current = _routes(client, name)
    if model not in current:
        _fail(f"{name} has no model '{model}'")
    route = current[model]
    if route is None:
        _fail(f"the table's entry '{model}' cannot be read")
    if as_json:
        typer.echo(json.dumps(entry_values(route), indent=2, ensure_ascii=False))
    else:
        typer.echo(yaml.safe_dump(brief_values(route), sort_keys=False, allow_unicode=True), nl=False)


@models.command()
def schema(
    output: Annotated[Path, typer.Option(help="The file to write, or to compare with.")] = SCHEMA,
    check_only: Annotated[bool, typer.Option("--check", help="Write nothing; fail when the file differs.")] = False,
) -> None:
    """Write the catalogue's JSON Schema, or check that the one on disk is current."""
    from completions_cli.catalogue_file import schema_text  # noqa: PLC0415

    text = schema_text()
    if not check_only:
        output.write_text(text, encoding="utf-8")
        return
    if not output.is_file() or output.read_text(encoding="utf-8") != text:
        _fail(f"{output} is stale: run 'completions models schema'")


def models_table(routes: list[ModelRoute]) -> Table:
    """One row a model."""
    from completions_cli.catalogue_file import dollars  # noqa: PLC0415

    table = Table(
        "id",
        "aliases",
        "family",
        "endpoint",
        "price",
        "fallbacks",
        caption="price: US dollars per million tokens, input / cached input / output",
    )
    for column in table.columns:
        column.overflow = "fold"
    for route in routes:
        price = route.price
        prices = () if price is None else (price.input_nanos, price.cached_input_nanos, price.output_nanos)
        target = route.inference_component or route.target_variant
        cells = (
            route.model_id,
            "\n".join(route.aliases),
            route.family if route.family_version is None else f"{route.family} {route.family_version}",
            route.endpoint_name if target is None else f"{route.endpoint_name}\n{target}",
            " / ".join(map(dollars, prices)),
            "\n".join(route.fallbacks),
        )
        table.add_row(*map(Text, cells))
    return table


def _read(file: Path) -> tuple[ModelRoute, ...]:
    from completions_cli.catalogue import CatalogueError, read_catalogue  # noqa: PLC0415 - not for --help

    try:
        return read_catalogue(file)
    except CatalogueError as error:
        typer.echo(str(error), err=True)
        count = len(error.problems)
        _fail(f"{file}: {count} problems" if count != 1 else f"{file}: 1 problem")


@contextmanager
def _registry(table: str | None, local: bool) -> Iterator[tuple[DynamoDBClient, str]]:
    """The client and the table's name. AWS's refusals end the command."""
    name = registry_table(table, local)
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - --help should not pay for boto3

    from completions.clients import build_dynamodb_client  # noqa: PLC0415

    try:
        with closing(build_dynamodb_client()) as client:
            yield client, name
    except (ClientError, BotoCoreError) as error:
        _fail(f"table {name}: {error}")


def registry_table(table: str | None, local: bool) -> str:
    """The table to use; with ``local``, the running stack's environment becomes this process's own."""
    if local:
        try:
            use_local_environment()
        except NoStackError as error:
            _fail(str(error))
        return os.environ["REGISTRY_TABLE"]
    if not table:
        _fail("no table: set REGISTRY_TABLE or --table, or use --local", _USAGE)
    return table


def _routes(client: DynamoDBClient, table: str) -> Mapping[str, ModelRoute | None]:
    from completions.registry.dynamodb import read_models  # noqa: PLC0415 - not for --help

    return read_models(client, table)


def _print_changes(changes: CatalogueChanges) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for change in changes.changes:
        console.print(_headline(change))
        for field in change.fields:
            console.print(Text(f"    {field.name}: {_said(field.old)} → {_said(field.new)}"))
    for model_id in changes.kept:
        console.print(Text(f"  {model_id}: in the table, not in the file; stays without --prune"))
    for conflict in changes.conflicts:
        typer.echo(f"completions models: {conflict}", err=True)


def _headline(change: ModelChange) -> Text:
    note = "" if change.note is None else f" ({change.note})"
    return Text(f"{change.kind} {change.model_id}{note}", style=_COLOURS[change.kind])


def _said(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


def _fail(message: str, code: int = _INVALID) -> NoReturn:
    typer.echo(f"completions models: {message}", err=True)
    raise typer.Exit(code)
