"""The batch engine: lines a second, and the peak memory of each of its functions, for a small file and a large one.

``--storm N`` answers N lines with everything that can go wrong instead, and checks that the books balance.

Each function runs in a process of its own over real boto3, against an object store on this machine; batches, keys and
books are in memory, and the model's endpoint answers at once. The assembler's parts are made up, as large as the input.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
SMALL, LARGE = "5000x20000", "50000x20000"
"""100 MB, and a gigabyte: as many lines as a batch may have."""
FUNCTIONS: Final = ("splitter", "worker", "assembler")
WORKED_PARTS: Final = 20
MOST_GROWTH: Final = 1.25
"""Of peak memory, while the file grows ten times."""
STORE: Final = "bench-bucket"


@contextmanager
def helper(script: str) -> Iterator[str]:
    """A process that prints its URL and runs until this ends."""
    command = [sys.executable, str(HERE / script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(10)


def measured(function: str, file: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """One function over one file, in a process of its own."""
    command = [sys.executable, __file__, "--child", function, file]
    run = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def compare() -> bool:
    """Print the table; whether memory is flat."""
    with ExitStack() as cleanup:
        environment = {
            "AWS_ENDPOINT_URL_S3": cleanup.enter_context(helper("object_server.py")),
            "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": cleanup.enter_context(helper("standin.py")),
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "POWERTOOLS_LOG_LEVEL": "CRITICAL",
            "REGISTRY_TABLE": "none",
            "USAGE_TABLE": "none",
        }
        print(f"{'function':<12}{'file':>10}{'lines':>9}{'seconds':>10}{'lines/s':>10}{'peak MiB':>10}{'growth':>8}")
        flat = True
        for function in FUNCTIONS:
            small, large = (measured(function, file, environment) for file in (SMALL, LARGE))
            for found in (small, large):
                growth = found["peak"] / small["peak"]
                print(
                    f"{function:<12}{found['bytes'] / 1e6:>7,.0f} MB{found['lines']:>9,}{found['seconds']:>10.2f}"
                    f"{found['lines'] / found['seconds']:>10,.0f}{found['peak']:>10.1f}{growth:>8.2f}"
                )
            flat = flat and large["peak"] <= small["peak"] * MOST_GROWTH
    print(
        f"Peak memory is {'flat' if flat else 'NOT FLAT'}: at most {MOST_GROWTH} times as much for ten times the file."
    )
    return flat


def child(function: str, file: str) -> None:
    """What ``measured`` starts; prints what it found."""
    lines, size = map(int, file.split("x"))
    work = {"splitter": _split, "worker": _work, "assembler": _assemble}[function](file, lines)
    started = time.monotonic()
    done = work()
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"lines": done, "bytes": lines * size, "seconds": seconds, "peak": peak}))


class Engine:
    """One batch over one file."""

    def __init__(self, file: str) -> None:
        from completions.clients import SystemClock, build_s3_client  # noqa: PLC0415 - the parent needs none of it
        from completions.domain.batches import Batch  # noqa: PLC0415
        from completions.pipelines.batch_split import BatchSplitter, SplitLimits  # noqa: PLC0415
        from completions.stores.objects import S3ObjectStore  # noqa: PLC0415
        from event_fakes import MemoryBooks, MemoryReplies  # noqa: PLC0415
        from in_memory_batches import MemoryBatches  # noqa: PLC0415

        now = datetime.now(UTC)
        self.batch = Batch(f"batch_{file}", "owner:bench", "bench", "file-1", f"input/{file}", now, now + timedelta(1))
        self.clock, self.store = SystemClock(), MemoryBatches(self.batch)
        self.objects = S3ObjectStore(build_s3_client(), STORE)
        self.replies, self.books = MemoryReplies(), MemoryBooks()
        limits = SplitLimits(["/v1/completions"], 50_000, 50, STORE, 10, 100)
        self.splitter = BatchSplitter(self.objects, self.store, self.clock, limits)

    def split(self) -> int:
        """The number of parts."""
        return int(str(self.splitter.split("owner:bench", self.batch.batch_id)["parts"]))

    def parts(self) -> Iterator[Any]:
        """As the index has them; the splitter has run in an earlier process."""
        from completions.domain.batch_places import index_key  # noqa: PLC0415
        from completions.pipelines.batch_parts import Part  # noqa: PLC0415

        for line in self.objects.get(index_key(self.batch.batch_id)).splitlines():
            yield Part.model_validate_json(line)


def _split(file: str, lines: int) -> Callable[[], int]:
    engine = Engine(file)

    def work() -> int:
        engine.split()
        return lines

    return work


def _work(file: str, lines: int) -> Callable[[], int]:
    from bench_models import PRINCIPALS, routes  # noqa: PLC0415

    from completions.clients import build_sagemaker_client  # noqa: PLC0415
    from completions.pipelines.answering import EventAnswering  # noqa: PLC0415
    from completions.pipelines.batch_work import BatchWorker, EarlierReplies, WorkLimits  # noqa: PLC0415
    from completions.service.complete import CompletionService  # noqa: PLC0415
    from completions.service_bootstrap import build_backend, every_dialects_endpoints  # noqa: PLC0415
    from completions.settings import read_settings  # noqa: PLC0415
    from completions.stores.replies import S3ReplyStore  # noqa: PLC0415
    from fakes import InMemoryRegistry  # noqa: PLC0415

    engine, settings = Engine(file), read_settings()
    registry = InMemoryRegistry({"": next(iter(PRINCIPALS.values()))}, routes())
    backend = build_backend(build_sagemaker_client(settings), settings, engine.clock)
    service = CompletionService(registry, backend, engine.books, engine.clock)
    replies = S3ReplyStore(engine.objects._s3, STORE)
    endpoints = every_dialects_endpoints(settings)
    answering = EventAnswering(endpoints, service, registry, replies=replies, records=engine.books, clock=engine.clock)
    earlier = EarlierReplies(replies, engine.books)
    worker = BatchWorker(
        answering, earlier, engine.objects, engine.store, clock=engine.clock, limits=WorkLimits(lines_at_once=8)
    )

    def work() -> int:
        done = 0
        for part, _ in zip(engine.parts(), range(WORKED_PARTS), strict=False):
            told = worker.work("owner:bench", engine.batch.batch_id, part, engine.clock.monotonic() + 800)
            assert told["failed"] == 0, told
            done += told["completed"]
        return done

    return work


def _assemble(file: str, lines: int) -> Callable[[], int]:
    from completions.domain.completion import Usage  # noqa: PLC0415
    from completions.domain.events import EventReply  # noqa: PLC0415
    from completions.pipelines.batch_assemble import BatchAssembler  # noqa: PLC0415
    from completions.pipelines.batch_parts import keep_result, replied  # noqa: PLC0415
    from completions.pipelines.batch_parts import read_part as read  # noqa: PLC0415
    from completions.pipelines.batch_work import EarlierReplies  # noqa: PLC0415

    engine = Engine(file)
    engine.split()
    text = json.dumps({"choices": [{"text": "x" * 19_000}]}).encode()
    for part in engine.parts():
        results = [
            replied(engine.batch, line, EventReply("r", 200 if line.number % 50 else 400, text, "m", Usage(5, 5), 1))
            for line in read(engine.objects, engine.batch, part) or ()
        ]
        keep_result(engine.objects, engine.batch, part.part, results)
    assembler = BatchAssembler(EarlierReplies(engine.replies, engine.books), engine.objects, engine.store, engine.clock)

    def work() -> int:
        assert assembler.assemble("owner:bench", engine.batch.batch_id)["status"] == "completed"
        return lines

    return work


def storm(count: int) -> None:
    """Raises ``AssertionError`` where a line is lost, told twice, or paid twice."""
    os.environ["POWERTOOLS_LOG_LEVEL"] = "CRITICAL"  # read when the service is imported
    from batch_stage import batch_stage  # noqa: PLC0415
    from batch_storm import check_storm  # noqa: PLC0415
    from completions.pipelines import answering  # noqa: PLC0415

    for name, seconds in (("_RUNNING_SECONDS", 1.0), ("_BUSY_SECONDS", 0.1)):
        setattr(answering, name, seconds)
    started = time.monotonic()
    with batch_stage("eu-central-1", UPSTREAM_ATTEMPTS="1") as stage:
        check_storm(stage, count)
    seconds = time.monotonic() - started
    print(f"{count:,} lines: each answered once, the books balance; {seconds:,.0f} s, {count / seconds:,.0f} lines/s")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--storm", type=int, metavar="N", help="answer N lines with everything that can go wrong")
    parser.add_argument("--child", nargs=2, metavar=("FUNCTION", "FILE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    for folder in ("functions", "infra", "tests"):
        sys.path.insert(0, str(HERE.parents[1] / folder))
    if chosen.child:
        child(*chosen.child)
    elif chosen.storm:
        storm(chosen.storm)
    elif not compare():
        sys.exit(1)


if __name__ == "__main__":
    main()
