"""Save and load a checkpoint beside torch.distributed.checkpoint alone, in turns, in one process.

    python scripts/bench/saves.py [--megabytes 1000] [--repeat 5] [--json]

A save here is also summed up and published, and a load is verified: read the ratios, which are
medians of the ratios within a turn. The limit of a machine is torch's call while other threads, as
many as cores, hash the same bytes. Where other programs use the cores, compare processor times.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ground import machine, progress, show, table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from orchestrator.config import schema
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.saving.checkpoint import Checkpoints
from orchestrator.engine.saving.loading import LoadTarget, resume_state
from orchestrator.engine.saving.ownership import TrainingRun
from orchestrator.records import checkpoint_store

TENSORS = 64
HASHED = " + sha256 beside it"
BASES = {
    "dcp.save" + HASHED: "dcp.save", "save": "dcp.save", "stall": "save",
    "dcp.load" + HASHED: "dcp.load", "load": "dcp.load",
}  # fmt: skip
# Seconds of the clock, and of the processor in all threads.
Sample = tuple[float, float]


class Beside:
    """Has nothing beside the model."""

    def prime(self, _: object, __: object) -> dict[str, Tensor]:
        return {}

    def restore(self, _: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure saves and loads beside torch's own.")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    model = nn.Module()
    for number in range(TENSORS):
        weight = torch.randn(options.megabytes * 250_000 // TENSORS)
        model.register_parameter(f"w{number}", nn.Parameter(weight))
    found: dict[str, list[Sample]] = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        measure(model, Path(name), options.repeat, found)
    dist.destroy_process_group()
    rows = [row(what, found) for what in found]
    text = table(["what", "median", "ratio", "processor", "ratio"], rows)
    show(options.json, f"{options.megabytes} MB", machine(Path(sys.executable)), text, found)


def row(what: str, found: dict[str, list[Sample]]) -> list[str]:
    """Format the medians of all turns but the first, and those of the ratios to the base."""
    cells = [what]
    for kind in (0, 1):
        own = [sample[kind] for sample in found[what][1:]]
        base = [sample[kind] for sample in found[BASES.get(what, what)][1:]]
        ratio = statistics.median(mine / other for mine, other in zip(own, base, strict=True))
        of = f"{ratio:.3f} of {BASES[what]}" if what in BASES else ""
        cells += [f"{statistics.median(own):.2f} s", of]
    return cells


def measure(model: nn.Module, place: Path, repeat: int, found: dict[str, list[Sample]]) -> None:
    alone, state = Ranks(0, 1, 0, torch.device("cpu"), ((0, "here"),)), dict(model.state_dict())
    state = {f"model.{name}": value for name, value in state.items()}
    kept, run = schema.CheckpointConfig(keep=1), TrainingRun("run", "bench")
    store = Checkpoints(kept, place / "ours", alone, run, quiet, node_holds_all=True)
    target = LoadTarget(alone, run, model, Beside(), quiet)

    def now() -> Sample:
        return time.perf_counter(), time.process_time()

    def note(what: str, began: Sample) -> None:
        clock, processor = now()
        found.setdefault(what, []).append((clock - began[0], processor - began[1]))

    def timed(what: str, call: Callable[[], object]) -> None:
        began = now()
        call()
        note(what, began)

    def torch_loads() -> None:
        load(state, checkpoint_id=place / "torch")

    def torch_saves() -> None:
        save(state, checkpoint_id=place / "new")

    def new_to_old() -> None:
        # After the save, as ours does: the pages of the old files would serve the new ones.
        shutil.rmtree(place / "torch", ignore_errors=True)
        (place / "new").rename(place / "torch")

    for turn in range(repeat + 1):
        progress(f"turn {turn} of {repeat}")
        timed("dcp.save", torch_saves)
        new_to_old()
        began = now()
        store.save(turn, state, {"stepper": {}, "run": vars(store.run)})
        note("stall", began)
        if problem := store.wait():
            sys.exit(problem)
        note("save", began)
        timed("dcp.load", torch_loads)
        timed("load", lambda: resume_state(lambda: here(place), target, place / "ours"))
        timed("dcp.save" + HASHED, lambda: hashing(state, torch_saves))
        new_to_old()
        timed("dcp.load" + HASHED, lambda: hashing(state, torch_loads))


def hashing(state: dict[str, Tensor], call: Callable[[], object]) -> None:
    """Call, while threads hash the tensors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for value in state.values():
            data: Any = value.numpy()
            pool.submit(sha256, data)
        call()


def here(place: Path) -> list[checkpoint_store.Checkpoint]:
    return checkpoint_store.list_checkpoints(place / "ours")


def quiet(_: object) -> None:
    pass


if __name__ == "__main__":
    main()
