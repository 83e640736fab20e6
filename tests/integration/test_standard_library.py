"""Two hundred files of the standard library, each cut at a seeded random line: buffered text, streamed text and record
agree, and the counts are the container's own."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from completions_cli.local.stack import LocalStack
from ledger_reader import LedgerReader

FILES = 200
SEED = 20_261_129


def cut_files() -> list[str]:
    """The texts before the cut."""
    chooser = random.Random(SEED)  # noqa: S311 - a reproducible choice
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        path for path in folder.rglob("*.py") if "site-packages" not in path.parts and "test" not in path.parts
    )
    prompts = []
    for path in chooser.sample(paths, 2 * FILES):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        if len(lines) > 2:
            cut = chooser.randrange(1, len(lines))
            prompts.append("".join(lines[max(0, cut - 30) : cut]))
    return prompts[:FILES]


@pytest.fixture
def http(stack: LocalStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.base_url, headers={"Authorization": "Bearer sk-local"}, timeout=60) as client:
        yield client


def streamed(http: httpx.Client, request: dict[str, Any]) -> tuple[str, str, dict[str, int], str]:
    """Joined text, finish reason, usage and request id."""
    text: list[str] = []
    finish = ""
    usage: dict[str, int] = {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/completions", json={**request, **options}) as reply:
        frames = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert frames.pop() == "[DONE]"
    for chunk in map(json.loads, frames):
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            text.append(choice["text"])
            finish = choice["finish_reason"] or finish
    return "".join(text), finish, usage, reply.headers["x-request-id"]


def container_prompt_tokens(stack: LocalStack, http: httpx.Client, prompt: str) -> int:
    """What the container's own tokenizer counts."""
    url = stack.sagemaker.containers["demo"].removesuffix("/invocations") + "/tokenize"
    count: int = http.post(url, json={"prompt": prompt}).json()["count"]
    return count


def test_buffered_streamed_and_metered_agree_on_200_files(
    ledger: LedgerReader, stack: LocalStack, http: httpx.Client
) -> None:
    prompts = cut_files()
    assert len(prompts) == FILES
    before = ledger.count()
    for number, prompt in enumerate(prompts):
        request: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": 16, "seed": number}
        request["temperature"] = (0, 0.8)[number % 2]

        reply = http.post("/v1/completions", json=request)
        whole = reply.json()
        text, finish, usage, stream_id = streamed(http, request)

        assert reply.status_code == 200, reply.text
        assert whole["choices"][0]["text"] == text
        assert whole["choices"][0]["finish_reason"] == finish
        assert whole["usage"] == usage
        assert usage["prompt_tokens"] == container_prompt_tokens(stack, http, prompt)
        for request_id in (reply.headers["x-request-id"], stream_id):
            record = ledger.settled(request_id)
            assert record.outcome == "succeeded"
            assert (record.prompt_tokens, record.completion_tokens, record.estimated) == (
                usage["prompt_tokens"],
                usage["completion_tokens"],
                False,
            )
    assert ledger.count() - before == 2 * FILES
