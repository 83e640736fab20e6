"""The platform's facts about a request, in each form they come in."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from completions.web.arrival import LAMBDA_CONTEXT_HEADER, REQUEST_CONTEXT_HEADER, SETTLE_SECONDS, Arrival, arrival
from completions_cli.local.events import LambdaContext
from fakes import ManualClock

NOW_MS = int(ManualClock().now().timestamp() * 1000)


class Context:
    """What Lambda hands to a buffered function."""

    aws_request_id = "lambda-1"

    def get_remaining_time_in_millis(self) -> int:
        return 10_000


def buffered(event: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Arrival:
    return arrival({"aws.event": event, "aws.context": Context()}, headers or {}, ManualClock())


def streamed(request_context: object = None, lambda_context: object = None) -> Arrival:
    headers = {REQUEST_CONTEXT_HEADER: request_context, LAMBDA_CONTEXT_HEADER: lambda_context}
    return arrival({}, {name: json.dumps(value) for name, value in headers.items() if value is not None}, ManualClock())


def test_a_buffered_request_has_the_gateways_id() -> None:
    assert buffered({"requestContext": {"requestId": "gateway-1"}}).request_id == "gateway-1"


def test_sam_local_has_one_gateway_id_for_all_requests_so_the_invocations_own_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SAM_LOCAL", "true")
    assert buffered({"requestContext": {"requestId": "the-same-for-all"}}).request_id == "lambda-1"


@pytest.mark.parametrize("event", [{}, {"requestContext": {}}, {"requestContext": {"requestId": None}}])
def test_a_buffered_request_without_a_gateway_has_lambdas_id(event: dict[str, Any]) -> None:
    assert buffered(event).request_id == "lambda-1"


def test_a_buffered_request_ends_before_the_function_does() -> None:
    assert buffered({}) == Arrival("lambda-1", 1000.0, 1000.0 + 10 - SETTLE_SECONDS, streamed=False)


def test_a_buffered_request_ignores_headers_that_only_a_client_can_have_sent() -> None:
    headers = {REQUEST_CONTEXT_HEADER: '{"requestId":"forged"}', LAMBDA_CONTEXT_HEADER: '{"deadline":1}'}
    assert buffered({}, headers) == buffered({})


def test_a_streamed_request_has_the_gateways_id() -> None:
    assert streamed({"requestId": "gateway-1"}, {"request_id": "lambda-1"}).request_id == "gateway-1"


def test_a_streamed_request_without_a_gateway_has_lambdas_id() -> None:
    assert streamed(None, {"request_id": "lambda-1"}).request_id == "lambda-1"


def test_a_streamed_request_ends_before_the_function_does() -> None:
    assert streamed({"requestId": "g"}, {"deadline": NOW_MS + 10_000}).deadline == pytest.approx(
        1000.0 + 10 - SETTLE_SECONDS
    )


def test_the_local_gateways_lambda_header_is_understood() -> None:
    clock = ManualClock()
    context = LambdaContext("f", timeout_seconds=30, aws_request_id="lambda-1", started=clock.now().timestamp())
    arrived = arrival({}, {LAMBDA_CONTEXT_HEADER: context.to_header()}, clock)
    assert arrived == Arrival("lambda-1", 1000.0, 1000.0 + 30 - SETTLE_SECONDS)


def test_a_bare_server_gives_a_fresh_id_and_no_deadline() -> None:
    first, second = streamed(), streamed()
    assert first.deadline is None
    assert uuid.UUID(first.request_id) != uuid.UUID(second.request_id)


@pytest.mark.parametrize("text", ["", "null", "[]", "5", '"text"', "{}", "not json", "{"])
def test_a_header_that_holds_no_object_says_nothing(text: str) -> None:
    arrived = arrival({}, {REQUEST_CONTEXT_HEADER: text, LAMBDA_CONTEXT_HEADER: text}, ManualClock())
    assert uuid.UUID(arrived.request_id).version == 4
    assert arrived.deadline is None


SIGNER = "arn:aws:iam::123456789012:user/ada"


def test_each_form_tells_who_signed() -> None:
    identity = {"identity": {"userArn": SIGNER, "accountId": "123456789012", "caller": "AIDAEXAMPLE"}}
    assert buffered({"requestContext": identity}).caller == SIGNER
    assert streamed(identity).caller == SIGNER


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"identity": None},
        {"identity": {}},
        {"identity": {"userArn": None}},
        {"identity": {"userArn": ""}},
        {"identity": {"userArn": [SIGNER]}},
        {"identity": [SIGNER]},
        {"identity": SIGNER},
    ],
)
def test_nobody_signed_where_the_context_names_nobody(context: dict[str, Any]) -> None:
    assert buffered({"requestContext": context}).caller is None
    assert streamed(context).caller is None


def test_a_buffered_requests_header_signs_nothing() -> None:
    header = {REQUEST_CONTEXT_HEADER: json.dumps({"identity": {"userArn": SIGNER}})}
    assert buffered({"requestContext": {"requestId": "gateway-1"}}, header).caller is None


@pytest.mark.parametrize("text", ["", "[]", "null", "{", SIGNER])
def test_a_header_that_the_adapter_did_not_write_signs_nothing(text: str) -> None:
    assert arrival({}, {REQUEST_CONTEXT_HEADER: text}, ManualClock()).caller is None
