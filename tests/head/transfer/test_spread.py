"""Many nodes pass a tree on to each other: here servers of ours, each with a home of its own."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import NodeError, UsageError
from orchestrator.config.schema import Sync
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import Reached
from orchestrator.head.connect.subprocess_transport import ProcessChannel
from orchestrator.head.transfer import send, spread
from orchestrator.head.transfer.peer import Peer
from orchestrator.head.transfer.schedule import givers
from orchestrator.head.transfer.send import Batch, Sender, Sent, SharedBatches
from orchestrator.head.transfer.spread import PassingOn, places
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.facts import Address, Interface
from orchestrator.protocol.requests.transfer import Take
from tests.head.transfer.test_send import check_out, reach, scan, send_tree

pytestmark = pytest.mark.slow

NODES = 4  # one after the other
FILES = {f"many/{number}": b"%d" % number for number in range(400)}
FILES |= {"large": os.urandom(600_000), "empty": b""}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(send, "BATCH_BYTES", 50_000)
    for name, content in FILES.items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return scan(tmp_path / "work")


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Reached]]:
    reached = []
    for number in range(NODES):
        monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / f"home{number}"))
        reached.append(reach(f"node{number}"))
    monkeypatch.setattr(spread, "givers", lambda sites: givers(sites, width=1))
    monkeypatch.setattr(spread, "places", lambda giver, taker: ("127.0.0.1",))
    yield reached
    for node in reached:
        node.channel.close()


class Uplink:
    """Counts the contents that leave the head."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = 0
        real = NodeChannel.put

        def put(channel: NodeChannel, data: bytes, timeout: float) -> None:
            self.size += len(data)
            real(channel, data, timeout)

        monkeypatch.setattr(NodeChannel, "put", put)


ALL = PassingOn(3, 0)


def have_all(nodes: list[Reached], tree: Tree) -> bool:
    return all(check_out(node.channel, tree).workdir for node in nodes)


def test_the_head_sends_one_copy_to_each_chain(
    tree: Tree, nodes: list[Reached], monkeypatch: pytest.MonkeyPatch
) -> None:
    uplink, seen, said = Uplink(monkeypatch), [], []  # type: ignore[var-annotated]
    results = send_tree(nodes, tree, seen.append, ALL, said.append)
    assert results == [(tree.files, tree.size)] * NODES
    assert sum(seen) == tree.size * NODES
    lists = NODES * len(zlib.compress(tree.listing, 1))
    assert 600_000 < uplink.size - lists < 1.1 * 600_000
    assert said == []
    assert have_all(nodes, tree)
    uplink.size = 0
    assert send_tree(nodes, tree, passing_on=ALL) == [(0, 0)] * NODES
    assert send_tree(nodes, tree, passing_on=PassingOn(3)) == [(0, 0)] * NODES  # not worth it


