"""A job continues on fewer nodes, and its next attempt takes back those that return: one curve."""

import json
import re
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load
from tests.engine.worlds import Job, run
from tests.launching import Head

# The batch is that of all ranks.
STEPS, BATCH = 40, 12

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
    assert sorted(samples) == sorted(trained_on(whole, 1, 2, STEPS))
    assert len(samples) == STEPS * BATCH


def undisturbed(directory: Path, setting: str) -> Path:
    """The experiment of the same training on two nodes from its first step to its last."""
    config = asdict(load.load_config(None, [*SETTINGS, setting]))
    place, call = str(directory / "undisturbed"), "tests.end_to_end.test_shrink:train_beside"
    job = Job(place, [1, 1], config, env={"ORCHESTRATOR_ATTEMPT": "1"}, call=call)
    assert run(job) == [[0, 0]], job.output()
    return job.experiment()


def train_beside(place: Path) -> None:
    # The Python that forks the ranks has imported torch; this one need not.
    from orchestrator.engine import train

    # This directory holds own_data.py.
    sys.path.insert(0, str(place.parent))
    train.main()


def test_next_attempt_takes_back_lost_node(lonely: Head) -> None:
    lonely.script("own_data.py", DATA)
    settings = [*ENGINE, "--set", f"{ACCUMULATE}=3", "--max-restarts", "2"]
    whole = undisturbed(lonely.directory, f"{ACCUMULATE}=3")
    lost = lonely.cluster.addresses[1]
    options = ["--nnodes", "1:2", "--node-loss-timeout", "3", "--connect-timeout", "2"]
    options += ["--env", "SLOW_ATTEMPTS=12", "--sync", "always"]
    command = lonely.launch(*settings, *options)
    command.wait_for("saved step 4")
    lonely.cluster.cut(1)
    command.wait_for("the job continues with 1 of 2 nodes")
    command.wait_for("1 rank in place of 2: a step has 6 micro-batches of each, 6 as before")
    command.wait_for(r"saved step \d+: ")
    lonely.cluster.restore(1)
    lonely.cluster.exec(0, ["pkill", "-KILL", "-x", "rank0"])
    command.wait_for(f"{lost} joins")
    assert command.finish() == 0, command.text

    record = lonely.record
    assert record["state"] == "done" and len(record["nodes"]) == 2
    attempts = record["attempts"]
    assert [one["state"] for one in attempts] == ["lost", "failed", "done"]
    assert [len(one["nodes"]) for one in attempts] == [2, 1, 2]
    goodput, wall = record["goodput"], record["ended"] - record["started"]
    assert sum(goodput.values()) == pytest.approx(wall, abs=0.1)
    same_training(lonely, whole, command.text, (2, 1, 2))
    assert lonely.nothing_left()
