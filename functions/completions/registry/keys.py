"""API keys as their operator handles them: written, changed, listed and removed, every secret along with its entry.

All but ``list_keys`` raise botocore's errors: this is for operators, who are told why a table cannot be reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import ClientError
from pydantic import ValidationError

from completions.domain.metering import Principal
from completions.dynamodb_json import deserialized, serialized
from completions.observability import logger
from completions.registry.items import KEY_SORT, KEYS_PARTITION, KeyEntry, KeyEntryItem, KeyItem, key_partition

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_TRIES: Final = 10
_PAUSE_SECONDS: Final = 0.02
_OUTRUN: Final = frozenset({"ConditionalCheckFailed", "TransactionConflict"})

Change = Callable[[KeyEntry], KeyEntry]
"""What becomes of a key. It is asked again when someone else's change came first."""


class KeyMissingError(Exception):
    """There is no key of this id."""


class KeyUnreadableError(Exception):
    """The key's entry is not what this version writes."""


class KeyContendedError(Exception):
    """Others change the same key all the time."""


def put_key(
    client: DynamoDBClient, table: str, secret_sha256: str, principal: Principal, prefix: str | None = None
) -> None:
    """Write one API key by its digest, whatever was there before: other secrets of the key's id end with this."""
    gone = _digests(_raw_entry(client, table, principal.key_id) or {}) - {secret_sha256}
    client.transact_write_items(
        TransactItems=[*_secret_deletes(table, gone), *_puts(table, KeyEntry(principal, secret_sha256, prefix))]
    )


def create_key(client: DynamoDBClient, table: str, entry: KeyEntry) -> None:
    """Write a key whose id is new, and its caller's first. Raises ``KeyContendedError`` when it is not."""
    puts = [action["Put"] for action in _puts(table, entry)]
    actions = [{"Put": {**put, "ConditionExpression": "attribute_not_exists(pk)"}} for put in puts]
    if _write(client, actions):
        return
    known = read_key(client, table, entry.principal.key_id)
    if known != entry:  # a repetition by the SDK, after a reply that was lost, finds its own work
        name = entry.principal.key_id if known is not None or entry.arn is None else f"of {entry.arn}"
        raise KeyContendedError(f"there is a key {name} already")


def change_key(client: DynamoDBClient, table: str, key_id: str, change: Change) -> tuple[KeyEntry, KeyEntry]:
    """Carry out ``change`` on the newest version; what was, and what is.

    Raises ``KeyMissingError``, ``KeyUnreadableError`` or ``KeyContendedError``.
    """
    for attempt in range(_TRIES):
        before = read_key(client, table, key_id)
        if before is None:
            raise KeyMissingError(f"there is no key {key_id}")
        after = change(before)
        if after == before:
            return before, before
        after = replace(after, version=before.version + 1)
        gone = {digest for digest, _, _ in before.secrets()} - {digest for digest, _, _ in after.secrets()}
        if _write(client, [*_secret_deletes(table, gone), *_puts(table, after, **_unchanged(before.version))]):
            return before, after
        time.sleep(_PAUSE_SECONDS * (attempt + 1))
    raise KeyContendedError(f"the key {key_id} is being changed by someone else; nothing was written")


def delete_key(client: DynamoDBClient, table: str, key_id: str) -> None:
    """Remove a key and all its secrets, also one whose entry cannot be read.

    Raises ``KeyMissingError`` or ``KeyContendedError``.
    """
    for attempt in range(_TRIES):
        item = _raw_entry(client, table, key_id)
        if item is None:
            raise KeyMissingError(f"there is no key {key_id}")
        entry = _delete(table, KEYS_PARTITION, key_id, **_unchanged(item.get("version")))
        if _write(client, [*_secret_deletes(table, _digests(item)), entry]):
            return
        time.sleep(_PAUSE_SECONDS * (attempt + 1))
    raise KeyContendedError(f"the key {key_id} is being changed by someone else; nothing was written")


