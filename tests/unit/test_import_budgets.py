"""What each function's start may import: names and counts, which no machine changes, in a fresh interpreter.

A cold start is mostly imports. Functions that speak no HTTP start without a web framework, those of one dialect without
the others, and the two that answer from themselves without any package at all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANDLERS = ROOT / "functions" / "completions" / "handlers"
NAMES = sorted(path.stem for path in HANDLERS.glob("*.py") if path.stem != "__init__")
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "functions"),
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",  # nobody listens: an import that calls out fails here
    "REGISTRY_TABLE": "registry",
    "USAGE_TABLE": "usage",
    "PIPELINE_TABLE": "pipeline",
    "PIPELINE_BUCKET": "pipeline",
    "BATCH_STATE_MACHINE": "arn:aws:states:us-east-1:123456789012:stateMachine:batches",
}
CHILD = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
print(json.dumps({"modules": sorted(sys.modules), "http": hasattr(module, "app")}))
"""
ALONE = frozenset({"health", "dashboard"})
"""They answer from themselves."""
WEB = frozenset({"annotated_doc", "anyio", "fastapi", "mangum", "opentelemetry", "python_multipart", "starlette"})
SERVER = frozenset({"click", "h11", "uvicorn"})
"""What serves an app, and is not imported by it."""
AWS = frozenset({"boto3", "botocore", "dateutil", "jmespath", "s3transfer", "six", "urllib3"})
COMMON = AWS | {
    "annotated_types",
    "aws_lambda_powertools",
    "pydantic",
    "pydantic_core",
    "typing_extensions",
    "typing_inspection",
}
# snapshot_restore_py is the runtime's own; the rest is imported where it is installed, as beside these tests it is, but
# in a function it is not
NOT_DEPLOYED = frozenset(
    {
        "OpenSSL",
        "_cffi_backend",
        "_awscrt",
        "awscrt",
        "certifi",
        "cryptography",
        "idna",
        "snapshot_restore_py",
        "sniffio",
    }
)
NEVER = frozenset(
    {
        "doctest", "email_validator", "ftplib", "http.server", "httpx", "imaplib", "jinja2", "itsdangerous", "pdb",
        "pydoc", "requests", "smtplib", "socketserver", "sqlite3", "tkinter", "unittest", "wsgiref", "yaml",
    }
)  # fmt: skip
"""Servers, tools and optional helpers of the frameworks: no function has a use for one."""
DIALECTS = frozenset({"openai", "scale", "scale_v1", "sourcegraph"})
BOOKS = frozenset({"usage_rollup", "usage_sweeper", "batch_starter"})
"""Workers that ask no model."""
MOST_MODULES = {"http": 750, "worker": 600, "books": 500, "alone": 80}
"""Beyond the bare interpreter's. A module is half a millisecond of a start and more: what adds a tenth is noticed."""


@dataclass(frozen=True)
class Start:
    """``modules`` are those that a bare interpreter does not have."""

    modules: frozenset[str]
    http: bool

    @property
    def packages(self) -> frozenset[str]:
        """Top-level names that are neither Python's nor the project's, and are deployed."""
        tops = {name.partition(".")[0] for name in self.modules}
        private = {name for name in tops if name.startswith("_")}
        return frozenset(tops - sys.stdlib_module_names - private - NOT_DEPLOYED - {"completions"})

    @property
    def own(self) -> frozenset[str]:
        """The project's modules, without the project's name."""
        return frozenset(name.removeprefix("completions.") for name in self.modules if name.startswith("completions."))


def loaded(target: str) -> tuple[frozenset[str], bool]:
    run = subprocess.run(
        [sys.executable, "-c", CHILD, target], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    return frozenset(told["modules"]), told["http"]


@cache
def bare() -> frozenset[str]:
    return loaded("json")[0]


@cache
def started(name: str) -> Start:
    modules, http = loaded(f"completions.handlers.{name}")
    return Start(modules - bare(), http)


@pytest.mark.parametrize("name", NAMES)
def test_a_function_imports_no_package_that_its_kind_has_no_use_for(name: str) -> None:
    start = started(name)
    allowed = frozenset[str]() if name in ALONE else COMMON | WEB if start.http else COMMON
    assert start.packages <= allowed


@pytest.mark.parametrize("name", NAMES)
def test_no_function_imports_a_server_or_a_tool(name: str) -> None:
    assert not started(name).modules & (NEVER | SERVER)


@pytest.mark.parametrize("name", NAMES)
def test_a_function_stays_within_its_count_of_modules(name: str) -> None:
    start = started(name)
    kind = "alone" if name in ALONE else "books" if name in BOOKS else "http" if start.http else "worker"
    deployed = {module for module in start.modules if module.partition(".")[0] not in NOT_DEPLOYED}
    assert len(deployed) <= MOST_MODULES[kind], kind


def test_health_imports_nothing_of_the_project_but_itself() -> None:
    assert started("health").own == {"handlers", "handlers.health"}


def test_the_dashboard_imports_its_page_alone() -> None:
    assert started("dashboard").own == {"handlers", "handlers.dashboard", "dashboard", "dashboard.page"}


@pytest.mark.parametrize("name", ["usage_rollup", "usage_sweeper"])
def test_what_works_behind_the_usage_table_knows_no_request(name: str) -> None:
    own = started(name).own
    assert not {module for module in own if module.partition(".")[0] in ("web", "service", "backends", "stores")}
    assert not own & {f"dialects.{dialect}{suffix}" for dialect in DIALECTS for suffix in ("", "_wire")}


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("openai_completions", "openai"),
        ("scale_completions", "scale"),
        ("scale_v1_completions", "scale_v1"),
        ("sourcegraph_completions", "sourcegraph"),
    ],
)
def test_a_function_of_one_dialect_imports_no_other(name: str, dialect: str) -> None:
    own = started(name).own
    assert {other for other in DIALECTS if f"dialects.{other}" in own} == {dialect}
