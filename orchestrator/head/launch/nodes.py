"""Find the nodes of a launch, reach them all at once, and learn what each of them is."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from orchestrator.config.launch import Launch
from orchestrator.errors import NodeError, OrchestratorError
from orchestrator.head.code.scan import Scan
from orchestrator.head.code.shared import marker
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached, reach
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.transport import Transport
from orchestrator.head.held.transport import HeldTransport
from orchestrator.head.inventory.environment import chosen
from orchestrator.head.inventory.node_list import Node, read_nodes
from orchestrator.head.inventory.probed_node import ProbedNode
from orchestrator.head.launch.request import Request
from orchestrator.head.plan.plan import DEFAULT_PORT
from orchestrator.head.slurm import allocation
from orchestrator.protocol.messages import PortWish, Probe, ProbeTarget
from orchestrator.records import experiment
from orchestrator.records.experiment import Experiment, JobRecord


class NodeSource(Protocol):
    """The source of the nodes: a list, a Slurm allocation, or this machine alone (run-node)."""

    @property
    def nodes(self) -> tuple[Node, ...]: ...

    def transport(self, timeout: float) -> Transport: ...

    def experiment(self, root: Path, name: str) -> Experiment: ...

    def mark(self, record: JobRecord) -> JobRecord:
        """Note in the record what is needed to find the nodes again."""
        ...


@dataclass(frozen=True)
class ListedNodes:
    """The nodes of a list, reached by SSH."""

    nodes: tuple[Node, ...]
    ssh_config: Path | None
    strict: bool
    fresh: bool = False  # no servers that were started before

    def transport(self, timeout: float) -> HeldTransport:
        config, ready = SshConfig(self.ssh_config), not self.fresh
        return HeldTransport(config, timeout=timeout, strict=self.strict, ready_servers=ready)

    def experiment(self, root: Path, name: str) -> Experiment:
        return experiment.create(root, name)

    def mark(self, record: JobRecord) -> JobRecord:
        return record


@dataclass(frozen=True)
class Nodes:
    """Nodes with open channels, the master first, and those that could not be reached."""

    source: NodeSource
    transport: Transport
    reached: tuple[Reached, ...]
    lost: tuple[tuple[Node, OrchestratorError], ...] = ()
    spares: tuple[Node, ...] = ()
    at: float = 0.0  # when all had answered
    scan: Scan | None = None  # of the code that they run

    @property
    def probed(self) -> list[ProbedNode]:
        return [node.probed for node in self.reached]


def source_of(request: Request) -> NodeSource:
    """Take the nodes of the list, or Slurm's where they are asked for or there is no list."""
    asked, where = request.nodes_from, request.where
    listed = where.nodes is not None or where.node_list.exists()
    if asked == "slurm" or (asked is None and not listed):
        allocated = allocation.allocated(asked=asked == "slurm")
        if allocated is not None:
            return allocated
    nodes = read_nodes(where.node_list)
    strict = request.config.launch.strict_host_keys
    return ListedNodes(nodes, where.ssh_config, strict, request.fresh)


def reach_all(request: Request) -> Nodes:
    """Reach every node of a job; it is an error if one, or a spare, cannot be reached."""
    nodes = try_all(request)
    if nodes.lost:
        total = len(nodes.reached) + len(nodes.lost)
        raise NodeError(fleet.failure_table(nodes.lost, total, "; nothing was started"))
    return replace(nodes, reached=tuple(node for node in nodes.reached if not node.node.spare))


def try_all(request: Request, settle: Callable[[Node, Launch], Node] | None = None) -> Nodes:
    """Reach every node that answers, the spares last, and learn what it is."""
    launch, source = request.config.launch, source_of(request)
    transport = source.transport(launch.connect_timeout)
    listed = [(settle or settled)(node, launch) for node in source.nodes]
    active = [node for node in listed if not node.spare]
    spares = [node for node in listed if node.spare]
    here = Path.cwd()
    probe = Probe(
        cwd=str(here),
        workdir=launch.workdir,
        peers=tuple(peers(transport, active)),
        target=ProbeTarget(kind=request.target.kind, name=request.target.name),
        accelerate=request.accelerate is not None,
    )
    port = PortWish(
        wanted=launch.master_port or DEFAULT_PORT,
        exact=launch.master_port is not None,
        peers=len(active) > 1,
    )

    nodes = [*active, *spares]
    with marker(here) as path:

        def reach_node(node: Node) -> Reached:
            question = probe.replace(marker=path, port=port if node is active[0] else None)
            return reach(transport, node, question)

        results = fleet.everywhere(nodes, reach_node)
    return Nodes(
        source=source,
        transport=transport,
        reached=tuple(result for result in results if isinstance(result, Reached)),
        lost=tuple(fleet.failures(nodes, results)),
        spares=tuple(spares),
        at=time.time(),
    )


def settled(node: Node, launch: Launch) -> Node:
    """Return a node with the environment that a launch gives to those that name none."""
    return replace(
        node,
        python=node.python or launch.python,
        activate=chosen(node.activate, launch.activate),
        wrap=chosen(node.wrap, launch.wrap),
    )


def peers(transport: Transport, active: Sequence[Node]) -> list[str]:
    """List the hosts to which every node looks for a route: the master, and all numeric ones.

    Names are left to the doctor: a name server that does not answer would hold up the launch.
    """
    hosts = [transport.config.of_node(node).host for node in active]
    return list(dict.fromkeys([hosts[0], *filter(is_numeric, hosts[1:])]))


def is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
