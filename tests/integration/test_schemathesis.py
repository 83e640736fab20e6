"""Generated requests to every documented route of the running stack: no fault of ours, nothing undocumented back."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from completions_cli.local.stack import LocalStack
from completions_cli.openapi import OUTPUT

KEY = "sk-local"
BASIC = base64.b64encode(f"{KEY}:".encode()).decode()
CREDENTIALS = {"bearer": f"Bearer {KEY}", "basic": f"Basic {BASIC}", "sourcegraphToken": f"token {KEY}"}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 12
MOST_TOKENS = 4
ROOT = Path(__file__).parents[2]
DOCUMENT: dict[str, Any] = json.loads((ROOT / OUTPUT).read_text())
OPERATIONS = [
    pytest.param(path, method, scheme, id=f"{method} {path} {scheme}")
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    for scheme in CREDENTIALS
    if any(scheme in alternative for alternative in operation.get("security", [{"bearer": []}]))
]


def configured() -> schemathesis.Config:
    """Credentials are the test's own business."""
    config = schemathesis.Config()
    config.projects.default.generation.update(with_security_parameters=False)
    return config


SCHEMA = schemathesis.openapi.from_dict(DOCUMENT, config=configured())


def affordable(case: Case, known_model: bool) -> Case:
    """A model that exists, half of the time, and answers of a few tokens."""
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_new_tokens", "maxTokensToSample", "min_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], MOST_TOKENS)
        for name in ("n", "best_of"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 3)
        if known_model and "model" in case.body:
            case.body["model"] = "demo"
    if known_model and "model_endpoint_name" in case.query:
        case.query["model_endpoint_name"] = "demo"
    return case


@pytest.mark.parametrize(("path", "method", "scheme"), OPERATIONS)
def test_nothing_undocumented_comes_back(stack: LocalStack, path: str, method: str, scheme: str) -> None:
    operation = SCHEMA[path][method]
    cases = st.one_of(operation.as_strategy(), operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=EXAMPLES,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, known_model=st.booleans())
    def run(case: Case, known_model: bool) -> None:
        response = affordable(case, known_model).call(
            base_url=stack.base_url, headers={"Authorization": CREDENTIALS[scheme]}, timeout=30
        )
        case.validate_response(response, checks=CHECKS)

    run()


@pytest.mark.parametrize(("path", "method", "scheme"), OPERATIONS)
def test_the_documented_example_is_answered(stack: LocalStack, path: str, method: str, scheme: str) -> None:
    documented = DOCUMENT["paths"][path][method]
    content = documented.get("requestBody", {}).get("content", {}).get("application/json", {})
    case = SCHEMA[path][method].Case(
        path_parameters={"model": "demo", "name": "demo"} if "{" in path else {},
        query={"model_endpoint_name": "demo"} if "/llm/completions" in path else {},
        body=content.get("example", schemathesis.core.NOT_SET),
        media_type="application/json" if content else None,
    )
    response = case.call(base_url=stack.base_url, headers={"Authorization": CREDENTIALS[scheme]}, timeout=30)

    case.validate_response(response, checks=CHECKS)
    assert (
        response.status_code == min(int(status) for status in documented["responses"] if method != "delete")
        if (method != "delete")
        else 403
    )
