"""What the user asked for; reaching every node of it, and learning what each is. Starts nothing."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.schema import Config
from orchestrator.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.subprocess_transport import Allocation, SrunTransport
from orchestrator.head.connect.transport import Transport
from orchestrator.head.inventory.node_list import Node, read_nodes
from orchestrator.head.plan.accelerate import Accelerate
from orchestrator.head.plan.model import Target
from orchestrator.head.plan.plan import DEFAULT_PORT
from orchestrator.protocol.messages import PortWish, Probe, ProbeTarget


@dataclass(frozen=True)
class Request:
    """What the user typed, resolved with the config file."""

    nodes: Path
    ssh_config: Path | None
    experiments: Path
    config: Config
    target: Target
    env: dict[str, str]
    command: tuple[str, ...]
    config_file: Path | None = None
    detached: bool = False  # nobody will follow it from here
    allocation: Allocation | None = None  # its nodes, in place of the list's
    parcel: Path | None = None  # a directory: what travels to the nodes beside the program
    accelerate: Accelerate | None = None  # starts the ranks, in place of torchrun


def way_to(request: Request) -> tuple[Transport, tuple[Node, ...]]:
    launch, given = request.config.launch, request.allocation
    if given is not None:
        return SrunTransport(
            given.job, given.addresses, timeout=launch.connect_timeout
        ), given.nodes
    config, strict = SshConfig(request.ssh_config), launch.strict_host_keys
    nodes = read_nodes(request.nodes)
    return SshTransport(config, timeout=launch.connect_timeout, strict=strict), nodes


def prepare(request: Request) -> tuple[Transport, list[Reached], list[Node]]:
    """Reach every node and learn what it is. Starts nothing."""
    ssh, everyone, results, active = everybody(request)
    reached = fleet.all_or_table(everyone, results, "; nothing was started")
    return ssh, reached[:active], everyone[active:]


def everybody(
    request: Request,
) -> tuple[Transport, list[Node], list[Reached | OrchestratorError], int]:
    """Every node, the spares last, with what came of it; and how many are no spares."""
    ssh, nodes = way_to(request)
    launch = request.config.launch
    active = [node for node in nodes if not node.spare]
    spares = [node for node in nodes if node.spare]
    probe = Probe(
        cwd=str(Path.cwd()),
        workdir=launch.workdir,
        peers=tuple(peers(ssh, active)),
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
        return fleet.reach(ssh, node, launch.python, asked)

    everyone = [*active, *spares]
    return ssh, everyone, fleet.everywhere(everyone, reach), len(active)


def peers(ssh: Transport, active: Sequence[Node]) -> list[str]:
    """To whom every node is asked its way: the master, and all others that a number names.

    Names are left to the doctor: a name server that does not answer would hold up the launch.
    """
    hosts = [ssh.config.of_node(node).host for node in active]
    return list(dict.fromkeys([hosts[0], *filter(is_numeric, hosts[1:])]))


def is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
