"""``completions doctor``: what stands in the way of a deployment, and of a deployed service."""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from completions_cli.doctor_aws import BotoAws
    from completions_cli.doctor_checks import Finding, Findings
    from completions_cli.doctor_plan import Plan
    from completions_cli.doctor_stack import DeployedStack

_FAILED: Final = 1
_CANNOT: Final = 2
_COLOURS: Final = {"ok": "green", "warning": "yellow", "failed": "bold red", "not checked": "dim"}
_EXPORTS: Final = {
    "REGISTRY_TABLE": "RegistryTableName",
    "USAGE_TABLE": "UsageTableName",
    "BASE_URL": "BaseUrl",
    "COMPLETIONS_BASE_URL": "BaseUrl",
    "PIPELINE_BUCKET": "PipelineBucketName",
}

doctor = typer.Typer(help=__doc__, invoke_without_command=True)

EnvironmentOption = Annotated[str, typer.Option("--config-env", help="The environment in samconfig.toml.")]
ConfigOption = Annotated[Path, typer.Option("--config-file", help="The file with the environments.")]
StackOption = Annotated[str | None, typer.Option("--stack", help="The stack's name, in place of the environment's.")]
RegionOption = Annotated[str | None, typer.Option("--region", help="In place of the environment's or the profile's.")]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model-config-env",
        help="The environment of a model's own stack, once for each model. Without: model, if there is one.",
    ),
]
_SAMCONFIG: Final = Path("samconfig.toml")


class _CannotError(Exception):
    """Nothing can be looked at, why not, and what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason
        self.advice = advice


@doctor.callback()
def diagnose(  # noqa: PLR0917 - every argument is an option of the command
    context: typer.Context,
    config_env: EnvironmentOption = "dev",
    stack: StackOption = None,
    model_config_env: ModelsOption = None,
    region: RegionOption = None,
    config_file: ConfigOption = _SAMCONFIG,
    before: Annotated[
        bool, typer.Option("--before", help="What a deployment needs: no models unless named, nothing of what runs.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Only what needs no account.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at parameters, account, quotas and what is deployed, and change nothing.

    Ends with 0 when nothing has failed, with 1 when something has, and with 2 when the account cannot be looked at.
    """
    if context.invoked_subcommand is not None:
        return
    from completions_cli.doctor_checks import failed  # noqa: PLC0415 - --help should not pay for boto3

    report = _Report(config_env, as_json)
    try:
        plan = _plan(config_file, config_env, model_config_env, models=not before, stack=stack, region=region)
    except _CannotError as error:
        report.add(replace(failed(error.reason, error.advice), check="samconfig"))
    else:
        try:
            for finding in _examine(plan, before=before, offline=offline):
                report.add(finding)
        except _CannotError as error:
            report.end(str(error))
            raise typer.Exit(_CANNOT) from None
    report.end()
    if report.count("failed"):
        raise typer.Exit(_FAILED)


@doctor.command()
def overrides(config_env: EnvironmentOption = "dev", config_file: ConfigOption = _SAMCONFIG) -> None:
    """Print an environment's parameters and a new ReleaseId: sam deploy --parameter-overrides file://NAME.yaml."""
    from completions_cli.doctor_plan import overrides_text  # noqa: PLC0415 - --help should not pay for it

    try:
        typer.echo(overrides_text(_plan(config_file, config_env, models=False)))
    except _CannotError as error:
        _fail(str(error))


@doctor.command()
def environment(
    config_env: EnvironmentOption = "dev",
    stack: StackOption = None,
    region: RegionOption = None,
    config_file: ConfigOption = _SAMCONFIG,
) -> None:
    """Print where a stack's tables and API are, for the shell's eval. The other commands read it."""
    from completions_cli.doctor_aws import NotAnsweredError  # noqa: PLC0415 - --help should not pay for boto3
    from completions_cli.doctor_stack import deployed_stack  # noqa: PLC0415

    try:
        plan = _plan(config_file, config_env, models=False, stack=stack, region=region)
        with _account(plan) as aws:
            found = deployed_stack(aws, plan.api.name)
    except (_CannotError, NotAnsweredError) as error:
        _fail(str(error))
    if found is None:
        _fail(f"there is no stack {plan.api.name} in {aws.region}; make deploy ENV={config_env}")
    if missing := [output for output in _EXPORTS.values() if output not in found.outputs]:
        _fail(f"{found.name} is {found.status} and has no output {', '.join(missing)}; completions doctor says more")
    values = {"AWS_PROFILE": plan.profile, "AWS_DEFAULT_REGION": aws.region}
    values |= {name: found.outputs[output] for name, output in _EXPORTS.items()}
    for name, value in values.items():
        if value:
            typer.echo(f"export {name}={shlex.quote(value)}")


def _plan(
    config: Path,
    environment: str,
    named: Sequence[str] | None = None,
    *,
    models: bool,
    stack: str | None = None,
    region: str | None = None,
) -> Plan:
    """With ``models``, those of the usual environment where none are named. Raises ``_CannotError``."""
    from completions_cli.doctor_plan import read_plan, usual_models  # noqa: PLC0415 - not for --help
    from completions_cli.local.template import TemplateError  # noqa: PLC0415
    from completions_cli.parameters import SamConfigError  # noqa: PLC0415

    try:
        wanted = named or (usual_models(config) if models else ())
        return read_plan(config, environment, wanted, stack=stack, region=region)
    except SamConfigError as error:
        raise _CannotError(str(error), "--config-env and --config-file choose another") from None
    except TemplateError as error:
        raise _CannotError(str(error), "run this where the project's template.yaml is") from None


