"""All nodes at once: the same work for each in its own thread, every failure named in one table."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from orchestrator.errors import NodeError, OrchestratorError
from orchestrator.head.connect.channel import Link, python_candidates
from orchestrator.head.connect.ssh_config import Destination
from orchestrator.head.connect.transport import Connection, Transport
from orchestrator.head.inventory.facts import Facts
from orchestrator.head.inventory.node_list import Node
from orchestrator.head.inventory.probed_node import ProbedNode
from orchestrator.text import table

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Reached:
    """A node with an open link."""

    node: Node
    destination: Destination
    connection: Connection
    link: Link
    facts: Facts

    @property
    def probed(self) -> ProbedNode:
        return ProbedNode(self.node, self.facts, self.connection.address)


def everywhere(items: Sequence[T], work: Callable[[T], R]) -> list[R | OrchestratorError]:
    """work(item) for all items at once; each one's result or its error, in order."""
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
    """The results, or one error that names every node that failed."""
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


def open_link(connection: Connection, python: str | None, timeout: float) -> Link:
    link = Link(connection, python_candidates(python), timeout)
    link.begin(timeout)
    return link


def reach(ssh: Transport, node: Node, python: str | None, request: dict[str, Any]) -> Reached:
    """Connect, start the link, probe: one node's whole way, in one go."""
    destination, connection = connect(ssh, node)
    link = open_link(connection, node.python or python, ssh.timeout)
    request = {**request, "workdir": node.workdir or request["workdir"]}
    asked = time.time()
    answer = link.ask("probe", ssh.timeout, **request)
    answered = time.time()
    # The probe itself takes most of the round trip and reads its clock at the end.
    facts = Facts.of(answer, clock_offset=answer["time"] - answered + min(0.001, answered - asked))
    return Reached(node, destination, connection, link, facts)
