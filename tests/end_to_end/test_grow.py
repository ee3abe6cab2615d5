"""A job goes on with fewer nodes, and with all of them when they are back: one curve."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load
from orchestrator.engine import train
from tests.engine.worlds import Job, run
from tests.launching import Head

STEPS, BATCH = 40, 12  # of all ranks

# Each rank writes down what it reads; some attempts are slow, so that there is time to change.
DATA = """
import os, time, torch
from pathlib import Path
place = Path(os.environ["ORCHESTRATOR_EXPERIMENT"], "outputs")
attempt, rank = os.environ["ORCHESTRATOR_ATTEMPT"], os.environ["RANK"]

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 500

    def __getitem__(self, index):
        if attempt in os.environ.get("SLOW_ATTEMPTS", ""):
            time.sleep(0.1)
        with (place / f"read_{attempt}_{rank}").open("a") as file:
            file.write(f"{index}\\n")
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum()[None].sin()}

def samples(split):
    return Samples()

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

def loss(model, batch):
    each = (model(batch["x"]) - batch["y"]).square()
    return each.sum(), torch.tensor(each.numel())
"""
SETTINGS = [
    *(f"training.max_steps={STEPS}", "training.batch_size=2"),
    *("model.target=own_data:model", "dataset.target=own_data:samples", "logging.interval=1"),
    *("training.loss=own_data:loss", "checkpoint.steps=4", "optimizer.lr=0.01"),
    *("fsdp.sharding_strategy=full_shard",),
]
ENGINE = ["--nproc", "1", *[word for value in SETTINGS for word in ("--set", value)]]


ACCUMULATE = "training.gradient_accumulation"


def curve(experiment: Path, key: str) -> dict[int, Any]:
    """A value of each step, as it was trained last; equal on all ranks, and in all attempts."""
    found: dict[int, Any] = {}
    lines = (experiment / "outputs/rank_00_metrics.jsonl").read_text().splitlines()
    for line in (line for line in map(json.loads, lines) if key in line):
        before = found.setdefault(line["step"], line[key])
        assert before == pytest.approx(line[key], abs=1e-5), (line["step"], key)
    return found


def trained_on(experiment: Path, attempt: int, ranks: int, steps: int) -> list[int]:
    """The samples of so many steps of an attempt; what it read after them came to nothing."""
    files = [experiment / f"outputs/read_{attempt}_{rank}" for rank in range(ranks)]
    each = steps * BATCH // ranks
    return [int(index) for file in files for index in file.read_text().split()[:each]]


def same_training(head: Head, whole: Path, said: str, nodes: tuple[int, ...]) -> None:
    """Attempts on so many nodes, a rank each, are one training: curves, and samples."""
    for key in ("loss", "lr", "tokens"):
        expected = curve(whole, key)
        assert list(expected) == list(range(1, STEPS + 1))
        assert curve(head.experiment, key) == pytest.approx(expected, abs=1e-5), key
    resumed = [int(step) for step in re.findall(r"resuming after step (\d+),", said)]
    lengths = [end - begin for begin, end in pairwise([0, *resumed, STEPS])]
    samples = [
        index
        for attempt, (ranks, steps) in enumerate(zip(nodes, lengths, strict=True), 1)
        for index in trained_on(head.experiment, attempt, ranks, steps)
    ]
    assert sorted(samples) == sorted(trained_on(whole, 1, nodes[0], STEPS))
    assert len(samples) == STEPS * BATCH


def undisturbed(directory: Path, setting: str) -> Path:
    """The experiment of the same training on two nodes from its first step to its last."""
    config = asdict(load.load(None, [*SETTINGS, setting]))
    place, call = str(directory / "undisturbed"), "tests.end_to_end.test_grow:train_beside"
    job = Job(place, [1, 1], config, env={"ORCHESTRATOR_ATTEMPT": "1"}, call=call)
    assert run(job) == [[0, 0]], job.output()
    return job.experiment()


def train_beside(place: Path) -> None:
    sys.path.insert(0, str(place.parent))  # where own_data.py is
    train.main()


def test_who_was_away_at_the_launch_joins_is_lost_and_comes_back(
    netns_cluster: Any, tmp_path: Path
) -> None:
    """The first time it is given its part by a head that did not launch the job."""
    head = Head(netns_cluster(3), tmp_path)
    head.script("own_data.py", DATA)
    settings = [*ENGINE, "--set", f"{ACCUMULATE}=3", "--max-restarts", "1"]
    whole = undisturbed(tmp_path, f"{ACCUMULATE}=3")
    away = head.cluster.addresses[2]
    head.cluster.cut(2)
    options = ["--nnodes", "2:3", "--node-loss-timeout", "3", "--connect-timeout", "2"]
    options += ["--env", "SLOW_ATTEMPTS=123", "--sync", "always", "--grow-every", "1"]
    launch = head.launch(*settings, *options)
    launch.wait_for(f"{away} is skipped: ")
    launch.wait_for("training on 500 samples")
    launch.process.kill()
    launch.process.wait()
    command = head.command("orchestrator", "attach")
    command.wait_for("saved step 4")
    head.cluster.restore(2)
    joins = f"{away} can join: on with 3 nodes instead of 2"
    command.wait_for(f"{joins}; asking all ranks to save")
    command.wait_for("3 ranks in place of 2: a step keeps its 12 samples, 2 micro-batches of 2")
    command.wait_for(r"saved step \d+: ")
    head.cluster.cut(2)
    command.wait_for("the job continues with 2 of 3 nodes")
    command.wait_for("resuming after step")
    head.cluster.restore(2)
    command.wait_for(f"{joins}; asking all ranks to save")
    command.wait_for(rf"attempt 4 of at most 4 \({joins}\)")
    status = head.command("orchestrator", "status")
    assert status.finish() == 0 and "attempt 4 of at most 4" in status.text
    assert command.finish() == 0, command.text

    # With the shard of the node that was lost, of which the next one has a copy.
    layouts = re.findall(r"from memory .*put together from full_shard in (.) shards", command.text)
    assert layouts == ["2", "3", "2"]
    record = head.record
    assert record["state"] == "done" and len(record["nodes"]) == 3
    attempts = record["attempts"]
    assert [one["state"] for one in attempts] == ["resized", "lost", "resized", "done"]
    assert [len(one["nodes"]) for one in attempts] == [2, 3, 2, 3]
    assert attempts[0]["verdict"] is None and attempts[0]["why"].startswith(f"{away} can join")
    assert all(0 < one["ran"] < one["ended"] - one["started"] for one in attempts)
    goodput, wall = record["goodput"], record["ended"] - record["started"]
    assert goodput["resize"] > attempts[3]["ended"] - attempts[3]["started"] - attempts[3]["ran"]
    assert sum(goodput.values()) == pytest.approx(wall, abs=0.1)
    same_training(head, whole, command.text, (2, 3, 2, 3))
    assert head.nothing_left()
