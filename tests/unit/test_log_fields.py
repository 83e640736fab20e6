"""A log record has attributes of its own, and ``logging`` raises ``KeyError`` for a field that is called like one: only
at a level that is written, so no test at another level would meet it."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

RESERVED = {*vars(logging.makeLogRecord({})), "message", "asctime"} - {"exc_info", "stack_info"}


def reserved_fields(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each field of a log call that cannot be one."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger")), keywords=keywords):
                yield from ((node.lineno, word.arg) for word in keywords if word.arg in RESERVED and word.arg)


@pytest.mark.parametrize("field", ["name", "message", "filename", "process"])
def test_a_field_that_logging_refuses_is_found(field: str) -> None:
    assert list(reserved_fields(f"x = 1\nlogger.info('event', {field}=x)")) == [(2, field)]
    with pytest.raises(KeyError):
        logging.getLogger(__name__).critical("event", extra={field: "x"})


def test_no_log_call_names_a_field_as_logging_does(project_root: Path) -> None:
    functions = project_root / "functions"
    found = {
        f"{path.relative_to(functions)}:{line} {field}"
        for path in functions.rglob("*.py")
        for line, field in reserved_fields(path.read_text())
    }
    assert found == set()
