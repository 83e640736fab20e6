"""The templates under checkov's rules for AWS. What a rule asks is done, or its skip says in the template why not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from cloudformation import deployed

pytestmark = pytest.mark.skipif(
    "CHECKOV_READY" not in os.environ,
    reason="checkov is a tool in an environment of its own, some 100 packages; `make templates` runs it",
)
CHECKOV: Final = "checkov==3.3.30"
# How uv says that the index is out of reach; whatever else keeps the tool from being installed is a failure.
UNREACHABLE: Final = ("error sending request", "client error (connect)", "http status server error", "was disabled")
# checkov passes over what the defaults leave out, so here all of it is there
EVERYTHING: Final = {
    "AccessLogs": "on",
    "ApiGatewayLogRole": "create",
    "AsyncBucketPattern": "completions-async-*",
    "CorsOrigins": "https://app.example.com",
    "DomainName": "completions.example.com",
    "CertificateArn": "arn:aws:acm:us-east-1:123456789012:certificate/1",
    "HostedZoneId": "Z1",
    "ReplyBucketPattern": "completions-replies-*",
    "ReplyBusPattern": "completions-replies-*",
    "ReplyQueuePattern": "completions-replies-*",
    "UsagePlanRate": "10",
    "WafRequestsPerFiveMinutes": "2000",
    "WorkerConcurrency": "2",
}


@dataclass(frozen=True)
class Findings:
    """What checkov says: ``failed`` and ``skipped`` as rule and resource, ``reasons`` of the skips."""

    passed: int
    failed: tuple[tuple[str, str], ...]
    skipped: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]
    parsing_errors: int


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def scan(interpreter: str, folder: Path, *templates: str) -> Findings:
    # without --skip-download it asks its maker for the texts of its rules
    options = ("--framework", "cloudformation", "--skip-download", "--output", "json", "--file", *templates)
    done = run(interpreter, "-m", "checkov.main", *options, cwd=folder)
    assert done.stdout.startswith("{"), f"checkov answered {done.returncode}: {done.stdout}{done.stderr}"
    report = json.loads(done.stdout)
    failed, skipped = (report["results"][kind] for kind in ("failed_checks", "skipped_checks"))
    return Findings(
        passed=report["summary"]["passed"],
        failed=tuple((one["check_id"], one["resource"]) for one in failed),
        skipped=tuple((one["check_id"], one["resource"]) for one in skipped),
        reasons=tuple(one["check_result"]["suppress_comment"] for one in skipped),
        parsing_errors=report["summary"]["parsing_errors"],
    )


def resolved(root: Path, **form: str) -> dict[str, Any]:
    """The deployed resources. SAM gives the stage no metadata, though it makes it of the API's properties."""
    resources = deployed(root, **form)
    stage = {**resources["ApiStage"], "Metadata": resources["Api"]["Metadata"]}
    return {"AWSTemplateFormatVersion": "2010-09-09", "Resources": {**resources, "ApiStage": stage}}


@pytest.fixture(scope="module")
def interpreter(project_root: Path) -> str:
    """The Python of checkov's own environment, which is in uv's cache from the first time on."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not on the path")
    tool = ("uv", "tool", "run", "--quiet", "--python", sys.executable, "--from", CHECKOV)
    installed = run(*tool, "python", "-c", "import sys; print(sys.executable)", cwd=project_root)
    if installed.returncode != 0:
        reason = f"{CHECKOV} cannot be installed: {installed.stderr.strip()}"
        if any(sign in reason.lower() for sign in UNREACHABLE):
            pytest.skip(reason)
        raise AssertionError(reason)
    return installed.stdout.strip()


@pytest.fixture(scope="module")
def findings(project_root: Path, interpreter: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Findings]:
    """Of the templates as they are written, and of what SAM makes of the root's."""
    files = [project_root / "template.yaml", *sorted((project_root / "infra").glob("*.yaml"))]
    templates = [str(file.relative_to(project_root)) for file in files if "\nResources:" in file.read_text()]
    assert len(templates) > 1
    folder = tmp_path_factory.mktemp("transformed")
    for name, form in (("classic", {}), ("managed", {"Compute": "managed-instances"})):
        (folder / f"{name}.json").write_text(json.dumps(resolved(project_root, **EVERYTHING, **form)))
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(scan, interpreter, project_root, *templates)
        transformed = pool.submit(scan, interpreter, folder, "classic.json", "managed.json")
        return {"written": written.result(), "transformed": transformed.result()}


@pytest.mark.parametrize("form", ["written", "transformed"])
def test_no_rule_fails(findings: dict[str, Findings], form: str) -> None:
    assert findings[form].parsing_errors == 0
    assert findings[form].failed == ()
    assert findings[form].passed > 0


@pytest.mark.parametrize("form", ["written", "transformed"])
def test_every_skip_has_a_reason(findings: dict[str, Findings], form: str) -> None:
    assert findings[form].reasons
    assert all(len(reason.split()) > 3 for reason in findings[form].reasons)


def test_the_skipped_rules_are_these(findings: dict[str, Findings]) -> None:
    skipped = {rule for one in findings.values() for rule, _ in one.skipped}
    assert skipped == {
        "CKV_AWS_18",  # a log of the bucket's reads
        "CKV_AWS_21",  # versions of what is in it: prompts that are gone are to be gone
        "CKV_AWS_26",  # keys of one's own in KMS: for topics,
        "CKV_AWS_27",  # queues,
        "CKV_AWS_119",  # tables,
        "CKV_AWS_158",  # log groups
        "CKV_AWS_173",  # and functions' variables
        "CKV_AWS_76",  # access logs, a parameter
        "CKV_AWS_115",  # functions with a concurrency that is kept for them,
        "CKV_AWS_116",  # a dead-letter queue
        "CKV_AWS_117",  # and a network
        "CKV_AWS_120",  # a cache of the API
        "CKV_AWS_192",  # a firewall that reads bodies
        "CKV_AWS_370",  # a model without a network
    }


def test_the_workers_reservation_is_no_skip(findings: dict[str, Findings]) -> None:
    # the functions that answer callers share what the account has; the workers can be given some
    skipping = {resource for rule, resource in findings["written"].skipped if rule == "CKV_AWS_115"}
    assert skipping
    workers = ("UsageRollup", "UsageSweeper", "BatchS", "BatchWorker", "BatchAssembler", "Queued", "AsyncResults")
    assert not any(worker in resource for resource in skipping for worker in workers)
