"""What the functions weigh, and how long it takes to build them."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table
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
    command = ["sam", "build", "--parallel", "--build-dir", str(target), "--parameter-overrides", "Architecture=arm64"]
    environment = {**os.environ, "TREES": str(trees), "ARCHITECTURE": "arm64", "SAM_CLI_TELEMETRY": "0"}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"sam build failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def artifact_table() -> Table:
    """Build twice, the first time with nothing but uv's cache to start from."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold = built(folder / "build", folder / "trees")
        warm = built(folder / "build", folder / "trees")
        table = Table("function", "unzipped MB", "zipped MB", "upload", title="Artifacts, arm64")
        weights: dict[str, float] = {}
        for function in functions(folder / "build"):
            upload = dir_checksum(str(function))
            weights.setdefault(upload, zipped(function))
            table.add_row(function.name, f"{unzipped(function):.1f}", f"{weights[upload]:.1f}", upload[:8])
    table.caption = f"sam build: {cold:.1f} s cold, {warm:.1f} s warm. One upload a name: {len(weights)} in all."
    return table


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
