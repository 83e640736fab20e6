"""``completions probe``: whether an endpoint speaks as its registry entry says."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from completions_cli.models import JsonOption, LocalOption, TableOption, registry_table

if TYPE_CHECKING:
    from completions.domain.catalog import ModelRoute
    from completions_cli.probe_checks import Check
    from completions_cli.probe_endpoint import Endpoint

_COLOURS = {"matches": "green", "differs": "bold red", "skipped": "dim"}


def probe(
    model: Annotated[str, typer.Argument(help="An id or an alias.")],
    table: TableOption = None,
    local: LocalOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ask a model's endpoint for a few tokens, and compare how it answers with what its registry entry says."""
    name = registry_table(table, local)
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415 - --help should not pay for boto3

    from completions.domain.errors import ServiceError  # noqa: PLC0415
    from completions.settings import SettingsError  # noqa: PLC0415
    from completions_cli.probe_checks import EndpointAbsentError, Verdict, probe_endpoint  # noqa: PLC0415

    try:
        endpoint = _endpoint(model, name)
        checks = list(probe_endpoint(endpoint))
    except ServiceError as error:
        _fail(f"{error.message} ({error.detail})")
    except (SettingsError, BotoCoreError) as error:  # a setting, no region, no credentials
        _fail(str(error))
    except EndpointAbsentError as error:
        _fail(f"{model} cannot be asked: {error}")
    if as_json:
        typer.echo(json.dumps(_report(endpoint, checks), indent=2, ensure_ascii=False))
    else:
        _print(endpoint, checks)
    if any(check.verdict is Verdict.DIFFERS for check in checks):
        raise typer.Exit(1)


def _endpoint(model: str, table: str) -> Endpoint:
    """Raises ``BackendUnavailableError`` when the registry cannot be read; an unknown model ends the command."""
    from completions.backends.families import CODECS  # noqa: PLC0415 - --help should not pay for boto3
    from completions.bootstrap import build_parts  # noqa: PLC0415
    from completions.clients import build_sagemaker_client  # noqa: PLC0415
    from completions.settings import read_settings  # noqa: PLC0415
    from completions_cli.probe_endpoint import Endpoint  # noqa: PLC0415

    # a probe is not metered, so the usage table may be left unset
    settings = read_settings({"USAGE_TABLE": "unused", **os.environ, "REGISTRY_TABLE": table})
    parts = build_parts(settings)
    route = parts.registry.route(model)
    if route is None:
        _fail(f"{table} has no model '{model}'")
    codec = CODECS.get(route.family)
    if codec is None:
        _fail(f"there is no family '{route.family}'; there are {', '.join(sorted(CODECS))}")
    return Endpoint(route, codec, parts.backend, build_sagemaker_client(settings))


def checks_table(route: ModelRoute, checks: Sequence[Check]) -> Table:
    """One row a check."""
    version = "" if route.family_version is None else f" {route.family_version}"
    title = f"{route.model_id}: {route.family}{version} on {route.endpoint_name}"
    table = Table("check", "promised", "observed", "", title=Text(title))
    for check in checks:
        verdict = Text(check.verdict, style=_COLOURS[check.verdict])
        table.add_row(Text(check.name), Text(check.expected), Text(check.observed), verdict)
    return table


def _print(endpoint: Endpoint, checks: Sequence[Check]) -> None:
    Console().print(checks_table(endpoint.route, checks))
    typer.echo(f"cost: {endpoint.prompt_tokens} prompt tokens and {endpoint.generated_tokens} generated tokens")
    different = [check.name for check in checks if check.verdict == "differs"]
    if different:
        typer.echo(f"{endpoint.route.model_id} is not what its entry says: {', '.join(different)}", err=True)


def _report(endpoint: Endpoint, checks: Sequence[Check]) -> dict[str, object]:
    route = endpoint.route
    return {
        "model": route.model_id,
        "family": route.family,
        "family_version": route.family_version,
        "endpoint": route.endpoint_name,
        "matches": not any(check.verdict == "differs" for check in checks),
        "prompt_tokens": endpoint.prompt_tokens,
        "generated_tokens": endpoint.generated_tokens,
        "checks": [
            {
                "name": check.name,
                "expected": check.expected,
                "observed": check.observed,
                "verdict": str(check.verdict),
            }
            for check in checks
        ],
    }


def _fail(message: str) -> NoReturn:
    typer.echo(f"completions probe: {message}", err=True)
    raise typer.Exit(1)
