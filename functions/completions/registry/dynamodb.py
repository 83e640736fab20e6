"""Keys and models from the registry table: one batched read for a cold request, none for a warm one.

What operators do with keys is in ``registry/keys.py``; ``put_key`` and ``list_keys`` are here by name as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from pydantic import ValidationError

from completions.domain.catalog import ModelRoute
from completions.domain.errors import BackendUnavailableError
from completions.domain.metering import Principal
from completions.domain.ports import Clock, Registry
from completions.dynamodb_json import deserialized, serialized
from completions.registry.items import (
    KEY_SORT,
    KEYS_PARTITION,
    MODEL_PARTITION,
    KeyEntryItem,
    KeyItem,
    ModelItem,
    key_partition,
)
from completions.registry.keys import list_keys, put_key

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

__all__ = ["DynamoRegistry", "list_keys", "put_key", "put_model", "read_models", "write_models"]

_Key = tuple[str, str]
_T = TypeVar("_T")
_Item = Mapping[str, Any]
_MAX_SORT_KEY_BYTES = 1024
_MAX_TRANSACTION = 100
_READS = 3  # DynamoDB hands back what it had no capacity for


@dataclass(frozen=True, slots=True)
class _Cached:
    item: _Item | None
    until: float


class DynamoRegistry(Registry):
    """``cache_seconds`` is also how long a revoked key or a changed model may still be served by a warm environment."""

    def __init__(
        self,
        client: DynamoDBClient,
        table: str,
        clock: Clock,
        cache_seconds: float,
        most_cached: int = 10_000,
    ) -> None:
        self._client = client
        self._table = table
        self._clock = clock
        self._cache_seconds = cache_seconds
        self._most_cached = most_cached
        self._cache: dict[_Key, _Cached] = {}

    def principal(self, secret_sha256: str, *, next_model: str | None = None) -> Principal | None:
        key = (key_partition(secret_sha256), KEY_SORT)
        items = self._items([key, (MODEL_PARTITION, next_model)] if _is_name(next_model) else [key])
        return _parsed(items[key], lambda item: KeyItem.model_validate(item).to_principal())

    def principal_of(self, key_id: str) -> Principal | None:
        if not _is_name(key_id):
            return None
        key = (KEYS_PARTITION, key_id)
        return _parsed(self._items([key])[key], lambda item: KeyEntryItem.model_validate(item).to_entry().principal)

    def route(self, model: str) -> ModelRoute | None:
        if not _is_name(model):
            return None
        key = (MODEL_PARTITION, model)
        return _parsed(self._items([key])[key], lambda item: ModelItem.model_validate(item).to_route())

    def routes(self) -> Sequence[ModelRoute]:
        with _unreachable_as_unavailable():
            pages = self._client.get_paginator("query").paginate(
                TableName=self._table,
                KeyConditionExpression="pk = :models",
                ExpressionAttributeValues={":models": {"S": MODEL_PARTITION}},
            )
            items = [deserialized(item) for page in pages for item in page["Items"]]
        models = (_parsed(item, lambda item: ModelItem.model_validate(item).to_route()) for item in items)
        return sorted({route.model_id: route for route in models if route}.values(), key=lambda route: route.model_id)

    def _items(self, keys: list[_Key]) -> dict[_Key, _Item | None]:
        """Each key's item, from the cache where it is fresh, in one read for all the others."""
        now = self._clock.monotonic()
        cached = {key: found for key in keys if (found := self._cache.get(key)) is not None and found.until > now}
        missing = [key for key in keys if key not in cached]
        read = self._read(missing) if missing else {}
        if len(self._cache) > self._most_cached:  # wrong keys and model names are remembered too, but not without end
            self._cache = {key: found for key, found in self._cache.items() if found.item is not None}
        for key in missing:
            self._cache[key] = _Cached(read.get(key), now + self._cache_seconds)
        return {key: cached[key].item if key in cached else read.get(key) for key in keys}

    def _read(self, keys: list[_Key]) -> dict[_Key, _Item]:
        # consistent: a read that lags behind would keep a revoked key alive for one more round of the cache
        names = [{"pk": {"S": pk}, "sk": {"S": sk}} for pk, sk in keys]
        wanted: Any = {self._table: {"Keys": names, "ConsistentRead": True}}
        found: dict[_Key, _Item] = {}
        with _unreachable_as_unavailable():
            for _ in range(_READS):
                reply = self._client.batch_get_item(RequestItems=wanted)
                for item in map(deserialized, reply["Responses"].get(self._table, [])):
                    found[item["pk"], item["sk"]] = item
                wanted = reply.get("UnprocessedKeys")
                if not wanted:
                    return found
        raise BackendUnavailableError("The registry is busy; try again shortly.", retry_after=1, detail="throttled")


