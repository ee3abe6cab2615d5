"""Nodes that pass on what is pushed: no one of them is waited for without an end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.head.chores import push, relay
from orchestrator.head.chores.numbered_node import NumberedNode
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.ssh_config import Destination
from orchestrator.head.connect.subprocess_transport import LocalTransport
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer.fanout import Fanout
from orchestrator.node.transfer.files import Given
from orchestrator.node.transfer.give import Giver
from orchestrator.protocol.requests.transfer import GivingNode, NamedFile

TOKEN = "0" * 64


def test_a_node_that_has_all_and_gives_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has changed the file there since it came: it stays another one for ever."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(relay, "STALLED_SECONDS", 0.0)
    for name in ("here", "before"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("words")
    wanted = NamedFile(path="file", size=5, sum="0" * 64, changed=1)
    giver = Giver(TOKEN, Given(str(tmp_path / "before"), (), (wanted,)), 60.0)
    cargo = push.load(tmp_path / "here", str(tmp_path / "there"))
    nodes = [NumberedNode(at, Node("here", python=sys.executable)) for at in range(3)]
    connection = LocalTransport().connect(Destination("here", "", 0, ()))
    channel = open_channel(connection, nodes[2].node, 60.0)
    try:
        sums = push.Sums(cargo)
        sending = push.Sending(channel, nodes[2], cargo, sums, Progress("sending", 0), b"")
        way = relay.Relay(cargo, sums, nodes, Fanout(3, 0), list[str]().append)
        for at in range(2):
            way.end(at, whole=True)
        where = GivingNode(addresses=("127.0.0.1",), port=giver.port, token=TOKEN)
        size, why = way.take(2, sending, [wanted], where)
        assert size == 0 and why
    finally:
        giver.close()
        connection.close()
