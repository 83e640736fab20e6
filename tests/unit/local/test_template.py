"""What the local gateway reads of a template."""

from __future__ import annotations

from pathlib import Path

import pytest

from completions_cli.local.template import Resolver, TemplateError, load_template, read_gateway

COMPLETIONS = {
    ("POST", path)
    for path in (
        "/v1/completions",
        "/completions",
        "/v2/completions",
        "/v1/llm/completions-sync",
        "/v1/llm/completions-stream",
        "/.api/completions/code",
        "/.api/completions/stream",
    )
}
HANDLERS = ("openai_completions", "scale_completions", "scale_v1_completions", "sourcegraph_completions")
OTHERS = {("GET", "/v1/models"), ("GET", "/v1/models/{model+}"), ("GET", "/healthz")}


@pytest.mark.parametrize("mode", ["streamed", "buffered"])
def test_either_response_mode_has_every_route_once(project_root: Path, mode: str) -> None:
    routes = read_gateway(project_root / "template.yaml", {"ResponseMode": mode}).routes
    found = [(route.method, route.path) for route in routes]
    assert len(found) == len(set(found))
    assert set(found) >= COMPLETIONS | OTHERS


@pytest.mark.parametrize(("mode", "streamed"), [("streamed", COMPLETIONS), ("buffered", set[tuple[str, str]]())])
def test_only_completions_are_streamed_and_only_in_that_mode(
    project_root: Path, mode: str, streamed: set[tuple[str, str]]
) -> None:
    routes = read_gateway(project_root / "template.yaml", {"ResponseMode": mode}).routes
    assert {(route.method, route.path) for route in routes if route.streamed} == streamed


def test_streaming_is_the_default(project_root: Path) -> None:
    path = project_root / "template.yaml"
    assert read_gateway(path, {}) == read_gateway(path, {"ResponseMode": "streamed"})


def test_a_streamed_function_names_its_app(project_root: Path) -> None:
    routes = read_gateway(project_root / "template.yaml", {"ResponseMode": "streamed"}).routes
    apps = {route.function.variables.get("APP_MODULE") for route in routes if route.streamed}
    assert apps == {f"completions.handlers.{name}:app" for name in HANDLERS}


def test_a_buffered_function_names_its_handler(project_root: Path) -> None:
    routes = read_gateway(project_root / "template.yaml", {"ResponseMode": "buffered"}).routes
    handlers = {route.function.handler for route in routes if (route.method, route.path) in COMPLETIONS}
    assert handlers == {f"completions.handlers.{name}.handler" for name in HANDLERS}


def test_the_gateways_own_answers_are_read(project_root: Path) -> None:
    replies = read_gateway(project_root / "template.yaml", {}).replies
    assert (replies["REQUEST_TOO_LARGE"].status, replies["MISSING_AUTHENTICATION_TOKEN"].status) == (413, 404)
    assert '"code":"unknown_url"' in replies["MISSING_AUTHENTICATION_TOKEN"].body


def test_an_answer_without_a_status_keeps_the_gateways_own(project_root: Path) -> None:
    assert read_gateway(project_root / "template.yaml", {}).replies["DEFAULT_4XX"].status is None


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "template.yaml"
    path.write_text(text, encoding="utf-8")
    return path


FUNCTION = """
    Type: AWS::Serverless::Function
    Properties:
      Handler: m.h
      Timeout: 29
      Events:
        Queue: {Type: SQS, Properties: {Queue: q}}
"""
API = """
  Api:
    Type: AWS::Serverless::Api
    Properties:
      DefinitionBody:
        paths:
          /b:
            post:
              x-amazon-apigateway-integration:
                uri: !Sub arn:aws:lambda:path/2021-11-15/functions/${F.Arn}:live/response-streaming-invocations
                responseTransferMode: STREAM
          /c:
            post:
              x-amazon-apigateway-integration:
                uri: !Sub arn:aws:lambda:path/2015-03-31/functions/${F.Arn}/invocations
            options: !Ref AWS::NoValue
"""
DEFINED = f"""
Globals:
  Function:
    Timeout: 29
    Environment: {{Variables: {{LEVEL: INFO, COLOUR: red}}}}
Resources:{API}
  F:{FUNCTION}"""


