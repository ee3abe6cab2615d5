"""A cluster without a shared disk: parts and copies of a checkpoint, a lost disk, a lost node."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.launching import BIN, Command, Head

LAST = 6
TRAINING = ["--nproc", "1", "--set", "fsdp.sharding_strategy=full_shard", "--set"]
TRAINING += ["scheduler.total_steps=6", "--set", "logging.interval=1", "--sync", "off"]
SAVING = ["--set", "checkpoint.steps=2", "--set", "checkpoint.copies=2"]


def test_training_resumes_after_lost_disk_and_node(netns_cluster: Any, tmp_path: Path) -> None:
    # The engine needs no directory of the head's, so nothing exists elsewhere.
    here = tmp_path / "here"
    here.mkdir()
    head = Head(netns_cluster(2, tmpfs=[str(tmp_path)]), here)
    cluster = head.cluster
    first = head.run("--name", "cut", *TRAINING, *SAVING, "--set", "training.max_steps=4")
    assert "each keeps its own part of every checkpoint" in first.text
    cut = head.experiment
    places = [cluster.run_home(node) / "runs" for node in (0, 1)]
    parts = [
        sorted(path.name for path in place.glob("cut*/*/*/*/*/step_00000004/__*"))
        for place in places
    ]
    own = ["__0_0.distcp", "__1_0.distcp"]
    assert [[name for name in names if "alike" not in name] for names in parts] == [own] * 2
    for path in places[1].glob("cut*"):
        shutil.rmtree(path)
    resume = ("--set", f"checkpoint.resume={cut.name}")
    words = ("--name", "again", *TRAINING, *SAVING, "--set", f"training.max_steps={LAST}")
    again = head.run(*words, *resume)
    assert "resuming after step 4" in again.text, again.text

    newest = head.experiments[0]
    assert newest.name.startswith("again")
    cluster.end_sshd(1)
    head.command("orchestrator", "pull", "--checkpoints", newest.name).ends(4)
    # One node is missing, but its parts are there.
    typed = [str(BIN / "orchestrator"), "checkpoint", "verify", "--json", newest.name]
    verify = Command(typed, head.directory, {}).ends()
    assert json.loads(verify.text)["newest_good"] == LAST

    cluster.spawn_sshd(1)
    for path in places[0].glob("cut*/*/*/*/*/step_*/__1_0.distcp"):
        path.unlink()
    short = head.command("orchestrator", "pull", "--checkpoints", cut.name).ends(1)
    assert "checkpoints/step_00000004: step 4 lacks __1_0.distcp" in short.text
    # Ranks search the disks of their own nodes; nothing is carried from others.
    alone = head.launch("--nnodes", "1", *TRAINING, *resume)
    assert alone.finish() != 0, alone.text
    assert "step 4 lacks __1_0.distcp (written by host1)" in alone.text
    assert "launch on nodes that have these files" in alone.text
