"""Reading a catalogue file: every problem in it at once, each with its line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from completions.domain.catalog import ModelRoute
from completions_cli.catalogue_file import ModelEntry
from completions_cli.catalogue_rules import entry_faults, name_faults
from completions_cli.catalogue_yaml import LocatedData, Place, Problem, load_located, spelled

_STAND_INS: Final[Mapping[str, Any]] = {
    "id": "model",
    "endpoint": "endpoint",
    "family": "vllm",
    "context_length": 2**40,
    "created": 0,
}
"""For what an entry must have and has wrong, so that its other keys can be looked at too."""


class CatalogueError(Exception):
    """The file cannot be used; ``problems`` are all there are, by line."""

    def __init__(self, path: Path, problems: Iterable[Problem]) -> None:
        self.path = path
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        for problem in self.problems:
            place = f"{problem.place}: " if problem.place else ""
            yield f"{self.path}:{problem.line}: {place}{problem.message}"


def read_catalogue(path: Path) -> tuple[ModelRoute, ...]:
    """The models of a file, in its order. Raises ``CatalogueError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise CatalogueError(path, [Problem(line, "", "not UTF-8")]) from None
    except OSError as error:
        raise CatalogueError(path, [Problem(1, "", error.strerror or "cannot be read")]) from None
    data = load_located(text)
    routes, problems = _models(data)
    if problems:
        raise CatalogueError(path, problems)
    return tuple(routes)


def _models(data: LocatedData) -> tuple[list[ModelRoute], list[Problem]]:
    problems = list(data.problems)
    if problems and data.value is None:
        return [], problems
    if not isinstance(data.value, dict) or "models" not in data.value:
        return [], [*problems, Problem(data.line(()), "", "the file must have one key, 'models'")]
    problems += [
        Problem(data.line((key,)), key, "unknown key; the file has only 'models'")
        for key in data.value
        if key != "models"
    ]
    raw = data.value["models"]
    if not isinstance(raw, list):
        return [], [*problems, Problem(data.line(("models",)), "models", "must be a list")]
    read = [_Entry.of(data, index, value) for index, value in enumerate(raw)]
    for entry in read:
        problems += entry.problems
    for fault in name_faults(raw):
        problems.append(_problem(data, fault.place, fault.message.format(line=data.line(fault.other))))
    return [entry.route for entry in read if entry.route is not None], problems


@dataclass(frozen=True, slots=True)
class _Entry:
    route: ModelRoute | None
    problems: Sequence[Problem]

    @classmethod
    def of(cls, data: LocatedData, index: int, value: object) -> _Entry:
        """One entry. Where some keys are wrong, the rules about the others are still looked at."""
        place: Place = ("models", index)
        if not isinstance(value, dict):
            return cls(None, [_problem(data, place, "must be a model: keys and values")])
        wrong: set[str] = set()
        problems: list[Problem] = []
        try:
            entry = ModelEntry.model_validate(value)
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                wrong.add(str(fault["loc"][0]))
                problems.append(_problem(data, (*place, *fault["loc"]), _message(fault)))
            entry = ModelEntry.model_validate(_mended(value, wrong))
        problems += [
            _problem(data, (*place, *fault.place), fault.message)
            for fault in entry_faults(entry)
            if wrong.isdisjoint(fault.concerns)
        ]
        return cls(None if problems else entry.to_route(), problems)


def _mended(value: Mapping[str, Any], wrong: set[str]) -> dict[str, Any]:
    sound = {name: content for name, content in value.items() if name not in wrong}
    return {**_STAND_INS, **sound}


def _message(fault: Any) -> str:
    """pydantic's message, plainer where an operator meets it often."""
    kind, where = fault["type"], fault["loc"]
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        nearest = get_close_matches(str(where[-1]), _siblings(where), n=1)
        return f"unknown key; did you mean '{nearest[0]}'?" if nearest else "unknown key"
    if kind == "string_pattern_mismatch" and where[0] == "family_version":
        return 'must be a version such as "0.27.1"'
    if kind in ("string_pattern_mismatch", "string_too_long") and where[0] in (
        "endpoint",
        "inference_component",
        "target_variant",
    ):
        return "must be at most 63 letters, digits and inner hyphens, as SageMaker names things"
    if kind == "enum" and where[-1] == "[key]":
        return f"there is no parameter '{fault['input']}'"
    message: str = fault["msg"]
    return message[:1].lower() + message[1:]


def _siblings(where: Sequence[str | int]) -> list[str]:
    """The keys there are beside the last one of ``where``."""
    model: Any = ModelEntry
    for step in where[:-1]:
        annotation = model.model_fields[step].annotation
        model = next(
            kind for kind in (annotation, *getattr(annotation, "__args__", ())) if hasattr(kind, "model_fields")
        )
    return list(model.model_fields)


def _problem(data: LocatedData, place: Place, message: str) -> Problem:
    """A model is called by its id, where it has one."""
    shown = tuple(step for step in place if step != "[key]")
    if len(shown) < 2:
        return Problem(data.line(place), spelled(shown), message)
    entry = data.value["models"][shown[1]]
    name = entry.get("id") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > 60:
        return Problem(data.line(place), spelled(shown), message)
    field = spelled(shown[2:])
    return Problem(data.line(place), f"{name}: {field}" if field else name, message)
