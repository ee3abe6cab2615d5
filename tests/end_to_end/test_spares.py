"""Nodes that are lost or not fit are passed over, and a spare takes their place."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.netns import NetnsCluster
from tests.clusters.require import require_namespaces, require_sshd
from tests.launching import Head

MEET = """
import os
names = "NNODES", "NODE_IP", "MASTER_ADDR"
print("{} nodes, {} at {}".format(*map(os.environ.get, names)), flush=True)
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


def test_spare_replaces_lost_master(someone: Head, four_nodes: NetnsCluster) -> None:
    """The next node is the master then: it is asked for ports, the others for a way to it."""
    first, second, third, _ = four_nodes.addresses
    lines = [second, third, f"{first} spare"]
    someone.node_list = four_nodes.write_list(lines, "other.txt")
    four_nodes.cut(1)
    try:
        text = someone.run("--no-torchrun", "--connect-timeout", "3", "meet.py").text
    finally:
        four_nodes.restore(1)
    assert f"{second} is skipped: it does not answer" in text
    assert f"2 nodes, 2 ranks, master {third}:" in text
    assert f"2 nodes, {first} at {third}" in text
