"""API Gateway's proxy events and replies, payload version 1.0.

Source: API Gateway developer guide, "Lambda proxy integrations". The peer is Powertools' model of the event.
"""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from aws_lambda_powertools.utilities.data_classes import APIGatewayProxyEvent

from completions_cli.local.events import (
    HttpReply,
    HttpRequest,
    LambdaContext,
    proxy_event,
    proxy_reply,
    request_context,
)


def http_request(**overrides: Any) -> HttpRequest:
    fields: dict[str, Any] = {
        "method": "GET",
        "path": "/v1/models/org/demo",
        "query": "a=1&b=2&b=3&c=",
        "headers": [("host", "example"), ("x-tag", "one"), ("x-tag", "two")],
        "body": b"",
        "source_ip": "127.0.0.1",
        "resource": "/v1/models/{model+}",
        "path_parameters": {"model": "org/demo"},
    }
    return HttpRequest(**{**fields, **overrides})


# Events


def test_an_event_has_every_member_of_version_one() -> None:
    assert set(proxy_event(http_request())) == {
        "resource",
        "path",
        "httpMethod",
        "headers",
        "multiValueHeaders",
        "queryStringParameters",
        "multiValueQueryStringParameters",
        "pathParameters",
        "stageVariables",
        "requestContext",
        "body",
        "isBase64Encoded",
    }


def test_powertools_reads_the_event() -> None:
    event = APIGatewayProxyEvent(proxy_event(http_request(method="POST", body=b'{"a":"\xc3\xa9"}')))
    assert (event.http_method, event.path, event.resource) == ("POST", "/v1/models/org/demo", "/v1/models/{model+}")
    assert event.json_body == {"a": "\u00e9"}
    assert event.path_parameters == {"model": "org/demo"}
    assert event.request_context.identity.source_ip == "127.0.0.1"
    assert event.request_context.resource_path == "/v1/models/{model+}"
    assert event.request_context.request_id


def test_a_repeated_header_is_last_in_one_map_and_whole_in_the_other() -> None:
    event = proxy_event(http_request())
    assert event["headers"]["x-tag"] == "two"
    assert event["multiValueHeaders"] == {"host": ["example"], "x-tag": ["one", "two"]}


def test_a_repeated_query_parameter_is_last_in_one_map_and_whole_in_the_other() -> None:
    event = proxy_event(http_request())
    assert event["queryStringParameters"] == {"a": "1", "b": "3", "c": ""}
    assert event["multiValueQueryStringParameters"] == {"a": ["1"], "b": ["2", "3"], "c": [""]}


def test_query_parameters_are_decoded() -> None:
    assert proxy_event(http_request(query="q=a%20b%26c"))["queryStringParameters"] == {"q": "a b&c"}


@pytest.mark.parametrize(
    ("overrides", "member"),
    [
        ({"query": ""}, "queryStringParameters"),
        ({"query": ""}, "multiValueQueryStringParameters"),
        ({"path_parameters": {}}, "pathParameters"),
        ({"body": b""}, "body"),
        ({}, "stageVariables"),
    ],
)
def test_what_a_request_lacks_is_null(overrides: dict[str, Any], member: str) -> None:
    assert proxy_event(http_request(**overrides))[member] is None


def test_the_context_path_holds_the_stage() -> None:
    context = request_context(http_request())
    assert context["path"] == f"/{context['stage']}/v1/models/org/demo"


def test_every_request_has_an_id_of_its_own() -> None:
    first, second = request_context(http_request()), request_context(http_request())
    assert first["requestId"] != second["requestId"]


# Replies


def test_a_body_of_a_binary_type_travels_as_base64() -> None:
    headers = [("content-type", 'Multipart/form-data; boundary="b"')]
    event = proxy_event(http_request(method="POST", body=b"\xff\r\n", headers=headers), {"multipart/form-data"})
    assert (event["body"], event["isBase64Encoded"]) == ("/w0K", True)


def test_a_text_body_is_sent_as_utf_8() -> None:
    assert proxy_reply({"statusCode": 200, "body": "\u00e9"}) == HttpReply(200, [], "\u00e9".encode())


def test_a_base64_body_is_decoded() -> None:
    encoded = base64.b64encode(b"\x00\xff").decode()
    assert proxy_reply({"statusCode": 200, "body": encoded, "isBase64Encoded": True}).body == b"\x00\xff"


@pytest.mark.parametrize("result", [{"statusCode": 204}, {"statusCode": 204, "body": None, "headers": None}])
def test_a_reply_needs_a_status_alone(result: dict[str, Any]) -> None:
    assert proxy_reply(result) == HttpReply(204, [], b"")


def test_single_and_multiple_headers_are_merged() -> None:
    reply = proxy_reply(
        {"statusCode": 200, "headers": {"A": "1"}, "multiValueHeaders": {"Set-Cookie": ["b=1", "c=2"]}, "body": ""}
    )
    assert reply.headers == [("A", "1"), ("Set-Cookie", "b=1"), ("Set-Cookie", "c=2")]


def test_a_header_in_both_maps_is_taken_from_the_multiple_one() -> None:
    reply = proxy_reply({"statusCode": 200, "headers": {"a": "1"}, "multiValueHeaders": {"A": ["2", "3"]}, "body": ""})
    assert reply.headers == [("A", "2"), ("A", "3")]


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"body": "text"},
        {"statusCode": None},
        {"statusCode": "fine"},
        {"statusCode": 200, "body": "a", "isBase64Encoded": True},
        {"statusCode": 200, "body": {"a": 1}},
        {"statusCode": 200, "body": 5},
    ],
)
def test_what_the_gateway_refuses_raises(result: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        proxy_reply(result)


# Lambda's context


def test_the_time_that_remains_counts_down_to_zero() -> None:
    assert 28_000 < LambdaContext("f", 29).get_remaining_time_in_millis() <= 29_000
    assert LambdaContext("f", 29, started=time.time() - 60).get_remaining_time_in_millis() == 0


def test_the_context_header_names_the_request_and_its_deadline() -> None:
    header = json.loads(LambdaContext("f", 29, aws_request_id="r", started=1000.0).to_header())
    assert (header["request_id"], header["deadline"]) == ("r", 1_029_000)
    assert header["invoked_function_arn"].endswith(":function:f")
