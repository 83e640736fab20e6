"""DynamoDB's typed JSON: pydantic models in, plain attributes out. A leaf that the table adapters share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from boto3.dynamodb.types import TypeDeserializer, TypeSerializer
from pydantic import BaseModel


def serialized(item: BaseModel, **keys: str) -> dict[str, Any]:
    """``item`` and the key attributes in typed JSON; unset fields are left out."""
    serializer = TypeSerializer()
    # DynamoDB's numbers are decimal, and boto3 takes no float for one
    plain = {**keys, **json.loads(item.model_dump_json(exclude_none=True), parse_float=Decimal)}
    return {name: serializer.serialize(value) for name, value in plain.items()}


def deserialized(item: Mapping[str, Any]) -> dict[str, Any]:
    """The plain attributes of an item in typed JSON; numbers are ``Decimal``."""
    deserializer = TypeDeserializer()
    return {name: deserializer.deserialize(value) for name, value in item.items()}
