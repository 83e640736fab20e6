"""The dialects as a client speaks them: how each asks for one greedy completion, where its answers hold the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

PROMPT = "class Parser:\n    def __init__(self"
TOKENS = 24


@dataclass(frozen=True)
class Speaker:
    """One dialect. ``body`` takes whether to stream, and the model's name."""

    path: str
    headers: dict[str, str]
    body: Callable[[bool, str], dict[str, Any]]
    text: Callable[[httpx.Response], str]
    joined: Callable[[httpx.Response], str]
    end: str
    stream_path: str | None = None

    def address(self, *, stream: bool, model: str = "demo") -> str:
        """The path, and the query where the dialect names its model there."""
        path = self.stream_path if stream and self.stream_path else self.path
        return path.replace("=demo", f"={model}")

    def ask(self, http: httpx.Client, *, stream: bool, model: str = "demo") -> httpx.Response:
        """The reply, read to its end."""
        address = self.address(stream=stream, model=model)
        return http.post(address, json=self.body(stream, model), headers=self.headers)


def data_frames(reply: httpx.Response) -> list[Any]:
    """The JSON of every event but ``[DONE]``."""
    frames = re.findall(r"^data: (.*?)\r?$", reply.text, re.MULTILINE)
    return [json.loads(frame) for frame in frames if frame != "[DONE]"]


def openai_body(stream: bool, model: str = "demo") -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": stream}


def v1_body(stream: bool, model: str = "demo") -> dict[str, Any]:
    return {"prompt": PROMPT, "max_new_tokens": TOKENS, "temperature": 0}


def sourcegraph_body(stream: bool, model: str = "demo") -> dict[str, Any]:
    message = {"speaker": "human", "text": PROMPT}
    return {"model": model, "messages": [message], "maxTokensToSample": TOKENS, "temperature": 0, "stream": stream}


def choice_text(reply: httpx.Response) -> str:
    text: str = reply.json()["choices"][0]["text"]
    return text


def joined_choices(reply: httpx.Response) -> str:
    return "".join(choice["text"] for frame in data_frames(reply) for choice in frame["choices"])


def last_completion(reply: httpx.Response) -> str:
    text: str = [frame["completion"] for frame in data_frames(reply) if "completion" in frame][-1]
    return text


BASIC = {"Authorization": "Basic c2stbG9jYWw6"}
TOKEN = {"Authorization": "token sk-local"}
SPEAKERS = {
    "openai": Speaker(
        "/v1/completions",
        {"Authorization": "Bearer sk-local"},
        openai_body,
        choice_text,
        joined_choices,
        "data: [DONE]\n\n",
    ),
    "scale": Speaker("/v2/completions", BASIC, openai_body, choice_text, joined_choices, "data: [DONE]\r\n\r\n"),
    "scale-v1": Speaker(
        "/v1/llm/completions-sync?model_endpoint_name=demo",
        {"x-api-key": "sk-local"},
        v1_body,
        lambda reply: str(reply.json()["output"]["text"]),
        lambda reply: "".join(frame["output"]["text"] for frame in data_frames(reply)),
        '"error":null}\r\n\r\n',
        stream_path="/v1/llm/completions-stream?model_endpoint_name=demo",
    ),
    "sourcegraph-cumulative": Speaker(
        "/.api/completions/code",
        TOKEN,
        sourcegraph_body,
        lambda reply: str(reply.json()["completion"]),
        last_completion,
        "event: done\ndata: {}\n\n",
    ),
    "sourcegraph-delta": Speaker(
        "/.api/completions/code?api-version=8",
        TOKEN,
        sourcegraph_body,
        lambda reply: str(reply.json()["completion"]),
        lambda reply: "".join(frame.get("deltaText", "") for frame in data_frames(reply)),
        "event: done\ndata: {}\n\n",
    ),
}
