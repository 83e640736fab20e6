"""The dashboard's page as a response: its headers, and what they allow."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx

from completions.handlers import dashboard
from completions_cli.local.stack import LocalStack


def answer(project_root: Path) -> dict[str, Any]:
    return dashboard.handler(json.loads((project_root / "events" / "dashboard.json").read_text()), None)


def test_the_function_answers_its_event_with_the_page(project_root: Path) -> None:
    reply = answer(project_root)
    assert reply["statusCode"] == 200
    assert reply["headers"]["content-type"] == "text/html; charset=utf-8"
    assert reply["headers"]["x-request-id"] == "3f1c9a52-7f0e-4d7e-9a0b-1f6d3f1e2c17"
    assert reply["body"].startswith("<!doctype html>")


def test_the_policy_allows_the_pages_own_text_alone(project_root: Path) -> None:
    reply = answer(project_root)
    headers, body = reply["headers"], reply["body"]
    policy = {name: values.split() for name, _, values in (one.partition(" ") for one in _policy(headers))}
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        inline = re.findall(rf"<{tag}>(.*?)</{tag}>", body, re.DOTALL)
        assert inline
        assert body.count(f"<{tag}") == len(inline)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
        assert policy[directive] == [f"'sha256-{digest}'" for digest in digests]
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
    assert policy["frame-ancestors"] == ["'none'"]
    assert policy["connect-src"] == ["'self'"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "http" not in headers["content-security-policy"]


def _policy(headers: dict[str, str]) -> list[str]:
    return headers["content-security-policy"].split("; ")


def test_the_other_headers_keep_the_page_to_itself(project_root: Path) -> None:
    headers = answer(project_root)["headers"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"


def test_the_page_names_no_other_host(project_root: Path) -> None:
    addresses = set(re.findall(r"https?://[\w.]+", answer(project_root)["body"]))
    assert addresses == {"http://www.w3.org"}  # the name of SVG's elements


def test_the_function_starts_without_a_web_framework() -> None:
    code = "import sys, completions.handlers.dashboard; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"fastapi", "starlette", "mangum", "pydantic", "boto3"} & set(modules)


def test_the_local_stack_serves_it(stack: LocalStack, buffered_url: str) -> None:
    for base in (stack.base_url, buffered_url):
        reply = httpx.get(f"{base}/dashboard")
        assert reply.status_code == 200
        assert reply.headers["x-frame-options"] == "DENY"
        assert "unsafe-inline" not in reply.headers["content-security-policy"]
        assert "Completions gateway" in reply.text
