"""Text to token ids and back, for the embedded model.

Ids, in this order: 256 byte tokens (id = byte value), the special tokens, then the corpus's most frequent pieces. The
byte tokens make every text encodable, so a rare character may span several tokens, as in real tokenizers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

# A word with the space before it, a short number, a newline with its indent, other blanks, a run of punctuation.
PIECE = re.compile(r" ?[^\W\d]\w*|\d{1,3}|\n[ \t]*|[^\S\n]+| ?[^\w\s]+")
VOCABULARY_SIZE = 8192
MAX_PIECE_CHARS = 32


class Special(IntEnum):
    """Ids of the special tokens, in the spelling of Qwen2.5-Coder."""

    END_OF_TEXT = 256
    FIM_PREFIX = 257
    FIM_SUFFIX = 258
    FIM_MIDDLE = 259
    FIM_PAD = 260
    REPO_NAME = 261
    FILE_SEP = 262

    @property
    def spelling(self) -> str:
        """The marker as it stands in prompt text, such as ``<|fim_prefix|>``."""
        return f"<|{self.name.lower().replace('end_of_text', 'endoftext')}|>"


class Tokenizer:
    """A fixed vocabulary. ``encode`` and ``decode`` are inverse for every text without lone surrogates."""

    def __init__(self, pieces: Sequence[str]) -> None:
        """``pieces`` get the ids after the special tokens, in the order given."""
        self._specials: dict[str, int] = {special.spelling: int(special) for special in Special}
        self._split_specials = re.compile("(" + "|".join(map(re.escape, self._specials)) + ")")
        self._ids = {chr(byte): byte for byte in range(128)}
        self._bytes = [bytes([byte]) for byte in range(256)] + [spelling.encode() for spelling in self._specials]
        for piece in pieces:
            self._ids[piece] = len(self._bytes)
            self._bytes.append(piece.encode())

    @classmethod
    def train(cls, documents: Iterable[str], size: int = VOCABULARY_SIZE) -> Tokenizer:
        """Keep the most frequent pieces of ``documents``; equal counts in text order, so the ids are reproducible."""
        counts: Counter[str] = Counter()
        for document in documents:
            counts.update(PIECE.findall(document))
        room = size - 256 - len(Special)
        usable = (item for item in counts.items() if _is_vocabulary_piece(item[0]))
        ranked = sorted(usable, key=lambda item: (-item[1], item[0]))
        return cls([piece for piece, _ in ranked[:room]])

    @property
    def size(self) -> int:
        """Number of ids; every id is in ``range(size)``."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``. Special tokens are recognised in the text; a lone surrogate becomes ``?``."""
        ids: list[int] = []
        for part in self._split_specials.split(text):
            special = self._specials.get(part)
            if special is not None:
                ids.append(special)
            else:
                ids.extend(self._encode_plain(part))
        return ids

    def encode_documents(self, documents: Iterable[str]) -> list[int]:
        """Ids of the documents, each followed by ``END_OF_TEXT``. Remembers every piece, so it is for bounded text."""
        known = {piece: [token] for piece, token in self._ids.items()}
        ids: list[int] = []
        for document in documents:
            for piece in PIECE.findall(document):
                tokens = known.get(piece)
                if tokens is None:
                    tokens = known[piece] = list(self._split(piece))
                ids += tokens
            ids.append(Special.END_OF_TEXT)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a special token's are its spelling."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        r"""One token as it stands in logprobs: its text, or ``bytes:\xNN...`` where it is not UTF-8 by itself."""
        raw = self._bytes[token_id]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` hides the token."""
        return Special.END_OF_TEXT <= token_id <= Special.FILE_SEP

    def _encode_plain(self, text: str) -> Iterator[int]:
        for piece in PIECE.findall(text):
            token = self._ids.get(piece)
            if token is not None:
                yield token
            else:
                yield from self._split(piece)

    def _split(self, piece: str) -> Iterator[int]:
        """Cover an unknown piece by its longest known prefixes, and by UTF-8 bytes where none is known."""
        start = 0
        while start < len(piece):
            for end in range(min(len(piece), start + MAX_PIECE_CHARS), start, -1):
                token = self._ids.get(piece[start:end])
                if token is not None:
                    yield token
                    break
            else:
                end = start + 1
                yield from piece[start].encode("utf-8", "replace")
            start = end


def _is_vocabulary_piece(piece: str) -> bool:
    """One ASCII character already has its byte token; a second id for the same text would split its counts."""
    return len(piece) <= MAX_PIECE_CHARS and not (len(piece) == 1 and piece.isascii())
