"""A gateway for text and code completions from SageMaker endpoints."""

__version__ = "0.1.0"
