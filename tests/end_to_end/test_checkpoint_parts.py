"""A cluster without a shared disk: parts and copies of a checkpoint, a lost disk, a lost node."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.launching import BIN, Command, Head

pytestmark = pytest.mark.cluster

LAST = 6
TRAINING = ["--nproc", "1", "--set", "fsdp.sharding_strategy=full_shard", "--set"]
TRAINING += ["scheduler.total_steps=6", "--set", "logging.interval=1", "--sync", "off"]
SAVING = ["--set", "checkpoint.steps=2", "--set", "checkpoint.copies=2"]


def losses(experiment: Path) -> dict[int, float]:
    path = experiment / "outputs/rank_00_metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_disk_and_a_node_may_be_lost(netns_cluster: Any, tmp_path: Path) -> None:
    # The engine needs no directory of the head's, so nothing exists elsewhere.
    here = tmp_path / "here"
    here.mkdir()
    head = Head(netns_cluster(3, tmpfs=[str(tmp_path)]), here)
    cluster = head.cluster
    whole = head.run("--name", "a_whole", *TRAINING, "--set", f"training.max_steps={LAST}")
    assert "each keeps its own part of every checkpoint" in whole.text
    expected = losses(head.experiment)
    head.run("--name", "cut", *TRAINING, *SAVING, "--set", "training.max_steps=4")
    cut = head.experiment

    places = [cluster.run_home(node) / "runs" for node in range(3)]
    parts = [
        sorted(path.name for path in place.glob("cut*/*/*/*/*/step_00000004/__*"))
        for place in places
    ]
    own = [[f"__{rank}_0.distcp" for rank in ranks] for ranks in ((0, 2), (0, 1), (1, 2))]
    assert [[name for name in names if "alike" not in name] for names in parts] == own
    for path in places[2].glob("cut*"):
        shutil.rmtree(path)
    again = head.run("--name", "cut", *TRAINING, *SAVING, "--set", f"training.max_steps={LAST}",
                     "--set", f"checkpoint.resume={cut.name}")  # fmt: skip
    assert "resuming after step 4" in again.text, again.text
    assert losses(head.experiment) == {step: expected[step] for step in (5, 6)}

    newest = head.experiment
    cluster.end_sshd(1)
    pull = head.command("orchestrator", "pull", "--checkpoints", newest.name)
    # One node is missing, but its parts are there.
    assert pull.finish() == 4, pull.text
    words = [str(BIN / "orchestrator"), "checkpoint", "verify", "--json", newest.name]
    verify = Command(words, head.directory, {})
    assert verify.finish() == 0, verify.text
    assert json.loads(verify.text)["newest_good"] == LAST

    cluster.spawn_sshd(1)
    shutil.rmtree(next(places[1].glob(f"{cut.name}-*")))
    short = head.command("orchestrator", "pull", "--checkpoints", cut.name)
    assert short.finish() == 1, short.text
    assert "checkpoints/step_00000004: step 4 lacks __1_0.distcp" in short.text
    for place in places:
        for path in place.iterdir():
            shutil.rmtree(path)
    source = f"experiments/{newest.name}/outputs/checkpoints"
    push = head.command("orchestrator", "push", "--node", "1", source, "~/kept")
    assert push.finish() == 0, push.text
    passed_on = head.run("--name", "passed_on", *TRAINING, "--set", "training.max_steps=7",
                         "--set", "checkpoint.resume=~/kept")  # fmt: skip
    assert "resuming after step 6" in passed_on.text, passed_on.text


def test_a_launch_on_nodes_that_lack_parts_says_which(netns_cluster: Any, tmp_path: Path) -> None:
    """Ranks search the disks of their own nodes; nothing is carried from others."""
    head = Head(netns_cluster(3, tmpfs=[str(tmp_path)]), tmp_path)
    addresses = head.cluster.addresses
    head.node_list = head.cluster.write_list(addresses[:2], "first.txt")
    saving = ["--set", "checkpoint.steps=2", "--set", "training.max_steps=4"]
    head.run("--name", "cut", *TRAINING, *saving)
    resume = ["--set", f"checkpoint.resume={head.experiment.name}"]
    head.node_list = head.cluster.write_list(addresses[1:], "others.txt")
    others = head.launch("--name", "others", *TRAINING, *resume)
    assert others.finish() != 0, others.text
    assert "step 4 lacks __0_0.distcp (written by host0)" in others.text
    assert "launch on nodes that have these files" in others.text
