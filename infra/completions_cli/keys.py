"""``completions keys``: who may ask, for which models, and how much. A secret is shown once, by what makes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from rich.console import Console

from completions.domain.limits import KeyLimits, LimitKind
from completions.domain.metering import Principal
from completions.web.callers import caller_arn, caller_digest
from completions_cli import keys_values as values
from completions_cli.local.environment import NoStackError, use_local_environment
from completions_cli.models import JsonOption, LocalOption, TableOption

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

    from completions.registry.items import KeyEntry
    from completions.registry.keys import Change

_FAILED: Final = 1
_USAGE: Final = 2
_MOST_RETIRED: Final = 20
_LAG: Final = "functions may remember the key as it was for REGISTRY_CACHE_SECONDS, 30 unless set otherwise"

keys = typer.Typer(no_args_is_help=True, help=__doc__)

KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="The key's id, how its secret begins, or its caller's ARN.")
]
RpmOption = Annotated[str | None, typer.Option("--rpm", metavar="N", help="Requests a minute; or none.")]
TpmOption = Annotated[str | None, typer.Option("--tpm", metavar="N", help="Tokens a minute.")]
ParallelOption = Annotated[str | None, typer.Option("--parallel", metavar="N", help="Requests at a time.")]
DayTokensOption = Annotated[str | None, typer.Option("--tokens-per-day", metavar="N", help="Days are UTC's.")]
MonthTokensOption = Annotated[str | None, typer.Option("--tokens-per-month", metavar="N", help="So are months.")]
DayBudgetOption = Annotated[
    str | None, typer.Option("--budget-per-day", metavar="DOLLARS", help="US dollars, as 5 or '$0.25'.")
]
MonthBudgetOption = Annotated[
    str | None, typer.Option("--budget-per-month", metavar="DOLLARS", help="US dollars, as 5 or '$0.25'.")
]


@keys.command()
def create(  # noqa: PLR0917 - every argument is an option of the command
    owner: Annotated[str, typer.Option(help="Who answers for its use.")],
    arn: Annotated[
        str | None, typer.Option(metavar="ARN", help="Whose key it is who signs requests with IAM; no secret is made.")
    ] = None,
    team: Annotated[str | None, typer.Option(help="Whose keys may share a container's prefix cache.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may see everyone's usage.")] = False,
    model: Annotated[
        list[str] | None, typer.Option(help="A model it may use, by id or alias; repeat it. All, unless given.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="WHEN", help="2027-01-31 (from midnight UTC on), or 90d from now.")
    ] = None,
    rpm: RpmOption = None,
    tpm: TpmOption = None,
    parallel: ParallelOption = None,
    tokens_per_day: DayTokensOption = None,
    tokens_per_month: MonthTokensOption = None,
    budget_per_day: DayBudgetOption = None,
    budget_per_month: MonthBudgetOption = None,
    table: TableOption = None,
    local: LocalOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a key, and print it: this once, for its SHA-256 is all that is stored. One for an ARN has no secret."""
    now = _now()
    with _faults("--owner"):
        owner = values.name(owner)
    with _faults("--arn"):
        caller = None if arn is None else values.caller(arn)
    with _faults("--team"):
        team = None if team is None else values.name(team)
    with _faults("--expires"):
        ends = None if expires is None else values.expiry(expires, now)
    with _faults():
        given = values.limits_given(
            _options(rpm, tpm, parallel, tokens_per_day, tokens_per_month, budget_per_day, budget_per_month)
        )
    from completions.registry.keys import create_key  # noqa: PLC0415 - --help should not pay for boto3

    secret = values.new_secret()
    with _registry(table, local) as registry:
        allowed = None if not model else _model_ids(registry, model)
        limits = values.changed(KeyLimits(), given)
        principal = Principal(values.new_key_id(), owner, team, admin, allowed, limits, ends)
        entry = _new_entry(principal, secret, caller, now)
        create_key(registry.client, registry.table, entry)
    if arn is None:
        _print_secret(secret, entry, as_json, f"{principal.key_id} for {owner}")
    else:
        _print_caller(entry, as_json, arn)


