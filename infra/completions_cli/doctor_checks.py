"""What a check finds, and the checks that need no account."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias

from completions_cli.doctor_aws import NotAnsweredError
from completions_cli.doctor_plan import Plan, PlannedStack, covers
from completions_cli.parameters import NOT_CHECKED, check_parameters


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was found, and what to do. ``check`` and ``subject`` say of what."""

    verdict: Verdict
    found: str
    advice: str = ""
    subject: str = ""
    check: str = ""

    @property
    def title(self) -> str:
        """The check, and on what it was made where there are several."""
        return f"{self.check} {self.subject}".strip()


Findings: TypeAlias = Iterator[Finding]


def ok(found: str, subject: str = "") -> Finding:
    """Nothing to be done."""
    return Finding(Verdict.OK, found, "", subject)


def warning(found: str, advice: str, subject: str = "") -> Finding:
    """It works, but not as it should."""
    return Finding(Verdict.WARNING, found, advice, subject)


def failed(found: str, advice: str, subject: str = "") -> Finding:
    """It does not work."""
    return Finding(Verdict.FAILED, found, advice, subject)


def not_checked(found: str, advice: str = "", subject: str = "") -> Finding:
    """Nobody knows."""
    return Finding(Verdict.NOT_CHECKED, found, advice, subject)


def not_answered(error: NotAnsweredError, subject: str = "") -> Finding:
    """AWS did not say."""
    advice = f"allow {error.action} to whoever runs this, or look yourself" if error.denied else ""
    return not_checked(str(error), advice, subject)


@dataclass(frozen=True, slots=True)
class Check:
    """A row of a table of checks. ``of`` is called with what the table's checks are made on."""

    name: str
    of: Callable[..., Iterable[Finding]]


def findings(checks: Sequence[Check], *made_on: object) -> Findings:
    """Every finding, as soon as it is there."""
    for check in checks:
        try:
            for finding in check.of(*made_on):
                yield replace(finding, check=check.name)
        except NotAnsweredError as error:
            yield replace(not_answered(error), check=check.name)


def parameters(plan: Plan) -> Findings:
    """The service's parameters against its template."""
    return _checked(plan.api)


def model_parameters(plan: Plan) -> Findings:
    """Each model's parameters against its template."""
    for model in plan.models:
        yield from (replace(finding, subject=model.environment) for finding in _checked(model))


def planned_endpoints(plan: Plan) -> Findings:
    """Whether the functions may call the endpoints that the models' stacks make, and each stack makes its own."""
    pattern = plan.api.value("ModelEndpointPattern")
    names = Counter(model.value("EndpointName") for model in plan.models)
    stacks = Counter([plan.api.name, *(model.name for model in plan.models)])
    for model in plan.models:
        name = model.value("EndpointName")
        if names[name] > 1:
            yield failed(f"{name} is made by {names[name]} stacks", "give each an EndpointName of its own", name)
        elif stacks[model.name] > 1:
            yield failed(
                f"{model.environment} has the stack_name {model.name} of another", "give it one of its own", name
            )
        elif covers(pattern, name):
            yield ok(f"ModelEndpointPattern {pattern} covers it", name)
        else:
            yield failed(
                f"ModelEndpointPattern {pattern} does not cover it, so the functions may not call it",
                f"change ModelEndpointPattern in [{plan.api.environment}.deploy.parameters], or EndpointName",
                name,
            )


BEFORE_AN_ACCOUNT: Final = (
    Check("parameters", parameters),
    Check("model parameters", model_parameters),
    Check("model endpoint", planned_endpoints),
)


def _checked(stack: PlannedStack) -> Findings:
    messages = check_parameters(stack.template, stack.values)
    place = f"mend parameter_overrides of [{stack.environment}.deploy.parameters]"
    for message in messages:
        unknown = message.endswith(NOT_CHECKED)
        yield not_checked(message) if unknown else failed(message, place)
    if not any(not message.endswith(NOT_CHECKED) for message in messages):
        yield ok(f"{stack.file} takes what {stack.environment} gives")
