"""``completions batch``: many requests in one file."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from completions_cli.local.environment import NoStackError, use_local_environment
from completions_cli.models import JsonOption, LocalOption

if TYPE_CHECKING:
    from completions_cli.batch_api import BatchApi
    from completions_cli.batch_files import BatchInput

_FAILED: Final = 1
_USAGE: Final = 2
_INTERRUPTED: Final = 130
_WIDE: Final = 160
_DONE: Final = "completed"

batch = typer.Typer(no_args_is_help=True, help=__doc__)

BaseUrlOption = Annotated[str | None, typer.Option(envvar="COMPLETIONS_BASE_URL", help="The service's address.")]
ApiKeyOption = Annotated[
    str | None, typer.Option(envvar="COMPLETIONS_API_KEY", show_default=False, help="A key of the service.")
]
BatchArgument = Annotated[str, typer.Argument(help="The batch's id, as batch_….")]
IntervalOption = Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")]


@batch.command()
def submit(  # noqa: PLR0917 - every argument is an option of the command
    file: Annotated[str, typer.Argument(help="Lines of JSON with custom_id, method, url and body; - reads them.")],
    name: Annotated[str | None, typer.Option(help="What tells it from others of the same content.")] = None,
    endpoint: Annotated[str, typer.Option(help="The one URL of all lines; * where each says its own.")] = "*",
    wait_for_it: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
    through_s3: Annotated[bool, typer.Option("--s3", help="Put it into the bucket, however small it is.")] = False,
    bucket: Annotated[str | None, typer.Option(envvar="PIPELINE_BUCKET", help="The pipeline's bucket.")] = None,
    key_id: Annotated[
        str | None, typer.Option(envvar="PIPELINE_KEY_ID", help="The id of the key that pays, through the bucket.")
    ] = None,
    base_url: BaseUrlOption = None,
    api_key: ApiKeyOption = None,
    local: LocalOption = False,
    interval: IntervalOption = 2.0,
) -> None:
    """Begin a batch. The same content under the same name is one batch: run again, this finds it and pays nothing."""
    with _told():
        from completions_cli.batch_files import MOST_HTTP_BYTES, opened_input  # noqa: PLC0415 - not for --help

        if local:
            _use_stack()
            bucket, key_id = bucket or os.environ.get("PIPELINE_BUCKET"), key_id or "local"
        with opened_input(file, name) as given:
            if through_s3 or given.size > MOST_HTTP_BYTES:
                if endpoint != "*":
                    _fail("--endpoint: through the bucket each line says its own URL; leave it out", _USAGE)
                begun = _through_bucket(given, bucket, key_id, _api(base_url, api_key, local, required=False))
            else:
                begun = _through_http(given, endpoint, _api(base_url, api_key, local))
    if begun is None:
        return
    batch_id: str = begun["id"]
    if wait_for_it:
        _wait(batch_id, base_url, api_key, local, interval)
    else:
        typer.echo(f"wait for it: {_command('wait', batch_id, local)}")


@batch.command()
def status(
    batch_id: BatchArgument,
    base_url: BaseUrlOption = None,
    api_key: ApiKeyOption = None,
    local: LocalOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say how far it is."""
    with _told():
        found = _api(base_url, api_key, local).batch(batch_id)
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print(found)


@batch.command()
def wait(
    batch_id: BatchArgument,
    base_url: BaseUrlOption = None,
    api_key: ApiKeyOption = None,
    local: LocalOption = False,
    interval: IntervalOption = 2.0,
) -> None:
    """Show how it gets on until it has ended. Ctrl-C leaves it running."""
    _wait(batch_id, base_url, api_key, local, interval)


@batch.command()
def cancel(
    batch_id: BatchArgument, base_url: BaseUrlOption = None, api_key: ApiKeyOption = None, local: LocalOption = False
) -> None:
    """Answer no more of its lines; those that are answered stay, and are in its output."""
    with _told():
        _print(_api(base_url, api_key, local).cancel(batch_id))


@batch.command()
def fetch(
    batch_id: BatchArgument,
    output_dir: Annotated[Path, typer.Option(file_okay=False, help="Where the files go.")] = Path(),
    base_url: BaseUrlOption = None,
    api_key: ApiKeyOption = None,
    local: LocalOption = False,
) -> None:
    """Fetch what it came to: ID.output.jsonl, ID.errors.jsonl where lines failed, and ID.json, the batch itself."""
    with _told():
        api = _api(base_url, api_key, local)
        found = api.batch(batch_id)
        from completions_cli.batch_view import ENDED  # noqa: PLC0415 - not for --help

        if found["status"] not in ENDED:
            _fail(f"{batch_id} is {found['status']}; wait for it: {_command('wait', batch_id, local)}")
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            for kind, file_id in (("output", found.get("output_file_id")), ("errors", found.get("error_file_id"))):
                if file_id is not None:
                    target = output_dir / f"{batch_id}.{kind}.jsonl"
                    size = api.download(file_id, target)
                    typer.echo(f"{target}: {size:,} bytes")
            about = output_dir / f"{batch_id}.json"
            about.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
            typer.echo(str(about))
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}")
    _print(found)


