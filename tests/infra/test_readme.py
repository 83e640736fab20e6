"""What the README states as printed from the code is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from completions.backends.families import CODECS
from completions.dialects.documentation import Documentation
from completions.domain.catalog import Parameter
from completions.settings import Settings
from completions_cli.dialect_table import body_fields, dialect_table, named_fields
from completions_cli.openapi import documentations
from fakes import route


def capability_table() -> str:
    """The README's table of parameters and container families."""
    tables = {family: codec.abilities(route(family=family)).capabilities for family, codec in CODECS.items()}
    rows = [["parameter", *tables], ["---"] * (1 + len(tables))]
    rows += [
        [f"`{parameter}`", *(str(table[parameter]) for table in tables.values())] for parameter in sorted(Parameter)
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_capability_table_is_the_codecs_own(project_root: Path) -> None:
    text = (project_root / "README.md").read_text()
    match = re.search(r"<!-- capabilities -->\n(.*?)<!-- /capabilities -->", text, re.DOTALL)
    assert match is not None
    assert match[1] == capability_table()


def test_the_dialect_table_is_the_dialects_own(project_root: Path) -> None:
    text = (project_root / "README.md").read_text()
    match = re.search(r"<!-- dialects -->\n(.*?)<!-- /dialects -->", text, re.DOTALL)
    assert match is not None
    assert match[1] == dialect_table()


@pytest.mark.parametrize("documentation", documentations(), ids=lambda one: one.title)
def test_the_dialect_table_names_every_field(documentation: Documentation) -> None:
    assert body_fields(documentation) == named_fields(documentation)


def test_every_setting_is_described(project_root: Path) -> None:
    text = (project_root / "README.md").read_text()
    for name in Settings.model_fields:
        assert f"`{name.upper()}`" in text
