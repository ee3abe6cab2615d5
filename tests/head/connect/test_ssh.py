"""A connection that breaks under what is sent."""

import contextlib
import socket
from collections.abc import Callable

import pytest

from orchestrator.head.connect.fabric_login import FabricChannel, FabricConnection
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.nodes.node_list import read_nodes
from tests.conftest import Cluster
from tests.node.running import wait_until

pytestmark = pytest.mark.cluster

SENDS: dict[str, Callable[[FabricChannel], None]] = {
    "data": lambda channel: channel.sendall(b"x"),
    "the end of the input": lambda channel: channel.shutdown_write(),
    "its end": lambda channel: channel.close(),
}


@pytest.mark.parametrize("what", SENDS)
def test_failed_send_leaves_report_to_reader(two_nodes: Cluster, what: str) -> None:
    transport = SshTransport(SshConfig(two_nodes.ssh_config))
    node = read_nodes(two_nodes.node_list)[0]
    connection = transport.connect(node)
    assert isinstance(connection, FabricConnection)
    channel = connection.run("cat", 10.0)
    assert isinstance(channel, FabricChannel)
    under = connection.transport.sock
    assert isinstance(under, socket.socket)
    # The next write gets EPIPE.
    under.shutdown(socket.SHUT_WR)
    # The channel is closed already if the reader was faster.
    with contextlib.suppress(OSError):
        SENDS[what](channel)
    assert channel.recv(1) == b""
    wait_until(lambda: not connection.alive)
