"""What a Cody client asks a site before its first completion, and what it hears."""

from __future__ import annotations

import json
from typing import Any

import pytest

from completions.dialects.dialect import WireReply, WireRequest
from completions.dialects.sourcegraph import SourcegraphDialect
from completions.dialects.sourcegraph_site import site_resources
from completions.domain.catalog import ModelRoute
from fakes import principal, route

MODELS = "/.api/modelconfig/supported-models.json"
CONFIG = "/.api/client-config"
GRAPHQL = "/.api/graphql"


def ask(
    path: str,
    *routes: ModelRoute,
    default: str | None = None,
    query: dict[str, str] | None = None,
    body: bytes = b"",
) -> WireReply:
    """What the resource at ``path`` replies to Alice."""
    (resource,) = [one for one in site_resources(default, "1.2.3") if one.path == path]
    return resource.reply(WireRequest(resource.method, path, query or {}, {}, body), principal(), routes)


def models(*routes: ModelRoute, default: str | None = None) -> Any:
    return json.loads(ask(MODELS, *routes, default=default).body)


def data(operation: str, *routes: ModelRoute, default: str | None = None) -> Any:
    """A query as Cody sends it: named by the query string."""
    answer = json.loads(ask(GRAPHQL, *routes, default=default, query={operation: ""}).body)
    assert set(answer) == {"data"}
    return answer["data"]


def resolved(reference: str) -> tuple[str, ...]:
    """The registry names that a completion request for ``reference`` tries, in order."""
    body = {"model": reference, "messages": [{"speaker": "human", "text": "a"}]}
    wire = WireRequest("POST", "/.api/completions/code", {}, {}, json.dumps(body).encode())
    canonical = SourcegraphDialect(streamed=False).decode(wire)
    return (canonical.model, *canonical.other_models)


def test_the_routes_are_those_of_the_original() -> None:
    assert [(one.method, one.path) for one in site_resources(None, "1")] == [
        ("GET", MODELS),
        ("GET", CONFIG),
        ("POST", GRAPHQL),
    ]


# supported-models.json


def test_the_list_of_models_byte_for_byte() -> None:
    assert ask(MODELS, route(context_length=8192)).body.decode() == (
        """{
    "schemaVersion": "1.0",
    "revision": "1.2.3",
    "providers": [
        {
            "id": "openaicompatible",
            "displayName": "Completions gateway"
        }
    ],
    "models": [
        {
            "modelRef": "openaicompatible::v1::demo",
            "displayName": "demo",
            "modelName": "demo",
            "capabilities": [
                "autocomplete",
                "chat"
            ],
            "category": "balanced",
            "status": "stable",
            "tier": "enterprise",
            "contextWindow": {
                "maxInputTokens": 6144,
                "maxOutputTokens": 2048
            },
            "clientSideConfig": {
                "openAICompatible": {}
            }
        }
    ],
    "defaultModels": {
        "chat": "openaicompatible::v1::demo",
        "fastChat": "openaicompatible::v1::demo",
        "codeCompletion": "openaicompatible::v1::demo"
    }
}"""
    )


@pytest.mark.parametrize("path", [MODELS, CONFIG])
def test_documents_are_indented_json_sent_as_plain_text(path: str) -> None:
    reply = ask(path, route())
    assert (reply.status, reply.media_type, reply.headers) == (
        200,
        "text/plain; charset=utf-8",
        {"vary": "Authorization"},
    )
    assert reply.body.startswith(b'{\n    "')


def test_no_models_are_an_empty_list_without_defaults() -> None:
    found = models(default="demo")
    assert (found["models"], found["defaultModels"]) == ([], {})


@pytest.mark.parametrize(
    ("default", "expected"),
    [(None, "a"), ("b", "b"), ("bee", "b"), ("gone", "a")],
)
def test_the_default_models_are_members_of_the_list(default: str | None, expected: str) -> None:
    found = models(route(model_id="a"), route(model_id="b", aliases=("bee",)), default=default)
    assert set(found["defaultModels"].values()) == {f"openaicompatible::v1::{expected}"}
    assert set(found["defaultModels"].values()) <= {model["modelRef"] for model in found["models"]}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (route(model_id="demo", aliases=("other",)), "demo"),
        (route(model_id="org/demo"), "org__demo"),
        (route(model_id="org/demo", aliases=("a/b", "plain")), "plain"),
        (route(model_id="a/b__c/d"), "a__b__c__d"),
        (route(model_id="qwen2.5-coder", fim_family="qwen", aliases=("x", "code-qwen-7b")), "code-qwen-7b"),
        (route(model_id="qwen2.5-coder", fim_family="qwen", aliases=("org/code-qwen",)), "org__code-qwen"),
        (route(model_id="qwen2.5-coder", fim_family="qwen"), "qwen2.5-coder"),
        (route(model_id="m", fim_family="codestral", aliases=("code-qwen",)), "m"),
        (route(model_id="m", fim_family="codellama", aliases=("llama-code-13b",)), "llama-code-13b"),
    ],
)
def test_a_model_is_published_without_slashes_and_by_the_name_cody_can_fill_in(model: ModelRoute, name: str) -> None:
    (found,) = models(model)["models"]
    assert found["modelRef"] == f"openaicompatible::v1::{name}"


