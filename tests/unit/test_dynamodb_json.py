"""DynamoDB's typed JSON, held against boto3's own reading and writing of it."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from boto3.dynamodb.types import TypeDeserializer, TypeSerializer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from completions.dynamodb_json import deserialized, serialized, typed

NUMBERS = st.integers(-(10**30), 10**30) | st.floats(-1e30, 1e30).filter(lambda one: one == 0 or abs(one) > 1e-30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.text() | NUMBERS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def as_decimals(value: Any) -> Any:
    """boto3 takes no floats, and gives decimals for all numbers."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Decimal(str(value))
    if isinstance(value, list):
        return [as_decimals(one) for one in value]
    return {name: as_decimals(one) for name, one in value.items()} if isinstance(value, dict) else value


@given(VALUES)
def test_a_value_is_written_so_that_boto3_reads_the_same(value: Any) -> None:
    written: Any = typed(value)
    assert TypeDeserializer().deserialize(written) == as_decimals(value)


@given(VALUES)
def test_what_boto3_writes_is_read_as_it_was(value: Any) -> None:
    written = TypeSerializer().serialize(as_decimals(value))
    assert deserialized({"one": written}) == {"one": as_decimals(value)}


def test_sets_and_bytes_which_are_only_read_are_what_they_are() -> None:
    item = {"names": {"SS": ["a", "b"]}, "sizes": {"NS": ["1", "2.5"]}, "raw": {"B": b"\x00"}, "all": {"BS": [b"\x01"]}}
    assert deserialized(item) == {
        "names": {"a", "b"},
        "sizes": {Decimal(1), Decimal("2.5")},
        "raw": b"\x00",
        "all": {b"\x01"},
    }


def test_a_model_is_written_without_what_is_not_set_and_with_its_keys() -> None:
    class Item(BaseModel):
        when: datetime
        share: float
        count: int
        name: str | None = None

    item = Item(when=datetime(2026, 3, 1, tzinfo=UTC), share=0.1, count=10**15)
    assert serialized(item, pk="a", sk="b") == {
        "pk": {"S": "a"},
        "sk": {"S": "b"},
        "when": {"S": "2026-03-01T00:00:00Z"},
        "share": {"N": "0.1"},
        "count": {"N": "1000000000000000"},
    }


def test_a_value_that_no_attribute_can_be_is_refused() -> None:
    with pytest.raises(TypeError, match="set"):
        typed({1, 2})


def test_a_type_that_is_not_dynamodbs_is_refused() -> None:
    with pytest.raises(TypeError, match="Q"):
        deserialized({"one": {"Q": "1"}})
