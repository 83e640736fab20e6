"""Scale's own Python client against the service its environment names; prints what it saw as one JSON document."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

# the project does not depend on it
import llmengine  # type: ignore[import-not-found]

PROMPT = sys.argv[1]
ARGUMENTS: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_new_tokens": 12, "temperature": 0}


def raised(call: Callable[[], object]) -> list[str]:
    """The class and the text of the error that ``call`` ends in."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - which one it is, is what the test asserts
        return [type(error).__name__, str(error)]
    return ["", "no error"]


def create(**changes: Any) -> Any:
    """One answer, or with ``stream`` all of its parts."""
    answer = llmengine.Completion.create(**{**ARGUMENTS, **changes})
    return [plain(part) for part in answer] if changes.get("stream") else plain(answer)


async def create_asynchronously() -> dict[str, Any]:
    """The same two calls of the asynchronous half of the client."""
    whole = await llmengine.Completion.acreate(**ARGUMENTS)
    stream = await llmengine.Completion.acreate(**ARGUMENTS, stream=True)
    return {"sync": plain(whole), "stream": [plain(part) async for part in stream]}


def plain(answer: Any) -> Any:
    """A model of the client's, as what JSON has."""
    return json.loads(answer.json())


def errors() -> dict[str, list[str]]:
    """What each refusal turns into. The second model's endpoint refuses three calls, as the test has arranged."""
    seen = {
        "unknown model": raised(lambda: create(model="nope")),
        "unknown model, streamed": raised(lambda: create(model="nope", stream=True)),
        "unknown model, looked up": raised(lambda: llmengine.Model.get("nope")),
        "bad request": raised(lambda: create(top_k=5)),
        "bad request, streamed": raised(lambda: create(top_k=5, stream=True)),
        "throttled": raised(lambda: create(model="demo-vllm")),
        "throttled, streamed": raised(lambda: create(model="demo-vllm", stream=True)),
        "engine failure": raised(lambda: create(model="demo-vllm")),
    }
    llmengine.api_engine.set_api_key("sk-wrong")
    seen["wrong key"] = raised(create)
    seen["wrong key, streamed"] = raised(lambda: create(stream=True))
    seen["wrong key, listing"] = raised(llmengine.Model.list)
    llmengine.api_engine.set_api_key(os.environ["SCALE_API_KEY"])
    return seen


report = {
    "sync": create(),
    "stream": create(stream=True),
    "sync, scored": create(return_token_log_probs=True),
    "stream, scored": create(return_token_log_probs=True, stream=True),
    "stop": create(stop_sequences=[" file"]),
    "stop, included": create(stop_sequences=[" file"], include_stop_str_in_output=True, stream=True),
    "asynchronous": asyncio.run(create_asynchronously()),
    "models": plain(llmengine.Model.list()),
    "model": plain(llmengine.Model.get("demo")),
    "errors": errors(),
    "broken off": create(model="demo-vllm", stream=True),
}
json.dump(report, sys.stdout)
