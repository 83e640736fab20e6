"""Whatever SageMaker and a container do to a request, in any order: what every reply and record must hold all the same.

The scripts are generated. A caller, or the model's own limit, gives up after ``PATIENCE_MS``; a fault may last longer.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from completions_cli.local.faults import Fault, Refusal, Replacement
from completions_cli.local.stack import LocalStack
from family_models import family_models
from ledger_reader import LedgerReader
from speakers import SPEAKERS, Speaker, data_frames

FAMILIES = ("vllm", "lmi", "tgi")
PATIENCE_MS = 400
GRACE_SECONDS = 1.5
TOO_LONG_MS = 3_000
ATTEMPTS = 3  # UPSTREAM_ATTEMPTS' default
SECRET = "CUDA error: secret-detail"
STATUSES = {200, 400, 413, 429, 500, 503, 504}

# The call was never dispatched, or the container turned it away unread: nothing else may be repeated (sagemaker's
# table of errors: throttled, not ready, service unavailable, and the container's own 429 and 503)
REPEATABLE = [
    Refusal(kind="throttled"),
    Refusal(kind="not_ready"),
    Refusal(kind="unavailable"),
    Refusal(kind="model_error", status=429, message=SECRET),
    Refusal(kind="model_error", status=503, message=SECRET),
]
FINAL = [
    Refusal(kind="no_capacity"),
    Refusal(kind="not_found"),
    Refusal(kind="access_denied"),
    Refusal(kind="internal"),
    Refusal(kind="internal_dependency"),
    Refusal(kind="connection_reset"),
    *(Refusal(kind="model_error", status=status, message=SECRET) for status in (0, 400, 404, 413, 422, 424, 500, 502)),
]
GARBAGE = [
    b"",
    b"\n\n",
    b": comment\n\n",
    b"data: \n\n",
    b"data: {}\n\n",
    b"data: [DONE]\n\n",
    b"[]\n",
    b"null\n",
    b"\xff\xfe\x00\n",
    b"<html>502 Bad Gateway</html>",
    b'{"choices": [{"index": 99, "text": "x"}]}\n',
    b'{"choices": [{"index": 0, "text": 7}]}\n',
    b'{"token": {"id": 1}}\n',
    b'{"error": "' + SECRET.encode() + b'", "code": 424}\n',
]
DELAYS = st.sampled_from([*[0] * 6, 5, TOO_LONG_MS])


@st.composite
def streams(draw: st.DrawFn) -> Fault:
    """A good answer, in parts, held up, and perhaps broken off."""
    ending = draw(st.sampled_from(["exception_after", "cut_after", "end_after", None]))
    fields: dict[str, object] = {} if ending is None else {ending: draw(st.integers(0, 4_000))}
    return Fault.model_validate(
        {
            "head_delay_ms": draw(DELAYS),
            "split_every": draw(st.sampled_from([None, None, 19, 256])),
            "delay_ms": draw(st.sampled_from([0, 0, 1])),
            "stall_after": draw(st.integers(0, 3_000)),
            "stall_ms": draw(DELAYS),
            "exception_kind": draw(st.sampled_from(["ModelStreamError", "InternalStreamFailure"])),
            **fields,
        }
    )


FAULTS = st.one_of(
    st.builds(
        Fault,
        refusal=st.sampled_from([*REPEATABLE, *FINAL]),
        head_delay_ms=DELAYS,
        calls=st.sampled_from([1, 1, 2, 4, None]),
    ),
    st.builds(
        Fault,
        replacement=st.builds(
            Replacement,
            body=st.sampled_from(GARBAGE) | st.binary(max_size=64),
            repeat=st.sampled_from([1, 3]),
            content_type=st.sampled_from(
                ["text/event-stream", "application/jsonlines", "application/json", "text/html"]
            ),
        ),
        split_every=st.sampled_from([None, 1]),
    ),
    streams(),
)


@pytest.fixture(scope="module")
def scripted(stack: LocalStack) -> Iterator[Mapping[str, str]]:
    """Models that give up by themselves, for dialects whose callers cannot say when."""
    with family_models(stack, "scripted", timeout_seconds=PATIENCE_MS / 1000) as names:
        yield names


@pytest.fixture(scope="module")
def http(stack: LocalStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.base_url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def reference(http: httpx.Client) -> str:
    """What the model says, whoever asks."""
    return SPEAKERS["openai"].text(SPEAKERS["openai"].ask(http, stream=False))


def ask(http: httpx.Client, speaker: Speaker, model: str, *, stream: bool) -> httpx.Response:
    """The reply, read to its end. Only Sourcegraph's callers can say how long they wait."""
    limit = {"x-timeout-ms": str(PATIENCE_MS)} if speaker.path.startswith("/.api") else {}
    return http.post(
        speaker.address(stream=stream, model=model),
        json=speaker.body(stream, model),
        headers={**speaker.headers, **limit},
    )


def streamed_text(reply: httpx.Response) -> str:
    """All that a stream of any dialect said, however it ended."""
    frames = data_frames(reply)
    cumulative = [frame["completion"] for frame in frames if "completion" in frame]
    if cumulative:
        return str(cumulative[-1])
    deltas = [choice["text"] for frame in frames for choice in frame.get("choices", ())]
    deltas += [frame["deltaText"] for frame in frames if "deltaText" in frame]
    deltas += [frame["output"]["text"] for frame in frames if frame.get("output")]
    return "".join(deltas)


def finished(speaker: Speaker, reply: httpx.Response) -> bool:
    """Whether a stream came to its dialect's end; Sourcegraph ends broken ones so, too, behind an error event."""
    return reply.text.endswith(speaker.end) and "event: error" not in reply.text


