"""The environment of a function, read once."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from completions.settings import Settings, SettingsError, read_settings

TABLES = {"REGISTRY_TABLE": "keys", "USAGE_TABLE": "usage"}


def test_two_table_names_are_enough() -> None:
    assert read_settings(TABLES) == Settings(
        registry_table="keys",
        usage_table="usage",
        registry_cache_seconds=30,
        usage_retention_days=400,
        upstream_connect_timeout=3,
        upstream_read_timeout=60,
    )


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("REGISTRY_CACHE_SECONDS", "0", "registry_cache_seconds", 0),
        ("REGISTRY_CACHE_SECONDS", "2.5", "registry_cache_seconds", 2.5),
        ("USAGE_RETENTION_DAYS", "7", "usage_retention_days", 7),
        ("UPSTREAM_CONNECT_TIMEOUT", "1", "upstream_connect_timeout", 1),
        ("UPSTREAM_READ_TIMEOUT", "0.5", "upstream_read_timeout", 0.5),
    ],
)
def test_each_variable_sets_its_field(variable: str, text: str, field: str, value: float) -> None:
    assert getattr(read_settings(TABLES | {variable: text}), field) == value


@pytest.mark.parametrize(
    "change",
    [
        {"REGISTRY_TABLE": ""},
        {"USAGE_TABLE": ""},
        {"REGISTRY_CACHE_SECONDS": "-1"},
        {"USAGE_RETENTION_DAYS": "0"},
        {"USAGE_RETENTION_DAYS": "1.5"},
        {"UPSTREAM_CONNECT_TIMEOUT": "0"},
        {"UPSTREAM_READ_TIMEOUT": "soon"},
    ],
)
def test_a_variable_at_fault_is_named(change: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=next(iter(change))):
        read_settings(TABLES | change)


def test_every_variable_at_fault_is_named_at_once() -> None:
    with pytest.raises(SettingsError, match=r"REGISTRY_TABLE.*USAGE_TABLE.*UPSTREAM_READ_TIMEOUT"):
        read_settings({"UPSTREAM_READ_TIMEOUT": "soon"})


def test_a_fault_never_shows_the_variables_value() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(TABLES | {"USAGE_RETENTION_DAYS": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    assert read_settings(TABLES | {"UPSTREAM_READ_TIMEOUT": ""}).upstream_read_timeout == 60


def test_other_variables_are_not_ours() -> None:
    assert read_settings(TABLES | {"PATH": "/bin", "AWS_REGION": "us-east-1"}) == read_settings(TABLES)


def test_settings_cannot_be_changed() -> None:
    settings = read_settings(TABLES)
    with pytest.raises(ValidationError):
        settings.usage_table = "other"  # type: ignore[misc]


def test_the_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TABLES.items():
        monkeypatch.setenv(name, value)
    assert read_settings().registry_table == "keys"


def test_fields_to_let_through_are_separated_by_commas() -> None:
    settings = read_settings(TABLES | {"OPENAI_EXTRA_FIELDS": "top_k, min_p,"})
    assert settings.openai_extra_fields == {"top_k", "min_p"}


def test_a_field_nobody_knows_cannot_be_let_through() -> None:
    with pytest.raises(SettingsError, match="no such field: messages; there are "):
        read_settings(TABLES | {"OPENAI_EXTRA_FIELDS": "messages"})


@pytest.mark.parametrize("mode", ["keys", "iam"])
def test_callers_are_known_in_one_of_two_ways(mode: str) -> None:
    assert read_settings(TABLES).auth_mode == "keys"
    assert read_settings(TABLES | {"AUTH_MODE": mode}).auth_mode == mode
    with pytest.raises(SettingsError, match="AUTH_MODE: Input should be 'keys' or 'iam'"):
        read_settings(TABLES | {"AUTH_MODE": mode.upper()})


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", ()),
        (" , ", ()),
        ("*", ("*",)),
        ("https://app.example.com", ("https://app.example.com",)),
        ("https://a.example, http://localhost:3000 ,", ("https://a.example", "http://localhost:3000")),
        ("http://[::1]:8000", ("http://[::1]:8000",)),
        ("vscode-webview://0a1b", ("vscode-webview://0a1b",)),
        ("https://a.example:80", ("https://a.example:80",)),
    ],
)
def test_origins_are_separated_by_commas(text: str, origins: tuple[str, ...]) -> None:
    assert read_settings(TABLES | {"CORS_ORIGINS": text}).cors_origins == origins


@pytest.mark.parametrize(
    "origin",
    [
        "app.example.com",
        "https://",
        "https://a.example/",
        "https://a.example/app",
        "https://A.example",
        "HTTPS://a.example",
        "https://a.example:443",
        "http://a.example:80",
        "https://*.example",
        "null",
        "https://a.example?x",
        "https://u@a.example",
        "https://a.example https://b.example",
    ],
)
def test_what_no_browser_calls_an_origin_is_refused_by_name(origin: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(TABLES | {"CORS_ORIGINS": f"https://good.example,{origin}"})
    assert f"CORS_ORIGINS: Value error, {origin!r} is no origin" in str(caught.value)


def test_every_origin_stands_alone() -> None:
    with pytest.raises(SettingsError, match=r"CORS_ORIGINS: .* stands alone"):
        read_settings(TABLES | {"CORS_ORIGINS": "*,https://app.example.com"})
