"""Measure the report of a long training: the time to make it, its size, the time to open it.

    python scripts/bench/views.py [--steps 1000000] [--ranks 64]

The metrics are lines as the engine writes them. The files of the ranks are one file under many
names, so that the disk of a laptop holds them; each is read as if it were its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

PER_NODE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        size = make(root / "long_20260101_000000", options.steps, options.ranks)
        print(f"{options.steps:,} steps x {options.ranks} ranks, {size / 1e9:.2f} GB of each rank")
        begin = time.perf_counter()
        command = [sys.executable, "-m", "orchestrator", "report", "--experiments", str(root)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"made in          {time.perf_counter() - begin:6.1f} s")
        page = root / "long_20260101_000000" / "report.html"
        print(f"size             {page.stat().st_size / 1e6:6.2f} MB")
        empty = root / "empty.html"
        empty.write_text("<!doctype html><p>nothing")
        times = [opened(each, root) for each in (empty, page, empty, page, empty, page)]
        print(
            f"opened and drawn {min(times[1::2]) - min(times[::2]):6.2f} s more than an empty page"
        )


def make(path: Path, steps: int, ranks: int) -> int:
    """Write an experiment; return the bytes of one rank's metrics."""
    (path / "outputs").mkdir(parents=True, mode=0o700)
    path.chmod(0o700)
    nodes = [
        NodeRecord(
            index=index, name=f"gpu{index}", host=f"gpu{index}", user=None, port=None,
            address=f"10.0.0.{index}", python="python", first_rank=index * PER_NODE, nproc=PER_NODE,
        )
        for index in range(ranks // PER_NODE)
    ]  # fmt: skip
    record = JobRecord("long", str(path), "running", ["master_launch"], nodes, time.time(), {})
    Experiment(path).write_record(record)
    first = path / "outputs" / "rank_00_metrics.jsonl"
    with first.open("w") as file:
        for step in range(1, steps + 1):
            loss = 2.0 + 3.0 * math.exp(-step / 50_000) + 0.1 * math.sin(step * 12.9898)
            line = {
                "time": 1.7e9 + step * 0.3, "rank": 0, "step": step, "epoch": step // 10_000,
                "loss": loss, "lr": 3e-4 * math.cos(step / steps), "grad_norm": 1.0 / loss,
                "tokens": step * 524_288, "tokens_per_s": 1.7e6 + step % 977,
                "step_ms": 300.0 + step % 13, "data_ms": 1.5 + step % 7,
                "forward_backward_ms": 280.0 + step % 11, "exposed_comm_ms": None,
                "optimizer_ms": 9.0 + step % 3, "memory_bytes": 60_000_000_000 + step,
                "memory_peak_bytes": 70_000_000_000, "mfu": 0.41, "mfu_measured": 0.55,
                "skipped_steps": 0,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    for rank in range(1, ranks):
        os.link(first, path / "outputs" / f"rank_{rank:02d}_metrics.jsonl")
    return first.stat().st_size


def opened(page: Path, root: Path) -> float:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("views.py needs Chromium: apt-get install chromium")
    begin = time.perf_counter()
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    profile = f"--user-data-dir={root / 'profile'}"
    subprocess.run([*command, profile, page.as_uri()], check=True, capture_output=True, timeout=300)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
