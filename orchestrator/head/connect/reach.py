"""Reach one node: connect, start our server at its other end, and ask for its facts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.channel import NodeChannel, NotActive
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.transport import Connection, Transport
from orchestrator.head.nodes.clock import clock_offset
from orchestrator.head.nodes.environment import Environment, chosen
from orchestrator.head.nodes.facts import Facts, ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.machine import Probe
from orchestrator.protocol.requests.request import Request

log = logging.getLogger(__name__)

A = TypeVar("A", bound=Message)


@dataclass(frozen=True)
class Reached:
    """A node with an open channel."""

    node: Node
    facts: Facts
    channel: NodeChannel
    # When the connection began and each step was done: begin, connect, server, probe
    times: dict[str, float] = field(default_factory=dict)

    @property
    def probed(self) -> ProbedNode:
        connection = self.channel.connection
        return ProbedNode(self.node, self.facts, connection.address, str(connection.way))


def open_channel(connection: Connection, node: Login, timeout: float) -> NodeChannel:
    """Start our server at the other end of a connection, and wait until it greets.

    Where that fails the connection is closed: who tries again and again would fill the node.
    """
    try:
        environment = Environment(node.python, chosen(node.activate), chosen(node.wrap))
        channel = NodeChannel(connection, environment, timeout)
        channel.name = node.host
        channel.begin(timeout)
    except BaseException:
        connection.close()
        raise
    return channel


def serving(ssh: Transport, node: Login) -> NodeChannel:
    """Connect to a node, over a connection of its own, and start our server there."""
    log.debug("%s: connecting", node.host)
    return open_channel(ssh.connect(node), node, ssh.timeout)


def attending(ssh: Transport, node: Login) -> NodeChannel:
    """Do so for what starts nothing there: to look after jobs, to end them, to fetch files.

    That must not hang on an environment that was removed or renamed meanwhile, or that waits for a
    disk: where it cannot be activated, our server does without.
    """
    try:
        return serving(ssh, node)
    except NotActive as error:
        try:
            return serving(ssh, replace(node, activate=None))
        except NodeError:
            raise error from None


@contextmanager
def for_now(ssh: Transport, node: Login) -> Iterator[NodeChannel]:
    """Have our server on a node, to look after something, and close the connection in the end."""
    channel = attending(ssh, node)
    try:
        yield channel
    finally:
        channel.connection.close()


@contextmanager
def kept_if_well(channel: NodeChannel) -> Iterator[None]:
    """Close the connection only where what is asked of it first fails."""
    try:
        yield
    except BaseException:
        channel.connection.close()
        raise


def ask_once(ssh: Transport, node: Login, request: Request[A], timeout: float) -> A:
    """Ask a node one thing, over a connection of its own."""
    with for_now(ssh, node) as channel:
        return channel.ask(request, timeout)


def reach(ssh: Transport, node: Node, request: Probe) -> Reached:
    """Connect to a node, start the server there and ask for its facts, in one go."""
    begun = time.time()
    log.debug("%s: connecting", node.host)
    connection = ssh.connect(node)
    connected = time.time()
    channel = open_channel(connection, node, ssh.timeout)
    asked = time.time()
    with kept_if_well(channel):
        probed = channel.ask(request.replace(workdir=node.workdir or request.workdir), ssh.timeout)
    answered = time.time()
    facts = Facts(**vars(probed), clock_offset=clock_offset(probed.time, asked, answered))
    times = {"begin": begun, "connect": connected, "server": asked, "probe": answered}
    return Reached(node, facts, channel, times)
