"""What the functions weigh, and how long it takes to build them."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from figures import Effort, Grid, Section, Target
from samcli.lib.utils.hash import dir_checksum

ROOT = Path(__file__).parents[2]
MAX_MEGABYTES = 40


def functions(build: Path) -> list[Path]:
    """The folders of ``sam build`` that hold a function."""
    return sorted(script.parent for script in build.glob("**/run.sh"))


def unzipped(folder: Path) -> float:
    """Megabytes of all files."""
    return sum(path.stat().st_size for path in files(folder)) / 1e6


def zipped(folder: Path) -> float:
    """Megabytes of the zip that the SAM CLI would upload."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files(folder):
            archive.write(path, path.relative_to(folder))
    return len(buffer.getvalue()) / 1e6


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def built(target: Path, trees: Path) -> float:
    """Seconds of a whole ``sam build``."""
    sam = str(Path(sys.executable).with_name("sam"))
    command = [sam, "build", "--parallel", "--build-dir", str(target), "--parameter-overrides", "Architecture=arm64"]
    environment = {**os.environ, "TREES": str(trees), "ARCHITECTURE": "arm64", "SAM_CLI_TELEMETRY": "0"}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"sam build failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def measure(_: Effort) -> Section:
    """Build twice, the first time with nothing but uv's cache to start from."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold = built(folder / "build", folder / "trees")
        warm = built(folder / "build", folder / "trees")
        found = functions(folder / "build")
        sizes = {function.name: unzipped(function) for function in found}
        uploads: dict[str, float] = {}
        for function in found:
            upload = dir_checksum(str(function))
            if upload not in uploads:
                uploads[upload] = zipped(function)
    rows = (
        ("functions", str(len(sizes))),
        ("each unzipped, MB", f"{max(sizes.values()):.1f}"),
        ("uploads", str(len(uploads))),
        ("each zipped, MB", f"{max(uploads.values()):.1f}"),
        ("sam build, s", f"{cold:.1f}"),
        ("sam build again, s", f"{warm:.1f}"),
    )
    data = {
        "unzipped_mb": max(sizes.values()),
        "zipped_mb": max(uploads.values()),
        "uploads": len(uploads),
        "functions": len(sizes),
        "build_cold_s": cold,
        "build_warm_s": warm,
    }
    target = Target("artifact of a function, unzipped", MAX_MEGABYTES, data["unzipped_mb"], "MB")
    return Section("artifact", (Grid("Artifacts, arm64", ("", ""), rows),), data, (target,))


def main() -> None:
    """Say what was built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=Path, required=True, help="the folder of a finished `sam build`")
    build = parser.parse_args().sizes
    weights = [unzipped(function) for function in functions(build)]
    if not weights:
        raise SystemExit(f"build: no function in {build}")
    print(f"build: {len(weights)} functions, {max(weights):.1f} MB each unzipped; {MAX_MEGABYTES} is the most")


if __name__ == "__main__":
    main()
