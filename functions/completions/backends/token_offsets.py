r"""Where each token begins in the returned text, counted here.

vLLM counts the text it has sent, which lags behind while it holds text back for a stop string, and counts a token that
is no character by itself by its escaped form (``bytes:\xe2\x82``), so its offsets neither rise nor slice the text back.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

_BYTES: Final = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")


class TokenOffsets:
    """The running count of one choice. Tokens that share a character share its offset."""

    def __init__(self) -> None:
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, tokens: tuple[str, ...]) -> tuple[int, ...]:
        """The offsets of the next ``tokens``, in characters."""
        offsets = []
        for token in tokens:
            offsets.append(self._position)
            self._position += len(self._text(token))
        return tuple(offsets)

    def _text(self, token: str) -> str:
        escaped = _BYTES.fullmatch(token)
        if escaped is None:
            self._decoder.reset()
            return token
        return self._decoder.decode(bytes.fromhex(escaped[1].replace("\\x", "")))
