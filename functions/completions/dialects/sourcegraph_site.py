"""What a Cody client asks a Sourcegraph site before its first completion: models, client settings, a little GraphQL.

The two configuration documents are indented JSON under ``text/plain``, as the original sends them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from completions.dialects.dialect import Resource, WireReply, WireRequest
from completions.dialects.sourcegraph import TEXT, VARY
from completions.dialects.sourcegraph_wire import SLASH, go_escaped, go_json
from completions.domain.catalog import ModelRoute
from completions.domain.metering import Principal

SITE_VERSION: Final = "6.1.0"
"""The Sourcegraph release whose API this is; clients choose their ``api-version`` by it."""

_STREAM_API_VERSION: Final = 8
_PROVIDER: Final = "openaicompatible"  # the one known to Cody that takes any model
_OPERATION: Final = re.compile(r"\b(?:query|mutation)\s+(\w+)")
_MOST_ANSWER_TOKENS: Final = 4000
# Cody builds a fill-in-the-middle prompt only for ids that hold one of these words
_INFILL_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "qwen": ("code-qwen",),
    "starcoder": ("starcoder",),
    "codellama": ("codellama", "llama-code"),
    "deepseek": ("deepseek",),
    "codegemma": ("codegemma",),
}


def site_resources(default_model: str | None, version: str) -> tuple[Resource, ...]:
    """``version`` is this gateway's own; the site's is ``SITE_VERSION``, whatever release of ours answers."""
    site = _Site(default_model, version)
    return (
        Resource("GET", "/.api/modelconfig/supported-models.json", site.supported_models),
        Resource("GET", "/.api/client-config", site.client_config),
        Resource("POST", "/.api/graphql", site.graphql),
    )


class _Site:
    def __init__(self, default_model: str | None, version: str) -> None:
        self._default_model = default_model
        self._version = version

    def supported_models(self, wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
        default = self._default(routes)
        reference = None if default is None else _reference(default)
        document = {
            "schemaVersion": "1.0",
            "revision": self._version,
            "providers": [{"id": _PROVIDER, "displayName": "Completions gateway"}],
            "models": [_model(route) for route in routes],
            "defaultModels": {}
            if reference is None
            else {"chat": reference, "fastChat": reference, "codeCompletion": reference},
        }
        return _document(document)

    def client_config(self, wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
        return _document(
            {
                "codyEnabled": True,
                "chatEnabled": True,
                "autoCompleteEnabled": True,
                "customCommandsEnabled": True,
                "attributionEnabled": False,
                "attribution": "none",
                "smartContextWindowEnabled": True,
                "modelsAPIEnabled": True,
                "latestSupportedCompletionsStreamAPIVersion": _STREAM_API_VERSION,
                "siteVersion": SITE_VERSION,
                "codeSearchEnabled": False,
                "notices": [],
            }
        )

    def graphql(self, wire: WireRequest, principal: Principal, routes: Sequence[ModelRoute]) -> WireReply:
        answer = _OPERATIONS.get(_operation(wire))
        if answer is None:
            body: object = {"data": None, "errors": [{"message": "This site does not answer this query."}]}
        else:
            body = {"data": answer(principal, self._default(routes))}
        return WireReply(200, go_json(body).encode(), "application/json", VARY)

    def _default(self, routes: Sequence[ModelRoute]) -> ModelRoute | None:
        """The configured model, if the caller may use it, or else the first."""
        named = (route for route in routes if self._default_model in (route.model_id, *route.aliases))
        return next(named, routes[0] if routes else None)


def _document(document: object) -> WireReply:
    text = json.dumps(document, ensure_ascii=False, indent=4)
    return WireReply(200, go_escaped(text).encode(), TEXT, VARY)


def _model(route: ModelRoute) -> dict[str, Any]:
    answer_tokens = min(_MOST_ANSWER_TOKENS, route.context_length // 4)
    return {
        "modelRef": _reference(route),
        "displayName": route.model_id,
        "modelName": _published_name(route),
        "capabilities": ["autocomplete", "chat"],
        "category": "balanced",
        "status": "stable",
        "tier": "enterprise",
        "contextWindow": {
            "maxInputTokens": route.context_length - answer_tokens,
            "maxOutputTokens": answer_tokens,
        },
        "clientSideConfig": {"openAICompatible": {}},
    }


def _reference(route: ModelRoute) -> str:
    return f"{_PROVIDER}::v1::{_published_name(route)}"


def _published_name(route: ModelRoute) -> str:
    """The id, or the alias by which Cody knows how to fill in the middle. A reference has no slash: ``SLASH`` stands
    for it, and is read back when a completion is asked for."""
    words = _INFILL_WORDS.get(route.fim_family or "", ())
    names = (route.model_id, *route.aliases)
    known = (name for name in names if any(word in name for word in words))
    plain = (name for name in names if "/" not in name)
    return next(known, next(plain, route.model_id)).replace("/", SLASH)


def _operation(wire: WireRequest) -> str:
    """By the query string, as Cody sends it, or by the body."""
    for name in wire.query:
        if name in _OPERATIONS:
            return name
    try:
        body = json.loads(wire.body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(body, dict):
        return ""
    named, query = body.get("operationName"), body.get("query")
    if isinstance(named, str) and named:
        return named
    found = _OPERATION.search(query) if isinstance(query, str) else None
    return found[1] if found else ""


def _product_version(principal: Principal, default: ModelRoute | None) -> dict[str, Any]:
    return {"site": {"productVersion": SITE_VERSION}}


def _current_user(principal: Principal, default: ModelRoute | None) -> dict[str, Any]:
    user = {
        "id": principal.key_id,
        "username": principal.owner,
        "hasVerifiedEmail": True,
        "displayName": principal.owner,
        "avatarURL": None,
        "primaryEmail": None,
        "organizations": {"nodes": []},
    }
    return {"currentUser": user}


def _cody_enabled(principal: Principal, default: ModelRoute | None) -> dict[str, Any]:
    return {"site": {"isCodyEnabled": True}}


def _llm_configuration(principal: Principal, default: ModelRoute | None) -> dict[str, Any]:
    if default is None:
        return {"site": {"codyLLMConfiguration": None}}
    name, tokens = f"{_PROVIDER}/{_published_name(default)}", default.context_length
    configuration = {
        "chatModel": name,
        "chatModelMaxTokens": tokens,
        "fastChatModel": name,
        "fastChatModelMaxTokens": tokens,
        "completionModel": name,
        "completionModelMaxTokens": tokens,
    }
    return {"site": {"codyLLMConfiguration": configuration}}


def _llm_provider(principal: Principal, default: ModelRoute | None) -> dict[str, Any]:
    return {"site": {"codyLLMConfiguration": {"provider": _PROVIDER}}}


_OPERATIONS: Final[Mapping[str, Callable[[Principal, ModelRoute | None], dict[str, Any]]]] = {
    "SiteProductVersion": _product_version,
    "CurrentUser": _current_user,
    "SiteHasCodyEnabled": _cody_enabled,
    "CurrentSiteCodyLlmConfiguration": _llm_configuration,
    "CurrentSiteCodyLlmProvider": _llm_provider,
}
