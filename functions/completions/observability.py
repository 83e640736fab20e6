"""The logger and the metrics that every layer but the domain may use. Prompts, completions and credentials are never
passed to either."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aws_lambda_powertools import Logger

if TYPE_CHECKING:
    from aws_lambda_powertools.metrics import EphemeralMetrics

NAMESPACE: Final = "completions"
"""CloudWatch's, of all metrics."""
SERVICE: Final = os.environ.get("POWERTOOLS_SERVICE_NAME") or "completions"
"""The deployment's name, in every line of the log and as a dimension of every metric: an account may have several."""

_MOST_FRAMES: Final = 12

logger = Logger(service=SERVICE)

for chatty in ("boto3", "botocore", "urllib3"):
    # their debug lines quote request bodies and headers, so no log level of ours may switch them on
    logging.getLogger(chatty).setLevel(logging.WARNING)


def new_metrics() -> EphemeralMetrics:
    """Metrics that share nothing with others; those that are not flushed are forgotten."""
    from aws_lambda_powertools.metrics import EphemeralMetrics  # noqa: PLC0415 - few functions measure anything

    return EphemeralMetrics(namespace=NAMESPACE, service=SERVICE)


def log_unexpected(error: Exception, **names: Any) -> None:
    """A fault of ours: type and places, without the message, which may quote the caller's text."""
    frames = traceback.extract_tb(error.__traceback__)
    logger.error(
        "unexpected_error",
        **names,
        error=type(error).__name__,
        frames=[f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-_MOST_FRAMES:]],
    )
