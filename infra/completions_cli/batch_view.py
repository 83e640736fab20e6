"""A batch on the terminal: a line, a table, a bar that moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from completions_cli.batch_api import BatchApiError

ENDED: Final = ("completed", "failed", "expired", "cancelled")
_COLOURS: Final = {"completed": "green", "failed": "bold red", "expired": "red", "cancelled": "yellow"}
_MOST_FAILURES: Final = 10
_LONGEST_PAUSE: Final = 30.0

Batch = Mapping[str, Any]


def counts(batch: Batch) -> tuple[int, int, int]:
    """Answered, failed, and all lines."""
    found = batch.get("request_counts") or {}
    return found.get("completed", 0), found.get("failed", 0), found.get("total", 0)


def facts(batch: Batch) -> str:
    """Tokens and money so far."""
    usage, cost = batch.get("usage") or {}, batch.get("cost")
    text = f"{usage.get('input_tokens', 0):,} + {usage.get('output_tokens', 0):,} tokens"
    return text if cost is None else f"{text}, ${cost['value']:,.4f}"


def line(batch: Batch) -> str:
    """All of it in a line."""
    completed, failed, total = counts(batch)
    return f"{batch['id']} {batch['status']}: {completed:,} of {total:,} lines, {failed:,} failed, {facts(batch)}"


def faults(batch: Batch, most: int = 10) -> Iterator[str]:
    """What is wrong with its file."""
    found = (batch.get("errors") or {}).get("data") or []
    for fault in found[:most]:
        place = "" if fault.get("line") is None else f"line {fault['line']}: "
        yield f"{place}{fault.get('message')} ({fault.get('code')})"
    if len(found) > most:
        yield f"and {len(found) - most} more"


def batches_table(batches: Sequence[Batch]) -> Table:
    """One row each."""
    table = Table("batch", "created (UTC)", "status", "lines", "failed", "tokens and cost")
    for batch in batches:
        completed, failed, total = counts(batch)
        status = Text(batch["status"], style=_COLOURS.get(batch["status"], ""))
        created = datetime.fromtimestamp(batch["created_at"], UTC).strftime("%Y-%m-%d %H:%M")
        table.add_row(batch["id"], created, status, f"{completed:,}/{total:,}", f"{failed:,}", facts(batch))
    return table


def watched(
    read: Callable[[], Batch],
    show: Callable[[Batch], None],
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Batch:
    """Shown until it has ended. Passing failures are waited out. Raises ``BatchApiError``."""
    failures = 0
    while True:
        try:
            batch = read()
        except BatchApiError as error:
            failures += 1
            if not error.passing or failures >= _MOST_FAILURES:
                raise
            sleep(min(seconds * 2**failures, _LONGEST_PAUSE))
            continue
        failures = 0
        show(batch)
        if batch["status"] in ENDED:
            return batch
        sleep(seconds)


class LiveView:
    """A bar where somebody watches; otherwise a line whenever the status changes, or a tenth is done. What it ended as
    is for the one who waited to say."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: object = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]:,} failed, {task.fields[facts]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("waiting", total=None, failed=0, facts="")

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def show(self, batch: Batch) -> None:
        """What is known now."""
        completed, failed, total = counts(batch)
        if self._console.is_terminal:
            self._progress.update(
                self._task,
                description=batch["status"],
                total=total or None,
                completed=completed + failed,
                failed=failed,
                facts=facts(batch),
            )
            return
        news = (batch["status"], 10 * (completed + failed) // total if total else 0)
        if news != self._told and batch["status"] not in ENDED:
            self._told = news
            self._console.print(line(batch), highlight=False, soft_wrap=True, markup=False)
