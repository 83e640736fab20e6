"""How SageMaker refuses a call: status, error type and message. Source: its service model and the observed wire."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

ACCOUNT: Final = "123456789012"
_REFUSALS: Final[Mapping[str, tuple[int, str, str | None]]] = MappingProxyType(
    {
        "throttled": (400, "ThrottlingException", None),
        "not_ready": (429, "ModelNotReadyException", "The model is not ready to serve inference requests."),
        "no_capacity": (
            400,
            "ValidationError",
            "Inference Component has no capacity to process this request. ApplicationAutoScaling may be in-progress "
            "(if configured) or try to increase the capacity by invoking UpdateInferenceComponentRuntimeConfig API.",
        ),
        "not_found": (400, "ValidationError", f"Endpoint {{endpoint}} of account {ACCOUNT} not found."),
        "access_denied": (
            403,
            "AccessDeniedException",
            f"User: arn:aws:iam::{ACCOUNT}:user/local is not authorized to perform: sagemaker:InvokeEndpoint "
            f"on resource: arn:aws:sagemaker:us-east-1:{ACCOUNT}:endpoint/{{endpoint}}",
        ),
        "unavailable": (503, "ServiceUnavailable", "The service is currently unavailable."),
        "internal": (500, "InternalFailure", "An internal failure occurred."),
        "internal_dependency": (530, "InternalDependencyException", "A dependency failed internally."),
    }
)


def refusal_reply(kind: str, endpoint: str) -> tuple[int, str, str | None]:
    """Status, error type and message of a scripted refusal of ``endpoint``."""
    status, error_type, message = _REFUSALS[kind]
    return status, error_type, None if message is None else message.replace("{endpoint}", endpoint)
