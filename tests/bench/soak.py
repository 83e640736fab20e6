"""Many mixed requests at once with faults underneath, and whether every one of them is accounted for in the end.

The service, its model containers and the SageMaker stand-in run in a process of their own, whose memory is watched;
DynamoDB, which keeps every record, and the clients run in this one. Exits with 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import httpx2 as httpx

from completions.backends.families import CODECS
from completions.dynamodb_json import deserialized
from completions.metering.items import RECORD_SORT
from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import StackOptions, running_stack
from completions_cli.local.tables import moto_dynamodb
from family_models import family_models
from speakers import SPEAKERS, data_frames

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "soak",
    "AWS_SECRET_ACCESS_KEY": "soak",
    "AWS_DEFAULT_REGION": "us-east-1",
    # log and metrics go to standard output, which nobody reads behind its first line
    "POWERTOOLS_LOG_LEVEL": "CRITICAL",
    "POWERTOOLS_METRICS_DISABLED": "true",
}
AT_ONCE = 16
FAULTY = 0.1
PREFIX = "soak"
WARM_UP = 0.1
MOST_GROWTH, SPARE_MEGABYTES = 0.15, 20
BAD = [
    *(Fault(refusal=Refusal(kind=kind)) for kind in ("throttled", "not_ready", "unavailable", "internal", "not_found")),
    Fault(refusal=Refusal(kind="connection_reset")),
    Fault(refusal=Refusal(kind="model_error", status=500)),
    Fault(refusal=Refusal(kind="model_error", status=503)),
    Fault(exception_after=700),
    Fault(cut_after=700),
    Fault(end_after=700),
    Fault(end_after=0),
    Fault(split_every=64, delay_ms=1),
    Fault(head_delay_ms=50),
]
GOOD = Fault()


# The service's process


def serve(dynamodb_url: str, requests: int) -> None:
    """Serve until the parent closes our standard input; its first line are the address and the process id."""
    draw = random.Random(7)  # noqa: S311 - a plan that can be repeated
    # every fault is scripted, so no circuit may open on the sum of them
    options = StackOptions(
        port=0,
        template=ROOT / "template.yaml",
        dynamodb_url=dynamodb_url,
        settings={"CIRCUIT_FAILURES": "1000000"},
    )
    with running_stack(options) as stack, family_models(stack, PREFIX, fim_family="qwen") as models:
        for name in models.values():
            script = [draw.choice(BAD) if draw.random() < FAULTY else GOOD for _ in range(requests)]
            stack.sagemaker.faults.replace(name, script)
        print(json.dumps({"url": stack.base_url, "usage_table": stack.environment["USAGE_TABLE"]}), flush=True)
        sys.stdin.read()


@contextmanager
def service(dynamodb_url: str, requests: int) -> Iterator[tuple[int, dict[str, str]]]:
    """The other process: its id, and what it says."""
    command = [sys.executable, __file__, "--serve", dynamodb_url, "--requests", str(requests)]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.pid, json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()


def resident_megabytes(pid: int) -> float:
    """What the process holds in memory now."""
    status = Path(f"/proc/{pid}/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return int(kilobytes) / 1024


# Its clients


@dataclass(frozen=True, slots=True)
class Told:
    """What one client learned. ``usage`` is prompt and completion tokens, where the dialect tells them.

    ``claimed`` says that the request was fit to be served, so that there must be a record of it."""

    request_id: str | None
    kind: str
    ended: str
    claimed: bool = True
    usage: tuple[int, int] | None = None


@dataclass
class Tally:
    """All that was told, from every thread."""

    told: list[Told] = field(default_factory=list)
    done: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class Client:
    """One thread's clients, and its own source of chance."""

    def __init__(self, url: str, seed: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=60, verify=False)  # plain HTTP: no certificates to load
        self._draw = random.Random(seed)  # noqa: S311
        self._models = [f"{PREFIX}-{family}" for family in CODECS]

    def act(self) -> Told:
        """One request of any kind."""
        acts = (self._openai_or_scale, self._plain, self._hang_up, self._refused)
        (act,) = self._draw.choices(acts, weights=(55, 30, 12, 3))
        return act()

    def _openai_or_scale(self) -> Told:
        dialect = self._draw.choice(["openai", "scale"])
        speaker, model = SPEAKERS[dialect], self._draw.choice(self._models)
        stream = self._draw.random() < 0.5
        body = {**speaker.body(stream, model), **self._extras(stream)}
        if stream:
            body["stream_options"] = {"include_usage": True}
        reply = self._http.post(speaker.path, json=body, headers=speaker.headers)
        return Told(
            reply.headers.get("x-request-id"),
            f"{dialect} {'stream' if stream else 'whole'}",
            _ending(reply, speaker.end if stream else None),
            usage=_usage(data_frames(reply) if stream else [reply.json()]) if reply.status_code == 200 else None,
        )

    def _extras(self, stream: bool) -> dict[str, Any]:
        draw = self._draw
        extras: dict[str, Any] = {"max_tokens": draw.choice([1, 8, 24])}
        if draw.random() < 0.25:
            extras |= {"n": draw.choice([2, 3]), "temperature": 1, "seed": draw.randrange(2**31)}
        if draw.random() < 0.25:
            extras["stop"] = [draw.choice(["\n", "self", "zq-never"])]
        if draw.random() < 0.2:
            extras["echo"] = True
        if draw.random() < 0.2:
            extras["prompt"] = ["import os\n", "class A:\n    "]
        return extras

    def _plain(self) -> Told:
        dialect = self._draw.choice([name for name in SPEAKERS if name not in ("openai", "scale")])
        speaker, stream = SPEAKERS[dialect], self._draw.random() < 0.5
        reply = speaker.ask(self._http, stream=stream, model=self._draw.choice(self._models))
        kind = f"{dialect} {'stream' if stream else 'whole'}"
        return Told(reply.headers.get("x-request-id"), kind, _ending(reply, speaker.end if stream else None))

    def _hang_up(self) -> Told:
        """Leave behind the first bytes of a stream, or behind a status."""
        speaker, model = self._draw.choice([*SPEAKERS.values()]), self._draw.choice(self._models)
        address, body = speaker.address(stream=True, model=model), speaker.body(True, model)
        with self._http.stream("POST", address, json=body, headers=speaker.headers) as reply:
            next(reply.iter_raw(), b"")
            return Told(reply.headers.get("x-request-id"), "hang-up", "left")

    def _refused(self) -> Told:
        """A parameter that nobody can honour: it must cost nothing, a record included."""
        speaker = SPEAKERS["scale"]
        body = {**speaker.body(False, self._draw.choice(self._models)), "use_beam_search": True}
        reply = self._http.post(speaker.path, json=body, headers=speaker.headers)
        return Told(reply.headers.get("x-request-id"), "refused", str(reply.status_code), claimed=False)


