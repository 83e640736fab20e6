"""Who asks: by an API key, or by the signature that API Gateway has checked. Never by both.

Of a key only the SHA-256 is ever compared or looked up.
"""

from __future__ import annotations

import hashlib
from typing import Final, Protocol

from completions.dialects.dialect import CALLER_REFUSED, Dialect, WireRequest
from completions.domain.errors import AuthenticationError, PermissionDeniedError
from completions.domain.metering import Principal
from completions.domain.ports import Clock, Registry
from completions.web.callers import caller_arn, caller_digest

MOST_CHARACTERS: Final = 512
_INVALID: Final = "invalid_api_key"
_MOST_TOLD: Final = 200


class Authenticator(Protocol):
    """One way to know who asks."""

    def authenticate(
        self, dialect: Dialect, wire: WireRequest, *, caller: str | None = None, next_model: str | None = None
    ) -> Principal:
        """``caller`` is the ARN that the platform names; ``next_model`` is read in the same round trip.

        Raises ``AuthenticationError``, and ``PermissionDeniedError`` for somebody known who may not ask.
        """
        ...


class KeyAuthenticator(Authenticator):
    """By the key that the dialect finds in the request. Who signed it, if anybody, does not count."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock

    def authenticate(
        self, dialect: Dialect, wire: WireRequest, *, caller: str | None = None, next_model: str | None = None
    ) -> Principal:
        secret = dialect.credential(wire)
        if secret is None:
            raise AuthenticationError(
                "No API key was sent. Put it in the Authorization header, as in 'Authorization: Bearer YOUR_API_KEY'."
            )
        if not _can_be_key(secret):
            raise AuthenticationError(
                f"The API key is malformed: a key is 1 to {MOST_CHARACTERS} visible ASCII characters.", code=_INVALID
            )
        principal = self._registry.principal(secret_digest(secret), next_model=next_model)
        if principal is None:
            raise AuthenticationError("The API key is not known here.", code=_INVALID)
        if fault := _of_no_use(principal, self._clock):
            raise AuthenticationError(f"The API key {fault}.", code=_INVALID)
        return principal


class IamAuthenticator(Authenticator):
    """By who signed the request. IAM says who may call, the caller's row what it may use and spend.

    Keys are not looked at, least of all when nobody signed.
    """

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock

    def authenticate(
        self, dialect: Dialect, wire: WireRequest, *, caller: str | None = None, next_model: str | None = None
    ) -> Principal:
        if not caller:
            raise AuthenticationError(
                "The request came without a caller's identity: callers are known by their signature here, and this "
                "method is not behind AWS_IAM authorization. API keys are not accepted.",
                code=CALLER_REFUSED,
            )
        arn = caller_arn(caller)
        if arn is None:
            raise _refused(f"{caller[:_MOST_TOLD]} is not the ARN of a role, a user or root.")
        principal = self._registry.principal(caller_digest(arn), next_model=next_model)
        if principal is None:
            raise _refused(
                f"{arn} is not known here: nothing says what it may use and spend. The operator lets it in with "
                f"'completions keys create --arn {arn} --owner OWNER'."
            )
        if fault := _of_no_use(principal, self._clock):
            raise _refused(f"The key of {arn} {fault}.")
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


def _of_no_use(principal: Principal, clock: Clock) -> str | None:
    if principal.disabled:
        return "is disabled"
    expired = principal.expires_at is not None and principal.expires_at <= clock.now()
    return "has expired" if expired else None


def _refused(message: str) -> PermissionDeniedError:
    return PermissionDeniedError(message, code=CALLER_REFUSED)
