"""EventBridge Scheduler: functions that are called every so often."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Event, Thread
from typing import Any

from completions.observability import logger
from completions_cli.local.triggers import ScheduleTrigger

Call = Callable[[Mapping[str, Any]], Any]


@contextmanager
def running_schedules(triggers: Sequence[ScheduleTrigger]) -> Iterator[None]:
    """While this lasts, each trigger's function is called when its time has come."""
    stop = Event()
    threads = [
        Thread(target=run_schedule, args=(trigger, trigger.target.when_called(), stop), daemon=True)
        for trigger in triggers
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def run_schedule(trigger: ScheduleTrigger, call: Call, stop: Event) -> None:
    """Until it is stopped. A call that fails is the log's; the next one comes in its time."""
    while not stop.wait(trigger.seconds):
        try:
            call(scheduled_event(trigger.name))
        except Exception as error:  # noqa: BLE001 - whatever a function raises
            logger.warning("function_failed", function=trigger.target.name, error=type(error).__name__)


def scheduled_event(name: str) -> dict[str, Any]:
    """What Scheduler sends a function that no input was chosen for."""
    return {
        "version": "0",
        "id": str(uuid.uuid4()),
        "detail-type": "Scheduled Event",
        "source": "aws.scheduler",
        "account": "123456789012",
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "region": "us-east-1",
        "resources": [f"arn:aws:scheduler:us-east-1:123456789012:schedule/default/{name}"],
        "detail": "{}",
    }