def _is_name(model: str | None) -> TypeGuard[str]:
    """Whether it can be a sort key at all: DynamoDB's is 1 to 1024 bytes."""
    return model is not None and 0 < len(model.encode()) <= _MAX_SORT_KEY_BYTES


def put_model(client: DynamoDBClient, table: str, route: ModelRoute) -> None:
    """Write one model under its id and each alias."""
    item = ModelItem.from_route(route)
    for name in (route.model_id, *route.aliases):
        client.put_item(TableName=table, Item=serialized(item, pk=MODEL_PARTITION, sk=name))


def read_models(client: DynamoDBClient, table: str) -> dict[str, ModelRoute | None]:
    """Every model item by its name, an id or an alias; ``None`` for one that cannot be read.

    Raises botocore's errors: this is for operators, who are told why a table cannot be reached.
    """
    pages = client.get_paginator("query").paginate(
        TableName=table,
        KeyConditionExpression="pk = :models",
        ExpressionAttributeValues={":models": {"S": MODEL_PARTITION}},
        ConsistentRead=True,
    )
    models: dict[str, ModelRoute | None] = {}
    for item in (deserialized(item) for page in pages for item in page["Items"]):
        try:
            models[item["sk"]] = ModelItem.model_validate(item).to_route()
        except ValidationError:
            models[item["sk"]] = None
    return models


def write_models(
    client: DynamoDBClient, table: str, puts: Mapping[str, ModelRoute], deletes: Collection[str] = ()
) -> None:
    """Write ``puts`` and remove ``deletes``, items by name that are in one of the two.

    All or nothing up to 100 items; beyond, in steps of which each is, with every removal after every write, so that
    no name leads nowhere in between. Raises botocore's errors.
    """
    actions: list[Any] = [
        {"Put": {"TableName": table, "Item": serialized(ModelItem.from_route(route), pk=MODEL_PARTITION, sk=name)}}
        for name, route in puts.items()
    ]
    actions += [
        {"Delete": {"TableName": table, "Key": {"pk": {"S": MODEL_PARTITION}, "sk": {"S": name}}}}
        for name in sorted(deletes)
    ]
    for start in range(0, len(actions), _MAX_TRANSACTION):
        client.transact_write_items(TransactItems=actions[start : start + _MAX_TRANSACTION])


def _parsed(item: Mapping[str, Any] | None, parse: Callable[[Mapping[str, Any]], _T]) -> _T | None:
    if item is None:
        return None
    try:
        return parse(item)
    except ValidationError as error:
        fields = sorted({str(fault["loc"][0]) for fault in error.errors(include_input=False) if fault["loc"]})
        raise BackendUnavailableError(
            "The registry holds an entry that cannot be read.",
            detail=f"registry item {item.get('sk')!r}: wrong {', '.join(fields)}",
        ) from None


@contextmanager
def _unreachable_as_unavailable() -> Iterator[None]:
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise BackendUnavailableError(
            "The registry cannot be read right now.", retry_after=1, detail=type(error).__name__
        ) from error
