"""moto's server, held to two promises of DynamoDB's that the local stack relies on.

Writes are atomic: requests are served one at a time, since moto's own steps may be interleaved by its threads. And a
transaction that fails takes back what it wrote and no more: moto copies the whole table before each one, which takes
long for a table of some size, and puts the copy in the table's place, which leaves those who read its stream behind.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock, Thread
from typing import Any, Final

from moto.dynamodb.models import DynamoDBBackend
from moto.dynamodb.models.dynamo_type import DynamoType
from moto.dynamodb.models.table import Table
from moto.dynamodbstreams.models import DynamoDBStreamsBackend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

_SERVING: Final = Lock()  # all servers of a process have the same tables
_MOST_ITERATORS: Final = 100

_transact: Final = DynamoDBBackend.transact_write_items
_get_records: Final = DynamoDBStreamsBackend.get_records


@contextmanager
def moto_dynamodb() -> Iterator[str]:
    """moto's server on a free loopback port; its URL."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    DynamoDBBackend.transact_write_items = _transact_in_place  # type: ignore[method-assign, assignment]
    DynamoDBStreamsBackend.get_records = _get_records_and_forget  # type: ignore[method-assign, assignment]
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, _one_at_a_time(app), threaded=True, request_handler=MotoRequestHandler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _one_at_a_time(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def serial(environ: Any, start_response: Any) -> Iterable[bytes]:
        with _SERVING:
            return app(environ, start_response)

    return serial


def _transact_in_place(backend: DynamoDBBackend, transact_items: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    before = [
        _found(backend, action)
        for item in transact_items
        for action in item.values()
        if action.get("TableName") in backend.tables
    ]
    events = {table.name: (table, len(table.stream_shard.items)) for table, *_ in before if table.stream_shard}
    Table.__deepcopy__ = _itself  # type: ignore[attr-defined]
    try:
        _transact(backend, list(transact_items))  # type: ignore[arg-type]
    except Exception:
        for table, hash_key, range_key, item in before:
            if item is None:
                table.items.get(hash_key, {}).pop(range_key, None)
            else:
                table.items[hash_key][range_key] = item
        for table, count in events.values():
            del table.stream_shard.items[count:]
        raise
    finally:
        del Table.__deepcopy__  # type: ignore[attr-defined]


def _itself(table: Table, _: object) -> Table:
    return table


def _found(backend: DynamoDBBackend, action: Mapping[str, Any]) -> tuple[Any, DynamoType, DynamoType, Any]:
    """The table of an action, the item's key, and a copy of the item as it is."""
    table: Any = backend.get_table(action["TableName"])
    attributes = action.get("Item") or action["Key"]
    hash_key = DynamoType(attributes[table.hash_key_attr])
    range_key = DynamoType(attributes[table.range_key_attr])
    return table, hash_key, range_key, copy.deepcopy(table.get_item(hash_key, range_key))


def _get_records_and_forget(backend: DynamoDBStreamsBackend, iterator_arn: str, limit: int) -> dict[str, Any]:
    """A poller asks all day long, and moto keeps every iterator it ever gave."""
    reply = _get_records(backend, iterator_arn, limit)
    for old in list(backend.shard_iterators)[:-_MOST_ITERATORS]:
        del backend.shard_iterators[old]
    return reply