def _examine(plan: Plan, *, before: bool, offline: bool) -> Findings:
    """Every finding, in order. Raises ``_CannotError`` where the account cannot be asked."""
    from completions_cli.doctor_account import ACCOUNT  # noqa: PLC0415 - --help should not pay for boto3
    from completions_cli.doctor_checks import BEFORE_AN_ACCOUNT, findings, not_checked  # noqa: PLC0415
    from completions_cli.doctor_stack import DEPLOYED, TO_BE_DEPLOYED  # noqa: PLC0415

    wrong = False
    for finding in findings(BEFORE_AN_ACCOUNT, plan):
        wrong |= finding.verdict == "failed"
        yield finding
    if not plan.models and not before:
        advice = "name the environments of the models' stacks with --model-config-env"
        yield replace(not_checked("whether the account has instances and images for them", advice), check="models")
    if offline:
        return
    if wrong:
        yield replace(not_checked("not looked at with wrong parameters", "mend them first"), check="account")
        return
    with _account(plan) as aws:
        yield from _identity(aws)
        yield from findings(ACCOUNT, plan, aws)
        stack = yield from _stack(plan, aws)
        if stack is not None and stack.serves:
            yield from findings(TO_BE_DEPLOYED if before else DEPLOYED, plan, aws, stack)


@contextmanager
def _account(plan: Plan) -> Iterator[BotoAws]:
    """Raises ``_CannotError`` without a region, or with a profile that is not there."""
    import boto3  # noqa: PLC0415 - --help should not pay for it
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415

    from completions_cli.doctor_aws import BotoAws  # noqa: PLC0415

    try:
        session = boto3.Session(profile_name=plan.profile, region_name=plan.region)
    except BotoCoreError as error:
        raise _CannotError(str(error), "aws configure list-profiles") from None
    if session.region_name is None:
        raise _CannotError("no region", "set AWS_DEFAULT_REGION, give --region, or set region in samconfig.toml")
    aws = BotoAws(session, session.region_name)
    try:
        yield aws
    finally:
        aws.close()


def _identity(aws: BotoAws) -> Findings:
    from completions_cli.doctor_aws import NotAnsweredError  # noqa: PLC0415 - not for --help
    from completions_cli.doctor_checks import ok  # noqa: PLC0415

    try:
        caller = aws.ask("sts", "get_caller_identity")
    except NotAnsweredError as error:
        advice = "aws sts get-caller-identity must work first: aws configure sso, or AWS_PROFILE"
        raise _CannotError(f"the account cannot be asked: {error.message}", advice) from None
    yield replace(ok(f"{caller['Arn']}, in {aws.region}"), check="account")


def _stack(plan: Plan, aws: BotoAws) -> Generator[Finding, None, DeployedStack | None]:
    from completions_cli.doctor_aws import NotAnsweredError  # noqa: PLC0415 - not for --help
    from completions_cli.doctor_checks import not_answered  # noqa: PLC0415
    from completions_cli.doctor_stack import deployed_stack, stack_finding  # noqa: PLC0415

    try:
        stack = deployed_stack(aws, plan.api.name)
        finding = stack_finding(plan, aws, stack)
    except NotAnsweredError as error:
        stack, finding = None, not_answered(error)
    yield replace(finding, check="stack")
    return stack


class _Report:
    """Prints findings as they come, or all of them as JSON in the end."""

    def __init__(self, environment: str, as_json: bool) -> None:
        self._environment = environment
        self._as_json = as_json
        self._console = Console(highlight=False, soft_wrap=True)
        self._findings: list[Finding] = []

    def count(self, verdict: str) -> int:
        """How many findings there are of a kind."""
        return sum(finding.verdict == verdict for finding in self._findings)

    def add(self, finding: Finding) -> None:
        """Print a finding."""
        self._findings.append(finding)
        if self._as_json:
            return
        self._console.print(
            Text.assemble((f"{finding.verdict:<12}", _COLOURS[finding.verdict]), f"{finding.title}: {finding.found}")
        )
        if finding.advice:
            self._console.print(Text(f"{'':<12}→ {finding.advice}"))

    def end(self, cannot: str | None = None) -> None:
        """Print the sum; ``cannot`` says why not everything was looked at."""
        if self._as_json:
            typer.echo(json.dumps(self._values(cannot), indent=2, ensure_ascii=False))
        else:
            typer.echo(", ".join(f"{self.count(verdict)} {verdict}" for verdict in _COLOURS))
        if cannot is not None:
            typer.echo(f"completions doctor: {cannot}", err=True)

    def _values(self, cannot: str | None) -> dict[str, object]:
        return {
            "environment": self._environment,
            **{verdict.replace(" ", "_"): self.count(verdict) for verdict in _COLOURS},
            "cannot": cannot,
            "checks": [
                {
                    "check": finding.check,
                    "subject": finding.subject,
                    "verdict": str(finding.verdict),
                    "found": finding.found,
                    "advice": finding.advice,
                }
                for finding in self._findings
            ],
        }


def _fail(message: str) -> NoReturn:
    typer.echo(f"completions doctor: {message}", err=True)
    raise typer.Exit(_CANNOT)
