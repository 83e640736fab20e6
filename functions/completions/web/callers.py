"""Callers that IAM knows: the one form of their ARN, and the digest under which the registry keeps what they may do.

API Gateway names the signer of a request. A role signs through its sessions, whose ARN has no room for the role's path:
session and role are normalised to the role without a path, ``arn:aws:iam::ACCOUNT:role/NAME``. No two roles of an
account share a name, whatever their paths. Users keep their path, for it stands in their ARN everywhere; federated
users and root are as they are. Any partition will do.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

EXAMPLE: Final = "arn:aws:iam::123456789012:role/NAME"
_ARN: Final = r"arn:(?P<partition>aws[a-z0-9-]*)"
_NAME: Final = r"[\w+=,.@-]{1,64}"
_PATH: Final = r"(?:[!-~]{1,510}/)?"
_ROLES: Final = (
    re.compile(rf"{_ARN}:iam::(?P<account>\d{{12}}):role/{_PATH}(?P<name>{_NAME})", re.ASCII),
    re.compile(rf"{_ARN}:sts::(?P<account>\d{{12}}):assumed-role/(?P<name>{_NAME})/[!-.0-~]{{1,64}}", re.ASCII),
)
_OTHERS: Final = re.compile(
    rf"{_ARN}:(?:iam::\d{{12}}:(?:user/{_PATH}{_NAME}|root)|sts::\d{{12}}:federated-user/{_NAME})", re.ASCII
)


def caller_arn(text: str) -> str | None:
    """The ARN that stands for all ways to name a caller; ``None`` for what names none."""
    for form in _ROLES:
        if role := form.fullmatch(text):
            return f"arn:{role['partition']}:iam::{role['account']}:role/{role['name']}"
    return text if _OTHERS.fullmatch(text) else None


def caller_digest(arn: str) -> str:
    """What stands in the place of a secret's digest. No secret has it: none has a blank (see ``KeyAuthenticator``)."""
    return hashlib.sha256(f"iam {arn}".encode()).hexdigest()
