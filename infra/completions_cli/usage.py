"""``completions usage``: what was used today, from the usage table's own records."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from completions_cli.local.environment import NoStackError, use_local_environment

if TYPE_CHECKING:
    from completions.metering.items import RecordItem


def usage(
    table: Annotated[str | None, typer.Option(envvar="USAGE_TABLE", help="The usage table's name.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Ask the running `completions serve`.")] = False,
) -> None:
    """Print today's (UTC) requests and tokens by model and key."""
    if local:
        try:
            use_local_environment()
        except NoStackError as error:
            _fail(str(error))
        table = os.environ["USAGE_TABLE"]
    if not table:
        _fail("no table: set USAGE_TABLE or --table, or use --local")
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - --help should not pay for boto3

    from completions.bootstrap import build_dynamodb_client  # noqa: PLC0415
    from completions.metering.records import day_records, open_claims  # noqa: PLC0415

    today = datetime.now(UTC).date()
    try:
        with closing(build_dynamodb_client()) as client:
            records = list(day_records(client, table, today))
            unsettled = open_claims(client, table, today)
    except (ClientError, BotoCoreError) as error:
        _fail(f"table {table}: {error}")
    Console().print(usage_table(records, today))
    typer.echo(f"claimed and not settled (in progress, or lost in a crash): {unsettled}")


def usage_table(records: Iterable[RecordItem], day: date) -> Table:
    """One row a model and key, most tokens first, and a total."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for record in records:
        total = totals.setdefault((record.model, record.key_id), Counter())
        total.update(
            {
                "requests": 1,
                "succeeded": int(record.outcome == "succeeded"),
                "prompt": record.prompt_tokens,
                "completion": record.completion_tokens,
            }
        )
    columns = ("requests", "succeeded", "prompt", "completion")
    table = Table("model", "key", *(_heading(name) for name in columns), title=f"Usage on {day.isoformat()} (UTC)")
    for column in table.columns[2:]:
        column.justify = "right"
    for (model, key), total in sorted(totals.items(), key=lambda row: -row[1]["completion"] - row[1]["prompt"]):
        table.add_row(model, key, *(f"{total[name]:,}" for name in columns))
    overall = sum(totals.values(), Counter[str]())
    table.add_section()
    table.add_row("all", "", *(f"{overall[name]:,}" for name in columns))
    return table


def _heading(name: str) -> str:
    return f"{name} tokens" if name in ("prompt", "completion") else name


def _fail(message: str) -> NoReturn:
    typer.echo(f"completions usage: {message}", err=True)
    raise typer.Exit(1)
