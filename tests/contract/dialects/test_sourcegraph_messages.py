"""The prompt that Sourcegraph's messages come to, the versions there are, and the models that spellings stand for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from completions.dialects.dialect import ErrorHead, WireRequest
from completions.dialects.sourcegraph import SourcegraphDialect
from completions.dialects.sourcegraph_wire import MessagesError, UnsupportedVersionError
from completions.domain.completion import CompletionRequest
from completions.domain.errors import InvalidRequestError

CODE = SourcegraphDialect(streamed=False)
CHAT = SourcegraphDialect(streamed=True)
ROUTES = {"code": CODE, "stream": CHAT}
MESSAGE = {"speaker": "human", "text": "def f("}
HEAD = ErrorHead("request-1", now=0)


def decode(dialect: SourcegraphDialect = CODE, version: str | None = "1", **fields: Any) -> CompletionRequest:
    """The canonical form of a minimal body with ``fields`` added."""
    query = {} if version is None else {"api-version": version}
    body = json.dumps({"model": "demo", "messages": [MESSAGE]} | fields).encode()
    return dialect.decode(WireRequest("POST", "/.api/completions/code", query, {}, body))


def refused(dialect: SourcegraphDialect = CODE, version: str | None = "1", **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        decode(dialect, version, **fields)
    return caught.value


def speaking(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"speaker": speaker, "text": text} for speaker, text in turns]


def chat(*turns: tuple[str, str], version: str | None = "1") -> str:
    """The prompt of a conversation."""
    (prompt,) = decode(CHAT, version, messages=speaking(*turns)).prompts
    assert isinstance(prompt, str)
    return prompt


# Messages


@pytest.mark.parametrize(
    "message",
    [
        {"speaker": "human", "text": " a\n"},
        {"role": "user", "text": " a\n"},
        {"role": "user", "content": " a\n"},
        {"speaker": "human", "content": " a\n"},
        {"role": "user", "content": " a\n", "text": "other"},
        {"role": "user", "content": None, "text": " a\n"},
        {"role": "user", "content": "", "text": " a\n"},
        {"role": "user", "content": [{"type": "text", "text": " a\n"}]},
        {"role": "user", "content": [{"type": "text", "text": " "}, {"type": "text", "text": "a\n"}]},
        {"role": "user", "content": [{"type": "text", "text": " a\n", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "file", "file": {"uri": "file:///a", "content": " a\n"}}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": " a\n"}, {"type": "text"}, {"type": "text", "text": None}],
        },
        {"text": " a\n"},
        {"role": "assistant", "text": " a\n"},
    ],
)
def test_each_form_of_a_message_is_the_prompt_verbatim_on_the_code_route(message: dict[str, Any]) -> None:
    assert decode(messages=[message]).prompts == (" a\n",)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "image_url"),
        ({"type": "repo", "repo": {"id": "1", "name": "a", "filePatterns": []}}, "repo"),
        ({"type": "file", "file": {"uri": "file:///a"}}, "file"),
        ({"type": "file"}, "file"),
        ({"type": "sound"}, "type"),
        ({}, "type"),
        (None, "type"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_a_part_that_cannot_be_served_is_a_400_that_names_it(route: str, part: Any, named: str) -> None:
    error = refused(ROUTES[route], messages=[{"role": "user", "content": [part]}])
    assert named in error.message
    assert (error.param, ROUTES[route].encode_error(error, HEAD).status) == ("messages", 400)


NO_PROMPT_CODE: list[list[Any]] = [
    *([], [MESSAGE, MESSAGE], speaking(("human", "a"), ("assistant", ""))),
    *([{"speaker": "human", "text": ""}], [{"speaker": "human"}], [None], [{"role": "user", "content": []}]),
]
NO_PROMPT_CHAT: list[list[Any]] = [
    *([], [None], [{"text": "a"}], speaking(("bot", "a")), speaking(("human", ""))),
    *(speaking(("system", "a")), speaking(("system", ""), ("human", "a"))),
    speaking(("human", "a"), ("human", "b")),
    speaking(("human", "a"), ("assistant", "b"), ("assistant", "c")),
    speaking(("human", "a"), ("system", "b")),
    speaking(("human", "a"), ("assistant", ""), ("human", "b")),
    speaking(("human", "a"), ("assistant", "b"), ("human", "")),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "messages"),
    [*(("code", messages) for messages in NO_PROMPT_CODE), *(("stream", messages) for messages in NO_PROMPT_CHAT)],
)
def test_messages_that_make_no_prompt_fail_as_the_model_would(route: str, messages: list[Any], stream: bool) -> None:
    error = refused(ROUTES[route], messages=messages, stream=stream)
    reply = ROUTES[route].encode_error(error, HEAD)
    assert isinstance(error, MessagesError)
    if stream:
        data = json.dumps({"error": error.message}, separators=(",", ":"))
        assert (reply.status, reply.media_type) == (200, "text/event-stream")
        assert reply.body == f"event: error\ndata: {data}\n\nevent: done\ndata: {{}}\n\n".encode()
    else:
        assert (reply.status, reply.media_type) == (400, "text/plain; charset=utf-8")
        assert reply.body == f"{error.message}\n".encode()


@pytest.mark.parametrize("version", [None, "1", "8"])
@pytest.mark.parametrize(
    ("turns", "prompt"),
    [
        ([("human", "hi")], "\n\nHuman: hi\n\nAssistant:"),
        ([("human", "hi"), ("assistant", "")], "\n\nHuman: hi\n\nAssistant:"),
        ([("human", "hi"), ("assistant", "well")], "\n\nHuman: hi\n\nAssistant: well"),
        (
            [("human", "a"), ("assistant", "b"), ("human", "c")],
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:",
        ),
        ([("system", "Be brief."), ("human", "a")], "Be brief.\n\nHuman: a\n\nAssistant:"),
    ],
)
def test_a_conversation_becomes_claudes_text_form(
    turns: list[tuple[str, str]], prompt: str, version: str | None
) -> None:
    assert chat(*turns, version=version) == prompt


IDENTITY = "You are Cody, an AI coding assistant from Sourcegraph."


def test_the_legacy_identity_becomes_the_system_message_and_loses_its_acknowledgement() -> None:
    turns = [("human", IDENTITY), ("assistant", "I am Cody."), ("human", "a")]
    assert chat(*turns, version=None) == f"{IDENTITY}\n\nHuman: a\n\nAssistant:"
    assert chat(*turns, version="1").startswith("\n\nHuman: You are Cody")


def test_a_legacy_identity_without_acknowledgement_loses_nothing() -> None:
    assert chat(("human", IDENTITY), ("human", "a"), version=None) == f"{IDENTITY}\n\nHuman: a\n\nAssistant:"


def test_the_last_words_of_a_legacy_assistant_lose_trailing_space() -> None:
    turns = [("human", "a"), ("assistant", " b \n")]
    assert chat(*turns, version=None) == "\n\nHuman: a\n\nAssistant:  b"
    assert chat(*turns, version="1") == "\n\nHuman: a\n\nAssistant:  b \n"


def test_a_legacy_question_without_answer_goes_with_it() -> None:
    turns = [("human", "a"), ("assistant", ""), ("human", "b"), ("assistant", "c"), ("human", "d")]
    assert chat(*turns, version=None) == "\n\nHuman: b\n\nAssistant: c\n\nHuman: d\n\nAssistant:"


def test_a_legacy_human_without_words_is_an_error() -> None:
    assert isinstance(refused(CHAT, None, messages=speaking(("human", ""))), MessagesError)


# Models


@pytest.mark.parametrize(
    ("spelled", "names"),
    [
        ("demo", ("demo",)),
        ("openaicompatible::v1::demo", ("demo", "openaicompatible::v1::demo")),
        ("a::v::org/demo", ("org/demo", "a::v::org/demo")),
        ("a::v::b::c", ("b::c", "a::v::b::c")),
        ("a::b", ("a::b",)),
        ("a::::b", ("a::::b",)),
        ("fireworks/starcoder", ("fireworks/starcoder", "starcoder")),
        (
            "accounts/fireworks/models/qwen",
            ("accounts/fireworks/models/qwen", "fireworks/models/qwen", "qwen"),
        ),
        ("org/", ("org/",)),
        ("a::v::org__demo", ("org__demo", "a::v::org__demo", "org/demo")),
        ("a/org__demo", ("a/org__demo", "org__demo", "org/demo")),
    ],
)
def test_each_spelling_of_a_model_has_its_readings_in_order(spelled: str, names: tuple[str, ...]) -> None:
    canonical = decode(model=spelled)
    assert (canonical.model, *canonical.other_models) == names


@pytest.mark.parametrize("sent", [{"model": ""}, {"model": None}])
def test_no_model_is_the_default_one(sent: dict[str, Any]) -> None:
    dialect = SourcegraphDialect(streamed=False, default_model="org/default")
    assert decode(dialect, **sent).model == "org/default"
    assert decode(dialect).model == "demo"


# Versions


@pytest.mark.parametrize(
    ("version", "cumulative"),
    [(None, True), ("", True), ("1", True), ("2", False), ("3", False), ("5", False), ("8", False), ("9", False)],
)
@pytest.mark.parametrize("route", ROUTES)
def test_text_is_cumulative_below_version_two(route: str, version: str | None, cumulative: bool) -> None:
    assert decode(ROUTES[route], version).cumulative is cumulative


BAD_VERSIONS = ["0", "00", "-1", "x", "1.0", "1x", " ", "+", "\u0661", "9" * 5000]


@pytest.mark.parametrize("version", BAD_VERSIONS)
@pytest.mark.parametrize("route", ROUTES)
def test_any_other_version_is_not_acceptable(route: str, version: str) -> None:
    error = refused(ROUTES[route], version)
    reply = ROUTES[route].encode_error(error, HEAD)
    assert isinstance(error, UnsupportedVersionError)
    assert (reply.status, reply.body) == (406, b"Unsupported API Version (Please update your client)\n")
    assert len(reply.body) == 52


def test_the_version_is_checked_before_the_body() -> None:
    assert isinstance(refused(version="0", messages=5), UnsupportedVersionError)


def test_the_body_is_checked_before_the_model_and_the_model_before_the_messages() -> None:
    assert "decode" in refused(model="", messages=5).message
    assert "model" in refused(model="", messages=[]).message