@keys.command("list")
def list_keys(table: TableOption = None, local: LocalOption = False, as_json: JsonOption = False) -> None:
    """Print every key, without its secret."""
    from completions_cli.keys_view import entry_values, keys_table  # noqa: PLC0415 - not for --help

    with _registry(table, local) as registry:
        found = registry.entries()
    entries = [entry for entry in found.values() if entry is not None]
    if as_json:
        typer.echo(json.dumps([entry_values(entry, _now()) for entry in entries], indent=2, ensure_ascii=False))
    else:
        Console().print(keys_table(entries, _now()))
    if unreadable := [key_id for key_id, entry in found.items() if entry is None]:
        _fail(f"the table holds keys that cannot be read: {', '.join(unreadable)}")


@keys.command()
def show(key: KeyArgument, table: TableOption = None, local: LocalOption = False, as_json: JsonOption = False) -> None:
    """Print one key, without its secret."""
    with _registry(table, local) as registry:
        entry = registry.entry(registry.key_id(key))
    _print_entry(entry, as_json)


@keys.command()
def disable(key: KeyArgument, table: TableOption = None, local: LocalOption = False) -> None:
    """Refuse a key's requests until it is enabled again."""
    _switch(key, table, local, disabled=True)


@keys.command()
def enable(key: KeyArgument, table: TableOption = None, local: LocalOption = False) -> None:
    """Let a disabled key ask again."""
    _switch(key, table, local, disabled=False)


@keys.command()
def rotate(
    key: KeyArgument,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="How long the old secret still serves: 30m, 24h, 7d; 0 is not at all.")
    ] = "0",
    table: TableOption = None,
    local: LocalOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give a key a new secret, and print that: this once. Everything else about the key stays."""
    from completions.web.auth import secret_digest  # noqa: PLC0415 - --help should not pay for boto3

    with _faults("--grace"):
        kept = values.grace(grace)
    now, secret = _now(), values.new_secret()

    def change(entry: KeyEntry) -> KeyEntry:
        return _rotated(entry, secret_digest(secret), values.display_prefix(secret), now, kept)

    with _registry(table, local) as registry:
        _, entry = registry.change(registry.key_id(key), change)
    _print_secret(secret, entry, as_json, f"{entry.principal.key_id} has a new secret")
    ending = f"the old one ends at {now + kept:%Y-%m-%d %H:%M:%S} UTC" if kept else "the old one has ended"
    typer.echo(f"{ending}; {_LAG}", err=True)


@keys.command()
def delete(
    key: KeyArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    table: TableOption = None,
    local: LocalOption = False,
) -> None:
    """Remove a key for good. What it used stays in the usage table."""
    from completions.registry.keys import delete_key  # noqa: PLC0415 - --help should not pay for boto3

    with _registry(table, local) as registry:
        key_id = registry.key_id(key)
        if not yes and not typer.confirm(f"Delete {key_id}? Its usage records stay."):
            _fail("nothing was deleted")
        delete_key(registry.client, registry.table, key_id)
    typer.echo(f"{key_id} deleted; {_LAG}")


@keys.command()
def limits(  # noqa: PLR0917 - every argument is an option of the command
    key: KeyArgument,
    rpm: RpmOption = None,
    tpm: TpmOption = None,
    parallel: ParallelOption = None,
    tokens_per_day: DayTokensOption = None,
    tokens_per_month: MonthTokensOption = None,
    budget_per_day: DayBudgetOption = None,
    budget_per_month: MonthBudgetOption = None,
    table: TableOption = None,
    local: LocalOption = False,
) -> None:
    """Change a key's limits: a number sets one, `none` takes it away, and what is not named stays."""
    from completions_cli.keys_view import limit_changes  # noqa: PLC0415 - not for --help

    with _faults():
        given = values.limits_given(
            _options(rpm, tpm, parallel, tokens_per_day, tokens_per_month, budget_per_day, budget_per_month)
        )
    if not given:
        _fail(f"name a limit to change: {', '.join(values.OPTIONS.values())}", _USAGE)

    def change(entry: KeyEntry) -> KeyEntry:
        principal = entry.principal
        return replace(entry, principal=replace(principal, limits=values.changed(principal.limits, given)))

    with _registry(table, local) as registry:
        before, after = registry.change(registry.key_id(key), change)
    typer.echo("\n".join(limit_changes(before.principal.limits, after.principal.limits)) or "no changes")


