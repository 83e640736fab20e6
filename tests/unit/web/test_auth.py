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
from completions.domain.ports import Registry
from completions.web.auth import IamAuthenticator, KeyAuthenticator, require_admin, secret_digest
from completions.web.callers import caller_digest
from fakes import InMemoryRegistry, ManualClock, principal

SECRET = "sk-a-key"
CLOCK = ManualClock()
NOW = CLOCK.now()
ROLE = "arn:aws:iam::123456789012:role/ci"
SESSION = "arn:aws:sts::123456789012:assumed-role/ci/ada"


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


def by_key(registry: Registry, request: tuple[Dialect, WireRequest], caller: str | None = None) -> Principal:
    return KeyAuthenticator(registry, CLOCK).authenticate(*request, caller=caller)


def by_caller(registry: Registry, caller: str | None, request: tuple[Dialect, WireRequest] | None = None) -> Principal:
    return IamAuthenticator(registry, CLOCK).authenticate(*(request or (OpenAIDialect(), wire())), caller=caller)


@pytest.mark.parametrize("form", range(7))
def test_a_known_key_is_let_in_in_every_form(form: int) -> None:
    registry = InMemoryRegistry({secret_digest(SECRET): principal()}, [])
    assert by_key(registry, sent(SECRET)[form]) == principal()


@pytest.mark.parametrize("form", range(7))
@pytest.mark.parametrize(
    "secret",
    ["x" * 513, "x" * 100_000, "sk-é", "sk-ключ", "sk-\x00", "sk-\x1b[31m", "sk-\x7f", "sk-a\tb", "sk a"],
    ids=["513", "huge", "latin-1", "cyrillic", "nul", "escape", "delete", "tab", "blank"],
)
def test_what_cannot_be_a_key_is_refused_before_any_read(form: int, secret: str) -> None:
    registry = CountingRegistry({}, [])
    with pytest.raises(AuthenticationError) as caught:
        by_key(registry, sent(secret)[form])
    assert registry.reads == 0
    assert secret not in caught.value.message


def test_a_key_of_512_characters_is_looked_for() -> None:
    registry = InMemoryRegistry({secret_digest("x" * 512): principal()}, [])
    assert by_key(registry, sent("x" * 512)[0]) == principal()


@pytest.mark.parametrize("form", range(7))
def test_an_empty_credential_is_refused_before_any_read(form: int) -> None:
    registry = CountingRegistry({secret_digest(""): principal()}, [])
    with pytest.raises(AuthenticationError):
        by_key(registry, sent("")[form])
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
        by_key(registry, sent(SECRET)[0])
    assert (caught.value.message, caught.value.code) == (told, "invalid_api_key")


def test_a_key_serves_to_the_last_moment() -> None:
    ends = principal(expires_at=NOW + timedelta(microseconds=1))
    registry = InMemoryRegistry({secret_digest(SECRET): ends}, [])
    assert by_key(registry, sent(SECRET)[0]) == ends


def test_only_an_admins_key_passes_where_an_admin_is_needed() -> None:
    require_admin(principal(admin=True))
    with pytest.raises(PermissionDeniedError, match="needs an admin's API key"):
        require_admin(principal())


def test_who_signed_does_not_count_where_keys_do() -> None:
    registry = InMemoryRegistry({secret_digest(SECRET): principal(), caller_digest(ROLE): principal(key_id="ci")}, [])
    assert by_key(registry, sent(SECRET)[0], caller=SESSION).key_id == "key-1"
    with pytest.raises(AuthenticationError, match="No API key was sent"):
        by_key(registry, (OpenAIDialect(), wire()), caller=SESSION)


@pytest.mark.parametrize("form", range(7))
def test_no_secret_leads_to_a_callers_row(form: int) -> None:
    registry = CountingRegistry({caller_digest(ROLE): principal()}, [])
    for secret in (f"iam {ROLE}", ROLE, SESSION, caller_digest(ROLE)):
        with pytest.raises(AuthenticationError):
            by_key(registry, sent(secret)[form])


@pytest.mark.parametrize("caller", [ROLE, SESSION])
def test_a_caller_is_let_in_by_its_row(caller: str) -> None:
    registry = InMemoryRegistry({caller_digest(ROLE): principal(key_id="ci")}, [])
    assert by_caller(registry, caller).key_id == "ci"


def test_a_callers_row_and_the_model_are_one_read() -> None:
    asked: list[str | None] = []

    class Told(InMemoryRegistry):
        def principal(self, secret_sha256: str, *, next_model: str | None = None) -> Principal | None:
            asked.append(next_model)
            return super().principal(secret_sha256, next_model=next_model)

    registry = Told({caller_digest(ROLE): principal()}, [])
    IamAuthenticator(registry, CLOCK).authenticate(OpenAIDialect(), wire(), caller=ROLE, next_model="demo")
    assert asked == ["demo"]


@pytest.mark.parametrize("caller", [None, ""])
@pytest.mark.parametrize("form", range(7))
def test_without_a_signature_no_key_helps(form: int, caller: str | None) -> None:
    registry = CountingRegistry({secret_digest(SECRET): principal()}, [])
    with pytest.raises(AuthenticationError, match="not behind AWS_IAM authorization"):
        by_caller(registry, caller, sent(SECRET)[form])
    assert registry.reads == 0


def test_a_caller_without_a_row_is_told_what_the_operator_must_do() -> None:
    with pytest.raises(PermissionDeniedError) as caught:
        by_caller(InMemoryRegistry({secret_digest(SECRET): principal()}, []), SESSION, sent(SECRET)[0])
    assert caught.value.message.startswith(f"{ROLE} is not known here")
    assert f"completions keys create --arn {ROLE}" in caught.value.message
    assert "ada" not in caught.value.message


@pytest.mark.parametrize("caller", ["arn:aws:iam::123456789012:group/all", "AIDAEXAMPLE", "arn:aws:s3:::bucket"])
def test_what_names_no_caller_is_refused_before_any_read(caller: str) -> None:
    registry = CountingRegistry({caller_digest(caller): principal()}, [])
    with pytest.raises(PermissionDeniedError) as caught:
        by_caller(registry, caller)
    assert caught.value.message == f"{caller} is not the ARN of a role, a user or root."
    assert registry.reads == 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"disabled": True}, f"The key of {ROLE} is disabled."),
        ({"expires_at": NOW}, f"The key of {ROLE} has expired."),
    ],
)
def test_a_callers_row_that_is_of_no_use_any_more_refuses_it(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(PermissionDeniedError) as caught:
        by_caller(InMemoryRegistry({caller_digest(ROLE): principal(**fields)}, []), SESSION)
    assert caught.value.message == told
