"""A job resumes on other nodes than it had, without a shared disk: the parts of its state come."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.netns import NetnsCluster
from tests.end_to_end.test_checkpoint_parts import LAST, TRAINING, losses
from tests.end_to_end.test_fanout import walled
from tests.launching import BIN, Command, Head

ENDS = ["--set", f"training.max_steps={LAST}"]
SAVING = ["--set", "checkpoint.steps=2", "--set", "training.max_steps=4"]


class Hosts:
    """Three hosts with disks of their own, and somebody who launches on some of them."""

    def __init__(self, cluster: NetnsCluster, directory: Path) -> None:
        self.cluster, self.head = cluster, Head(cluster, directory)

    def on(self, *numbers: int, spare: int | None = None) -> Head:
        lines = [self.cluster.addresses[number] for number in numbers]
        lines += [f"{self.cluster.addresses[spare]} spare"] if spare is not None else []
        self.head.node_list = self.cluster.write_list(lines, "some.txt")
        return self.head

    def parts(self, number: int, job: str) -> list[str]:
        places = (self.cluster.run_home(number) / "runs").glob(f"{job}*/*/experiment/outputs")
        found = [path for place in places for path in place.glob("*/step_00000004/__*")]
        return sorted(path.name for path in found if "alike" not in path.name)

    def forget(self, job: str, step: int) -> None:
        for number in range(len(self.cluster.addresses)):
            places = (self.cluster.run_home(number) / "runs").glob(f"{job}*/*/experiment/outputs")
            for path in [path for place in places for path in place.glob(f"*/step_{step:08d}")]:
                shutil.rmtree(path)


@pytest.fixture
def hosts(netns_cluster: Any, tmp_path: Path) -> Hosts:
    return Hosts(netns_cluster(3, tmpfs=[str(tmp_path)]), tmp_path)


def test_what_only_a_node_of_the_old_job_has_is_brought(hosts: Hosts) -> None:
    head, (a, b, _) = hosts.on(0, 1), hosts.cluster.addresses
    head.run("--name", "cut", *TRAINING, *ENDS, "--set", "checkpoint.steps=2")
    expected = losses(head.experiment)
    hosts.forget("cut", LAST)  # as if it had been cut short there
    parts = [hosts.parts(number, "cut") for number in range(3)]
    assert parts == [["__0_0.distcp"], ["__1_0.distcp"], []]
    again = hosts.on(1, 2).run("--name", "cut", *TRAINING, *ENDS, "--set", "checkpoint.resume=auto")
    assert "checkpoint of step 4: 1 file" in again.text, again.text
    assert f"that only {a} had brought to {b} in" in again.text
    assert "resuming after step 4" in again.text
    assert losses(head.experiment) == {step: expected[step] for step in (5, 6)}
    assert "WARNING" not in again.text


def test_nodes_that_cannot_call_each_other_and_one_that_is_away(hosts: Hosts) -> None:
    """What cannot go from node to node comes through the head; what is away is named."""
    head, (a, b, c) = hosts.on(0, 1), hosts.cluster.addresses
    head.run("--name", "cut", *TRAINING, *SAVING)
    cut = head.experiment.name
    alone = ["--name", "third", "--nproc", "2", *TRAINING[2:], *ENDS]
    alone += ["--set", f"checkpoint.resume={cut}"]
    with walled(hosts.cluster, 0):
        third = hosts.on(2).run(*alone)
    assert f"{c} cannot take files from {a} (" in third.text, third.text
    assert f"that only {a}, {b} had brought to {c}" in third.text
    assert "resuming after step 4" in third.text
    (job,) = (hosts.cluster.run_home(2) / "runs").iterdir()
    kept = {path.name for path in job.glob("0/experiment/outputs/checkpoints/*")}
    assert kept >= {"step_00000004", "step_00000006"}  # they go with the job that they came for
    assert not list(job.glob("*.brought"))

    hosts.cluster.end_sshd(0)
    away = head.launch(*alone)
    assert away.finish() == 3, away.text
    assert f"{a} cannot be reached (" in away.text
    assert "step 4 lacks __0_0.distcp (written by host0)" in away.text
    assert "bring these nodes back; or launch on nodes that have these files" in away.text
    assert len(head.experiments) == 2  # nothing of it is left
    assert not list((hosts.cluster.run_home(2) / "runs").glob("*/*.brought"))


def test_the_next_attempt_leaves_a_node(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(hosts.head.directory / "login"))
    head, (a, b, c) = hosts.on(0, 1, spare=2), hosts.cluster.addresses
    (head.directory / "node_ip_list.txt").write_bytes(head.node_list.read_bytes())
    settings = ["--set", "checkpoint.steps=2", "--set", "checkpoint.memory_every=0"]
    settings += ["--set", "training.max_steps=2000", "--max-restarts", "1"]
    command = head.launch("--name", "goes", *TRAINING, *settings)
    command.wait_for("saved step 4")
    words = [str(BIN / "orchestrator"), "node", "cordon", b]
    assert Command(words, head.directory, {}).finish() == 0
    hosts.cluster.exec(0, ["pkill", "-KILL", "-x", "rank0"])
    command.wait_for(f"{b} is cordoned .*: {c} takes its place")
    command.wait_for(f"that only {b} had brought to {a} in")
    command.wait_for(r"resuming after step \d+")
    command.interrupt()
    assert command.finish() == 130, command.text