@dataclass(frozen=True, slots=True)
class _Registry:
    client: DynamoDBClient
    table: str

    def entries(self) -> dict[str, KeyEntry | None]:
        """Every key by its id; ``None`` for one that cannot be read."""
        from completions.registry.keys import read_keys  # noqa: PLC0415 - --help should not pay for boto3

        return dict(read_keys(self.client, self.table))

    def key_id(self, named: str) -> str:
        """The id of the key that is meant; no such key, and more than one, end the command."""
        entries = self.entries()
        if named in entries:
            return named
        arn = caller_arn(named)
        names = {named} if arn is None else {arn}
        begun = {key_id for key_id, entry in entries.items() if entry is not None and names & _names(entry)}
        if len(begun) > 1:
            _fail(f"more than one key begins with {named}: {', '.join(sorted(begun))}")
        if not begun and arn is None and values.may_be_secret(named):  # then it is not even told back
            _fail(f"give the key's id or its first {values.PREFIX_CHARACTERS} characters, not the key itself", _USAGE)
        if not begun:
            _fail(f"{self.table} has no key {named!r}" if arn is None else f"{self.table} has no key of {arn}")
        return begun.pop()

    def entry(self, key_id: str) -> KeyEntry:
        """The key of this id, which there is."""
        from completions.registry.keys import KeyMissingError, read_key  # noqa: PLC0415 - not for --help

        entry = read_key(self.client, self.table, key_id)
        if entry is None:
            raise KeyMissingError(f"there is no key {key_id}")
        return entry

    def change(self, key_id: str, change: Change) -> tuple[KeyEntry, KeyEntry]:
        """What was, and what is."""
        from completions.registry.keys import change_key  # noqa: PLC0415 - --help should not pay for boto3

        return change_key(self.client, self.table, key_id, change)


@contextmanager
def _registry(table: str | None, local: bool) -> Iterator[_Registry]:
    """AWS's refusals, and what is wrong with a key, end the command."""
    if local:
        try:
            use_local_environment()
        except NoStackError as error:
            _fail(str(error))
        table = os.environ["REGISTRY_TABLE"]
    if not table:
        _fail("no table: set REGISTRY_TABLE or --table, or use --local", _USAGE)
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - --help should not pay for boto3

    from completions.clients import build_dynamodb_client  # noqa: PLC0415
    from completions.registry.keys import KeyContendedError, KeyMissingError, KeyUnreadableError  # noqa: PLC0415

    try:
        with closing(build_dynamodb_client()) as client:
            yield _Registry(client, table)
    except (KeyMissingError, KeyUnreadableError, KeyContendedError) as error:
        _fail(str(error))
    except (ClientError, BotoCoreError) as error:
        _fail(f"table {table}: {error}")


def _model_ids(registry: _Registry, named: Sequence[str]) -> frozenset[str]:
    """Keys are checked against ids, so an alias becomes one; an unknown name ends the command."""
    from completions.registry.dynamodb import read_models  # noqa: PLC0415 - --help should not pay for boto3

    known = read_models(registry.client, registry.table)
    routes = [known.get(one) for one in named]
    if unknown := [one for one, route in zip(named, routes, strict=True) if route is None]:
        _fail(f"--model: {registry.table} has no model '{unknown[0]}'; `completions models list` names them", _USAGE)
    return frozenset(route.model_id for route in routes if route is not None)


