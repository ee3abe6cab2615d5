"""Save and load a checkpoint beside torch.distributed.checkpoint alone, in turns, in one process.

    python scripts/bench/saves.py [--megabytes 1000] [--repeat 5] [--json]

A save here is also summed up and published, and a load is verified: read the ratios.
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
from pathlib import Path

import torch
import torch.distributed as dist
from ground import machine, progress, show, table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from orchestrator.config import schema
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.saving.checkpoint import Checkpoints
from orchestrator.engine.saving.loading import LoadTarget, resume
from orchestrator.engine.saving.ownership import TrainingRun
from orchestrator.records import checkpoint_store

TENSORS = 64


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
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        measure(model, Path(name), options.repeat, found)
    dist.destroy_process_group()
    middle = {what: statistics.median(seconds[1:]) for what, seconds in found.items()}
    bases = {"save": "dcp.save", "stall": "save", "load": "dcp.load"}
    rows = [
        [
            what,
            f"{seconds:.2f} s",
            f"{seconds / middle[bases[what]]:.3f} of {bases[what]}" if what in bases else "",
        ]
        for what, seconds in middle.items()
    ]
    text = table(["what", "median", "ratio"], rows)
    show(options.json, f"{options.megabytes} MB", machine(Path(sys.executable)), text, middle)


def measure(model: nn.Module, place: Path, repeat: int, found: dict[str, list[float]]) -> None:
    alone, state = Ranks(0, 1, 0, torch.device("cpu"), ((0, "here"),)), dict(model.state_dict())
    state = {f"model.{name}": value for name, value in state.items()}
    kept, run = schema.CheckpointConfig(keep=1), TrainingRun("run", "bench")
    store = Checkpoints(kept, place / "ours", alone, run, quiet, node_holds_all=True)
    target = LoadTarget(alone, run, model, Beside(), quiet)

    def timed(what: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        found.setdefault(what, []).append(time.perf_counter() - began)

    for turn in range(repeat + 1):
        progress(f"turn {turn} of {repeat}")
        # Both contenders write into new files.
        shutil.rmtree(place / "torch", ignore_errors=True)
        timed("dcp.save", lambda: save(state, checkpoint_id=place / "torch"))
        began = time.perf_counter()
        store.save(turn, state, {"stepper": {}, "run": vars(store.run)})
        found.setdefault("stall", []).append(time.perf_counter() - began)
        if problem := store.wait():
            sys.exit(problem)
        found.setdefault("save", []).append(time.perf_counter() - began)
        timed("dcp.load", lambda: load(state, checkpoint_id=place / "torch"))
        timed("load", lambda: resume(lambda: here(place), target, place / "ours"))


def here(place: Path) -> list[checkpoint_store.Checkpoint]:
    return checkpoint_store.every(place / "ours")


def quiet(_: object) -> None:
    pass


if __name__ == "__main__":
    main()
