"""Every dialect over every container family, whole and streamed, through everything that can happen to one call.

Each cell asserts what the client gets, the one usage record, and how many calls the endpoint saw.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from completions.backends.families import CODECS
from completions.metering.items import RecordItem
from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import LocalStack
from family_models import CONTAINERS, family_models
from ledger_reader import LedgerReader
from speakers import SPEAKERS, TOKENS, Speaker, data_frames

FAILURE = Fault(refusal=Refusal(kind="model_error", status=500, message="CUDA error: secret-detail"))
REFUSED_ONCE = {
    "throttled": Fault(refusal=Refusal(kind="throttled")),
    "not-ready": Fault(refusal=Refusal(kind="not_ready")),
}
# every family's answer is longer than this, and its first record is shorter
KEPT_BYTES = 700
BROKEN = {"exception": Fault(exception_after=KEPT_BYTES), "truncated": Fault(end_after=KEPT_BYTES)}


class Cell:
    """One family in one dialect, asked whole or in a stream."""

    def __init__(
        self, stack: LocalStack, ledger: LedgerReader, http: httpx.Client, family: str, speaker: Speaker
    ) -> None:
        self.speaker = speaker
        self.model = f"matrix-{family}"
        self._stack = stack
        self._ledger = ledger
        self._http = http
        self._before = self._calls

    def script(self, *faults: Fault) -> None:
        self._stack.sagemaker.faults.replace(self.model, list(faults))

    def ask(self, *, stream: bool) -> httpx.Response:
        return self.speaker.ask(self._http, stream=stream, model=self.model)

    def text(self, reply: httpx.Response, *, stream: bool) -> str:
        return self.speaker.joined(reply) if stream else self.speaker.text(reply)

    def record(self, reply: httpx.Response) -> RecordItem:
        return self._ledger.settled(reply.headers["x-request-id"])

    @property
    def calls(self) -> int:
        """Calls since the cell began."""
        return self._calls - self._before

    @property
    def _calls(self) -> int:
        return self._stack.sagemaker.call_count[self.model]


@pytest.fixture(scope="session")
def families(stack: LocalStack) -> Iterator[LocalStack]:
    """The stack, with a model of each family."""
    with family_models(stack, "matrix"):
        yield stack


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=SPEAKERS)
def speaker(request: pytest.FixtureRequest) -> Speaker:
    return SPEAKERS[request.param]


@pytest.fixture(params=CODECS)
def cell(
    request: pytest.FixtureRequest, families: LocalStack, ledger: LedgerReader, speaker: Speaker
) -> Iterator[Cell]:
    with httpx.Client(base_url=families.base_url, timeout=30) as http:
        cell = Cell(families, ledger, http, request.param, speaker)
        yield cell
        cell.script()


@pytest.fixture(scope="session")
def reference(families: LocalStack) -> str:
    """What the model says, whoever asks."""
    with httpx.Client(base_url=families.base_url, timeout=30) as http:
        speaker = SPEAKERS["openai"]
        return speaker.text(speaker.ask(http, stream=False))


def test_every_family_has_a_container_to_be_tried_on() -> None:
    assert set(CONTAINERS) == set(CODECS)


def test_ok(cell: Cell, stream: bool, reference: str) -> None:
    reply = cell.ask(stream=stream)
    assert reply.status_code == 200
    assert cell.text(reply, stream=stream) == reference
    assert not stream or reply.text.endswith(cell.speaker.end)
    record = cell.record(reply)
    assert (record.outcome, record.completion_tokens, record.attempts) == ("succeeded", TOKENS, 1)
    assert record.prompt_tokens > 0
    assert cell.calls == 1


def test_an_error_before_the_first_record(cell: Cell, stream: bool) -> None:
    cell.script(FAILURE)
    reply = cell.ask(stream=stream)
    assert "secret-detail" not in reply.text
    if stream and cell.speaker.path.startswith("/.api"):  # a dead model in this dialect's stream is an event
        assert (reply.status_code, reply.text.startswith("event: error")) == (200, True)
    else:
        assert reply.status_code == 500
    record = cell.record(reply)
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("failed", 0, 0)
    assert cell.calls == 1


@pytest.mark.parametrize("fault", BROKEN)
def test_an_error_after_the_first_record(cell: Cell, stream: bool, fault: str, reference: str) -> None:
    cell.script(BROKEN[fault])
    reply = cell.ask(stream=stream)
    if stream:
        assert reply.status_code == 200
        assert "[DONE]" not in reply.text
        frames = data_frames(reply)
        assert len([frame for frame in frames if frame.get("error")]) == 1
    else:
        assert reply.status_code == 500
    record = cell.record(reply)
    assert record.outcome == "failed"
    assert 0 < record.completion_tokens < TOKENS
    assert record.prompt_tokens > 0
    assert cell.calls == 1


@pytest.mark.parametrize("fault", REFUSED_ONCE)
def test_a_refusal_and_then_an_answer(cell: Cell, stream: bool, fault: str, reference: str) -> None:
    cell.script(REFUSED_ONCE[fault])
    reply = cell.ask(stream=stream)
    assert reply.status_code == 200
    assert cell.text(reply, stream=stream) == reference
    record = cell.record(reply)
    assert (record.outcome, record.completion_tokens, record.attempts) == ("succeeded", TOKENS, 2)
    assert cell.calls == 2


def test_a_client_that_hangs_up(cell: Cell, stream: bool, families: LocalStack, ledger: LedgerReader) -> None:
    cell.script(Fault(split_every=256, delay_ms=10) if stream else Fault())
    before = ledger.states(cell.model)
    _ask_and_hang_up(families.base_url, cell, stream=stream)
    record = _the_new_record(ledger, cell.model, before)
    if stream:
        assert (record.outcome, record.completion_tokens < TOKENS) == ("aborted", True)
    else:  # nobody can tell, before the answer is written, that its reader has gone
        assert (record.outcome, record.completion_tokens) == ("succeeded", TOKENS)
    assert cell.calls == record.attempts  # nothing is asked again for somebody who has gone, and the record tells all


def _ask_and_hang_up(base_url: str, cell: Cell, *, stream: bool) -> None:
    """The request over a bare socket, which is closed after the first bytes of a stream, or at once."""
    address = urlsplit(base_url)
    speaker = cell.speaker
    request = httpx.Request(
        "POST",
        base_url + speaker.address(stream=stream, model=cell.model),
        json=speaker.body(stream, cell.model),
        headers=speaker.headers,
    )
    head = f"POST {request.url.raw_path.decode()} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=10) as connection:
        connection.sendall(head.encode() + b"\r\n" + request.content)
        if stream:
            received = b""
            while b"data:" not in received:
                received += connection.recv(4096)
        else:
            deadline = time.monotonic() + 10
            while not cell.calls and time.monotonic() < deadline:
                time.sleep(0.005)


def _the_new_record(ledger: LedgerReader, model: str, before: Mapping[str, str]) -> RecordItem:
    deadline = time.monotonic() + 10
    new: set[str] = set()
    while not new and time.monotonic() < deadline:
        new = set(ledger.states(model)) - set(before)
    (key,) = new
    return ledger.settled(key.removeprefix("REQ#"), patience=10)