@pytest.mark.parametrize(
    "model",
    [
        route(model_id="demo"),
        route(model_id="org/demo"),
        route(model_id="org/team/demo"),
        route(model_id="a__b"),
        route(model_id="demo:latest"),
        route(model_id="a::b"),
        route(model_id="org/demo", aliases=("plain",)),
    ],
    ids=lambda model: model.model_id,
)
def test_every_published_name_leads_back_to_its_model(model: ModelRoute) -> None:
    known = {model.model_id, *model.aliases}
    (found,) = models(model)["models"]
    legacy = data("CurrentSiteCodyLlmConfiguration", model)["site"]["codyLLMConfiguration"]["completionModel"]
    for spelled in (found["modelRef"], found["modelName"], legacy):
        assert known & set(resolved(spelled))


def test_the_context_window_is_shared_by_question_and_answer() -> None:
    windows = [
        models(route(context_length=length))["models"][0]["contextWindow"] for length in (4, 4096, 16_384, 131_072)
    ]
    assert [window["maxOutputTokens"] for window in windows] == [1, 1024, 4000, 4000]
    assert [sum(window.values()) for window in windows] == [4, 4096, 16_384, 131_072]


def test_documents_are_escaped_as_go_escapes_them() -> None:
    assert b"a\\u003cb\\u0026c" in ask(MODELS, route(model_id="a<b&c")).body


# client-config


def test_the_client_settings_have_the_fields_that_cody_reads() -> None:
    found = json.loads(ask(CONFIG).body)
    assert found["latestSupportedCompletionsStreamAPIVersion"] == 8
    assert (found["siteVersion"], found["attribution"], found["notices"]) == ("6.1.0", "none", [])
    assert all(found[name] is True for name in ("codyEnabled", "chatEnabled", "autoCompleteEnabled"))
    assert all(isinstance(found[name], bool) for name in ("customCommandsEnabled", "attributionEnabled"))
    assert all(isinstance(found[name], bool) for name in ("smartContextWindowEnabled", "modelsAPIEnabled"))


# GraphQL


def test_the_products_version_byte_for_byte() -> None:
    reply = ask(GRAPHQL, query={"SiteProductVersion": ""})
    assert reply.body == b'{"data":{"site":{"productVersion":"6.1.0"}}}'
    assert (reply.status, reply.media_type) == (200, "application/json")


def test_the_current_user_is_the_keys_owner() -> None:
    assert data("CurrentUser")["currentUser"] == {
        "id": "key-1",
        "username": "alice",
        "hasVerifiedEmail": True,
        "displayName": "alice",
        "avatarURL": None,
        "primaryEmail": None,
        "organizations": {"nodes": []},
    }


def test_cody_is_enabled() -> None:
    assert data("SiteHasCodyEnabled") == {"site": {"isCodyEnabled": True}}


def test_the_configured_models_are_the_default_one() -> None:
    found = data("CurrentSiteCodyLlmConfiguration", route(model_id="a"), route(model_id="b/c"), default="b/c")
    assert found["site"]["codyLLMConfiguration"] == {
        "chatModel": "openaicompatible/b__c",
        "chatModelMaxTokens": 4096,
        "fastChatModel": "openaicompatible/b__c",
        "fastChatModelMaxTokens": 4096,
        "completionModel": "openaicompatible/b__c",
        "completionModelMaxTokens": 4096,
    }


def test_without_models_nothing_is_configured() -> None:
    assert data("CurrentSiteCodyLlmConfiguration") == {"site": {"codyLLMConfiguration": None}}


def test_the_provider_is_one_that_cody_knows() -> None:
    assert data("CurrentSiteCodyLlmProvider") == {"site": {"codyLLMConfiguration": {"provider": "openaicompatible"}}}


@pytest.mark.parametrize(
    "body",
    [
        {"query": "query SiteHasCodyEnabled { site { isCodyEnabled } }"},
        {"query": "\nquery   SiteHasCodyEnabled($a: Int) {\n}", "variables": {}},
        {"operationName": "SiteHasCodyEnabled", "query": "query Other { a } query SiteHasCodyEnabled { b }"},
        {"operationName": None, "query": "query SiteHasCodyEnabled { a }"},
    ],
)
@pytest.mark.parametrize("query", [{}, {"Unheard": ""}])
def test_the_operation_may_be_named_by_the_body(body: Any, query: dict[str, str]) -> None:
    reply = ask(GRAPHQL, query=query, body=json.dumps(body).encode())
    assert reply.body == b'{"data":{"site":{"isCodyEnabled":true}}}'


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b"5", b"{}", b"\xff", b"[" * 100_000, b'{"query":5}', b'{"operationName":[]}'),
        *(b'{"query":"query ViewerSettings { a }"}', b'{"query":"{ site { productVersion } }"}'),
    ],
    ids=lambda body: repr(body[:40]),
)
def test_any_other_query_is_answered_by_an_error_that_clients_expect(body: bytes) -> None:
    reply = ask(GRAPHQL, query={"ViewerSettings": ""}, body=body)
    assert (reply.status, reply.body) == (
        200,
        b'{"data":null,"errors":[{"message":"This site does not answer this query."}]}',
    )
