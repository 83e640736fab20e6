"""What is to be deployed: an environment of ``samconfig.toml``, its template, and the models' own stacks."""

from __future__ import annotations

import json
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from completions_cli.local.template import Resolver, load_template
from completions_cli.parameters import SamConfigError, plain_text, read_samconfig

TEMPLATE: Final = "template.yaml"
MODEL_TEMPLATE: Final = "infra/model-endpoint.yaml"
MODEL_ENVIRONMENT: Final = "model"
RELEASE: Final = "ReleaseId"
_UNESCAPED_BY_SAM: Final = re.compile(r"""\\(?=[ "'])""")


@dataclass(frozen=True, slots=True)
class PlannedStack:
    """A stack as its configuration would make it. ``values`` are the parameters given; others have their default."""

    environment: str
    name: str
    file: str
    template: Mapping[str, Any]
    values: Mapping[str, str]

    def value(self, parameter: str) -> str:
        """A parameter's value as text."""
        default = self.template["Parameters"].get(parameter, {}).get("Default", "")
        return self.values.get(parameter, plain_text(default))

    def resources(self) -> dict[str, Any]:
        """The resources there would be, by logical id."""
        known = {name: value for name, value in self.values.items() if name in self.template["Parameters"]}
        return Resolver(self.template, known).resources()


@dataclass(frozen=True, slots=True)
class Plan:
    """The service's stack, and its models'."""

    api: PlannedStack
    models: tuple[PlannedStack, ...] = ()
    region: str | None = None
    profile: str | None = None


def read_plan(
    config: Path, environment: str, models: Sequence[str], *, stack: str | None = None, region: str | None = None
) -> Plan:
    """Raises ``SamConfigError`` and ``TemplateError``. ``stack`` and ``region`` stand in the place of the file's."""
    settings = _deploy_settings(config, environment)
    values = read_samconfig(config, environment) | {RELEASE: new_release()}
    name = stack or settings.get("stack_name", "")
    if not name:
        raise SamConfigError(f"{config}: [{environment}.deploy.parameters]: there is no stack_name; or give --stack")
    return Plan(
        PlannedStack(environment, name, TEMPLATE, load_template(Path(TEMPLATE)), values),
        tuple(_model(config, one) for one in models),
        region or settings.get("region"),
        settings.get("profile"),
    )


def usual_models(config: Path) -> Sequence[str]:
    """The environment of a model's stack that need not be named, where there is one. Raises ``SamConfigError``."""
    return [MODEL_ENVIRONMENT] if MODEL_ENVIRONMENT in _environments(config) else []


def new_release() -> str:
    """A ``ReleaseId``."""
    return secrets.token_hex(5)


def overrides_text(plan: Plan) -> str:
    """All parameters of a deployment, for ``sam deploy --parameter-overrides file://NAME.yaml``.

    JSON is YAML in which every text stands in quotes: an id such as 123e456789 would be read as a number without.
    """
    values = {**plan.api.values, "Architecture": plan.api.value("Architecture")}  # the build must be for the same
    return json.dumps({name: _quoted(_quoted(value)) for name, value in values.items()}, indent=2, ensure_ascii=False)


def _quoted(value: str) -> str:
    """For SAM, which unquotes a file's values as it does those of a command line: once in the file, once after."""
    escaped = _UNESCAPED_BY_SAM.sub(r"\\\\", value)
    return f'"{escaped}"' if value and value[0] == value[-1] and value[0] in "\"'" else escaped


def covers(pattern: str, endpoint: str) -> bool:
    """Whether ``ModelEndpointPattern`` lets the functions call an endpoint; IAM's ``*`` is the shell's."""
    return fnmatchcase(endpoint, pattern)


def _model(config: Path, environment: str) -> PlannedStack:
    settings = _deploy_settings(config, environment)
    place = f"{config}: [{environment}.deploy.parameters]"
    name, file = settings.get("stack_name"), settings.get("template_file")
    if not name:
        raise SamConfigError(f"{place}: there is no stack_name")
    if not file:
        # sam looks for its configuration beside a template that is named on the command line
        raise SamConfigError(f'{place}: there is no template_file; set template_file = "{MODEL_TEMPLATE}"')
    return PlannedStack(environment, name, file, load_template(Path(file)), read_samconfig(config, environment))


def _deploy_settings(config: Path, environment: str) -> dict[str, str]:
    """The texts among the options of ``sam deploy``, read as SAM reads them."""
    read_samconfig(config, environment)  # says what is wrong with the file
    commands = _environments(config)[environment]
    settings: dict[str, str] = {}
    for command in ("global", "deploy"):
        parameters = commands.get(command, {}).get("parameters", {})
        settings |= {name: value for name, value in parameters.items() if isinstance(value, str)}
    return settings


def _environments(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_bytes().decode())
    except OSError as error:
        raise SamConfigError(f"{config}: {error.strerror}; run this where the project's samconfig.toml is") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SamConfigError(f"{config}: not TOML: {error}") from None