def _until(holds: Callable[[], bool]) -> None:
    """Wait up to five seconds for what other threads bring about."""
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def most_calls(script: Sequence[Fault]) -> int:
    """How often the endpoint may be called: once more than it turns the call away in a repeatable way."""
    turned_away = 0
    for fault in script:
        if fault.refusal not in REPEATABLE:
            break
        turned_away += ATTEMPTS if fault.calls is None else fault.calls
    return min(ATTEMPTS, turned_away + 1)


@dataclass(frozen=True)
class World:
    """What a script is played on. ``asked`` keeps the record of every request, by model."""

    stack: LocalStack
    models: Mapping[str, str]
    http: httpx.Client
    ledger: LedgerReader
    reference: str
    asked: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


@pytest.fixture
def world(
    stack: LocalStack, scripted: Mapping[str, str], http: httpx.Client, ledger: LedgerReader, reference: str
) -> Iterator[World]:
    """Afterwards there is one settled record for each request, and no other."""
    before = {model: set(ledger.states(model)) for model in scripted.values()}
    world = World(stack, scripted, http, ledger, reference)
    yield world
    for model, asked in world.asked.items():
        states = ledger.states(model)
        assert set(states) == before[model] | asked
        assert set(states.values()) == {"SETTLED"}


SCRIPTS = st.lists(FAULTS, min_size=1, max_size=3)
STALL = Fault(stall_after=900, stall_ms=TOO_LONG_MS)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(SCRIPTS, st.sampled_from(sorted(SPEAKERS)), st.sampled_from(FAMILIES), st.booleans())
@example([Fault(head_delay_ms=TOO_LONG_MS)], "sourcegraph-delta", "tgi", True)
@example([STALL], "openai", "lmi", True)
@example([STALL], "scale-v1", "vllm", False)
@example([Fault(refusal=REPEATABLE[0], calls=None)], "scale", "vllm", True)
@example([Fault(refusal=REPEATABLE[1]), Fault(end_after=1_500)], "openai", "vllm", True)
def test_no_script_of_faults_breaks_a_promise(
    world: World, script: list[Fault], dialect: str, family: str, stream: bool
) -> None:
    speaker, model = SPEAKERS[dialect], world.models[family]
    sagemaker = world.stack.sagemaker
    before = sagemaker.call_count[model]
    sagemaker.faults.replace(model, script)

    started = time.monotonic()
    reply = ask(world.http, speaker, model, stream=stream)
    elapsed = time.monotonic() - started
    calls = sagemaker.call_count[model] - before
    sagemaker.faults.replace(model, [])

    assert elapsed < PATIENCE_MS / 1000 + GRACE_SECONDS
    assert reply.headers["x-request-id"]
    assert reply.status_code in STATUSES
    assert "secret-detail" not in reply.text
    assert 1 <= calls <= most_calls(script)
    record = world.ledger.settled(reply.headers["x-request-id"])
    world.asked[model].add(record.pk)
    assert record.attempts == calls

    ended_well = reply.status_code == 200 and (not stream or finished(speaker, reply))
    assert (record.outcome == "succeeded") is ended_well
    if ended_well:
        assert (streamed_text(reply) if stream else speaker.text(reply)) == world.reference
    elif reply.status_code == 200:
        assert stream
        said = streamed_text(reply)
        assert world.reference.startswith(said)
        assert record.completion_tokens > 0 or not said
    else:
        assert record.first_token_ms is None or not stream  # a stream that has begun is never a status


# Answers without an end

MEGABYTE = 1024 * 1024
ENDLESS_BYTES = 200 * MEGABYTE
MOST_GROWTH = 40 * MEGABYTE


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/jsonlines", "application/json"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_endless_line_is_given_up_long_before_it_fills_the_memory(
    stack: LocalStack, ledger: LedgerReader, faults: LocalStack, http: httpx.Client, content_type: str, stream: bool
) -> None:
    piece = b"x" * 65_536
    endless = Replacement(body=piece, repeat=ENDLESS_BYTES // len(piece), content_type=content_type)
    faults.sagemaker.faults.replace("demo", [Fault(replacement=endless)])
    calls, hang_ups = stack.sagemaker.call_count["demo"], stack.sagemaker.hang_ups["demo"]

    tracemalloc.start()
    try:
        reply = SPEAKERS["openai"].ask(http, stream=stream)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < MOST_GROWTH
    assert reply.status_code == 500
    record = ledger.settled(reply.headers["x-request-id"])
    assert (record.outcome, record.completion_tokens, record.attempts) == ("failed", 0, 1)
    assert stack.sagemaker.call_count["demo"] == calls + 1
    _until(lambda: stack.sagemaker.hang_ups["demo"] == hang_ups + 1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("family", FAMILIES)
def test_comments_that_keep_a_connection_alive_do_not_outlast_the_callers_patience(
    scripted: Mapping[str, str],
    stack: LocalStack,
    ledger: LedgerReader,
    http: httpx.Client,
    family: str,
    stream: bool,
) -> None:
    model = scripted[family]
    busy = Replacement(body=b": keep-alive\n\n", repeat=TOO_LONG_MS // 50)
    stack.sagemaker.faults.replace(model, [Fault(replacement=busy, delay_ms=50)])

    started = time.monotonic()
    reply = ask(http, SPEAKERS["openai"], model, stream=stream)

    assert time.monotonic() - started < PATIENCE_MS / 1000 + GRACE_SECONDS
    assert reply.status_code == 504
    assert ledger.settled(reply.headers["x-request-id"]).outcome == "failed"
