"""``completions``: operator and developer commands."""

from __future__ import annotations

import typer

from completions_cli.batch import batch
from completions_cli.doctor import doctor
from completions_cli.keys import keys
from completions_cli.models import models
from completions_cli.openapi import openapi
from completions_cli.probe import probe
from completions_cli.serve import serve
from completions_cli.usage import usage

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False, help=__doc__)
app.command()(serve)
app.add_typer(keys, name="keys")
app.add_typer(models, name="models")
app.command()(probe)
app.add_typer(usage, name="usage")
app.add_typer(batch, name="batch")
app.command()(openapi)
app.add_typer(doctor, name="doctor")

if __name__ == "__main__":
    app()
