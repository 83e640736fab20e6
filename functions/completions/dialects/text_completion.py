"""The ``text_completion`` object, as OpenAI made it and others copied it: the parts that are the same everywhere."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from completions.domain.completion import Logprobs

OBJECT: Final = "text_completion"
_ID_ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # ``json.dumps`` makes one each time


def to_json(value: object) -> str:
    """Compact JSON on one line, characters as they are."""
    return _ENCODER.encode(value)


def completion_id(request_id: str) -> str:
    """``cmpl-`` and 29 alphanumerics, always the same for one logical request."""
    number = int.from_bytes(hashlib.sha256(request_id.encode()).digest())
    letters = []
    for _ in range(29):
        number, digit = divmod(number, len(_ID_ALPHABET))
        letters.append(_ID_ALPHABET[digit])
    return "cmpl-" + "".join(letters)


def logprobs_object(logprobs: Logprobs, shift: int = 0) -> dict[str, Any]:
    """The four arrays; ``shift`` characters are added to each offset."""
    return {
        "tokens": logprobs.tokens,
        "token_logprobs": logprobs.token_logprobs,
        "top_logprobs": logprobs.top_logprobs,
        "text_offset": [offset + shift for offset in logprobs.text_offset],
    }
