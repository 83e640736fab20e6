"""``completions usage sweep``: what the scheduled sweeper does, by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, NoReturn

import typer

from completions_cli.local.environment import NoStackError, use_local_environment


def sweep(
    local: Annotated[bool, typer.Option("--local", help="Use the running `completions serve`.")] = False,
) -> None:
    """Finish what functions that died left open: holds, claims, counters of past periods.

    The tables are REGISTRY_TABLE's and USAGE_TABLE's; SWEEP_AFTER_SECONDS and SWEEP_CHARGE are the function's own.
    Claims of today and yesterday are looked through from the start.
    """
    if local:
        try:
            use_local_environment()
        except NoStackError as error:
            _fail(str(error))
    from completions.metering.sweep import SweepError  # noqa: PLC0415 - --help should not pay for boto3
    from completions.settings import SettingsError  # noqa: PLC0415
    from completions.worker_bootstrap import build_sweeper  # noqa: PLC0415

    try:
        counts = build_sweeper().sweep(everything=True)
    except SettingsError as error:
        _fail(str(error))
    except SweepError as error:
        _print(asdict(error.counts))
        _fail(str(error))
    _print(asdict(counts))
    if not counts.complete:
        _fail("out of time before everything was seen; run it again")


def _print(counts: dict[str, int]) -> None:
    words = {
        "released": "holds released",
        "lost": "records settled as lost",
        "repaired": "records settled from what was left",
        "forgotten": "entries forgotten",
        "dropped": "old counters dropped",
    }
    for name, text in words.items():
        typer.echo(f"{counts[name]:>6,} {text}")


def _fail(message: str) -> NoReturn:
    typer.echo(f"completions usage sweep: {message}", err=True)
    raise typer.Exit(1)
