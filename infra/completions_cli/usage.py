"""``completions usage``: what was used, and whether the figures are right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer
from rich.console import Console

from completions_cli.local.environment import NoStackError, use_local_environment
from completions_cli.usage_replay import replay
from completions_cli.usage_report import GROUPS, UnknownGroupError, csv_text, json_text, parse_groups, usage_table
from completions_cli.usage_sweep import sweep

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

usage = typer.Typer(help="What was used, and whether the figures are right.", invoke_without_command=True)
usage.command()(sweep)
usage.command()(replay)

TableOption = Annotated[str | None, typer.Option(envvar="USAGE_TABLE", help="The usage table's name.")]
LocalOption = Annotated[bool, typer.Option("--local", help="Ask the running `completions serve`.")]
_WIDE: Final = 200
_INVALID: Final = 1
_USAGE: Final = 2


@usage.callback()
def report(  # noqa: PLR0917 - every argument is an option of the command
    context: typer.Context,
    first: Annotated[str | None, typer.Option("--from", metavar="DAY", help="The first day (UTC), today.")] = None,
    last: Annotated[str | None, typer.Option("--to", metavar="DAY", help="The last day (UTC), today.")] = None,
    group_by: Annotated[str, typer.Option(help=f"Any of {', '.join(GROUPS)}, separated by commas.")] = "model,key",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    table: TableOption = None,
    local: LocalOption = False,
) -> None:
    """Print requests, tokens and cost, from the roll-ups. A request is in them some seconds after its end."""
    if context.invoked_subcommand is not None:
        return
    today = datetime.now(UTC).date()
    until = _day(last, "--to") if last is not None else today
    since = _day(first, "--from") if first is not None else min(today, until)
    if since > until:
        _fail(f"--from {since} is after --to {until}", _USAGE)
    if as_csv and as_json:
        _fail("--csv and --json exclude each other", _USAGE)
    try:
        groups = parse_groups(group_by)
    except UnknownGroupError as error:
        _fail(str(error), _USAGE)
    from completions.clients import SystemClock  # noqa: PLC0415
    from completions.domain.usage import Granularity  # noqa: PLC0415 - --help should not pay for it
    from completions.metering.rollup_queries import RollUpReader  # noqa: PLC0415

    granularity = Granularity.HOUR if "hour" in groups else Granularity.DAY
    if since < today - granularity.kept:
        _fail(f"--from {since}: usage by the {granularity} is kept for {granularity.kept.days} days", _USAGE)
    with usage_client(table, local) as (client, name):
        reader = RollUpReader(client, name, SystemClock())
        end = _midnight(min(until, today), 1)
        rows = list(reader.rows(granularity, _midnight(since), end))
    if as_csv:
        typer.echo(csv_text(rows, groups), nl=False)
    elif as_json:
        typer.echo(json_text(rows, groups))
    else:
        days = f"on {since}" if since == until else f"from {since} to {until}"
        console = Console()
        if not console.is_terminal:  # whoever reads it has no width
            console.width = max(console.width, _WIDE)
        console.print(usage_table(rows, groups, f"Usage {days} (UTC)"))


@usage.command()
def audit(
    day: Annotated[str, typer.Argument(help="A day (UTC), as 2026-11-30.")],
    repair: Annotated[bool, typer.Option("--repair", help="Add the records that the roll-ups lack first.")] = False,
    table: TableOption = None,
    local: LocalOption = False,
) -> None:
    """Add a day's records up anew, and compare with the roll-ups and with the counters of keys with limits."""
    wanted = _day(day, "DAY")
    if wanted > datetime.now(UTC).date():
        _fail(f"DAY {wanted} is yet to come", _USAGE)
    from completions.clients import SystemClock  # noqa: PLC0415 - --help should not pay for boto3
    from completions_cli.usage_audit import DayAudit, add_missing  # noqa: PLC0415

    with usage_client(table, local) as (client, name):
        if repair:
            added, failed = add_missing(client, name, wanted, SystemClock())
            typer.echo(f"added to the roll-ups: {added:,} records")
            if failed:
                _fail(f"{failed:,} records could not be added; see the log")
        result = DayAudit(client, name, wanted, SystemClock()).run()
    typer.echo(f"{wanted}: {result.records:,} records of {result.keys:,} keys")
    typer.echo(f"claimed and not settled (in progress, or lost in a crash): {result.unsettled:,}")
    for line in result.agreements:
        typer.echo(f"agree: {line}")
    for line in result.differences:
        typer.echo(f"DIFFER: {line}")
    if result.missing:
        typer.echo(f"not in the roll-ups: {result.missing:,} records; they come within seconds, or with --repair")
    if result.differences or result.missing:
        _fail(f"{wanted}: the figures differ" + ("; the day is not over" if wanted >= datetime.now(UTC).date() else ""))


@contextmanager
def usage_client(table: str | None, local: bool) -> Iterator[tuple[DynamoDBClient, str]]:
    """The client and the usage table's name; AWS's refusals end the command."""
    if local:
        try:
            use_local_environment()
        except NoStackError as error:
            _fail(str(error))
        table = os.environ["USAGE_TABLE"]
    if not table:
        _fail("no table: set USAGE_TABLE or --table, or use --local")
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - --help should not pay for boto3

    from completions.clients import build_dynamodb_client  # noqa: PLC0415

    try:
        with closing(build_dynamodb_client()) as client:
            yield client, table
    except (ClientError, BotoCoreError) as error:
        _fail(f"table {table}: {error}")


def _day(text: str, name: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        _fail(f"{name} {text}: not a day, as 2026-11-30", _USAGE)


def _midnight(day: date, later: int = 0) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=later)


def _fail(message: str, code: int = _INVALID) -> NoReturn:
    typer.echo(f"completions usage: {message}", err=True)
    raise typer.Exit(code)
