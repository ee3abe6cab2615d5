"""Find the nodes of a launch, connect to all of them at once, and collect facts on each."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from orchestrator.common import interrupt
from orchestrator.common.errors import NodeError, OrchestratorError, UsageError
from orchestrator.common.hosts import join_names
from orchestrator.common.text import plural
from orchestrator.config.launch import Launch
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached, reach_node
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes import activations
from orchestrator.head.nodes.environment import NONE
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.nodes.node_list import Node, read_nodes
from orchestrator.head.plan.plan import DEFAULT_PORT
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.screen import failures
from orchestrator.head.screen.progress import counted_work
from orchestrator.head.transfer.listing import OURS
from orchestrator.head.transfer.scan import Scan
from orchestrator.protocol.message import is_address
from orchestrator.protocol.requests.machine import PortRequest, Probe
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord

log = logging.getLogger(__name__)


class NodeSource(Protocol):
    """The source of the nodes: a list, a Slurm allocation, or this machine alone (run-node)."""

    @property
    def nodes(self) -> tuple[Node, ...]: ...

    def transport(self, timeout: float) -> Transport: ...

    def experiment(self, root: Path, name: str) -> Experiment: ...

    def mark(self, record: JobRecord) -> JobRecord:
        """Return the record with the fields that a later command needs to find the nodes again."""
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
        return experiments.create_experiment(root, name)

    def mark(self, record: JobRecord) -> JobRecord:
        return record


@dataclass(frozen=True)
class Bounds:
    """The least and most nodes of a job."""

    least: int
    most: int


@dataclass(frozen=True)
class Nodes:
    """Nodes with open channels, the master first, and those that could not be reached."""

    source: NodeSource
    transport: Transport
    reached: tuple[Reached, ...]
    lost: tuple[tuple[Node, OrchestratorError], ...] = ()
    spares: tuple[Reached, ...] = ()
    # The time at which all nodes had answered.
    at: float = 0.0
    # The scan of the code that they run.
    scan: Scan | None = None
    # The bounds are removed once the nodes of the job are chosen from the reached ones.
    bounds: Bounds | None = None
    # The name of the node that was asked for free ports.
    master: str = ""
    # Lines for the user on the nodes that were skipped, each with the reason.
    notes: tuple[str, ...] = ()

    @property
    def probed(self) -> list[ProbedNode]:
        return [node.probed for node in self.reached]


def source_of(request: LaunchRequest) -> NodeSource:
    """Return the node list, or the Slurm allocation if it is requested or there is no list."""
    asked, where = request.nodes_from, request.where
    listed = where.nodes is not None or where.node_list.exists()
    if asked == "slurm" or (asked is None and not listed):
        from orchestrator.head.schedulers import queue

        allocated = queue.allocated_nodes(asked=asked == "slurm")
        if allocated is not None:
            return allocated
    nodes = read_nodes(where.node_list)
    strict = request.config.launch.strict_host_keys
    return ListedNodes(nodes, where.ssh_config, strict)


def reach_nodes(request: LaunchRequest) -> Nodes:
    """Connect to the nodes that a job can run on, spares last; raise if too few answer."""
    source = source_of(request)
    listed, bounds = candidate_nodes(source.nodes, request.config.launch)
    nodes = reach_given_nodes(request, source, listed)
    if len(nodes.reached) < bounds.least:
        total = len(nodes.reached) + len(nodes.lost)
        table = failures.failure_table(nodes.lost, total, "; nothing was started")
        raise NodeError("\n".join([table, *(f"  {note}" for note in nodes.notes)]))
    return replace(nodes, bounds=bounds)


def try_nodes(
    request: LaunchRequest, settle: Callable[[Node, Launch], Node] | None = None
) -> Nodes:
    """Connect to every node that answers, spares last, and collect its facts."""
    source = source_of(request)
    return reach_given_nodes(request, source, spares_last(source.nodes), settle)


def candidate_nodes(nodes: Sequence[Node], launch: Launch) -> tuple[list[Node], Bounds]:
    """Return the nodes that a job can run on, preferred ones first, and the job's bounds."""
    active = sum(not node.spare for node in nodes)
    least, most = launch.node_counts or (active, active)
    if least > len(nodes):
        has = f"the node list has {plural(len(nodes), 'node')}"
        raise UsageError(
            f"--nnodes {launch.nnodes}: {has}", "add nodes to the list, or ask for fewer"
        )
    return spares_last(nodes), Bounds(least, most)


