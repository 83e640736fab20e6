"""A process of its own for DynamoDB, through moto: the tables, the keys and the models of the benchmark.

Prints its URL and runs until its standard input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import boto3
from bench_models import PRINCIPALS, routes

from completions.registry.dynamodb import put_key, put_model
from completions.web.auth import secret_digest
from completions_cli.local.tables import create_tables, moto_dynamodb


def main() -> None:
    """Serve until the parent closes our standard input."""
    with moto_dynamodb() as url:
        client = boto3.client("dynamodb", endpoint_url=url)
        create_tables(client, Path(__file__).parents[2] / "infra" / "tables.yaml")
        for secret, principal in PRINCIPALS.items():
            put_key(client, "RegistryTable", secret_digest(secret), principal)
        for route in routes():
            put_model(client, "RegistryTable", route)
        print(url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
