"""Does the same work for all nodes at once, each in a thread; names every failure in one table."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from orchestrator.errors import NodeError, OrchestratorError
from orchestrator.head.connect.channel import NodeChannel, nonsense, python_candidates
from orchestrator.head.connect.ssh_config import Destination
from orchestrator.head.connect.transport import Connection, Transport
from orchestrator.head.inventory.facts import Facts
from orchestrator.head.inventory.node_list import Node
from orchestrator.head.inventory.probed_node import ProbedNode
from orchestrator.protocol.message import Nonsense
from orchestrator.protocol.messages import Probe
from orchestrator.text import table

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Reached:
    """A node with an open channel."""

    node: Node
    destination: Destination
    connection: Connection
    channel: NodeChannel
    facts: Facts

    @property
    def probed(self) -> ProbedNode:
        return ProbedNode(self.node, self.facts, self.connection.address)


def everywhere(items: Sequence[T], work: Callable[[T], R]) -> list[R | OrchestratorError]:
    """Do work(item) for all items at once; return each one's result or its error, in order."""
    results: list[R | OrchestratorError | None] = [None] * len(items)
    crashes: list[BaseException] = []

    def one(index: int, item: T) -> None:
        try:
            results[index] = work(item)
        except OrchestratorError as error:
            results[index] = error
        except BaseException as error:  # noqa: BLE001  a defect of ours: raised again in the caller
            crashes.append(error)

    threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # daemons: Ctrl-C leaves at once, and with the process the connections close
    if crashes:
        raise crashes[0]
    return cast("list[R | OrchestratorError]", results)


def all_or_table(
    nodes: Sequence[Node], results: Sequence[R | OrchestratorError], then: str
) -> list[R]:
    """Return the results, or raise one error that names every node that failed."""
    failed = [
        (n, r) for n, r in zip(nodes, results, strict=True) if isinstance(r, OrchestratorError)
    ]
    if not failed:
        return [result for result in results if not isinstance(result, OrchestratorError)]
    raise NodeError(failure_table(failed, len(nodes), then))


def failure_table(failed: Sequence[tuple[Node, OrchestratorError]], total: int, then: str) -> str:
    rows = []
    for node, error in failed:
        rows.append((node.name, error.what))
        if error.fix:
            rows.append(("", f"  -> {error.fix}"))
    heading = f"{len(failed)} of {total} nodes cannot be used{then}"
    return "\n".join([heading, *(f"  {line}" for line in table(rows))])


def connect(ssh: Transport, node: Node) -> tuple[Destination, Connection]:
    destination = ssh.config.of_node(node)
    return destination, ssh.connect(destination)


def open_channel(connection: Connection, python: str | None, timeout: float) -> NodeChannel:
    channel = NodeChannel(connection, python_candidates(python), timeout)
    channel.begin(timeout)
    return channel


def reach(ssh: Transport, node: Node, python: str | None, request: Probe) -> Reached:
    """Connect to one node, start the server there, and probe the node."""
    destination, connection = connect(ssh, node)
    channel = open_channel(connection, node.python or python, ssh.timeout)
    asked = time.time()
    probed = channel.ask(request.replace(workdir=node.workdir or request.workdir), ssh.timeout)
    answered = time.time()
    # The probe itself takes most of the round trip and reads its clock at the end.
    offset = probed.time - answered + min(0.001, answered - asked)
    try:
        facts = Facts.of(probed, clock_offset=offset)
    except Nonsense as error:
        raise nonsense(error) from error
    return Reached(node, destination, connection, channel, facts)
