"""Generated requests to every documented route of the running stack: no fault of ours, nothing undocumented back."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core import NOT_SET
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from completions_cli.local.stack import LocalStack
from completions_cli.openapi import OUTPUT

KEY = "sk-local"
BASIC = base64.b64encode(f"{KEY}:".encode()).decode()
CREDENTIALS: dict[str, dict[str, Any]] = {
    "bearer": {"headers": {"Authorization": f"Bearer {KEY}"}},
    "basic": {"headers": {"Authorization": f"Basic {BASIC}"}},
    "scaleKey": {"headers": {"x-api-key": KEY}},
    "sourcegraphToken": {"headers": {"Authorization": f"token {KEY}"}},
    "sourcegraphQueryToken": {"params": {"token": KEY}},
}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 12
QUERY: dict[str, Any] = {"model_endpoint_name": "demo", "start_time": 0}
"""What is asked where it is required."""
MOST_TOKENS = 4
ROOT = Path(__file__).parents[2]
DOCUMENT: dict[str, Any] = json.loads((ROOT / OUTPUT).read_text())
OPERATIONS = [
    pytest.param(path, method, scheme, id=f"{method} {path} {scheme}")
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    for scheme in [name for one in operation.get("security", [{"bearer": []}]) for name in one]
]


def configured() -> schemathesis.Config:
    """Credentials are the test's own business."""
    config = schemathesis.Config()
    config.projects.default.generation.update(with_security_parameters=False)
    return config


SCHEMA = schemathesis.openapi.from_dict(DOCUMENT, config=configured())


# Examples name files and batches that there are not, and a form has none that can be sent as JSON.
EXAMPLES_OF_NOTHING = {
    ("post", "/v1/files"): 400,
    ("post", "/v1/batches"): 400,
    ("get", "/v1/files/{file_id}"): 404,
    ("delete", "/v1/files/{file_id}"): 404,
    ("get", "/v1/files/{file_id}/content"): 404,
    ("get", "/v1/batches/{batch_id}"): 404,
    ("post", "/v1/batches/{batch_id}/cancel"): 404,
}


def affordable(case: Case[Any], known_model: bool) -> Case[Any]:
    """A model that exists, half of the time, and answers of a few tokens, with time to make them."""
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_new_tokens", "maxTokensToSample", "min_tokens"):
            _limit(case.body, name, MOST_TOKENS)
        for name in ("n", "best_of"):
            _limit(case.body, name, 3)
        case.body.pop("timeoutMs", None)
    case.headers.pop("X-Timeout-Ms", None)
    if known_model:
        for place, name in ((case.body, "model"), (case.query, "model_endpoint_name")):
            if isinstance(place, dict) and name in place:
                place[name] = "demo"
        for name in case.path_parameters:
            case.path_parameters[name] = "demo"
    return case


def _limit(body: dict[str, Any], name: str, most: int) -> None:
    if isinstance(body.get(name), int):
        body[name] = min(body[name], most)


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
    def run(case: Case[Any], known_model: bool) -> None:
        response = affordable(case, known_model).call(base_url=stack.base_url, timeout=30, **CREDENTIALS[scheme])
        case.validate_response(response, checks=CHECKS)

    run()


@pytest.mark.parametrize(("path", "method", "scheme"), OPERATIONS)
def test_the_documented_example_is_answered(stack: LocalStack, path: str, method: str, scheme: str) -> None:
    documented = DOCUMENT["paths"][path][method]
    content = documented.get("requestBody", {}).get("content", {}).get("application/json", {})
    asked = {one["name"] for one in documented.get("parameters", ()) if one["in"] == "query" and one["required"]}
    case = SCHEMA[path][method].Case(
        path_parameters=dict.fromkeys(re.findall(r"{(\w+)", path), "demo"),
        query={name: value for name, value in QUERY.items() if name in asked},
        body=content.get("example", NOT_SET),
        media_type="application/json" if content else None,
    )
    response = case.call(base_url=stack.base_url, timeout=30, **CREDENTIALS[scheme])

    case.validate_response(response, checks=CHECKS)
    assert response.status_code == EXAMPLES_OF_NOTHING.get((method, path), 403 if method == "delete" else 200)
