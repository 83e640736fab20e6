"""A GGUF file as the local model: llama.cpp's own server inside this process, through the optional extra ``llama``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LlamaMissingError(Exception):
    """The extra is not installed."""


@contextmanager
def serving_gguf(path: Path) -> Iterator[str]:
    """Load ``path`` and serve it on a free loopback port; its base URL. Raises ``LlamaMissingError``."""
    try:
        import xllamacpp  # noqa: PLC0415 - the optional extra
    except ImportError:
        raise LlamaMissingError("--gguf needs the extra 'llama': make serve EXTRA=llama ARGS=...") from None
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_ctx = 8192
    params.warmup = False
    server = xllamacpp.Server(params)
    try:
        yield server.listening_address
    finally:
        del server  # its destructor stops the listener
