"""Measure what it costs to keep the state in memory at every step of half a second, on two ranks.

    python scripts/bench/memory.py [--megabytes 40] [--frozen 0] [--rounds 1] [--json]

Beside it: none, and a checkpoint on disk at every step, one after the other in each round: on a
disk that both share, on one of each, and with checkpoint.copies, which sends each file to the
other. Two kinds of steps: one in which the host waits, as it does while a GPU computes, and one in
which it computes itself on all cores. On one node, and on two (each rank has memory of its own),
where each shard is sent to the other.

A busy machine makes steps longer, but not the processor time that a step takes. So where the host
waits, that time is counted too: of the thread that trains, which the step waits for, and of all
threads; what they take more than with none, in parts of the 0.5 s.

--frozen 95 makes 95% of the state weights that are not trained, as with LoRA. `holds` is what there
is then in the memory or on the disk of both ranks together, once the training is over.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ground import machine, show, table
from torch import Tensor, nn

from orchestrator import Trainer

RANKS, STEPS, FIRST, SECONDS = 2, 12, 2, 0.5
MEMORY = Path("/dev/shm")
DISK = Path("/var/tmp")
APART = "each node's disk"
COPIES = "each node's disk, and a copy on the other's"
HOW = ("none", "memory", "memory, sent to the other node", "disk", APART, COPIES)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure states that are kept in memory.")
    parser.add_argument("--megabytes", type=int, default=40, help="of each rank's state")
    parser.add_argument("--frozen", type=int, default=0, help="of it, in percent")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.megabytes, options.frozen / 100, options.rounds, options.rank)
        return
    about = machine(Path(sys.executable))
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        words = ["--nproc-per-node", str(RANKS), str(Path(__file__))]
        words += ["--megabytes", str(options.megabytes), "--frozen", str(options.frozen)]
        words += ["--rounds", str(options.rounds), "--rank", memory]
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=1800
        )
        files = [Path(memory, f"found_{number}") for number in range(RANKS)]
        by_rank = [json.loads(file.read_text(encoding="ascii")) for file in files]
    found = {
        name: Seconds(*map(statistics.fmean, zip(*(one[name] for one in by_rank), strict=True)))
        for name in by_rank[0]
    }
    rows = []
    for name, seconds in found.items():
        host, _, how = name.partition(": ")
        none = found[f"{host}: none"]
        row = [host, how, f"{seconds.wall * 1e3:.1f} ms", f"{seconds.wall / none.wall:.3f}"]
        if host == "waits":
            row += [more(seconds.own, none.own), more(seconds.threads, none.threads)]
        rows.append([*[*row, "", ""][:6], f"{seconds.held / 1e6:,.0f} MB"])
    head = ["in a step the host", "kept at every step", "takes", "of none"]
    text = table([*head, "processor: the step's thread", "all threads", "holds"], rows)
    title = (
        f"States of {options.megabytes} MB on each of {RANKS} ranks, of which {options.frozen}% are"
        " frozen, at every step"
    )
    show(options.json, title, about, text, {name: one._asdict() for name, one in found.items()})


class Seconds(NamedTuple):
    """The time of a step: wall clock and processor."""

    wall: float
    # The thread that trains.
    own: float
    # All threads of the rank.
    threads: float
    # Bytes of all ranks at the end.
    held: float = 0.0


def more(seconds: float, none: float) -> str:
    return f"{(seconds - none) * 1e3:+.1f} ms, {(seconds - none) / SECONDS:.1%}"


# -- a rank ---------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Much state, and little to compute with it."""

    def __init__(self, trained: int, frozen: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(trained // 64, 64)
        self.body = nn.Embedding(frozen // 64, 64).requires_grad_(False) if frozen else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rows(x)
        return out if self.body is None else out + self.body(x)


def rank(megabytes: int, frozen: float, rounds: int, memory: Path) -> None:
    """Train with each in turn, in the same processes, and write the times of a step."""
    number = int(os.environ["RANK"])
    factor = torch.randn(512, 512)
    times = work(factor)
    steps: dict[str, list[Seconds]] = {}
    for host in ("waits", "computes"):
        for how in HOW * rounds:
            os.environ.pop("ORCHESTRATOR_MEMORY_DIR", None)
            if how.startswith("memory"):
                # What lies in another directory is another node's memory.
                own = memory / f"{host}_{how}_{number if 'other node' in how else ''}"
                own.mkdir(mode=0o700, exist_ok=True)
                os.environ["ORCHESTRATOR_MEMORY_DIR"] = str(own)
            apart = how in (APART, COPIES)
            own_node = str(number if apart else 0)
            os.environ["GROUP_RANK"] = own_node
            disk = DISK / f"{memory.name}_{own_node}" if "disk" in how else None
            shown = "" if how == "none" else f"{memory.name}_*" if disk else f"{host}_{how}_*"
            where = (disk.parent if disk else memory), shown
            copies = 2 if how == COPIES else 1
            busy = times * (host == "computes")
            found = measured(megabytes, frozen, factor, busy, disk, where, copies)
            steps.setdefault(f"{host}: {how}", []).extend(found)
    medians = {
        name: [*map(statistics.median, zip(*own, strict=True))] for name, own in steps.items()
    }
    Path(memory, f"found_{number}").write_text(json.dumps(medians), encoding="ascii")


def measured(
    megabytes: int,
    frozen: float,
    factor: Tensor,
    times: int,
    disk: Path | None,
    # A directory, and the pattern of the files in it that hold the states.
    where: tuple[Path, str],
    copies: int,
) -> list[Seconds]:
    begun: list[Seconds] = []

    def step(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        begun.append(Seconds(time.perf_counter(), time.thread_time(), time.process_time()))
        for _ in range(times):
            factor @ factor
        if not times:
            time.sleep(SECONDS)
        return model(batch).square().sum(), len(batch)

    torch.manual_seed(0)
    # A weight has 4 bytes, and two moments if it is trained.
    size = megabytes * 1_000_000 * RANKS
    model = Wide(int(size * (1 - frozen)) // 12, int(size * frozen) // 4)
    config: dict[str, Any] = {"checkpoint": {"memory_every": 1, "copies": copies}}
    trainer = Trainer(model, torch.optim.AdamW, step=step, strategy="full_shard", config=config)
    more: dict[str, Any] = {"save_every": "1 steps", "save_to": disk} if disk is not None else {}
    data = [torch.arange(8)] * (STEPS * RANKS)
    trainer.train(data, max_period=f"{STEPS} steps", **more)
    held = held_in([*where[0].glob(where[1])] if where[1] else [])
    meet()
    if disk is not None:
        shutil.rmtree(disk, ignore_errors=True)
    pairs = itertools.pairwise(begun[FIRST:])
    return [
        Seconds(other.wall - one.wall, other.own - one.own, other.threads - one.threads, held)
        for one, other in pairs
    ]


def meet() -> None:
    """Wait until both have looked at what is there, which one of them then removes."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def held_in(directories: list[Path]) -> int:
    """Return the bytes that files take on disk; one with several names counts once."""
    files = [path.stat() for each in directories for path in each.rglob("*") if path.is_file()]
    return sum({one.st_ino: one.st_blocks * 512 for one in files}.values())


def work(factor: Tensor) -> int:
    """Count the matrix products that fit into SECONDS, with both ranks at work."""
    times, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        factor @ factor
        times += 1
    return times


if __name__ == "__main__":
    main()
