"""The nodes of a launch: where they come from, how they are reached, what each of them is."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.transport import Transport
from orchestrator.head.inventory.node_list import Node, read_nodes
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

    def transport(self, timeout: float) -> SshTransport:
        return SshTransport(SshConfig(self.ssh_config), timeout=timeout, strict=self.strict)

    def experiment(self, root: Path, name: str) -> Experiment:
        return experiment.create(root, name)

    def mark(self, record: JobRecord) -> JobRecord:
        return record


@dataclass(frozen=True)
class Everybody:
    """All nodes, the spares last, each with what came of reaching it."""

    source: NodeSource
    transport: Transport
    nodes: list[Node]
    results: list[Reached | OrchestratorError]

    @property
    def reached(self) -> list[Reached]:
        """The nodes that were reached and are no spares."""
        results = [result for result in self.results if isinstance(result, Reached)]
        return [result for result in results if not result.node.spare]

    @property
    def spares(self) -> list[Node]:
        return [node for node in self.nodes if node.spare]


def source_of(request: Request) -> NodeSource:
    """Take the nodes of the list, or Slurm's where they are asked for or there is no list."""
    asked, where = request.nodes_from, request.where
    listed = where.nodes is not None or where.node_list.exists()
    if asked == "slurm" or (asked is None and not listed):
        allocated = allocation.allocated(asked=asked == "slurm")
        if allocated is not None:
            return allocated
    nodes = read_nodes(where.node_list)
    return ListedNodes(nodes, where.ssh_config, request.config.launch.strict_host_keys)


def reach_all(request: Request, *, needed: bool) -> Everybody:
    """Reach every node and learn what it is; if all are needed, a missing one is an error."""
    launch, source = request.config.launch, source_of(request)
    transport = source.transport(launch.connect_timeout)
    active = [node for node in source.nodes if not node.spare]
    spares = [node for node in source.nodes if node.spare]
    probe = Probe(
        cwd=str(Path.cwd()),
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

    def reach(node: Node) -> Reached:
        asked = probe.replace(port=port) if node is active[0] else probe
        return fleet.reach(transport, node, launch.python, asked)

    nodes = [*active, *spares]
    results = fleet.everywhere(nodes, reach)
    if needed:
        fleet.all_or_table(nodes, results, "; nothing was started")
    return Everybody(source, transport, nodes, results)


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
