"""The streamed form through the real Lambda Web Adapter: the bytes that Lambda gets, and when it gets them."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapter.conftest import Functions
from adapter.held_container import TEXTS, HeldContainer, held_container
from adapter.runtime_api import DELIMITER, Invocation
from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import LocalStack
from ledger_reader import LedgerReader

if not os.environ.get("LAMBDA_ADAPTER"):
    pytest.skip(
        "LAMBDA_ADAPTER names no Lambda Web Adapter; `make adapter` builds one and runs these tests",
        allow_module_level=True,
    )

# the event of each streamed route, and how its answer ends
STREAMS = {
    "openai_completions_stream": b"data: [DONE]\n\n",
    "scale_completions_stream": b"data: [DONE]\r\n\r\n",
    "scale_v1_completions_stream": b'"error":null}\r\n\r\n',
    "sourcegraph_code_stream": b"event: done\ndata: {}\n\n",
    "sourcegraph_stream": b"event: done\ndata: {}\n\n",
}
BUFFERED = ("openai_completions", "scale_completions", "scale_v1_completions_sync", "sourcegraph_code")
REQUEST = {"model": "demo", "prompt": "import os\n", "max_tokens": 20, "temperature": 0}
MAX_PRELUDE_BYTES = 16_384


class Caller:
    """Sends events to the function that the gateway would send them to."""

    def __init__(self, functions: Functions, events: Path) -> None:
        self._functions = functions
        self._events = events

    def event(self, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The event of that name as a request of its own, with ``body`` for its own where one is given."""
        event: dict[str, Any] = json.loads((self._events / f"{name}.json").read_text())
        event["requestContext"]["requestId"] = f"adapter-{uuid.uuid4()}"
        if body is not None:
            event["body"] = json.dumps(body, ensure_ascii=False)
        return event

    def invoke(self, event: dict[str, Any], **options: Any) -> Invocation:
        """Begun, perhaps not yet answered."""
        return self._functions.behind(event["resource"]).api.invoke(event, **options)

    def ask(self, **fields: Any) -> Invocation:
        """The answer to an OpenAI request."""
        return self.invoke(self.event("openai_completions", {**REQUEST, **fields})).finished()


@pytest.fixture
def caller(functions: Functions, project_root: Path) -> Caller:
    return Caller(functions, project_root / "events")


@pytest.fixture
def held(stack: LocalStack) -> Iterator[HeldContainer]:
    """In the place of the ``demo`` endpoint's container."""
    before = stack.sagemaker.containers["demo"]
    with held_container() as container:
        stack.sagemaker.containers["demo"] = container.url
        yield container
    stack.sagemaker.containers["demo"] = before


def request_id(event: dict[str, Any]) -> str:
    name: str = event["requestContext"]["requestId"]
    return name


def frames(answer: Invocation) -> list[Any]:
    """The JSON of every event but ``[DONE]``."""
    data = re.findall(r"^data: (.*?)\r?$", answer.body.decode(), re.MULTILINE)
    return [json.loads(frame) for frame in data if frame != "[DONE]"]