def spares_last(nodes: Sequence[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.spare)


def reach_given_nodes(
    request: LaunchRequest,
    source: NodeSource,
    nodes: Sequence[Node],
    settle: Callable[[Node, Launch], Node] | None = None,
) -> Nodes:
    """Connect to all of these nodes at once; ask the first, the master, for free ports."""
    launch = request.config.launch
    transport = source.transport(launch.connect_timeout)
    notes = [] if settle else note_remembered(nodes, launch)
    nodes = [(settle or settle_node)(node, launch) for node in nodes]
    probe = probe_of(request, transport, nodes)
    # With --queue the ports are requested when it is the launch's turn.
    port = None if launch.queue else port_request(request, len(nodes))
    with marker_file(request.directory) as path:

        def reach_for_facts(node: Node) -> Reached:
            question = probe.replace(marker=path, port=port if node is nodes[0] else None)
            return reach_node(transport, node, question)

        log.info("connects to %d nodes", len(nodes))
        fleet.need_room_for_nodes(nodes)
        with counted_work("connecting", reach_for_facts, nodes) as counting:
            results = fleet.map_parallel(nodes, counting)
    return Nodes(
        source=source,
        transport=transport,
        reached=tuple(result for result in results if isinstance(result, Reached)),
        lost=tuple(failures.failed_nodes(nodes, results)),
        at=time.time(),
        master=nodes[0].name if port else "",
        notes=tuple(notes),
    )


def probe_of(request: LaunchRequest, transport: Transport, active: Sequence[Node]) -> Probe:
    """Return the request for the facts of a launch's nodes."""
    return Probe(
        cwd=str(request.directory),
        workdir=request.config.launch.workdir,
        peers=tuple(route_peers(transport, active)),
        target=request.target,
        accelerate=request.accelerate is not None,
    )


def port_request(request: LaunchRequest, nodes: int) -> PortRequest:
    """Return the request for a port on the first node of a job with `nodes` nodes."""
    wanted = request.config.launch.master_port
    return PortRequest(
        wanted=wanted or DEFAULT_PORT,
        exact=wanted is not None,
        peers=nodes > 1,
    )


def nodes_with_master(
    request: LaunchRequest, nodes: Nodes, chosen: Sequence[Reached]
) -> list[Reached]:
    """Return the nodes with the first as master: with its ports and each node's route to it."""
    probe = probe_of(request, nodes.transport, [node.node for node in chosen])
    port = port_request(request, len(chosen))
    asked = [
        probe.replace(
            workdir=node.facts.workdir, target=node.facts.target, port=None if at else port
        )
        for at, node in enumerate(chosen)
    ]
    answers = fleet.ask_all(chosen, asked, nodes.transport.timeout, "; nothing was started")
    return [
        replace(
            node,
            facts=node.facts.replace(
                routes=answer.routes, port=answer.port, peers_port=answer.peers_port
            ),
        )
        for node, answer in zip(chosen, answers, strict=True)
    ]


def settle_node(node: Node, launch: Launch) -> Node:
    """Return the node with the launch's Python, activation and wrapper if it names none itself."""
    return replace(
        node,
        python=node.python or launch.python,
        activate=remembered_activation(node, launch)
        or chosen_setting(node.activate, launch.activate),
        wrap=chosen_setting(node.wrap, launch.wrap),
    )


def chosen_setting(of_node: str | None, usual: str | None) -> str | None:
    """Return the setting of a node, else that for all nodes; None if it is the login's own."""
    setting = usual if of_node is None else of_node
    return None if setting in ("", NONE) else setting


def remembered_activation(node: Node, launch: Launch) -> str:
    """Return the activation that bootstrap recorded for this node, unless another one is named."""
    named = (node.activate, launch.activate, node.python, launch.python, node.wrap, launch.wrap)
    return (
        ""
        if any(way is not None for way in named)
        else activations.read_activations().get(activations.machine_of(node), "")
    )


def note_remembered(nodes: Sequence[Node], launch: Launch) -> list[str]:
    """Return a note on the nodes that run in the environment made by bootstrap."""
    names = [node.name for node in nodes if remembered_activation(node, launch)]
    return [
        f"{join_names(names)} {'runs' if len(names) == 1 else 'run'} in the environment that"
        " `orchestrator bootstrap` made (--activate none: in the login's own)"
    ] * bool(names)


def route_peers(transport: Transport, active: Sequence[Node]) -> list[str]:
    """Return the hosts to which every node looks up a route: the master and all numeric ones.

    The doctor checks host names: a name server that does not answer would delay the launch.
    """
    first, *others = (transport.host_of(node) for node in active)
    return list(dict.fromkeys([first, *filter(is_address, others)]))


# -- nodes that share the directory -----------------------------------------------------------

MARKER = os.fsdecode(OURS) + "marker-"


@contextlib.contextmanager
def marker_file(directory: Path) -> Iterator[str]:
    """Create a file with a unique name while nodes look for it; those that see it share the disk.

    Yields its path, or "" if it cannot be created: then no node counts as sharing the disk.
    """
    path = directory / f"{MARKER}{secrets.token_hex(8)}"
    try:
        path.touch(0o600, exist_ok=False)
    except OSError:
        yield ""
        return

    def remove() -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    # Ctrl-C during the connecting exits at once, without running the finally block.
    interrupt.call_before_exit(remove)
    try:
        yield str(path)
    finally:
        remove()
