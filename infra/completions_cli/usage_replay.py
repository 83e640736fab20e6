"""``completions usage replay``: records that only the log has, into the usage table."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from completions_cli.local.environment import NoStackError, use_local_environment

if TYPE_CHECKING:
    from completions.metering.replay import LoggedRecord

_MOST_NAMED: Final = 20


def replay(
    file: Annotated[str, typer.Argument(help="Log lines, one JSON object each; - reads standard input.")],
    table: Annotated[str | None, typer.Option(envvar="USAGE_TABLE", help="The usage table's name.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Use the running `completions serve`.")] = False,
    retention_days: Annotated[int, typer.Option(envvar="USAGE_RETENTION_DAYS", min=1, help="As the functions'.")] = 400,
) -> None:
    """Write the records of `usage_record_unwritten` events; writing them again changes nothing.

    Other lines are passed over, and so is whatever stands before a line's first brace, as `aws logs tail` prints it.
    """
    if local:
        try:
            use_local_environment()
        except NoStackError as error:
            _fail(str(error))
        table = os.environ["USAGE_TABLE"]
    if not table:
        _fail("no table: set USAGE_TABLE or --table, or use --local")
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - --help should not pay for boto3

    from completions.clients import SystemClock, build_dynamodb_client  # noqa: PLC0415
    from completions.domain.errors import MeteringError  # noqa: PLC0415
    from completions.metering.replay import Replayed, UsageReplayer  # noqa: PLC0415

    counts: Counter[str] = Counter()
    unreadable: list[int] = []
    try:
        with closing(build_dynamodb_client()) as client:
            replayer = UsageReplayer(client, table, retention_days, SystemClock())
            for number, record in logged_records(_lines(file)):
                if record is None:
                    unreadable.append(number)
                else:
                    counts[replayer.replay(record)] += 1
    except (ClientError, BotoCoreError) as error:
        _fail(f"table {table}: {error}; run it again, nothing is written twice")
    except MeteringError as error:
        _fail(f"table {table}: {error.detail}; run it again, nothing is written twice")
    typer.echo(f"{counts[Replayed.WRITTEN]:,} written, {counts[Replayed.THERE]:,} already there")
    if unreadable:
        lines = ", ".join(map(str, unreadable[:_MOST_NAMED])) + (", ..." if len(unreadable) > _MOST_NAMED else "")
        _fail(f"{len(unreadable):,} unreadable, on line {lines}")


def logged_records(lines: Iterable[str]) -> Iterator[tuple[int, LoggedRecord | None]]:
    """The unwritten records of these lines with the line's number; ``None`` stands for one that cannot be read."""
    from completions.metering.replay import UNWRITTEN, read_logged  # noqa: PLC0415 - not for --help

    for number, line in enumerate(lines, start=1):
        if UNWRITTEN not in line:
            continue
        for event in _objects(line):
            if event is not None and event.get("message") != UNWRITTEN:
                continue
            try:
                yield number, None if event is None else read_logged(event.get("record"))
            except ValueError:
                yield number, None


def _objects(line: str) -> Iterator[dict[str, Any] | None]:
    """The JSON objects in a line, and ``None`` for what begins like one and is none, or when there are none."""
    decoder, start = json.JSONDecoder(), line.find("{")
    if start < 0:
        yield None
    while start >= 0:
        try:
            value, end = decoder.raw_decode(line, start)
        except ValueError:
            yield None
            return
        yield value
        start = line.find("{", end)


def _lines(file: str) -> Iterator[str]:
    if file == "-":
        yield from sys.stdin
        return
    try:
        with Path(file).open(encoding="utf-8", errors="replace") as opened:
            yield from opened
    except OSError as error:
        _fail(f"{file}: {error.strerror}")


def _fail(message: str) -> NoReturn:
    typer.echo(f"completions usage replay: {message}", err=True)
    raise typer.Exit(1)
