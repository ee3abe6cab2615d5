"""`orchestrator nodes`: what the machines of the node list are, and which launches pass over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from orchestrator.common import text
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_NODE,
    OrchestratorError,
)
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes import machine
from orchestrator.head.nodes.machine import Machine
from orchestrator.head.nodes.node_list import choose, read_nodes
from orchestrator.head.screen import failures, output, styles
from orchestrator.head.screen.output import Column, Table, Terminal
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.request import Request, resolve
from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.requests.machine import CheckedUp, Examine
from orchestrator.protocol.timing import ANSWER_SECONDS
from orchestrator.records import cordons
from orchestrator.records.machines import machine_of

LOST = styles.FAILED


def name_of(node: Machine) -> str:
    """Name a machine, and what sets it apart from those that the next launch takes."""
    return f"{node.name}{' (spare)' * node.spare}{' (cordoned)' * bool(node.cordoned)}"


MACHINES: Table[Machine] = Table(
    (
        Column("NODE", name_of, absent=lambda node: (name_of(node), LOST)),
        Column(
            "HOST",
            lambda node: node.hostname,
            absent=lambda _: ("unreachable", LOST),
        ),
        Column("CPUS", lambda node: str(node.cpus)),
        Column("MEMORY", lambda node: text.size(node.memory, binary=True)),
        Column("DISK FREE", machine.disk_text),
        Column("TORCH", lambda node: node.torch or ("none", styles.WARNING)),
        Column("GPUS", machine.gpu_text),
        Column("DRIVER", lambda node: node.driver or "-"),
        Column("NETWORK", machine.network_text),
    ),
    is_absent=lambda node: not node.reached,
)
SITE: Column[Machine] = Column(
    "SITE", lambda node: node.site or "-", absent=lambda node: node.site or "-"
)


def nodes(arguments: LaunchArguments) -> int:
    machines = find_machines(resolve(arguments))
    data = {"nodes": [machine.to_json(node) for node in machines]}
    output.result(data, partial(to_text, machines))
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
    answers = fleet.ask(nodes, questions, ANSWER_SECONDS)
    return [a.checkup if isinstance(a, CheckedUp) else a for a in answers]


def to_text(machines: Sequence[Machine], terminal: Terminal) -> str:
    """Draw the table, and say why nodes are missing and which are cordoned."""
    lost = [node for node in machines if not node.reached]
    cordoned = [
        f"{node.name} is cordoned ({node.cordoned}): orchestrator nodes --uncordon {node.name}"
        for node in machines
        if node.cordoned
    ]
    notes = [reasons(lost, len(machines)) if lost else "", "\n".join(cordoned)]
    sited = [SITE] * any(node.site for node in machines)
    shown = replace(MACHINES, columns=(*MACHINES.columns, *sited))
    parts = [shown.text(machines, terminal), *map(output.printable, notes)]
    return "\n\n".join(filter(None, parts))


def reasons(lost: Sequence[Machine], total: int) -> str:
    """Say how many nodes could not be reached, and why."""
    lines = failures.reasons((node.name, node.problem, node.fix) for node in lost)
    first = f"{len(lost)} of {text.plural(total, 'node')} cannot be reached"
    return "\n  ".join([first, *lines])


# -- machines that launches pass over -------------------------------------------------------------


def cordon(node_list: Path, hosts: Sequence[str], free: Sequence[str], reason: str) -> int:
    """Keep jobs away from some machines, and let them back on others."""
    if hosts:
        nodes = choose(read_nodes(node_list), hosts)
        machines = list(dict.fromkeys(machine_of(each.node) for each in nodes))
        for each in cordons.add(machines, reason.strip()):
            output.write_out(f"{each.machine} is cordoned ({each.words}): launches skip it")
    known = cordons.read()
    again = [
        name for host in free for name in ([host] if host in known else named(node_list, host))
    ]
    cordons.remove(again)
    for name in dict.fromkeys(again):
        output.write_out(f"{name} {'is used again' if name in known else 'was not cordoned'}")
    return EXIT_DONE


def named(node_list: Path, host: str) -> list[str]:
    """Return the machines that a name or a number means in the node list."""
    return [machine_of(each.node) for each in choose(read_nodes(node_list), (host,))]
