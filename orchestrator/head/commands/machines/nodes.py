"""`orchestrator nodes`: list what each machine of the node list is."""

from __future__ import annotations

import json
from collections.abc import Sequence

from orchestrator.common import text
from orchestrator.common.errors import EXIT_DONE, EXIT_NODE, OrchestratorError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes import machine
from orchestrator.head.nodes.machine import Machine
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Terminal
from orchestrator.head.screen.table import Column, Table
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.request import Request, resolve
from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.requests.machine import CheckedUp, Examine
from orchestrator.records import cordons

LOST = "bold red"
GPU_SECONDS = 40.0  # without persistence mode the driver is loaded for every query


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


def find_machines(request: Request) -> list[Machine]:
    """Reach all nodes at once and describe each, in the order of the list."""
    answered = try_all(request)
    with_gpus = [node for node in answered.reached if node.probed.facts.gpus]
    names = [node.node.name for node in with_gpus]
    checkups = dict(zip(names, examine(with_gpus, "gpus"), strict=True))
    known = {node.name: machine.lost(node, error) for node, error in answered.lost}
    for node in answered.reached:
        checkup = checkups.get(node.node.name)
        tool = checkup if isinstance(checkup, Checkup) else None
        known[node.node.name] = machine.machine(node.probed, tool)
    cordoned = cordons.read()
    return [
        known[node.name].replace(cordoned=cordons.words_of(node, cordoned))
        for node in answered.source.nodes
    ]


def examine(nodes: Sequence[Reached], *parts: str) -> list[Checkup | OrchestratorError]:
    """Have the nodes examine parts of themselves closely."""
    questions = [Examine(workdir="/", parts=parts)] * len(nodes)
    answers = fleet.ask(nodes, questions, GPU_SECONDS)
    return [a.checkup if isinstance(a, CheckedUp) else a for a in answers]


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
