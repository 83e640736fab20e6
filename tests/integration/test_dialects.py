"""One service, many dialects: the same canonical request gives the same text, the same counts, one record in each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import LocalStack
from ledger_reader import LedgerReader
from speakers import (
    BASIC,
    SPEAKERS,
    TOKEN,
    TOKENS,
    Speaker,
    choice_text,
    data_frames,
    openai_body,
    sourcegraph_body,
)


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=30) as client:
        yield client


@pytest.fixture(params=SPEAKERS)
def speaker(request: pytest.FixtureRequest) -> Speaker:
    return SPEAKERS[request.param]


def test_the_same_request_gives_the_same_text_whole_and_streamed(
    http: httpx.Client, ledger: LedgerReader, speaker: Speaker
) -> None:
    reference = SPEAKERS["openai"].ask(http, stream=False)
    whole, streamed = speaker.ask(http, stream=False), speaker.ask(http, stream=True)

    assert speaker.text(whole) == speaker.joined(streamed) == choice_text(reference)
    assert streamed.text.endswith(speaker.end)
    expected = ledger.settled(reference.headers["x-request-id"])
    for reply in (whole, streamed):
        record = ledger.settled(reply.headers["x-request-id"])
        assert record.outcome == "succeeded"
        assert (record.prompt_tokens, record.completion_tokens) == (expected.prompt_tokens, TOKENS)
    assert ledger.settled(streamed.headers["x-request-id"]).streamed


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_throttled_endpoint_is_a_429_in_every_dialect(
    http: httpx.Client, faults: LocalStack, ledger: LedgerReader, speaker: Speaker, stream: bool
) -> None:
    faults.sagemaker.faults.replace("demo", [Fault(refusal=Refusal(kind="throttled"), calls=None)])
    before = faults.sagemaker.call_count["demo"]
    reply = speaker.ask(http, stream=stream)

    assert reply.status_code == 429
    assert reply.headers["retry-after"]
    assert ledger.settled(reply.headers["x-request-id"]).outcome == "refused"
    assert faults.sagemaker.call_count["demo"] == before + 3


@pytest.mark.parametrize("fault", [Fault(cut_after=2_000), Fault(end_after=2_000)], ids=["cut", "truncated"])
def test_a_stream_broken_upstream_ends_in_the_dialects_own_error(
    http: httpx.Client, faults: LocalStack, ledger: LedgerReader, speaker: Speaker, fault: Fault
) -> None:
    faults.sagemaker.faults.replace("demo", [fault])
    reply = speaker.ask(http, stream=True)

    assert reply.status_code == 200
    assert "[DONE]" not in reply.text
    errors = [frame for frame in data_frames(reply) if frame.get("error")]
    assert len(errors) == 1
    assert ledger.settled(reply.headers["x-request-id"]).outcome == "failed"


def test_a_dead_model_in_a_sourcegraph_stream_is_an_event_and_not_a_status(
    http: httpx.Client, faults: LocalStack
) -> None:
    faults.sagemaker.faults.replace("demo", [Fault(refusal=Refusal(kind="unavailable"), calls=None)])
    reply = SPEAKERS["sourcegraph-delta"].ask(http, stream=True)
    assert reply.status_code == 200
    assert re.fullmatch(r'event: error\ndata: {"error":".+"}\n\nevent: done\ndata: {}\n\n', reply.text)


@pytest.mark.parametrize(
    ("name", "status", "body"),
    [
        ("openai", 401, None),
        ("scale", 401, {"detail": "Could not authenticate user"}),
        ("scale-v1", 401, {"detail": "Could not authenticate user"}),
        ("sourcegraph-delta", 401, "Invalid access token.\n"),
    ],
)
def test_a_wrong_key_wears_the_dialects_body(http: httpx.Client, name: str, status: int, body: object) -> None:
    speaker = SPEAKERS[name]
    headers = {key: value.replace("sk-local", "sk-wrong") for key, value in speaker.headers.items()}
    if headers == BASIC:
        headers = {"Authorization": "Basic c2std3Jvbmc6"}
    reply = http.post(speaker.path, json=speaker.body(False, "demo"), headers=headers)
    assert reply.status_code == status
    if isinstance(body, str):
        assert reply.text == body
    elif body is not None:
        assert reply.json() == body


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 50_000, b"{" + b" " * 1_000_000]
)
def test_a_body_that_is_no_request_is_a_4xx_and_costs_nothing(
    http: httpx.Client, faults: LocalStack, ledger: LedgerReader, speaker: Speaker, content: bytes
) -> None:
    calls, records = faults.sagemaker.call_count["demo"], ledger.count()
    for path in {speaker.path, speaker.stream_path or speaker.path}:
        reply = http.post(path, content=content, headers=speaker.headers)
        assert 400 <= reply.status_code < 500, reply.text
        assert reply.headers["x-request-id"]
    assert (faults.sagemaker.call_count["demo"], ledger.count()) == (calls, records)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sk-local"},
        {"Authorization": "Basic c2stbG9jYWw6"},
        {"x-api-key": "sk-local"},
    ],
)
def test_scale_takes_three_forms_of_credentials(http: httpx.Client, headers: dict[str, str]) -> None:
    assert http.post("/v2/completions", json=openai_body(False), headers=headers).status_code == 200


def test_scales_n_alone_gives_that_many_choices(http: httpx.Client) -> None:
    body = {**openai_body(False), "n": 2, "temperature": 0.8, "seed": 1}
    reply = http.post("/v2/completions", json=body, headers=BASIC)
    assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "a+"},
        {"response_format": {"type": "json_object"}},
        {"use_beam_search": True, "best_of": 2},
    ],
)
def test_what_the_container_cannot_enforce_is_refused_and_named(http: httpx.Client, fields: dict[str, Any]) -> None:
    reply = http.post("/v2/completions", json={**openai_body(False), **fields}, headers=BASIC)
    assert reply.status_code == 400
    assert next(iter(fields)) in reply.json()["detail"]


@pytest.mark.parametrize(
    ("query", "headers", "status"),
    [
        ("", {"Authorization": "token sk-local"}, 200),
        ("?token=sk-local", {}, 200),
        ("", {"Authorization": "Basic c2stbG9jYWw6"}, 200),
        ("", {"Authorization": "Bearer sk-local"}, 401),
        ("?api-version=0", {"Authorization": "token sk-local"}, 406),
        ("?api-version=x", {"Authorization": "token sk-local"}, 406),
        ("?api-version=0", {}, 401),
    ],
)
def test_sourcegraphs_order_of_checks(http: httpx.Client, query: str, headers: dict[str, str], status: int) -> None:
    reply = http.post(f"/.api/completions/code{query}", json=sourcegraph_body(False), headers=headers)
    assert reply.status_code == status


def test_an_editors_stops_beyond_the_containers_four_all_count(http: httpx.Client) -> None:
    whole = SPEAKERS["sourcegraph-delta"].ask(http, stream=False).json()["completion"]
    stop = whole[6:9]
    body = {**sourcegraph_body(False), "stopSequences": [*"ⒶⒷⒸⒹⒺⒻⒼⒽⒾ", stop]}
    for stream in (False, True):
        reply = http.post("/.api/completions/code?api-version=8", json={**body, "stream": stream}, headers=TOKEN)
        speaker = SPEAKERS["sourcegraph-delta"]
        text = speaker.joined(reply) if stream else speaker.text(reply)
        assert text == whole[: whole.index(stop)]


def test_an_editor_that_names_no_model_gets_the_default(http: httpx.Client) -> None:
    body = {**sourcegraph_body(False), "model": ""}
    assert http.post("/.api/completions/code?api-version=8", json=body, headers=TOKEN).status_code == 200


def test_an_editor_finds_its_way_to_a_first_completion(http: httpx.Client) -> None:
    version = http.post(
        "/.api/graphql?SiteProductVersion",
        json={"query": "query SiteProductVersion { site { productVersion } }", "variables": {}},
        headers=TOKEN,
    ).json()["data"]["site"]["productVersion"]
    config = json.loads(http.get("/.api/client-config", headers=TOKEN).text)
    models = json.loads(http.get("/.api/modelconfig/supported-models.json", headers=TOKEN).text)
    chosen = models["defaultModels"]["codeCompletion"]

    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert config["codyEnabled"] is True
    assert chosen in [model["modelRef"] for model in models["models"]]
    api_version = config["latestSupportedCompletionsStreamAPIVersion"]
    body = {**sourcegraph_body(True), "model": chosen}
    reply = http.post(f"/.api/completions/code?api-version={api_version}", json=body, headers=TOKEN)
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.text.endswith("event: done\ndata: {}\n\n")
