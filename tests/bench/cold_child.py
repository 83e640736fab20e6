"""A fresh process that imports one thing, and perhaps answers a first event; prints what each cost.

``plain`` imports the frameworks alone, which is what the others are held against. Otherwise the first argument is a
handler's module. Nothing is imported before the clock runs but what the interpreter has anyway.
"""

import sys
import time

started_cpu, started = time.process_time(), time.perf_counter()
target = sys.argv[1]
if target == "plain":
    import aws_lambda_powertools  # noqa: F401
    import boto3  # noqa: F401
    import fastapi  # noqa: F401
    import mangum  # noqa: F401

    module = None
else:
    __import__(target)
    module = sys.modules[target]
ready_cpu, ready = time.process_time(), time.perf_counter()

import json  # noqa: E402
import re  # noqa: E402
import resource  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402


class Context:
    """Lambda's."""

    aws_request_id = "bench"
    function_name = "bench"
    invoked_function_arn = "arn:aws:lambda:us-east-1:123456789012:function:bench"
    memory_limit_in_mb = 512

    @staticmethod
    def get_remaining_time_in_millis() -> int:
        """Time enough."""
        return 29_000


def find_event(folder: str) -> dict[str, Any] | None:
    """A file of ``events/`` that this function answers: by its routes, or by its name."""
    name = target.rpartition(".")[2]
    routes = getattr(getattr(module, "app", None), "routes", None)
    for path in sorted(Path(folder).glob("*.json")):
        event: dict[str, Any] = json.loads(path.read_text())
        if routes is None:
            if path.stem == name:
                return event
        elif any(
            re.fullmatch(getattr(route, "path_regex", ""), event.get("path") or "")
            and event.get("httpMethod") in route.methods
            for route in routes
        ):
            return event
    return None


told: dict[str, Any] = {"import_cpu_ms": (ready_cpu - started_cpu) * 1000, "import_ms": (ready - started) * 1000}
event = None if module is None else find_event(sys.argv[2])
if event is not None:
    app: Any = getattr(module, "app", None)
    handler: Any = getattr(module, "handler", None)
    if handler is None:  # it is served by uvicorn alone
        from mangum import Mangum

        handler = Mangum(app, lifespan="off")
    started_cpu, started = time.process_time(), time.perf_counter()
    try:
        reply = handler(event, Context())
        status = reply.get("statusCode", 200) if isinstance(reply, dict) else 200
    except Exception as error:  # noqa: BLE001 - whatever it is
        status = type(error).__name__  # it needs more than there is here; its start was measured all the same
    told |= {
        "first_cpu_ms": (time.process_time() - started_cpu) * 1000,
        "first_ms": (time.perf_counter() - started) * 1000,
        "status": status,
    }
told |= {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "http": hasattr(module, "app")}
print("\n" + json.dumps(told))