def read_key(client: DynamoDBClient, table: str, key_id: str) -> KeyEntry | None:
    """The key of this id. Raises ``KeyUnreadableError``."""
    item = _raw_entry(client, table, key_id)
    try:
        return None if item is None else KeyEntryItem.model_validate(item).to_entry()
    except ValidationError:
        raise KeyUnreadableError(f"the table's entry of the key {key_id} cannot be read") from None


def read_keys(client: DynamoDBClient, table: str) -> Iterator[tuple[str, KeyEntry | None]]:
    """Every key's id, in their order, and its entry; ``None`` for one that cannot be read."""
    pages = client.get_paginator("query").paginate(
        TableName=table,
        KeyConditionExpression="pk = :keys",
        ExpressionAttributeValues={":keys": {"S": KEYS_PARTITION}},
        ConsistentRead=True,
    )
    for item in (deserialized(item) for page in pages for item in page["Items"]):
        try:
            yield item["sk"], KeyEntryItem.model_validate(item).to_entry()
        except ValidationError:
            yield item["sk"], None


def list_keys(client: DynamoDBClient, table: str) -> Iterator[KeyEntry]:
    """Every key that can be read; one that cannot is named in the log. Raises botocore's errors."""
    for key_id, entry in read_keys(client, table):
        if entry is None:
            logger.warning("unreadable_key", key_id=key_id)
        else:
            yield entry


def _raw_entry(client: DynamoDBClient, table: str, key_id: str) -> dict[str, Any] | None:
    name: Any = {"pk": {"S": KEYS_PARTITION}, "sk": {"S": key_id}}
    item = client.get_item(TableName=table, Key=name, ConsistentRead=True).get("Item")
    return None if item is None else deserialized(item)


def _digests(item: dict[str, Any]) -> set[str]:
    """Those of an entry that need not be readable otherwise."""
    retired = item.get("retired")
    parts = [item, *retired] if isinstance(retired, list) else [item]
    found = [part.get("sha256") for part in parts if isinstance(part, dict)]
    return {digest for digest in found if isinstance(digest, str)}


def _write(client: DynamoDBClient, actions: list[Any]) -> bool:
    """Whether all of it was written; ``False`` when another change came first."""
    try:
        client.transact_write_items(TransactItems=actions)
    except client.exceptions.TransactionCanceledException as error:
        if _OUTRUN.isdisjoint(_reasons(error)):
            raise
        return False
    return True


def _reasons(error: ClientError) -> set[str]:
    reasons: Any = error.response.get("CancellationReasons", ())
    return {reason.get("Code") for reason in reasons}


def _unchanged(version: object) -> dict[str, Any]:
    """The condition that an entry is still of this version; one that never had a number is as it was found."""
    if not isinstance(version, int | Decimal):
        return {"ConditionExpression": "attribute_exists(pk)"}
    return {
        "ConditionExpression": "#version = :version",
        "ExpressionAttributeNames": {"#version": "version"},
        "ExpressionAttributeValues": {":version": {"N": str(version)}},
    }


def _puts(table: str, entry: KeyEntry, **condition: Any) -> list[Any]:
    """An item for each secret, and the entry, which alone is under the condition."""
    index = serialized(KeyEntryItem.from_entry(entry), pk=KEYS_PARTITION, sk=entry.principal.key_id)
    secrets = [
        serialized(
            KeyItem(**KeyItem.facts(principal), prefix=prefix, arn=entry.arn, created_at=entry.created_at),
            pk=key_partition(digest),
            sk=KEY_SORT,
        )
        for digest, prefix, principal in entry.secrets()
    ]
    puts: list[Any] = [{"Put": {"TableName": table, "Item": item}} for item in secrets]
    return [*puts, {"Put": {"TableName": table, "Item": index, **condition}}]


def _secret_deletes(table: str, digests: Iterable[str]) -> list[Any]:
    return [_delete(table, key_partition(digest), KEY_SORT) for digest in sorted(digests)]


def _delete(table: str, pk: str, sk: str, **condition: Any) -> Any:
    return {"Delete": {"TableName": table, "Key": {"pk": {"S": pk}, "sk": {"S": sk}}, **condition}}