def _ending(reply: httpx.Response, end: str | None) -> str:
    if reply.status_code != 200:
        return str(reply.status_code)
    broken = end is not None and (not reply.text.endswith(end) or "event: error" in reply.text)
    return "broken" if broken else "whole"


def _usage(frames: list[Any]) -> tuple[int, int] | None:
    told = [frame["usage"] for frame in frames if frame.get("usage")]
    return (told[-1]["prompt_tokens"], told[-1]["completion_tokens"]) if told else None


def drive(url: str, pid: int, requests: int) -> tuple[list[Told], dict[str, float]]:
    """All requests, ``AT_ONCE`` at a time; what was told, and the memory after the warm-up and in the end."""
    tally, memory, local = Tally(), {}, threading.local()
    seeds = itertools.count(1)
    warm = max(1, int(requests * WARM_UP))

    def one(_: int) -> None:
        if not hasattr(local, "client"):
            local.client = Client(url, next(seeds))
        tally.told.append(local.client.act())
        if next(tally.done) == warm:
            memory["warm"] = resident_megabytes(pid)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(one, range(requests)):
            pass
    memory["end"] = resident_megabytes(pid)
    return tally.told, memory


# What must hold


def records(dynamodb_url: str, table: str) -> dict[str, dict[str, Any]]:
    """Every record by its request id, once none is open any more or ten seconds have passed."""
    client = boto3.client("dynamodb", endpoint_url=dynamodb_url)
    deadline = time.monotonic() + 10
    while True:
        pages = client.get_paginator("scan").paginate(TableName=table)
        items = [deserialized(item) for page in pages for item in page["Items"]]
        found = [item for item in items if item["pk"].startswith("REQ#") and item["sk"] == RECORD_SORT]
        if all(item["state"] == "SETTLED" for item in found) or time.monotonic() > deadline:
            assert len({item["request_id"] for item in found}) == len(found)
            return {item["request_id"]: item for item in found}
        time.sleep(0.2)


