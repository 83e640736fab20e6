"""A short soak: a few hundred mixed requests with faults underneath, every one of them accounted for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REQUESTS = 60


def test_a_few_hundred_mixed_requests_are_all_accounted_for(project_root: Path) -> None:
    command = [sys.executable, "tests/bench/soak.py", "--requests", str(REQUESTS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(
        command, cwd=project_root, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(rf"^requests +{REQUESTS} in ", run.stdout, re.MULTILINE)
