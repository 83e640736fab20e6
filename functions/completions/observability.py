"""The logger every layer but the domain may use. Prompts, completions and credentials are never passed to it."""

from __future__ import annotations

import logging

from aws_lambda_powertools import Logger

logger = Logger(service="completions")

for chatty in ("boto3", "botocore", "urllib3"):
    # their debug lines quote request bodies and headers, so no log level of ours may switch them on
    logging.getLogger(chatty).setLevel(logging.WARNING)
