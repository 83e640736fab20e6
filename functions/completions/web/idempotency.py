"""A logical request's name, where its caller gave it one: the same name is served and charged once."""

from __future__ import annotations

import hashlib
from typing import Final

from completions.dialects.dialect import WireRequest
from completions.domain.errors import InvalidRequestError
from completions.domain.metering import Principal

HEADER: Final = "idempotency-key"
_MOST_CHARACTERS: Final = 255


def logical_request(wire: WireRequest, principal: Principal) -> tuple[str | None, str | None]:
    """The record id that derives from the caller's ``Idempotency-Key``, and a digest of what is asked under it.

    Names are a key's own: two keys may use the same one. Raises ``InvalidRequestError`` for a name that is none.
    """
    name = wire.headers.get(HEADER)
    if name is None:
        return None, None
    if not 0 < len(name) <= _MOST_CHARACTERS or not name.isascii() or not name.isprintable():
        raise InvalidRequestError(
            f"'Idempotency-Key' must be 1 to {_MOST_CHARACTERS} printable ASCII characters.", param="Idempotency-Key"
        )
    asked = hashlib.sha256(wire.path.encode() + b"\n" + wire.body).hexdigest()
    return "idem-" + hashlib.sha256(f"{principal.key_id}\n{name}".encode()).hexdigest()[:40], asked
