"""Measure what it costs to keep the state in memory at every step of half a second, on two ranks.

    python scripts/bench/memory.py [--megabytes 40] [--json]

Beside it: none, and a checkpoint on disk at every step. Two kinds of steps: one in which the host
waits, as it does while a GPU computes, and one in which it computes itself on all cores. On one
node, and on two (each rank has memory of its own), where each shard is sent to the other.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ground import machine, progress, show, table
from torch import Tensor, nn

from orchestrator import Trainer

RANKS, STEPS, FIRST, SECONDS = 2, 11, 3, 0.5
MEMORY = Path("/dev/shm")
HOW = ("none", "memory", "memory, sent to the other node", "disk")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure states that are kept in memory.")
    parser.add_argument("--megabytes", type=int, default=40, help="of each rank's state")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.megabytes, *options.rank)
        return
    about = machine(Path(sys.executable))
    found = {
        f"the host {host}": {how: measured(options.megabytes, host, how) for how in HOW}
        for host in ("waits", "computes")
    }
    rows = []
    for host, by in found.items():
        for how, seconds in by.items():
            rows.append([host, how, f"{seconds * 1e3:.1f} ms", f"{seconds / by['none']:.3f}"])
    text = table(["a step in which", "kept at every step", "takes", "of none"], rows)
    title = f"States of {options.megabytes} MB on each of {RANKS} ranks, at every step"
    show(options.json, title, about, text, found)


def measured(megabytes: int, host: str, how: str) -> float:
    """Return what a step takes, by the mean of all ranks."""
    progress(f"the host {host}: {how}")
    with (
        tempfile.TemporaryDirectory() as place,
        tempfile.TemporaryDirectory(dir=MEMORY) as memory,
    ):
        words = ["--nproc-per-node", str(RANKS), str(Path(__file__)), "--megabytes", str(megabytes)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("ORCHESTRATOR_RESUME_DIR", None)
        if how.startswith("memory"):
            environment["ORCHESTRATOR_RESUME_DIR"] = memory
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words, "--rank", host, how, place],
            check=True, env=environment, stdout=subprocess.DEVNULL, timeout=600,
        )  # fmt: skip
        files = [Path(place, f"seconds_{number}") for number in range(RANKS)]
        return statistics.fmean(float(file.read_text(encoding="ascii")) for file in files)


# -- a rank ---------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Much state, and little to compute with it."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(parameters // 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rows(x)
        return out


def rank(megabytes: int, host: str, how: str, place: str) -> None:
    number = int(os.environ["RANK"])
    if "other node" in how:  # what lies in another directory is another node's memory
        own = Path(os.environ["ORCHESTRATOR_RESUME_DIR"], str(number))
        own.mkdir(mode=0o700)
        os.environ["ORCHESTRATOR_RESUME_DIR"] = str(own)
    torch.manual_seed(0)
    factor = torch.randn(512, 512)
    times = work(factor) if host == "computes" else 0
    begun: list[float] = []

    def step(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        begun.append(time.perf_counter())
        for _ in range(times):
            factor @ factor
        if not times:
            time.sleep(SECONDS)
        return model(batch).square().sum(), len(batch)

    model = Wide(megabytes * 1_000_000 * RANKS // 12)  # a weight and two moments, of 4 bytes each
    config: dict[str, Any] = {"checkpoint": {"memory_every": 1}} if how != "disk" else {}
    trainer = Trainer(model, torch.optim.AdamW, step=step, strategy="full_shard", config=config)
    data = [torch.arange(8)] * (STEPS * RANKS)
    more = {"save_every": "1 steps", "save_to": Path(place, "disk")} if how == "disk" else {}
    trainer.train(data, max_period=f"{STEPS} steps", **more)
    seconds = (begun[-1] - begun[FIRST]) / (len(begun) - 1 - FIRST)
    Path(place, f"seconds_{number}").write_text(str(seconds), encoding="ascii")
    shutil.rmtree(Path(place, "disk"), ignore_errors=True)


def work(factor: Tensor) -> int:
    """Count the products that take as long as a step, with both ranks at it."""
    times, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        factor @ factor
        times += 1
    return times


if __name__ == "__main__":
    main()
