"""64 ranks of 8 nodes on this machine: what a rank holds does not grow with their number."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.engine import train
from orchestrator.engine.ranks.ranks import joined
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

NODES = [8] * 8
CONFIG = {
    "training": {"max_steps": 3, "batch_size": 1, "eval_steps": 2},
    "model": {"model_dim": 64, "num_layers": 1, "num_heads": 2},
    "dataset": {"kind": "synthetic", "sequence_length": 8, "num_samples": 400},
    "checkpoint": {"steps": 1, "keep": 1},
    "logging": {"interval": 1},
}


def counted(directory: Path) -> None:
    """Train, and say how many files were open at the end: sockets to other ranks among them."""
    config = train.read_config()
    train.prepare(config)
    with joined(config) as ranks:
        train.Trainer.from_config(config, ranks).train()
        files = len(list(Path("/proc/self/fd").iterdir()))
    (directory / f"results_{os.environ['RANK']}").write_text(json.dumps(files))


def test_64_ranks_train_and_save(tmp_path: Path) -> None:
    world = sum(NODES)
    call = "tests.engine.sharding.test_many_ranks:counted"
    job = Job(str(tmp_path), NODES, CONFIG, call=call, timeout=900.0)
    (codes,) = run(job)
    assert codes == [0] * world, job.output()
    assert "hybrid_shard: 8 copies of the parameters, each in 8 shards" in job.output()
    losses = {
        tuple(line["loss"] for line in job.metrics(rank) if "loss" in line) for rank in (0, 63)
    }
    assert len(losses) == 1
    (saved,) = (job.experiment() / "outputs/checkpoints").iterdir()
    assert saved.name == "step_00000003"
    files = [json.loads((tmp_path / f"results_{rank}").read_text()) for rank in range(world)]
    # Rank 0 plans the checkpoints and talks to all; the others have neighbours. A file for every
    # rank in each of the three groups would be 189.
    assert max(files[1:]) < world
    assert files[0] < 3 * world
