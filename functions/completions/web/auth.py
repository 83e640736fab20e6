"""A credential to its principal. Only the key's SHA-256 is ever compared or looked up."""

from __future__ import annotations

import hashlib

from completions.dialects.dialect import Dialect, WireRequest
from completions.domain.errors import AuthenticationError
from completions.domain.metering import Principal
from completions.domain.ports import Clock, Registry


def authenticate(
    dialect: Dialect, wire: WireRequest, registry: Registry, clock: Clock, next_model: str | None = None
) -> Principal:
    """Raises ``AuthenticationError``. ``next_model`` is read in the same round trip as the key."""
    secret = dialect.credential(wire)
    if secret is None:
        raise AuthenticationError(
            "No API key was sent. Put it in the Authorization header, as in 'Authorization: Bearer YOUR_API_KEY'."
        )
    principal = registry.principal(secret_digest(secret), next_model=next_model)
    if principal is None:
        raise AuthenticationError("The API key is not known here.", code="invalid_api_key")
    if principal.disabled:
        raise AuthenticationError("The API key is disabled.", code="invalid_api_key")
    if principal.expires_at is not None and principal.expires_at <= clock.now():
        raise AuthenticationError("The API key has expired.", code="invalid_api_key")
    return principal


def secret_digest(secret: str) -> str:
    """The hexadecimal SHA-256 under which a key is stored."""
    return hashlib.sha256(secret.encode()).hexdigest()
