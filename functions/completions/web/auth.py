"""A credential to its principal. Only the key's SHA-256 is ever compared or looked up."""

from __future__ import annotations

import hashlib
from typing import Final

from completions.dialects.dialect import Dialect, WireRequest
from completions.domain.errors import AuthenticationError, PermissionDeniedError
from completions.domain.metering import Principal
from completions.domain.ports import Clock, Registry

MOST_CHARACTERS: Final = 512
_INVALID: Final = "invalid_api_key"


def authenticate(
    dialect: Dialect, wire: WireRequest, registry: Registry, clock: Clock, next_model: str | None = None
) -> Principal:
    """Raises ``AuthenticationError``. ``next_model`` is read in the same round trip as the key."""
    secret = dialect.credential(wire)
    if secret is None:
        raise AuthenticationError(
            "No API key was sent. Put it in the Authorization header, as in 'Authorization: Bearer YOUR_API_KEY'."
        )
    if not _can_be_key(secret):
        raise AuthenticationError(
            f"The API key is malformed: a key is 1 to {MOST_CHARACTERS} visible ASCII characters.", code=_INVALID
        )
    principal = registry.principal(secret_digest(secret), next_model=next_model)
    if principal is None:
        raise AuthenticationError("The API key is not known here.", code=_INVALID)
    if principal.disabled:
        raise AuthenticationError("The API key is disabled.", code=_INVALID)
    if principal.expires_at is not None and principal.expires_at <= clock.now():
        raise AuthenticationError("The API key has expired.", code=_INVALID)
    return principal


def require_admin(principal: Principal) -> None:
    """Raises ``PermissionDeniedError`` unless the key is an admin's."""
    if not principal.admin:
        raise PermissionDeniedError("This needs an admin's API key.")


def secret_digest(secret: str) -> str:
    """The hexadecimal SHA-256 under which a key is stored."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _can_be_key(secret: str) -> bool:
    """What cannot be one is told so without a look into the table."""
    visible = secret.isascii() and secret.isprintable() and " " not in secret
    return 0 < len(secret) <= MOST_CHARACTERS and visible
