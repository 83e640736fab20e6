"""moto's server, held to what the local stack relies on.

DynamoDB's writes are atomic: requests are served one at a time, since moto's own steps may be interleaved by its
threads. A transaction that fails takes back what it wrote and no more: moto copies the whole table before each one,
which takes long for a table of some size, and puts the copy in the table's place, which leaves those who read its
stream behind. And a long poll of SQS lets the others by: moto's own waits inside of one request.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
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
_LOOK_SECONDS: Final = 0.05

_transact: Final = DynamoDBBackend.transact_write_items
_get_records: Final = DynamoDBStreamsBackend.get_records

App = Callable[..., Iterable[bytes]]


@contextmanager
def moto_dynamodb() -> Iterator[str]:
    """moto's server on a free loopback port; its URL. It has every service of moto's, loaded when it is asked for."""
    with _serving(_services()) as url:
        yield url


@contextmanager
def moto_behind(prepare: Callable[[], None]) -> Iterator[str]:
    """Another door to the same services: who comes by it first waits for ``prepare``, which takes the other door."""
    with _serving(_prepared(_services(), prepare)) as url:
        yield url


@contextmanager
def _serving(app: App) -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    DynamoDBBackend.transact_write_items = _transact_in_place  # type: ignore[method-assign, assignment]
    DynamoDBStreamsBackend.get_records = _get_records_and_forget  # type: ignore[method-assign, assignment]
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@cache
def _services() -> App:
    app: App = DomainDispatcherApplication(create_backend_app)

    def serial(environ: Any, start_response: Any) -> Iterable[bytes]:
        if environ.get("HTTP_X_AMZ_TARGET") == "AmazonSQS.ReceiveMessage":
            _let_others_by()
        with _SERVING:
            return app(environ, start_response)

    return serial


def _prepared(app: App, prepare: Callable[[], None]) -> App:
    preparing = Lock()
    ready = False

    def guarded(environ: Any, start_response: Any) -> Iterable[bytes]:
        nonlocal ready
        with preparing:
            if not ready:
                prepare()
                ready = True
        return app(environ, start_response)

    return guarded


@cache
def _let_others_by() -> None:
    from moto.sqs.models import Message, SQSBackend  # noqa: PLC0415 - most who use this server never ask SQS

    receive = SQSBackend.receive_message

    def receive_in_turns(
        backend: SQSBackend, queue_name: str, count: int, wait_seconds_timeout: int, *rest: Any
    ) -> list[Message]:
        until = time.monotonic() + wait_seconds_timeout
        while True:
            found: list[Message] = receive(backend, queue_name, count, 0, *rest)
            if found or time.monotonic() >= until:
                return found
            _SERVING.release()
            try:
                time.sleep(_LOOK_SECONDS)
            finally:
                _SERVING.acquire()

    SQSBackend.receive_message = receive_in_turns  # type: ignore[method-assign, assignment]


@cache
def tell_uploads_once() -> None:
    """From now on an upload in parts is one event of the bucket's: moto tells the object's, too."""
    from moto.s3.models import S3Backend  # noqa: PLC0415 - most who use this server never ask S3

    put: Any = S3Backend.put_object

    def put_in_silence(backend: S3Backend, *place: Any, multipart: Any = None, **rest: Any) -> Any:
        if multipart is not None:
            rest["disable_notification"] = True
        return put(backend, *place, multipart=multipart, **rest)

    S3Backend.put_object = put_in_silence  # type: ignore[method-assign, assignment]


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
