"""A proxy before DynamoDB that counts real HTTP requests, and what AWS would charge for them.

Units follow AWS's rule, from the items' own sizes: a write unit for each KB begun of the larger of old and new item,
the same again for an index the item is in (where the item has changed), twice as many for the table in a transaction; a
read unit for each 4 KB begun, half of it where the read need not be consistent. moto's own figures are not these.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import urllib3

INDEX_KEYS = ("day_shard", "created_at")
"""Of ``ByDay``, which holds whole items."""
_WRITES = {"PutItem": "Item", "UpdateItem": "Key", "DeleteItem": "Key"}
_HEADERS = ("Content-Type", "X-Amz-Target", "Authorization", "X-Amz-Date", "X-Amz-Security-Token")
Item = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """One request: what it was, and its units."""

    operation: str
    write_units: float = 0
    read_units: float = 0


def item_size(item: Item) -> int:
    """Bytes, as AWS counts them for capacity: names and values."""
    return sum(len(name.encode()) + _value_size(value) for name, value in item.items())


def _value_size(value: Mapping[str, Any]) -> int:
    ((kind, plain),) = value.items()
    if kind == "S":
        return len(plain.encode())
    if kind == "N":
        digits = plain.lstrip("-").replace(".", "").strip("0") or "0"
        return math.ceil(len(digits) / 2) + (2 if plain.startswith("-") else 1)
    if kind == "M":
        return 3 + sum(1 + len(name.encode()) + _value_size(part) for name, part in plain.items())
    if kind == "L":
        return 3 + sum(1 + _value_size(part) for part in plain)
    if kind in ("SS", "NS"):
        return sum(_value_size({kind[0]: part}) for part in plain)
    return 1  # true, false, null


def write_units(old: Item, new: Item, *, transaction: bool = False) -> float:
    """Of a write that found ``old`` and left ``new``, either of which may be empty; a refused one costs the same."""
    table = max(1, math.ceil(max(item_size(old), item_size(new)) / 1024))
    return table * (2 if transaction else 1) + _index_units(old, new)


def _index_units(old: Item, new: Item) -> int:
    if old == new:
        return 0
    before, after = (
        math.ceil(item_size(item) / 1024) if all(name in item for name in INDEX_KEYS) else 0 for item in (old, new)
    )
    if before and after and all(old[name] == new[name] for name in INDEX_KEYS):
        return max(before, after)
    return before + after


class CountingProxy:
    """Between a client and the DynamoDB at ``upstream``. ``calls`` are in the order in which they ended."""

    def __init__(self, upstream: str) -> None:
        self.calls: list[Call] = []
        self._upstream = upstream
        self._pool = urllib3.PoolManager(maxsize=16)
        self._writing = Lock()  # an item must not change between the looks before and after a write
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """What ``AWS_ENDPOINT_URL_DYNAMODB`` is set to."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> CountingProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._pool.clear()

    def taken(self) -> list[Call]:
        """What there was since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def forward(self, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """Hand a request on, and count it."""
        operation = headers.get("X-Amz-Target", "").rpartition(".")[2]
        asked = json.loads(body or b"{}")
        actions = _actions(operation, asked)
        if not actions:
            status, answer = self._send(headers, body)
            self.calls.append(Call(operation, read_units=_read_units(operation, asked, json.loads(answer or b"{}"))))
            return status, answer
        with self._writing:
            old = [self._item(headers, *action) for action in actions]
            status, answer = self._send(headers, body)
            new = [self._item(headers, *action) for action in actions]
        transaction = operation == "TransactWriteItems"
        units = sum(write_units(*pair, transaction=transaction) for pair in zip(old, new, strict=True))
        self.calls.append(Call(operation, write_units=units))
        return status, answer

    def _item(self, headers: Mapping[str, str], table: str, key: Item) -> Item:
        target = headers["X-Amz-Target"].rpartition(".")[0] + ".GetItem"
        body = json.dumps({"TableName": table, "Key": key, "ConsistentRead": True}).encode()
        _, answer = self._send({**headers, "X-Amz-Target": target}, body)
        item: Item = json.loads(answer).get("Item", {})
        return item

    def _send(self, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        reply = self._pool.request("POST", self._upstream, body=body, headers=dict(headers), retries=False)
        return reply.status, reply.data


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, proxy: CountingProxy, *arguments: Any) -> None:
        self._proxy = proxy
        super().__init__(*arguments)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: self.headers[name] for name in _HEADERS if name in self.headers}
        status, answer = self._proxy.forward(headers, body)
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def _actions(operation: str, asked: Mapping[str, Any]) -> list[tuple[str, Item]]:
    """Table and key of each item that a request writes."""
    if operation == "TransactWriteItems":
        parts = [part for action in asked["TransactItems"] for part in action.values()]
        return [(part["TableName"], _key(part.get("Item") or part["Key"])) for part in parts]
    if operation in _WRITES:
        return [(asked["TableName"], _key(asked[_WRITES[operation]]))]
    return []


def _key(attributes: Item) -> Item:
    return {name: attributes[name] for name in ("pk", "sk")}


def _read_units(operation: str, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> float:
    if operation == "BatchGetItem":
        units = 0.0
        for table, wanted in asked["RequestItems"].items():
            found = answer.get("Responses", {}).get(table, [])
            missing = len(wanted["Keys"]) - len(found)
            units += (sum(map(_four_kilobytes, found)) + missing) * _share(wanted)
        return units
    if operation == "GetItem":
        return _four_kilobytes(answer.get("Item", {})) * _share(asked)
    if operation in ("Query", "Scan"):
        size = sum(map(item_size, answer.get("Items", [])))
        return max(1, math.ceil(size / 4096)) * _share(asked)
    return 0


def _four_kilobytes(item: Item) -> int:
    return max(1, math.ceil(item_size(item) / 4096))


def _share(asked: Mapping[str, Any]) -> float:
    return 1 if asked.get("ConsistentRead") else 0.5


def totals(calls: Sequence[Call]) -> tuple[int, float, float]:
    """Requests, write units, read units."""
    return len(calls), sum(call.write_units for call in calls), sum(call.read_units for call in calls)


def listed(calls: Iterable[Call]) -> str:
    """The operations in words."""
    counts = Counter(call.operation for call in calls)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