@pytest.mark.parametrize("name", STREAMS)
def test_lambda_is_sent_the_head_then_the_events(caller: Caller, ledger: LedgerReader, name: str) -> None:
    event = caller.event(name)
    answer = caller.invoke(event).finished()

    assert answer.headers["lambda-runtime-function-response-mode"] == "streaming"
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["content-type"] == "application/vnd.awslambda.http-integration-response"
    prelude, delimiter, body = answer.received.partition(DELIMITER)
    assert len(prelude) + len(delimiter) <= MAX_PRELUDE_BYTES
    assert body[:1] != b"\0"  # eight, and no more
    assert answer.prelude["statusCode"] == 200
    assert answer.prelude["headers"]["x-request-id"] == request_id(event)
    assert answer.prelude["headers"]["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.prelude["headers"]
    assert "transfer-encoding" not in answer.prelude["headers"]
    assert body.endswith(STREAMS[name])
    assert (answer.trailers, answer.error) == ({}, None)
    assert ledger.settled(request_id(event)).outcome == "succeeded"


@pytest.mark.parametrize("name", STREAMS)
def test_an_event_reaches_lambda_while_the_model_still_speaks(
    caller: Caller, held: HeldContainer, ledger: LedgerReader, name: str
) -> None:
    event = caller.event(name)
    answer = caller.invoke(event)
    # the model says no more before this is here: were it held back anywhere on the way, it would never come
    answer.wait(lambda sofar: sofar.body.count(b"data: ") >= len(TEXTS) - 2)
    assert held.ended is None
    held.release.set()
    answer.finished()

    first_event = next(chunk for chunk in answer.chunks if b"data: " in chunk.data)
    assert held.ended is not None
    assert answer.chunks[0].at <= first_event.at < held.ended
    assert answer.body.endswith(STREAMS[name])
    assert ledger.settled(request_id(event)).completion_tokens == len(TEXTS)


@pytest.mark.parametrize("name", BUFFERED)
def test_an_answer_that_is_not_streamed_is_whole_and_of_the_length_it_says(
    caller: Caller, ledger: LedgerReader, name: str
) -> None:
    event = caller.event(name)
    answer = caller.invoke(event).finished()

    assert answer.prelude["statusCode"] == 200
    assert answer.prelude["headers"]["content-type"].startswith("application/json")
    assert answer.prelude["headers"]["content-length"] == str(len(answer.body))
    assert answer.prelude["headers"]["x-request-id"] == request_id(event)
    assert isinstance(json.loads(answer.body), dict)
    assert ledger.settled(request_id(event)).streamed is False


def test_streamed_and_whole_text_are_the_same_through_one_process(caller: Caller) -> None:
    whole = json.loads(caller.ask().body)["choices"][0]["text"]
    streamed = caller.ask(stream=True)
    again = json.loads(caller.ask().body)["choices"][0]["text"]

    joined = "".join(choice["text"] for frame in frames(streamed) for choice in frame["choices"])
    assert whole == joined == again


def test_an_unknown_key_is_a_401_and_no_stream(caller: Caller) -> None:
    event = caller.event("openai_completions_stream")
    for headers, value in (("headers", "Bearer sk-unknown"), ("multiValueHeaders", ["Bearer sk-unknown"])):
        event[headers]["Authorization"] = value
    answer = caller.invoke(event).finished()

    assert answer.prelude["statusCode"] == 401
    assert answer.prelude["headers"]["content-type"].startswith("application/json")
    assert json.loads(answer.body)["error"]["code"] == "invalid_api_key"


def test_a_throttled_endpoint_is_a_429_before_the_first_byte(
    caller: Caller, faults: LocalStack, ledger: LedgerReader
) -> None:
    faults.sagemaker.faults.replace("demo", [Fault(refusal=Refusal(kind="throttled"), calls=3)])
    event = caller.event("openai_completions_stream")
    answer = caller.invoke(event).finished()

    assert answer.prelude["statusCode"] == 429
    assert answer.prelude["headers"]["retry-after"] == "1"
    assert json.loads(answer.body)["error"]["code"] == "rate_limit_exceeded"
    assert ledger.settled(request_id(event)).outcome == "refused"


@pytest.mark.parametrize("name", STREAMS)
def test_what_breaks_upstream_ends_the_stream_in_good_order_with_an_error_event(
    caller: Caller, faults: LocalStack, ledger: LedgerReader, name: str
) -> None:
    faults.sagemaker.faults.replace("demo", [Fault(cut_after=700)])
    event = caller.event(name)
    answer = caller.invoke(event).finished()

    assert answer.prelude["statusCode"] == 200
    assert b"[DONE]" not in answer.body
    said = [frame for frame in frames(answer) if frame]  # Sourcegraph's end has nothing in it
    assert [bool(frame.get("error")) for frame in said] == [False] * (len(said) - 1) + [True]
    assert (answer.trailers, answer.error) == ({}, None)  # to Lambda this invocation succeeded
    assert ledger.settled(request_id(event)).outcome == "failed"


def test_a_reader_who_leaves_ends_the_call_of_the_model_and_leaves_one_record(
    functions: Functions, caller: Caller, held: HeldContainer, stack: LocalStack, ledger: LedgerReader
) -> None:
    event = caller.event("openai_completions_stream")
    before, records = stack.sagemaker.hang_ups["demo"], ledger.count()
    with functions.environment() as environment:  # of its own, for the adapter does not outlive it
        adapter = environment.start_adapter()
        environment.start_app()
        answer = environment.api.invoke(event, hang_up_after=400)
        answer.wait(lambda sofar: len(sofar.received) >= 400)
        record = ledger.settled(request_id(event), patience=10)
        adapter.wait(10)

    assert (record.outcome, record.estimated) == ("aborted", True)
    assert 0 < record.completion_tokens < len(TEXTS)
    assert ledger.count() == records + 1
    held.release.set()
    wait_until(lambda: stack.sagemaker.hang_ups["demo"] > before)


def test_an_app_that_dies_leaves_a_stream_without_an_end(
    functions: Functions, caller: Caller, held: HeldContainer
) -> None:
    event = caller.event("openai_completions_stream")
    with functions.environment() as environment:
        environment.start_adapter()
        app = environment.start_app()
        answer = environment.api.invoke(event)
        answer.wait(lambda sofar: b"data: " in sofar.body)
        app.kill()
        answer.finished()

    *events, rest = answer.body.split(b"\n\n")
    assert all(json.loads(event.removeprefix(b"data: "))["choices"] for event in events)
    # The adapter ends the answer in good order, and writes the error's trailers into the body: lines that begin with no
    # field of an event, which readers of events pass over. What is missing is the end.
    assert (answer.complete, answer.trailers) == (True, {})
    assert rest.startswith(b"Lambda-Runtime-Function-Error-Type: ")


def test_no_event_is_asked_for_before_the_app_is_ready(functions: Functions, caller: Caller) -> None:
    with functions.environment() as environment:
        environment.start_adapter()
        assert environment.api.registered.wait(10)
        wait_until(lambda: "app is not ready" in environment.log.read_text())
        assert not environment.api.polled.is_set()
        environment.start_app()
        assert environment.api.polled.wait(30)
        answer = environment.api.invoke(caller.event("openai_completions")).finished()
    assert answer.prelude["statusCode"] == 200


def test_lambdas_deadline_reaches_the_app_which_answers_before_it(
    caller: Caller, faults: LocalStack, ledger: LedgerReader
) -> None:
    faults.sagemaker.faults.replace("demo", [Fault(head_delay_ms=20_000)])
    event = caller.event("openai_completions_stream")
    answer = caller.invoke(event, seconds=3).finished()

    assert time.time() * 1000 < answer.deadline_ms
    assert answer.prelude["statusCode"] == 504
    assert ledger.settled(request_id(event)).outcome == "failed"


def test_a_caller_cannot_write_the_platforms_headers(caller: Caller, ledger: LedgerReader) -> None:
    event = caller.event("openai_completions")
    forged = {
        "x-amzn-request-context": json.dumps({"requestId": "forged"}),
        "x-amzn-lambda-context": json.dumps({"deadline": 1}),
    }
    event["headers"] |= forged
    event["multiValueHeaders"] |= {name: [value] for name, value in forged.items()}
    answer = caller.invoke(event).finished()

    assert answer.prelude["statusCode"] == 200
    assert answer.prelude["headers"]["x-request-id"] == request_id(event)
    assert ledger.raw("forged") is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_text_of_several_bytes_a_letter_survives_every_cut(caller: Caller, faults: LocalStack, stream: bool) -> None:
    prompt = "# naïve café, 日本語, 🐍\n"
    faults.sagemaker.faults.replace("demo", [Fault(split_every=1)])
    answer = caller.ask(prompt=prompt, echo=True, stream=stream)

    replies = frames(answer) if stream else [json.loads(answer.body)]
    text = "".join(choice["text"] for reply in replies for choice in reply["choices"])
    assert text.startswith(prompt)


def test_a_query_and_a_stage_are_passed_as_the_client_sent_them(caller: Caller) -> None:
    event = caller.event("scale_v1_completions_sync")
    assert event["requestContext"]["path"] != event["path"]  # the stage is in the one, and the app must not see it
    answer = caller.invoke(event).finished()
    assert answer.prelude["statusCode"] == 200


def test_many_silent_answers_in_one_environment_keep_no_further_request_waiting(
    functions: Functions, caller: Caller, held: HeldContainer
) -> None:
    with functions.environment() as environment:
        environment.variables |= {"AWS_LAMBDA_MAX_CONCURRENCY": "64"}
        environment.start_adapter()
        environment.start_app()
        silent = [environment.api.invoke(caller.event("openai_completions_stream")) for _ in range(50)]
        for answer in silent:
            answer.wait(lambda sofar: sofar.body.count(b"data: ") >= len(TEXTS) - 2)
        late = [environment.api.invoke(caller.event("openai_completions_stream")) for _ in range(14)]
        for answer in late:
            answer.wait(lambda sofar: b"data: " in sofar.body)
        assert held.ended is None
        held.release.set()
        assert {answer.finished().prelude["statusCode"] for answer in (*silent, *late)} == {200}


def wait_until(what: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.01)
