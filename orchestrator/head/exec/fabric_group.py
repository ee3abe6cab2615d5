"""The nodes of a list as a group of fabric, over connections of ours.

fabric by itself reads no `Include` of an ssh_config, and takes a host key that has changed for a
new one. Only its way to a connection is replaced: run, put, get, sudo and Group are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.common.errors import import_optional
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import Destination
from orchestrator.head.nodes.node_list import Node

if TYPE_CHECKING:
    from fabric import Connection, Group


def group(ssh: SshTransport, nodes: Sequence[Node]) -> Group:
    """Return the nodes as a group that works on all of them at once; nothing is connected yet."""
    fabric = import_optional("fabric", "fabric", "Cluster.fabric() needs the package fabric, which")
    connections = [connection(fabric, ssh, ssh.config.of_node(node)) for node in nodes]
    return fabric.ThreadingGroup.from_connections(connections)


def connection(fabric: Any, ssh: SshTransport, destination: Destination) -> Connection:
    class VerifiedConnection(fabric.Connection):  # type: ignore[misc]
        """A connection of fabric that is opened as all of ours are."""

        def open(self) -> None:
            if not self.is_connected:
                # Kept, as the machines that it passes through are.
                self.verified = ssh.connect(destination)
                self.client._transport = self.transport = self.verified.transport

    return VerifiedConnection(
        destination.host,
        user=destination.user,
        port=destination.port,
        config=fabric.Config(overrides={"load_ssh_configs": False}),
    )
