"""`orchestrator nodes`: list what each machine of the node list is."""

from __future__ import annotations

import json
from collections.abc import Sequence

from orchestrator.common import text
from orchestrator.common.errors import EXIT_DONE, EXIT_NODE
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.nodes import machine
from orchestrator.head.nodes.machine import Machine
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Terminal
from orchestrator.head.screen.table import Column, Table
from orchestrator.head.start.machines import find_machines
from orchestrator.head.start.request import resolve

LOST = "bold red"


def name_of(node: Machine) -> str:
    """Name a machine, and what sets it apart from those that the next launch takes."""
    return f"{node.name}{' (spare)' * node.spare}{' (cordoned)' * bool(node.cordoned)}"


MACHINES: Table[Machine] = Table(
    (
        Column("NODE", name_of, absent=lambda node: (name_of(node), LOST)),
        Column("HOST", lambda node: node.hostname, absent=lambda _: ("unreachable", LOST)),
        Column("CPUS", lambda node: str(node.cpus)),
        Column("MEMORY", lambda node: text.size(node.memory, binary=True)),
        Column("DISK FREE", machine.disk_text),
        Column("TORCH", lambda node: node.torch or ("none", "yellow")),
        Column("GPUS", machine.gpu_text),
        Column("DRIVER", lambda node: node.driver or "-"),
        Column("NETWORK", machine.network_text),
    ),
    is_absent=lambda node: not node.reached,
    second=6,
)


def nodes(arguments: LaunchArguments, *, as_json: bool, color: bool | None) -> int:
    machines = find_machines(resolve(arguments))
    if as_json:
        shown = [machine.to_json(node) for node in machines]
        output.tell(json.dumps({"nodes": shown}, indent=1))
    else:
        output.tell(to_text(machines, output.terminal(color)))
    return EXIT_DONE if all(node.reached for node in machines) else EXIT_NODE


def to_text(machines: Sequence[Machine], terminal: Terminal) -> str:
    """Draw the table, and say why nodes are missing and which are cordoned."""
    lost = [node for node in machines if not node.reached]
    cordoned = [
        f"{node.name} is cordoned ({node.cordoned}): orchestrator node uncordon {node.name}"
        for node in machines
        if node.cordoned
    ]
    notes = [reasons(lost, len(machines)) if lost else "", "\n".join(cordoned)]
    parts = [MACHINES.text(machines, terminal), *map(output.printable, notes)]
    return "\n\n".join(filter(None, parts))


def reasons(lost: Sequence[Machine], total: int) -> str:
    """Name why each missing node could not be reached; unwrapped, as fixes are to be copied."""
    lines = [f"{len(lost)} of {text.plural(total, 'node')} cannot be reached"]
    for node in lost:
        lines.append(f"  {node.name}: {node.problem}")
        lines += [f"    -> {node.fix}"] * bool(node.fix)
    return "\n".join(lines)
