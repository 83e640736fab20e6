"""LangChain's ``OpenAI`` class against the service its environment names; prints what it saw as one JSON document."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

# the project does not depend on it
from langchain_openai import OpenAI  # type: ignore[import-not-found]

PROMPTS = sys.argv[1:]


def llm(**changes: Any) -> Any:
    """The class, set up alike."""
    return OpenAI(**{"model": "demo", "temperature": 0, "max_tokens": 12, "max_retries": 0, **changes})


def generated(result: Any) -> dict[str, Any]:
    """Texts and finish reasons by prompt, and what the client counted."""
    return {
        "choices": [[[one.text, one.generation_info["finish_reason"]] for one in row] for row in result.generations],
        "usage": result.llm_output["token_usage"],
    }


def raised(**changes: Any) -> list[str]:
    """The class and the text of the error that an invocation ends in."""
    try:
        llm(**changes).invoke(PROMPTS[0])
    except Exception as error:  # noqa: BLE001 - which one it is, is what the test asserts
        return [type(error).__name__, str(error)]
    return ["", "no error"]


async def asynchronously() -> dict[str, Any]:
    """The asynchronous half of the class."""
    return {
        "invoke": await llm().ainvoke(PROMPTS[0]),
        "stream": [part async for part in llm().astream(PROMPTS[0])],
        "batch": await llm().abatch(PROMPTS),
    }


report = {
    "invoke": llm().invoke(PROMPTS[0]),
    "stop": llm().invoke(PROMPTS[0], stop=[" file"]),
    "stream": list(llm().stream(PROMPTS[0])),
    "stream with usage": list(llm(model_kwargs={"stream_options": {"include_usage": True}}).stream(PROMPTS[0])),
    "streaming": llm(streaming=True).invoke(PROMPTS[0]),
    "batch": llm().batch(PROMPTS),
    "generate": generated(llm().generate(PROMPTS)),
    "two candidates": generated(llm(n=2).generate(PROMPTS)),
    "best of three": generated(llm(best_of=3, temperature=1, seed=5).generate(PROMPTS[:1])),
    "asynchronous": asyncio.run(asynchronously()),
    "unknown model": raised(model="nope"),
    "wrong key": raised(api_key="sk-wrong"),
    "bad request": raised(temperature=3),
}
json.dump(report, sys.stdout)
