"""Who is let in, and what is told to who is not."""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import Any

import pytest

from completions.dialects.dialect import Dialect, WireRequest
from completions.dialects.openai import OpenAIDialect
from completions.dialects.scale import ScaleDialect
from completions.dialects.sourcegraph import SourcegraphDialect
from completions.domain.errors import AuthenticationError, PermissionDeniedError
from completions.domain.metering import Principal
from completions.web.auth import authenticate, require_admin, secret_digest
from fakes import InMemoryRegistry, ManualClock, principal

SECRET = "sk-a-key"
CLOCK = ManualClock()
NOW = CLOCK.now()


class CountingRegistry(InMemoryRegistry):
    reads = 0

    def principal(self, secret_sha256: str, *, next_model: str | None = None) -> Principal | None:
        self.reads += 1
        return super().principal(secret_sha256, next_model=next_model)


def wire(query: dict[str, str] | None = None, **headers: str) -> WireRequest:
    return WireRequest("POST", "/", query or {}, {name.replace("_", "-"): text for name, text in headers.items()}, b"")


def basic(secret: str) -> str:
    return "Basic " + base64.b64encode(f"{secret}:".encode()).decode()


def sent(secret: str) -> list[tuple[Dialect, WireRequest]]:
    """The key in every form that can carry it."""
    return [
        (OpenAIDialect(), wire(authorization=f"Bearer {secret}")),
        (ScaleDialect(), wire(authorization=f"Bearer {secret}")),
        (ScaleDialect(), wire(authorization=basic(secret))),
        (ScaleDialect(), wire(x_api_key=secret)),
        (SourcegraphDialect(False), wire({"token": secret})),
        (SourcegraphDialect(False), wire(authorization=f"token {secret}")),
        (SourcegraphDialect(False), wire(authorization=basic(secret))),
    ]


@pytest.mark.parametrize("form", range(7))
def test_a_known_key_is_let_in_in_every_form(form: int) -> None:
    registry = InMemoryRegistry({secret_digest(SECRET): principal()}, [])
    assert authenticate(*sent(SECRET)[form], registry, CLOCK) == principal()


@pytest.mark.parametrize("form", range(7))
@pytest.mark.parametrize(
    "secret",
    ["x" * 513, "x" * 100_000, "sk-é", "sk-ключ", "sk-\x00", "sk-\x1b[31m", "sk-\x7f", "sk-a\tb", "sk a"],
    ids=["513", "huge", "latin-1", "cyrillic", "nul", "escape", "delete", "tab", "blank"],
)
def test_what_cannot_be_a_key_is_refused_before_any_read(form: int, secret: str) -> None:
    registry = CountingRegistry({}, [])
    with pytest.raises(AuthenticationError) as caught:
        authenticate(*sent(secret)[form], registry, CLOCK)
    assert registry.reads == 0
    assert secret not in caught.value.message


def test_a_key_of_512_characters_is_looked_for() -> None:
    registry = InMemoryRegistry({secret_digest("x" * 512): principal()}, [])
    assert authenticate(*sent("x" * 512)[0], registry, CLOCK) == principal()


@pytest.mark.parametrize("form", range(7))
def test_an_empty_credential_is_refused_before_any_read(form: int) -> None:
    registry = CountingRegistry({secret_digest(""): principal()}, [])
    with pytest.raises(AuthenticationError):
        authenticate(*sent("")[form], registry, CLOCK)
    assert registry.reads == 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"disabled": True}, "The API key is disabled."),
        ({"expires_at": NOW}, "The API key has expired."),
        ({"expires_at": NOW - timedelta(days=400)}, "The API key has expired."),
    ],
)
def test_a_key_that_is_of_no_use_any_more_is_refused(fields: dict[str, Any], told: str) -> None:
    registry = InMemoryRegistry({secret_digest(SECRET): principal(**fields)}, [])
    with pytest.raises(AuthenticationError) as caught:
        authenticate(*sent(SECRET)[0], registry, CLOCK)
    assert (caught.value.message, caught.value.code) == (told, "invalid_api_key")


def test_a_key_serves_to_the_last_moment() -> None:
    ends = principal(expires_at=NOW + timedelta(microseconds=1))
    registry = InMemoryRegistry({secret_digest(SECRET): ends}, [])
    assert authenticate(*sent(SECRET)[0], registry, CLOCK) == ends


def test_only_an_admins_key_passes_where_an_admin_is_needed() -> None:
    require_admin(principal(admin=True))
    with pytest.raises(PermissionDeniedError, match="needs an admin's API key"):
        require_admin(principal())
