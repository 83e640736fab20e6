"""The local stack's tables, as ``infra/tables.yaml`` declares them, and the key and models a newcomer starts with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from completions.domain.catalog import ModelRoute
from completions.domain.metering import Principal
from completions.registry.dynamodb import put_key, put_model
from completions.web.auth import secret_digest
from completions_cli.local.moto_server import moto_dynamodb
from completions_cli.local.template import load_template

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

__all__ = ["LOCAL_KEY", "create_tables", "moto_dynamodb", "seed_registry"]

LOCAL_KEY: Final = "sk-local"
_CREATE_TABLE_PROPERTIES: Final = (
    "BillingMode",
    "AttributeDefinitions",
    "KeySchema",
    "GlobalSecondaryIndexes",
)


def create_tables(client: DynamoDBClient, declaration: Path) -> None:
    """Create each declared table, named by its logical id, unless it is there already."""
    present = set(client.list_tables()["TableNames"])
    for name, resource in load_template(declaration)["Resources"].items():
        if resource["Type"] != "AWS::DynamoDB::Table" or name in present:
            continue
        properties = resource["Properties"]
        arguments: Any = {key: properties[key] for key in _CREATE_TABLE_PROPERTIES if key in properties}
        if "StreamSpecification" in properties:
            arguments["StreamSpecification"] = {"StreamEnabled": True, **properties["StreamSpecification"]}
        client.create_table(TableName=name, **arguments)
        client.get_waiter("table_exists").wait(TableName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 30})


def seed_registry(client: DynamoDBClient, table: str, routes: Sequence[ModelRoute]) -> None:
    """The local key, and ``routes``."""
    principal = Principal(key_id="local", owner="local", admin=True)
    put_key(client, table, secret_digest(LOCAL_KEY), principal)
    for route in routes:
        put_model(client, table, route)
