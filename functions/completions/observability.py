"""The logger every layer but the domain may use. Prompts, completions and credentials are never passed to it."""

from __future__ import annotations

from aws_lambda_powertools import Logger

logger = Logger(service="completions")
