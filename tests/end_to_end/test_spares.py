"""Nodes that are cordoned, lost or not fit are passed over, and a spare takes their place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.netns import NetnsCluster
from tests.clusters.require import require_namespaces, require_sshd
from tests.launching import BIN, Command, Head

pytestmark = pytest.mark.slow

MEET = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # who leaves before the others have met breaks their meeting
print("met", dist.get_world_size(), "on", os.environ["NODE_IP"], flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def four_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsCluster]:
    require_sshd()
    require_namespaces()
    with NetnsCluster(4, tmp_path_factory.mktemp("spares")) as running:
        yield running


@pytest.fixture
def someone(four_nodes: NetnsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    """A login of its own, for whom the last node of the list is a spare."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "login"))
    head = Head(four_nodes, tmp_path)
    *others, last = four_nodes.addresses
    head.node_list = four_nodes.write_list([*others, f"{last} spare"], "with_spare.txt")
    (tmp_path / "node_ip_list.txt").write_bytes(head.node_list.read_bytes())
    head.script("meet.py", MEET)
    return head


def node(head: Head, *words: str) -> str:
    command = Command([str(BIN / "orchestrator"), "nodes", *words], head.directory, {})
    assert command.finish() == 0, command.text
    return command.text


def test_cordoned_until_it_is_not(someone: Head) -> None:
    """Seen by every command that shows nodes, obeyed by the launch, and lifted again."""
    first, second, _, spare = someone.cluster.addresses
    lines = [first, second, f"{spare} spare"]
    someone.node_list = someone.cluster.write_list(lines, "three.txt")
    (someone.directory / "node_ip_list.txt").write_bytes(someone.node_list.read_bytes())
    assert "launches skip it" in node(someone, "--cordon", second, "--reason", "a bad fan")
    text = someone.run("meet.py").text
    assert f"{second} is skipped: it is cordoned (a bad fan, since " in text
    assert f"{spare} (spare) takes its place" in text
    assert f"met 2 on {spare}" in text and f"on {second}" not in text
    for words, expected in (
        (("nodes",), f"{second} (cordoned)"),
        (("doctor", "--quick"), f"{second}: it is cordoned (a bad fan"),
        (("plan", "meet.py"), f"# note: {second} is skipped: it is cordoned"),
    ):
        command = someone.command("orchestrator", *words)
        assert command.finish() == 0 and expected in command.text, command.text
    node(someone, "--cordon", spare)
    command = someone.launch("meet.py")
    assert command.finish() == 3
    assert f"orchestrator nodes --uncordon {second} --uncordon {spare}" in command.text
    node(someone, "--uncordon", second, "--uncordon", spare)
    text = someone.run("--nnodes", "1", "--max-restarts", "1", "meet.py").text
    assert re.search(rf"2 spare nodes: {second}.*{spare}", text) and f"met 1 on {first}" in text
    waiting = [someone.cluster.processes(node, "ORCHESTRATOR_ROOM=") for node in range(4)]
    assert not any(waiting)


def test_a_master_that_is_gone(someone: Head, four_nodes: NetnsCluster) -> None:
    """The next node is the master then: it is asked for ports, the others for a way to it."""
    first, second, third, _ = four_nodes.addresses
    lines = [second, third, f"{first} spare"]
    someone.node_list = four_nodes.write_list(lines, "other.txt")
    four_nodes.cut(1)
    try:
        text = someone.run("--connect-timeout", "3", "meet.py").text
    finally:
        four_nodes.restore(1)
    assert f"{second} is skipped: it does not answer" in text
    assert f"2 nodes, 2 ranks, master {third}:" in text
    assert f"met 2 on {first}" in text


TRAINING = [
    *("training.max_steps=60", "checkpoint.steps=3", "logging.interval=1", "training.batch_size=2"),
    *("model.num_layers=1", "model.model_dim=16", "dataset.sequence_length=32"),
]


def test_the_masters_node_is_cut_off_and_a_spare_goes_on(
    someone: Head, four_nodes: NetnsCluster
) -> None:
    """Ranks and supervisors meet at another node, and the job ends well without the first."""
    first, *_, spare = four_nodes.addresses
    settings = [word for value in TRAINING for word in ("--set", value)]
    command = someone.launch(*settings, "--max-restarts", "3", "--node-loss-timeout", "6")
    command.wait_for(f"1 spare node: {spare}")
    command.wait_for("saved step 3")
    four_nodes.cut(0)
    try:
        command.wait_for(f"{first} is lost: {spare} takes its place")
        command.wait_for("warm start on all nodes")
        command.wait_for(r"resuming after step \d")
        assert command.finish() == 0, command.text
    finally:
        four_nodes.restore(0)
    record = someone.record
    assert record["state"] == "done" and record["master"].startswith(f"{spare}:")
    assert [node["name"] for node in record["nodes"]] == [spare, *four_nodes.addresses[1:3]]
    assert [node["name"] for node in record["spares"]] == [first]
    assert someone.nothing_left()
