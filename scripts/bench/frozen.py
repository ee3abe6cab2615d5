"""Measure what it costs to save states and checkpoints of which 95% are frozen, in one process.

    python scripts/bench/frozen.py [--megabytes 200] [--json]

States in memory: with nothing known to be frozen, and with it, in turns; the least of 12 states.
Checkpoints: the first two of a run are written in full, those after them link the frozen weights.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from ground import machine, show, table
from torch import Tensor, nn

from orchestrator import Trainer
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.saving.memory import Memory
from orchestrator.engine.saving.ownership import Run

STATES, FIRST, CHECKPOINTS, FROZEN = 12, 2, 6, 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how frozen weights are saved.")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about = machine(Path(sys.executable))
    rows, found = [], {}
    for frozen in ((), ("body",)) * 2:
        name = "states, of which nothing is known to be frozen" if not frozen else "states"
        own, threads, wall, held = states(options.megabytes, frozen)
        rows.append([name, ms(own), ms(threads), ms(wall), f"{held / 1e6:,.0f} MB"])
        found[f"{name} {len(rows)}"] = [own, threads, wall, held]
    for number, (wall, held) in enumerate(checkpoints(options.megabytes), 1):
        rows.append([f"checkpoint {number}", "", "", ms(wall), f"{held / 1e6:,.0f} MB"])
        found[f"checkpoint {number}"] = [wall, held]
    head = ["saved", "processor: the step's thread", "all threads", "until it is done", "holds"]
    title = f"{options.megabytes} MB, of which {FROZEN:.0%} are frozen"
    show(options.json, title, about, table(head, rows), found)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def held_in(directory: Path) -> int:
    """Add up what files take; one that has several names counts once."""
    files = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum({one.st_ino: one.st_blocks * 512 for one in files}.values())


def states(megabytes: int, frozen: tuple[str, ...]) -> tuple[float, float, float, int]:
    size = megabytes * 1_000_000 // 4
    state = {
        "body": torch.randn(int(size * FROZEN)),
        "head": torch.randn(int(size * (1 - FROZEN))),
    }
    times = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        alone = Ranks(0, 1, 0, torch.device("cpu"), ((0, "here"),))
        place = Path(directory, "bench")
        memory = Memory(place, alone, Run(), lambda text: None, node_holds_all=True)
        for step in range(FIRST + STATES):
            state["head"] += 1
            wall, threads, own = time.perf_counter(), time.process_time(), time.thread_time()
            memory.save(step, state, {}, frozen=frozen)
            own = time.thread_time() - own
            memory.wait()
            times.append((own, time.process_time() - threads, time.perf_counter() - wall))
        least = [min(column) for column in zip(*times[FIRST:], strict=True)]
        return least[0], least[1], least[2], held_in(Path(directory))


class Wide(nn.Module):
    """Much state, and little to compute with it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.body = nn.Embedding(int(size * FROZEN) // 256, 64).requires_grad_(False)
        self.rows = nn.Embedding(int(size * (1 - FROZEN)) // 12 // 64, 64)  # and two moments

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rows(x) + self.body(x)
        return out


def checkpoints(megabytes: int) -> list[tuple[float, int]]:
    """Save one after each step; all are kept."""
    found: list[tuple[float, int]] = []

    def step(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).square().sum(), len(batch)

    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        directory = Path(name)

        def saved(trainer: Trainer) -> None:
            """Wait for what the step before has begun to save."""
            began, there = time.perf_counter(), directory / f"step_{trainer.state.step - 1:08d}"
            while trainer.state.step > 1 and not there.exists():
                time.sleep(0.001)
            found.append((time.perf_counter() - began, held_in(directory)))

        trainer = Trainer(
            Wide(megabytes * 1_000_000), torch.optim.AdamW, step=step, on_step_end=saved,
            config={"checkpoint": {"keep": CHECKPOINTS + 1}},
        )  # fmt: skip
        trainer.train(
            [torch.arange(8)] * (CHECKPOINTS + 1), max_period=f"{CHECKPOINTS + 1} steps",
            save_every="1 steps", save_to=directory,
        )  # fmt: skip
    return found[1:]


if __name__ == "__main__":
    main()
