"""Experiments on disk as jobs leave them, for tests of their page."""

import json
import math
from pathlib import Path
from typing import Any

from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.metrics import trainers
from orchestrator.records.outcome import SlowRank

STARTED = 1_700_000_000.0


def experiment(
    path: Path, *, ranks: int = 4, steps: int = 200, slow: int = 2, **changes: Any
) -> Experiment:
    """A training of two nodes; one rank waits for its data. Without steps it has no metrics."""
    (path / "outputs").mkdir(parents=True, mode=0o700)
    (path / "logs").mkdir(mode=0o700)
    path.chmod(0o700)
    nodes = [
        NodeRecord(
            index=index, name=name, host=name, user=None, port=None, address=name, python="python",
            first_rank=index * ranks // 2, nproc=ranks // 2, state="ended", exit_code=0,
            times={"ranks": STARTED + 3, "output": STARTED + 4},
        )
        for index, name in enumerate(("alpha", "beta"))
    ]  # fmt: skip
    held_up = [SlowRank(cause="slow input", rank=slow, node=1, time=STARTED + 9.0)]
    fields: dict[str, Any] = {"state": "done", "ended": STARTED + 60.0, "exit_code": 0}
    fields |= {"slow": held_up if steps and 0 <= slow < ranks else [], **changes}
    record = JobRecord(
        path.name, str(path), fields.pop("state"), ["master_launch", "train.py"], nodes, STARTED,
        **fields,
    )  # fmt: skip
    made = Experiment(path)
    made.write_record(record)
    made.write("config.yaml", "optimizer:\n  lr: 0.1\n")
    facts = {"hostname": "alpha", "cpus": 8, "torch": "2.13.0", "memory_kb": 1 << 24}
    manifest = {
        "nodes": [{"name": "alpha", "facts": facts, "environment": {"LR": "1"}}],
        "code": {"commit": "abc", "changed_files": ["a.py"]},
        "timeline": {"begin": STARTED - 0.5},
    }
    made.write("manifest.json", json.dumps(manifest))
    for node in nodes:
        made.log(node).write_text(f"hello from {node.name}\n")
    for rank in range(ranks if steps else 0):
        lines = [line(rank, step, slow) for step in range(1, steps + 1)]
        text = "".join(json.dumps(each) + "\n" for each in lines)
        (path / "outputs" / f"rank_{rank:02d}_metrics.jsonl").write_text(text)
    return made


def train_again(made: Experiment, *, ranks: int = 4, steps: int = 7) -> None:
    """Add what the second Trainer of the same program writes."""
    for rank in range(ranks):
        lines = [{**line(rank, step, -1), "loss": 9.0} for step in range(1, steps + 1)]
        text = "".join(json.dumps(each) + "\n" for each in lines)
        (made.path / "outputs" / trainers.file_name(rank, 2)).write_text(text)


ABOUT = {"cpus": 8, "gpus_at": ["0000:00:00", "0000:01:00"]}


def sample_machines(made: Experiment, *, nodes: int = 2, samples: int = 12) -> None:
    """Add what samplers write: the last node's GPUs are too hot from the middle on."""
    for node in range(nodes):
        lines: list[dict[str, Any]] = [{"about": {**ABOUT, "host": f"gpu{node}"}}]
        for at in range(samples):
            hot = node == nodes - 1 and at >= samples // 2
            lines.append(
                {
                    "cpu": 0.25, "memory_bytes": 2 << 30, "disk_write_per_s": 1000 * at,
                    "net": {"eth0": [1_000_000 * (node + 1), 5]}, "disks": {"/": [5, 10]},
                    "gpu": {"use": [0.9, 0.5 if hot else 0.9], "celsius": [60, 91 if hot else 61]},
                }
            )  # fmt: skip
        text = [
            json.dumps({"time": STARTED + 2 + 5 * i, "node": node, **each}) + "\n"
            for i, each in enumerate(lines)
        ]
        (made.path / f"outputs/node_{node:02d}_metrics.jsonl").write_text("".join(text))


def line(rank: int, step: int, slow: int) -> dict[str, Any]:
    data = 30.0 if rank == slow else 1.0
    return {
        "time": STARTED + step, "rank": rank, "step": step, "epoch": 0,
        "loss": 1.0 + math.exp(-step / 50), "lr": 0.1, "grad_norm": 1.0 / step,
        "tokens": step * 100, "tokens_per_s": 1000.0, "step_ms": 100.0, "data_ms": data,
        "forward_backward_ms": 60.0, "optimizer_ms": 5.0, "memory_peak_bytes": 1 << 30,
        "mfu": None, "skipped_steps": 1 if step > 150 else 0,
    }  # fmt: skip