def test_the_apis_definition_gives_the_routes_and_an_alias_is_its_function(tmp_path: Path) -> None:
    routes = read_gateway(written(tmp_path, DEFINED), {}).routes
    assert [(route.method, route.path, route.function.name, route.streamed) for route in routes] == [
        ("POST", "/b", "F", True),
        ("POST", "/c", "F", False),
    ]


def test_a_function_without_a_route_is_served_nowhere(tmp_path: Path) -> None:
    assert read_gateway(written(tmp_path, f"Resources:\n  F:{FUNCTION}"), {}).routes == ()


def test_a_definition_that_names_no_function_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="/b"):
        read_gateway(written(tmp_path, DEFINED.replace("${F.Arn}", "${G.Arn}")), {})


def test_a_functions_own_value_wins_over_the_globals(tmp_path: Path) -> None:
    text = DEFINED.replace("Handler: m.h\n      Timeout: 29", "Handler: m.h\n      Timeout: 7")
    assert {route.function.timeout for route in read_gateway(written(tmp_path, text), {}).routes} == {7}


def test_a_function_without_a_timeout_has_the_globals(tmp_path: Path) -> None:
    text = DEFINED.replace("      Timeout: 29\n", "")
    assert {route.function.timeout for route in read_gateway(written(tmp_path, text), {}).routes} == {29}


def test_without_any_timeout_a_function_has_lambdas_three_seconds(tmp_path: Path) -> None:
    text = f"Resources:{API}\n  F:{FUNCTION}".replace("      Timeout: 29\n", "")
    assert {route.function.timeout for route in read_gateway(written(tmp_path, text), {}).routes} == {3}


def test_a_functions_variables_are_merged_with_the_globals(tmp_path: Path) -> None:
    # SAM specification, "Globals section": maps are merged, and the resource's own keys win
    text = DEFINED.replace("Handler: m.h", "Handler: m.h\n      Environment: {Variables: {COLOUR: blue, SIZE: big}}")
    (variables, *_) = [route.function.variables for route in read_gateway(written(tmp_path, text), {}).routes]
    assert variables == {"LEVEL": "INFO", "COLOUR": "blue", "SIZE": "big"}


@pytest.mark.parametrize(
    ("condition", "exists"),
    [
        ("!Equals [!Ref Size, big]", True),
        ("!Equals [!Ref Size, small]", False),
        ("!Not [!Equals [!Ref Size, small]]", True),
        ("!Equals [!If [Big, x, y], x]", True),
        ("!Not [!Condition Big]", False),
        ("{Condition: Big}", True),
        ("!And [!Condition Big, !Equals [a, a]]", True),
        ("!And [!Condition Big, !Equals [a, b]]", False),
        ("!Or [!Condition Big, !Equals [a, b]]", True),
        ("!Or [!Not [!Condition Big], !Equals [a, b]]", False),
    ],
)
def test_a_resource_exists_when_its_condition_holds(tmp_path: Path, condition: str, exists: bool) -> None:
    text = f"""
Parameters:
  Size: {{Type: String, Default: big}}
Conditions:
  Big: !Equals [!Ref Size, big]
  Wanted: {condition}
Resources:
  F:
    Condition: Wanted{FUNCTION}"""
    assert ("F" in Resolver(load_template(written(tmp_path, text)), {}).resources()) is exists


def test_a_parameter_given_wins_over_its_default(tmp_path: Path) -> None:
    text = f"""
Parameters:
  Size: {{Type: String, Default: big}}
Conditions:
  Big: !Equals [!Ref Size, big]
Resources:
  F:
    Condition: Big{FUNCTION}"""
    assert Resolver(load_template(written(tmp_path, text)), {"Size": "small"}).resources() == {}


def test_a_parameter_the_template_does_not_have_is_an_error(project_root: Path) -> None:
    with pytest.raises(TemplateError, match="ResponseMood"):
        read_gateway(project_root / "template.yaml", {"ResponseMood": "streamed"})


def test_a_missing_template_says_where_to_run(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"run this where the project's template\.yaml is"):
        read_gateway(tmp_path / "template.yaml", {})


@pytest.mark.parametrize("text", ["", "[]", "text", "Parameters: {}", "Resources: [", "a: !Ref {b: ]"])
def test_what_is_not_a_template_is_an_error(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TemplateError, match=str(path)):
        read_gateway(path, {})
