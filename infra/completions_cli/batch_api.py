"""The files and batches of a running service, over HTTP. Every call may be repeated: what is made has a name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import urllib3
from urllib3.exceptions import HTTPError

BUSY: Final = (429, 502, 503, 504)
_TRIES: Final = 4
_PAGE: Final = 100
_PIECE_BYTES: Final = 1 << 18


class BatchApiError(Exception):
    """What the service refused, or that it cannot be reached; ``passing`` where it may be otherwise in a while."""

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


@dataclass(frozen=True, slots=True)
class Submitted:
    """What was asked to be made; ``known`` where it was there already."""

    body: Mapping[str, Any]
    known: bool


class BatchApi:
    """``base_url`` with or without ``/v1``. Raises ``BatchApiError``."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._root = base_url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"authorization": f"Bearer {api_key}"}
        self._pool = urllib3.PoolManager(timeout=urllib3.Timeout(connect=5, read=60))

    def upload(self, filename: str, content: bytes, name: str) -> Submitted:
        """A file for a batch."""
        fields: dict[str, str | bytes | tuple[str, str | bytes] | tuple[str, str | bytes, str]] = {
            "purpose": "batch",
            "file": (filename, content, "application/jsonl"),
        }
        body, kind = urllib3.encode_multipart_formdata(fields)
        return self._make("/files", body, {"content-type": kind, "idempotency-key": name})

    def create(self, file_id: str, endpoint: str, name: str) -> Submitted:
        """A batch of it."""
        order = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        headers = {"content-type": "application/json", "idempotency-key": name}
        return self._make("/batches", json.dumps(order).encode(), headers)

    def batch(self, batch_id: str) -> Mapping[str, Any]:
        """It, as it is now."""
        return self._read("GET", f"/batches/{quote(batch_id, safe='')}")

    def cancel(self, batch_id: str) -> Mapping[str, Any]:
        """It, as it is then."""
        return self._read("POST", f"/batches/{quote(batch_id, safe='')}/cancel")

    def batches(self, most: int) -> Iterator[Mapping[str, Any]]:
        """The newest first."""
        after: str | None = None
        while most > 0:
            query: dict[str, Any] = {"limit": min(most, _PAGE)} | ({} if after is None else {"after": after})
            page = self._read("GET", f"/batches?{urlencode(query)}")
            yield from page["data"]
            most -= len(page["data"])
            if not page["data"] or not page.get("has_more"):
                return
            after = page["data"][-1]["id"]

    def download(self, file_id: str, target: Path) -> int:
        """A file's content into ``target``, which is there when it is whole; its size."""
        unfinished = target.with_name(target.name + ".part")
        size = 0
        with self._reached("GET", f"/files/{quote(file_id, safe='')}/content", None, {}) as reply:
            try:
                with unfinished.open("wb") as file:
                    for piece in reply.stream(_PIECE_BYTES):
                        size += file.write(piece)
                unfinished.replace(target)
            finally:
                unfinished.unlink(missing_ok=True)
        return size

    def _make(self, path: str, body: bytes, headers: Mapping[str, str]) -> Submitted:
        with self._reached("POST", path, body, headers) as reply:
            return Submitted(_object(reply), reply.headers.get("idempotent-replayed") == "true")

    def _read(self, method: str, path: str) -> Mapping[str, Any]:
        with self._reached(method, path, None, {}) as reply:
            return _object(reply)

    @contextmanager
    def _reached(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """The reply, unread. A redirect elsewhere is followed without the key."""
        retries = urllib3.Retry(
            total=_TRIES,
            redirect=2,
            allowed_methods=None,
            status_forcelist=BUSY,
            backoff_factor=0.3,
            raise_on_status=False,
        )
        try:
            reply = self._pool.request(
                method,
                self._root + path,
                body=body,
                headers={**self._headers, **headers},
                retries=retries,
                preload_content=False,
            )
            try:
                if reply.status >= 400:
                    raise BatchApiError(_refusal(reply), passing=reply.status in BUSY)
                yield reply
            finally:
                reply.drain_conn()
                reply.release_conn()
        except HTTPError as error:
            place = urlsplit(self._root).netloc
            raise BatchApiError(f"{place} cannot be reached: {_reason(error)}", passing=True) from None


def _object(reply: urllib3.BaseHTTPResponse) -> Mapping[str, Any]:
    try:
        value = json.loads(reply.read())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BatchApiError("the answer is no JSON object: is --base-url the service's?")
    return value


def _refusal(reply: urllib3.BaseHTTPResponse) -> str:
    """The service's own words, else the status."""
    try:
        message = json.loads(reply.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = reply.reason or "no reason given"
    request_id = reply.headers.get("x-request-id")
    return f"{message} (HTTP {reply.status}{'' if request_id is None else f', request {request_id}'})"


def _reason(error: BaseException) -> str:
    """The innermost cause, without the object addresses that urllib3 writes."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        return _reason(reason)
    text = str(error)
    return text.partition(": ")[2] or text
