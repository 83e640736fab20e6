"""DynamoDB's typed JSON: pydantic models in, plain attributes out. A leaf that the table adapters share.

boto3 has the same for its resources, which nothing here uses. It takes three to four times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import BaseModel


def serialized(item: BaseModel, **keys: str) -> dict[str, Any]:
    """``item`` and the key attributes in typed JSON; unset fields are left out."""
    plain = {**keys, **item.model_dump(mode="json", exclude_none=True)}
    return {name: typed(value) for name, value in plain.items()}


def deserialized(item: Mapping[str, Any]) -> dict[str, Any]:
    """The plain attributes of an item in typed JSON; numbers are ``Decimal``."""
    return {name: _plain(value) for name, value in item.items()}


def typed(value: object) -> dict[str, Any]:
    """One value of JSON's own kinds. Raises ``TypeError`` for any other."""
    if isinstance(value, str):
        return {"S": value}
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, int | float):
        return {"N": str(value)}
    if value is None:
        return {"NULL": True}
    if isinstance(value, Mapping):
        return {"M": {name: typed(one) for name, one in value.items()}}
    if isinstance(value, list | tuple):
        return {"L": [typed(one) for one in value]}
    raise TypeError(f"no attribute of a table can be a {type(value).__name__}")


def _plain(value: Mapping[str, Any]) -> Any:
    ((kind, content),) = value.items()
    read = _READERS.get(kind)
    if read is None:
        raise TypeError(f"DynamoDB's type {kind} is not known here")
    return read(content)


def _as_it_is(content: Any) -> Any:
    return content


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "S": _as_it_is,
    "N": Decimal,
    "BOOL": _as_it_is,
    "NULL": lambda _: None,
    "M": deserialized,
    "L": lambda content: [_plain(one) for one in content],
    "B": _as_it_is,
    "SS": set,
    "NS": lambda content: {Decimal(one) for one in content},
    "BS": set,
}
