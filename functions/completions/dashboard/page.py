"""The page as one document with nothing outside it, and the headers under which a browser runs this text alone."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

_STYLE: Final = re.compile(r'<link rel="stylesheet" href="([\w.]+)" />')
_SCRIPT: Final = re.compile(r'<script src="([\w.]+)"></script>')


@dataclass(frozen=True, slots=True)
class Page:
    """A document and its response headers."""

    body: str
    headers: Mapping[str, str]


def load_page() -> Page:
    """The dashboard, put together from the files beside this one."""
    folder = files(__package__)
    body = folder.joinpath("page.html").read_text(encoding="utf-8")
    body, styles = _inlined(body, _STYLE, "style", folder)
    body, scripts = _inlined(body, _SCRIPT, "script", folder)
    return Page(body, _headers(scripts, styles))


def _inlined(body: str, reference: re.Pattern[str], tag: str, folder: Traversable) -> tuple[str, list[str]]:
    """``body`` with each file that is referred to in place of its reference, and the files' hashes."""
    hashes: list[str] = []

    def element(match: re.Match[str]) -> str:
        text = folder.joinpath(match[1]).read_text(encoding="utf-8")
        if f"</{tag}" in text:
            raise ValueError(f"{match[1]} would end its own element")
        hashes.append(_hash(text))
        return f"<{tag}>{text}</{tag}>"

    return reference.sub(element, body), hashes


def _hash(text: str) -> str:
    """A source of the Content Security Policy: the text itself, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _headers(scripts: list[str], styles: list[str]) -> dict[str, str]:
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(scripts),
        "style-src": " ".join(styles),
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # no text ever becomes markup
        "trusted-types": "'none'",
    }
    return {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-frame-options": "DENY",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",  # a deployment's page and its policy change together
    }
