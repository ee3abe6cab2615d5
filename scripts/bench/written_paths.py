"""Measure what it costs a rank to note where it writes.

    python scripts/bench/written_paths.py

In processor time of one process, before and after: an event that matters to nobody (Python raises
one for each `id()`), a step of a small model with DDP and AdamW, a file that is written again, and
files that are new each time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.node.job.ranks import written_paths

TIMES, LAYERS, WIDTH = 30, 20, 64


def least(function: Callable[[], object], number: int) -> float:
    """Return the microseconds of one call, in the best of several rounds."""
    rounds = []
    for _ in range(TIMES):
        began = time.process_time()
        for _ in range(number):
            function()
        rounds.append((time.process_time() - began) / number)
    return min(rounds) * 1e6


def stepper() -> Callable[[], object]:
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(8, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="written-") as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=0, world_size=1)
        count = iter(range(10**9))

        def write(name: str) -> None:
            Path(place, name).write_text("x", encoding="utf-8")

        step, thing = stepper(), object()
        measured = {
            "an event of no interest": (lambda: id(thing), 20_000),
            "a step": (step, 20),
            "a file written again": (lambda: write("same"), 200),
            "a new file": (lambda: write(f"new{next(count)}"), 200),
        }
        before = {name: least(*how) for name, how in measured.items()}
        run = Path(place, "home/runs/job/0")
        run.mkdir(parents=True)
        written_paths.watch(str(run / "written_0"), str(run))
        for name, how in measured.items():
            print(f"{name:24} {before[name]:10.2f} us {least(*how):10.2f} us with notes")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