def _rotated(entry: KeyEntry, sha256: str, prefix: str, now: datetime, kept: timedelta) -> KeyEntry:
    """The entry with a new secret. Those before it serve no longer than ``kept`` from now."""
    from completions.registry.items import RetiredSecret  # noqa: PLC0415 - --help should not pay for boto3

    if entry.arn is not None:
        _fail(f"{entry.principal.key_id} has no secret to rotate: {entry.arn} signs its requests")
    if entry.sha256 == sha256:  # a repetition finds its own work
        return entry
    ends = now + kept
    former = [RetiredSecret(entry.sha256, entry.prefix, ends), *entry.retired]
    serving = tuple(replace(one, until=min(one.until, ends)) for one in former if min(one.until, ends) > now)
    if len(serving) > _MOST_RETIRED:
        _fail(f"{len(serving)} old secrets would still serve; rotate without --grace to end them")
    return replace(entry, sha256=sha256, prefix=prefix, retired=serving)


def _new_entry(principal: Principal, secret: str, caller: str | None, now: datetime) -> KeyEntry:
    """A key of ``secret``, or of the caller where there is one."""
    from completions.registry.items import KeyEntry  # noqa: PLC0415 - --help should not pay for boto3
    from completions.web.auth import secret_digest  # noqa: PLC0415

    if caller is not None:
        return KeyEntry(principal, caller_digest(caller), created_at=now, arn=caller)
    return KeyEntry(principal, secret_digest(secret), values.display_prefix(secret), now)


def _switch(key: str, table: str | None, local: bool, *, disabled: bool) -> None:
    from completions_cli.keys_view import state  # noqa: PLC0415 - not for --help

    def change(entry: KeyEntry) -> KeyEntry:
        return replace(entry, principal=replace(entry.principal, disabled=disabled))

    with _registry(table, local) as registry:
        _, entry = registry.change(registry.key_id(key), change)
    typer.echo(f"{entry.principal.key_id} is {state(entry, _now())}; {_LAG}")


def _names(entry: KeyEntry) -> set[str | None]:
    return {entry.arn, *(prefix for _, prefix, _ in entry.secrets())}


def _options(*texts: str | None) -> dict[LimitKind, str | None]:
    return dict(zip(values.OPTIONS, texts, strict=True))


def _print_secret(secret: str, entry: KeyEntry, as_json: bool, headline: str) -> None:
    """The secret alone goes to the standard output, so that a shell can catch it."""
    from completions_cli.keys_view import entry_values  # noqa: PLC0415 - not for --help

    typer.echo(f"{headline}. This is the only time the secret is shown:", err=True)
    shown = {"key": secret, **entry_values(entry, _now())}
    typer.echo(json.dumps(shown, indent=2, ensure_ascii=False) if as_json else secret)


def _print_caller(entry: KeyEntry, as_json: bool, given: str) -> None:
    """The key's id alone goes to the standard output."""
    from completions_cli.keys_view import caller_words, entry_values  # noqa: PLC0415 - not for --help

    typer.echo("\n".join(caller_words(entry, given)), err=True)
    shown: Any = entry_values(entry, _now())
    typer.echo(json.dumps(shown, indent=2, ensure_ascii=False) if as_json else entry.principal.key_id)


def _print_entry(entry: KeyEntry, as_json: bool) -> None:
    from completions_cli.keys_view import entry_lines, entry_values  # noqa: PLC0415 - not for --help

    shown: Any = entry_values(entry, _now())
    typer.echo(json.dumps(shown, indent=2, ensure_ascii=False) if as_json else "\n".join(entry_lines(entry, _now())))


@contextmanager
def _faults(option: str | None = None) -> Iterator[None]:
    """A value that is none ends the command, named by its option."""
    try:
        yield
    except values.ValueFault as fault:
        _fail(f"{fault}" if option is None else f"{option}: {fault}", _USAGE)


def _now() -> datetime:
    return datetime.now(UTC)


def _fail(message: str, code: int = _FAILED) -> NoReturn:
    typer.echo(f"completions keys: {message}", err=True)
    raise typer.Exit(code)