def test_who_cannot_reach_another_is_served_from_here(
    tree: Tree, nodes: list[Reached], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And passes on what it gets to those after it."""

    def wrong_token(channel: NodeChannel, request: Any, timeout: float) -> Any:
        if isinstance(request, Take) and channel in (nodes[1].channel, nodes[3].channel):
            request = request.replace(giver=request.giver.replace(token="00" * 32))
        return real(channel, request, timeout)

    real = NodeChannel.ask
    monkeypatch.setattr(NodeChannel, "ask", wrong_token)
    uplink, said = Uplink(monkeypatch), []  # type: ignore[var-annotated]
    assert (
        send_tree(nodes, tree, passing_on=ALL, say=said.append) == [(tree.files, tree.size)] * NODES
    )
    assert 3 * 600_000 < uplink.size < 3.3 * 600_000
    assert len(said) == 2
    assert re.match(
        r"node[13] cannot take files from node[02] \(127.0.0.1: .*(hung up|token)", said[0]
    ), said
    assert re.match(r"files were also sent from here to node[13]$", said[1]), said
    assert have_all(nodes, tree)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_takes_no_other_with_it(
    tree: Tree, nodes: list[Reached], monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """One that gets it from here, and one in the middle: killed while contents come."""
    channel = nodes[lost].channel.channel
    assert isinstance(channel, ProcessChannel)
    assert channel.process is not None
    process = channel.process
    real = SharedBatches.get

    def get(self: SharedBatches, number: int) -> Batch | None:
        if number == 5:
            process.kill()
        return real(self, number)

    monkeypatch.setattr(SharedBatches, "get", get)
    said: list[str] = []
    results = send_tree(nodes, tree, passing_on=ALL, say=said.append)
    assert isinstance(results.pop(lost), NodeError)
    assert all(isinstance(sent, tuple) for sent in results), results
    assert said
    others = [node for at, node in enumerate(nodes) if at != lost]
    assert have_all(others, tree)


def test_a_full_disk_is_that_nodes_alone(
    tree: Tree, nodes: list[Reached], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Sender.go

    def refuse(self: Sender) -> Sent:
        if self.peer.channel is nodes[0].channel:
            raise NodeError("no space left on device")
        return real(self)

    monkeypatch.setattr(Sender, "go", refuse)
    said: list[str] = []
    results = send_tree(nodes, tree, passing_on=ALL, say=said.append)
    assert isinstance(results.pop(0), NodeError)
    assert results == [(tree.files, tree.size)] * (NODES - 1)
    assert "node1 cannot take files from node0 (" in said[0]


# -- by itself --------------------------------------------------------------------------------


def test_when_it_pays() -> None:
    auto = PassingOn.of("auto")
    assert auto.pays(64, 1 << 20)
    assert not auto.pays(4, 1 << 30)
    assert not auto.pays(64, 1 << 10)  # an edit
    assert not PassingOn.of(False).pays(1000, 1 << 30)
    assert not PassingOn.of(8).pays(7, 1 << 30)
    assert PassingOn.of(8).pays(8, 1)
    for wrong in (True, "on", -1):
        with pytest.raises(UsageError, match=r"sync\.fanout"):
            Sync(fanout=wrong)


NETWORKS = {
    "one network": ([("eth0", "10.0.0.1")], [("eth0", "10.0.0.2")], ["10.0.0.1", "192.0.2.1"]),
    "the faster": (
        [("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")],
        [("eth0", "10.0.0.2"), ("ib0", "10.1.0.2")],
        ["10.1.0.1", "192.0.2.1", "10.0.0.1"],
    ),
    "containers": (
        [("docker0", "172.17.0.1"), ("lo", "127.0.0.1")],
        [("docker0", "172.17.0.1"), ("lo", "127.0.0.1")],
        ["192.0.2.1"],
    ),
    "apart": ([("eth0", "10.0.0.1")], [("eth0", "10.0.1.1")], ["192.0.2.1"]),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_where_another_is_called(nodes_apart: Callable[..., Reached], case: str) -> None:
    giver, taker, expected = NETWORKS[case]
    assert list(places(peer(nodes_apart(giver)), peer(nodes_apart(taker)))) == expected


def peer(reached: Reached) -> Peer:
    return Peer("", reached.channel, reached)


@pytest.fixture
def nodes_apart() -> Callable[..., Reached]:
    from types import SimpleNamespace

    speeds = {"eth0": 10_000, "ib0": 200_000}

    def make(addresses: list[tuple[str, str]]) -> Any:
        facts = SimpleNamespace(
            addresses=[Address(name, address, 24) for name, address in addresses],
            interfaces=[
                Interface(name, "ethernet", "up", speed=speeds.get(name)) for name, _ in addresses
            ],
        )
        channel = SimpleNamespace(connection=SimpleNamespace(address="192.0.2.1"))
        return SimpleNamespace(node=SimpleNamespace(ifname=None), facts=facts, channel=channel)

    return make
