"""Reaches one node: connects, starts the node server there, and probes its facts."""

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
from orchestrator.head.nodes.environment import Environment
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
    # Unix times: "begin", and the end of each step ("connect", "server", "probe").
    times: dict[str, float] = field(default_factory=dict)

    @property
    def probed(self) -> ProbedNode:
        connection = self.channel.connection
        return ProbedNode(self.node, self.facts, connection.address, str(connection.way))


def open_channel(connection: Connection, node: Login, timeout: float) -> NodeChannel:
    """Start the node server over a connection, and wait for its greeting.

    On failure the connection is closed: repeated attempts would otherwise fill the node.
    """
    try:
        environment = Environment(node.python, node.activate, node.wrap)
        channel = NodeChannel(connection, environment, timeout)
        channel.name = node.host
        channel.begin(timeout)
    except BaseException:
        connection.close()
        raise
    return channel


def open_serving_channel(ssh: Transport, node: Login) -> NodeChannel:
    """Open a new connection to a node, and start the node server there."""
    log.debug("%s: connecting", node.host)
    return open_channel(ssh.connect(node), node, ssh.timeout)


def open_attending_channel(ssh: Transport, node: Login) -> NodeChannel:
    """Open a channel for commands that start no ranks (status, stop, fetch).

    Such commands must not fail because the node's environment was removed, renamed, or is on a disk
    that hangs. If it cannot be activated, the node server starts without it.
    """
    try:
        return open_serving_channel(ssh, node)
    except NotActive as error:
        try:
            return open_serving_channel(ssh, replace(node, activate=None))
        except NodeError:
            raise error from None


@contextmanager
def temporary_channel(ssh: Transport, node: Login) -> Iterator[NodeChannel]:
    """Open a channel as open_attending_channel() does; close its connection after the block."""
    channel = open_attending_channel(ssh, node)
    try:
        yield channel
    finally:
        channel.connection.close()


@contextmanager
def closed_on_error(channel: NodeChannel) -> Iterator[None]:
    """Close the channel's connection if the block fails; leave it open otherwise."""
    try:
        yield
    except BaseException:
        channel.connection.close()
        raise


def ask_node(ssh: Transport, node: Login, request: Request[A], timeout: float) -> A:
    """Send one request to a node over a new connection, and return the answer."""
    with temporary_channel(ssh, node) as channel:
        return channel.ask(request, timeout)


def reach_node(ssh: Transport, node: Node, request: Probe) -> Reached:
    """Connect to a node, start the server there and return it with its facts."""
    times = {"begin": time.time()}
    log.debug("%s: connecting", node.host)
    connection = ssh.connect(node)
    times["connect"] = time.time()
    channel = open_channel(connection, node, ssh.timeout)
    times["server"] = time.time()
    with closed_on_error(channel):
        probed = channel.ask(request.replace(workdir=node.workdir or request.workdir), ssh.timeout)
    times["probe"] = time.time()
    facts = Facts(**vars(probed), clock_offset=channel.clock.offset)
    return Reached(node, facts, channel, times)