@batch.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, the newest first.")] = 20,
    base_url: BaseUrlOption = None,
    api_key: ApiKeyOption = None,
    local: LocalOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the batches of the key's team."""
    with _told():
        found = list(_api(base_url, api_key, local).batches(limit))
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    from rich.console import Console  # noqa: PLC0415 - not for --help

    from completions_cli.batch_view import batches_table  # noqa: PLC0415

    console = Console()
    if not console.is_terminal:  # whoever reads it has no width
        console.width = max(console.width, _WIDE)
    console.print(batches_table(found))


def _through_http(given: BatchInput, endpoint: str, api: BatchApi) -> Mapping[str, Any]:
    file = api.upload(given.path.name, given.path.read_bytes(), given.request_name)
    made = api.create(file.body["id"], endpoint, given.request_name)
    if made.known:
        _print_known(made.body, given)
    else:
        _print(made.body)
    return made.body


def _through_bucket(
    given: BatchInput, bucket: str | None, key_id: str | None, api: BatchApi | None
) -> Mapping[str, Any] | None:
    """The batch, where the service is known that can be asked for it."""
    from completions_cli.batch_files import MOST_HTTP_BYTES, batch_of_object, put_into_bucket  # noqa: PLC0415

    if not bucket or not key_id:
        _fail(
            f"{given.path.name} has {given.size / 1e6:,.1f} MB, and {MOST_HTTP_BYTES / 1e6:.1f} MB fit over HTTP; "
            "to put it into the pipeline's bucket, set PIPELINE_BUCKET or --bucket, and --key-id to the key that pays",
            _USAGE,
        )
    key = given.object_key(key_id)
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - not for --help
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn  # noqa: PLC0415

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    console = Console()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("uploading", total=given.size)
            put = put_into_bucket(given, bucket, key, lambda size: bar.advance(task, size))
    except (BotoCoreError, ClientError) as error:
        _fail(f"s3://{bucket}/{key}: {error}")
    typer.echo(f"s3://{bucket}/{key}: {'put there' if put else 'was there already; nothing was sent'}")
    if api is None:
        typer.echo("its batch begins by itself; with COMPLETIONS_BASE_URL and COMPLETIONS_API_KEY it can be watched")
        return None
    found = batch_of_object(api, key)
    if found is None:
        _fail(
            f"no batch of {key} is to be seen yet: its key '{key_id}' may be of another team than the API key, or the "
            "function that starts it has failed; see its log"
        )
    if put:
        _print(found)
    else:
        _print_known(found, given)
    return found


def _wait(batch_id: str, base_url: str | None, api_key: str | None, local: bool, interval: float) -> None:
    with _told():
        api = _api(base_url, api_key, local)
        from rich.console import Console  # noqa: PLC0415 - not for --help

        from completions_cli.batch_view import LiveView, watched  # noqa: PLC0415

        try:
            with LiveView(Console()) as view:
                ended = watched(lambda: api.batch(batch_id), view.show, interval)
        except KeyboardInterrupt:
            typer.echo(f"{batch_id} goes on; wait again: {_command('wait', batch_id, local)}", err=True)
            raise typer.Exit(_INTERRUPTED) from None
    _print(ended)
    typer.echo(f"fetch what it came to: {_command('fetch', batch_id, local)}")
    if ended["status"] != _DONE:
        raise typer.Exit(_FAILED)


def _print(found: Mapping[str, Any]) -> None:
    from completions_cli.batch_view import faults, line  # noqa: PLC0415 - not for --help

    typer.echo(line(found))
    for fault in faults(found):
        typer.echo(f"  {fault}")


def _print_known(found: Mapping[str, Any], given: BatchInput) -> None:
    typer.echo(
        f"this content was submitted as '{given.name}' before, and nothing was done again; "
        "to run it anew, give it another --name"
    )
    _print(found)


def _api(base_url: str | None, api_key: str | None, local: bool, *, required: bool = True) -> Any:
    """The service; ``None`` where it is not named and need not be."""
    from completions_cli.batch_api import BatchApi  # noqa: PLC0415 - not for --help

    if local:
        _use_stack()
        base_url, api_key = os.environ.get("COMPLETIONS_BASE_URL"), os.environ.get("COMPLETIONS_API_KEY")
    if base_url and api_key:
        if not base_url.startswith(("http://", "https://")):
            _fail(f"--base-url {base_url}: not an http:// or https:// URL", _USAGE)
        return BatchApi(base_url, api_key)
    if required:
        _fail("set COMPLETIONS_BASE_URL and COMPLETIONS_API_KEY, or --base-url and --api-key, or use --local", _USAGE)
    return None


def _use_stack() -> None:
    try:
        use_local_environment()
    except NoStackError as error:
        _fail(str(error))


def _command(name: str, batch_id: str, local: bool) -> str:
    return f"completions batch {name} {shlex.quote(batch_id)}{' --local' if local else ''}"


@contextmanager
def _told() -> Iterator[None]:
    """What went wrong, in one line."""
    from completions_cli.batch_api import BatchApiError  # noqa: PLC0415 - not for --help
    from completions_cli.batch_files import InputError  # noqa: PLC0415

    try:
        yield
    except (BatchApiError, InputError) as error:
        _fail(str(error))


def _fail(message: str, code: int = _FAILED) -> NoReturn:
    typer.echo(f"completions batch: {message}", err=True)
    raise typer.Exit(code)