def faults_of(told: list[Told], found: Mapping[str, Mapping[str, Any]], memory: Mapping[str, float]) -> list[str]:
    """Every promise that was broken, in words."""
    claimed = {one.request_id for one in told if one.claimed}
    open_claims = [item["request_id"] for item in found.values() if item["state"] != "SETTLED"]
    with_usage = [one for one in told if one.usage is not None and one.ended == "whole"]
    mismatched = [
        (one, item)
        for one in with_usage
        if (item := found.get(str(one.request_id))) is not None
        and (item.get("outcome"), (item.get("prompt_tokens"), item.get("completion_tokens")))
        != ("succeeded", one.usage)
    ]
    unsaid = [
        one for one in told if one.ended == "whole" and one.usage is None and one.kind[:6] in ("openai", "scale ")
    ]
    growth = memory["end"] - memory["warm"]
    checks = {
        "replies without a request id": [one for one in told if not one.request_id],
        "request ids given twice": len(told) - len({one.request_id for one in told}),
        "requests without a record": claimed - set(found),
        "records without a request": set(found) - claimed,
        "claims left open": open_claims,
        "usage that differs from the record": mismatched,
        "whole answers without usage": unsaid,
        "refusals that were not 400": [one for one in told if not one.claimed and one.ended != "400"],
        "megabytes grown too much": growth > memory["warm"] * MOST_GROWTH + SPARE_MEGABYTES and round(growth),
    }
    return [f"{name}: {str(value)[:600]}" for name, value in checks.items() if value]


def report(
    told: list[Told], found: Mapping[str, Mapping[str, Any]], memory: Mapping[str, float], seconds: float
) -> None:
    """The figures."""
    with_usage = [one.usage for one in told if one.usage is not None and one.ended == "whole"]
    succeeded = [found.get(str(one.request_id), {}) for one in told if one.usage is not None and one.ended == "whole"]
    outcomes = Counter(item.get("outcome", "still open") for item in found.values())
    print(
        f"requests            {len(told)} in {seconds:.1f} s, {len(told) / seconds:.1f} a second, {AT_ONCE} at a time"
    )
    print(
        f"records             {len(found)}: " + ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    )
    print(f"upstream calls      {sum(int(item.get('attempts', 0)) for item in found.values())}")
    print(f"endings             {dict(Counter(one.ended for one in told).most_common())}")
    for number, name in enumerate(("prompt_tokens", "completion_tokens")):
        own = sum(usage[number] for usage in with_usage)
        print(f"{name:<20}{own} told to clients, {sum(int(item.get(name, 0)) for item in succeeded)} in their records")
    print(f"memory              {memory['warm']:.0f} MB at {WARM_UP:.0%}, {memory['end']:.0f} MB at 100%")


def soak(requests: int) -> list[str]:
    """Run it and print the figures; the promises that were broken."""
    os.environ.update(ENVIRONMENT)
    with moto_dynamodb() as dynamodb_url, service(dynamodb_url, requests) as (pid, said):
        started = time.perf_counter()
        told, memory = drive(said["url"], pid, requests)
        seconds = time.perf_counter() - started
        found = records(dynamodb_url, said["usage_table"])
    report(told, found, memory, seconds)
    return faults_of(told, found, memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.requests)
        return 0
    broken = soak(options.requests)
    for line in broken:
        print(f"BROKEN {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
