"""Describe the machines of a new node list: the table on the screen, and the lines of the file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.commands.machines.nodes import examine_nodes
from orchestrator.head.nodes import machine
from orchestrator.head.nodes.facts import NEWEST, PLAIN, Facts
from orchestrator.head.nodes.machine import Machine, gpu_text
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import Column, Table
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.request import LaunchRequest
from orchestrator.head.start.selection import diagnose_job, fabric_of

HEADER = (
    "# Written by `orchestrator init`. One machine a line, the master first. # keeps one out.\n"
    "# Options: slots=N python=PATH workdir=DIR activate=KIND:WHICH ifname=NAME spare\n"
)
# The cards that carry NCCL's data, where it is not the interface.
CARDS = {"infiniband": "NCCL by InfiniBand", "roce": "NCCL by RoCE"}
OPTIONS = ("slots", "python", "workdir", "activate", "wrap", "ifname", "site")


@dataclass(frozen=True)
class SeenMachine:
    """A machine of the list that lets us in, and the network that a training would use there."""

    node: Node
    facts: Machine
    shared: bool
    # The interface, its own address and its speed: eth0 10.0.0.1 25 Gb/s.
    network: str

    @property
    def line(self) -> str:
        """Return the machine's line in the list; its comment has no control characters."""
        given = {name: getattr(self.node, name) for name in OPTIONS}
        words = [f"{name}={value}" for name, value in given.items() if value is not None]
        words += ["spare"] * self.node.spare
        torch = f"torch {self.facts.torch}" if self.facts.torch else "no torch"
        gpus = gpu_text(self.facts)
        if gpus == "none" and self.node.slots is None:
            gpus = "no GPU: one rank, slots=N makes more"
        facts = f"{gpus}; Python {self.facts.python_version}, {torch}; {self.network}"
        comment = output.printable_text(" ".join(facts.split()))
        return f"{shlex.join([self.node.name, *words]):<24} # {comment}"


MACHINES: Table[SeenMachine] = Table(
    (
        Column("NODE", lambda seen: seen.node.name),
        Column("HOST", lambda seen: seen.facts.hostname, drop=2),
        Column("USER", lambda seen: seen.facts.user, drop=1),
        Column("GPUS", lambda seen: gpu_text(seen.facts)),
        Column("PYTHON", lambda seen: seen.facts.python_version),
        Column("TORCH", lambda seen: seen.facts.torch or ("none", styles.WARNING)),
        Column("THIS DIRECTORY", lambda seen: "shared" if seen.shared else "is sent"),
        Column("NETWORK", lambda seen: seen.network),
    )
)


def reached_machines(
    request: LaunchRequest, nodes: Nodes, wanted: Sequence[Node]
) -> list[SeenMachine]:
    """Return the machines that were reached; `wanted` has their nodes as they will be written."""
    addresses = diagnose_job(request, nodes, full=False).case.addresses
    cards = CARDS.get(fabric_of(request, nodes))
    checkups = examine_nodes(nodes.reached, "gpus")
    found = []
    for node, reached, checkup in zip(wanted, nodes.reached, checkups, strict=True):
        known = None if isinstance(checkup, OrchestratorError) else checkup
        own = addresses.get(node.name)
        network = f"{own.interface} {own.address}" if own else "no common network"
        interface = reached.facts.interface(own.interface) if own else None
        if interface is not None and interface.speed:
            network += f" {interface.speed / 1000:g} Gb/s"
        network = ", ".join(filter(None, [network, cards]))
        facts = machine.describe_machine(reached.probed, known)
        found.append(SeenMachine(node, facts, reached.facts.sees_directory, network))
    return found


def node_with_torch(facts: Facts, node: Node) -> Node:
    """Return the node, by another Python of that machine where only that one has torch."""
    found = [path for path in facts.torch_elsewhere if PLAIN.fullmatch(path)]
    if facts.torch or not found or any((node.python, node.activate, node.wrap)):
        return node
    if found[-1].endswith(NEWEST):
        return replace(node, activate="bootstrap")
    return replace(node, python=found[-1])


def text_of(machines: Sequence[SeenMachine]) -> str:
    return HEADER + "".join(f"{seen.line}\n" for seen in machines)
