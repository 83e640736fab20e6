"""The committed OpenAPI document is what the apps generate, what the template serves, and what the SDK really sends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from typer import Exit

from completions.dialects import sourcegraph_schema, sourcegraph_wire
from completions.dialects.dialect import WireRequest
from completions.domain.completion import CompletionRequest
from completions_cli.local.stack import LocalStack
from completions_cli.local.template import read_gateway
from completions_cli.openapi import OUTPUT, document_text, documentations, openapi

PROMPT = "def main():\n    "
Traffic = list[tuple[httpx2.Request, httpx2.Response]]


@pytest.fixture(scope="module")
def document(project_root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((project_root / OUTPUT).read_text())
    return loaded


@pytest.fixture
def traffic() -> Traffic:
    return []


@pytest.fixture
def client(stack: LocalStack, traffic: Traffic) -> Iterator[OpenAI]:
    """The official SDK; what it sends and is answered is kept in ``traffic``."""

    def record(response: httpx2.Response) -> None:
        response.read()
        traffic.append((response.request, response))

    http = httpx2.Client(event_hooks={"response": [record]})
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="sk-local", max_retries=0, http_client=http) as sdk:
        yield sdk


def operation(document: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    """The operation a real path belongs to; a literal path wins over a parameter."""
    for template in sorted(document["paths"], key=lambda path: "{" in path):
        if re.fullmatch(re.sub(r"\\{\w+\\}", ".+", re.escape(template)), path):
            found: dict[str, Any] = document["paths"][template][method.lower()]
            return found
    raise AssertionError(f"not documented: {method} {path}")


def validate(document: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    OAS31Validator({**schema, "components": document["components"]}).validate(value)


def validate_exchange(document: dict[str, Any], request: httpx2.Request, response: httpx2.Response) -> None:
    """Both halves against the document: body, status, content type, and each event of a stream."""
    documented = operation(document, request.method, request.url.path)
    if request.content:
        validate(
            document, documented["requestBody"]["content"]["application/json"]["schema"], json.loads(request.content)
        )
    kind = response.headers["content-type"].partition(";")[0]
    media = documented["responses"][str(response.status_code)]["content"][kind]
    if kind != "text/event-stream":
        validate(document, media["schema"], response.json())
        return
    frames = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert frames.pop() == "[DONE]"
    data = [branch["properties"]["data"] for branch in media["schema"]["anyOf"]]
    schemas = [one["contentSchema"] for one in data if "contentSchema" in one]
    for frame in frames:
        validate(document, {"anyOf": schemas}, json.loads(frame))


def test_the_committed_document_is_what_the_apps_generate(project_root: Path) -> None:
    assert (project_root / OUTPUT).read_text() == document_text()


def test_it_is_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    OpenAPIV31SpecValidator(document).validate()


def test_a_streamed_answer_is_documented_where_there_is_one(document: dict[str, Any]) -> None:
    posts = {path: json.dumps(methods.get("post", {})) for path, methods in document["paths"].items()}
    streams = {path for path, operation in posts.items() if "text/event-stream" in operation}
    completing = {path for path, methods in document["paths"].items() if "completions" in path and "post" in methods}
    assert streams == completing - {"/v1/llm/completions-sync"}


@pytest.mark.parametrize("mode", ["streamed", "buffered"])
def test_it_has_the_templates_routes_and_no_other(document: dict[str, Any], project_root: Path, mode: str) -> None:
    documented = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    routes = read_gateway(project_root / "template.yaml", {"ResponseMode": mode}).routes
    assert documented == {(route.method, route.path.replace("+}", "}")) for route in routes}


def test_the_gateways_own_answers_have_the_form_they_are_said_to_have(
    document: dict[str, Any], project_root: Path
) -> None:
    replies = read_gateway(project_root / "template.yaml", {}).replies
    assert replies
    for reply in replies.values():
        body = re.sub(r"\$context\.error\.messageString", '"message"', reply.body)
        validate(document, {"$ref": "#/components/schemas/GatewayError"}, json.loads(body))


def test_sourcegraphs_published_fields_are_those_that_are_read() -> None:
    properties = sourcegraph_schema.DOCUMENTATION.schemas["SourcegraphCompletionRequest"]["properties"]
    assert {name.lower() for name in properties} == set(sourcegraph_wire._BODY)


def test_every_example_is_decoded() -> None:
    for documentation in documentations():
        for path, dialect in documentation.endpoints.items():
            body = json.dumps(documentation.operations["POST", path].example).encode()
            query = {"model_endpoint_name": "demo"}
            assert isinstance(dialect.decode(WireRequest("POST", path, query, {}, body)), CompletionRequest)


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "openapi.json"
    openapi(target)
    openapi(target, check=True)
    target.write_text(target.read_text().replace("3.1.0", "3.0.0"))

    with pytest.raises(Exit) as stale:
        openapi(target, check=True)
    assert stale.value.exit_code == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_sdks_completions(document: dict[str, Any], client: OpenAI, traffic: Traffic) -> None:
    create = client.completions.create
    create(model="demo", prompt=PROMPT, max_tokens=4, temperature=0)
    create(model="demo", prompt=[PROMPT, "import "], n=2, best_of=3, max_tokens=3, seed=1, stop=["\n\n", "#"])
    create(model="demo", prompt=[[101, 102], [103]], max_tokens=2, logit_bias={"104": 5}, user="someone")
    create(model="demo", prompt="import os\n", echo=True, logprobs=2, max_tokens=1, top_p=0.5, stop="\n\n")
    list(create(model="demo", prompt=PROMPT, max_tokens=6, stream=True))
    list(
        create(
            model="demo",
            prompt=PROMPT,
            max_tokens=6,
            n=2,
            logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    assert [response.status_code for _, response in traffic] == [200] * 6
    for request, response in traffic:
        validate_exchange(document, request, response)


def test_the_sdks_models(document: dict[str, Any], client: OpenAI, traffic: Traffic) -> None:
    client.models.list()
    client.models.retrieve("demo")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("acme/unknown")
    with pytest.raises(openai.PermissionDeniedError):
        client.models.delete("demo")

    assert [response.status_code for _, response in traffic] == [200, 200, 404, 403]
    for request, response in traffic:
        validate_exchange(document, request, response)


def test_the_sdks_errors(document: dict[str, Any], client: OpenAI, traffic: Traffic) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="demo", prompt=PROMPT, n=3, best_of=2)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt=PROMPT)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").completions.create(model="demo", prompt=PROMPT)

    assert [response.status_code for _, response in traffic] == [400, 404, 401]
    for request, response in traffic:
        validate_exchange(document, request, response)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 3}, {"n": 0}, {"stop": []}, {"top_k": 5}, {"prompt": []}, {"logit_bias": {"a": 1}}, {"model": ""}],
)
def test_what_the_document_forbids_is_refused(
    document: dict[str, Any], client: OpenAI, traffic: Traffic, wrong: dict[str, Any]
) -> None:
    body = {"model": "demo", "prompt": PROMPT, **wrong}
    assert not OAS31Validator(
        {"$ref": "#/components/schemas/OpenAICompletionRequest", "components": document["components"]}
    ).is_valid(body)
    with pytest.raises(openai.BadRequestError):
        client.post("/completions", body=body, cast_to=object)
