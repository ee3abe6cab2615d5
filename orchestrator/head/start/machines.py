"""Reach all nodes at once, and look closer at what each of them is and who uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes import clock, machine
from orchestrator.head.nodes.machine import Machine
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.request import Request
from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.requests.machine import CheckedUp, Examine
from orchestrator.records import cordons

GPU_SECONDS = 40.0  # without persistence mode the driver is loaded for every query


@dataclass(frozen=True)
class Used:
    """Who uses one machine: what it answered, or why it could not be asked."""

    node: Node
    cpus: int = 0
    checkup: Checkup | None = None
    error: OrchestratorError | None = None


def find_machines(request: Request) -> list[Machine]:
    """Reach all nodes at once and describe each, in the order of the list."""
    answered = try_all(request)
    with_gpus = [node for node in answered.reached if node.probed.facts.gpus]
    checkups = {
        node.node.name: answer
        for node, answer in zip(with_gpus, look(with_gpus, "gpus"), strict=True)
        if isinstance(answer, Checkup)
    }
    known = {
        node.node.name: machine.machine(node.probed, checkups.get(node.node.name))
        for node in answered.reached
    }
    known.update({node.name: machine.lost(node, error) for node, error in answered.lost})
    cordoned = cordons.read()
    return [
        known[node.name].replace(cordoned=cordons.words_of(node, cordoned))
        for node in answered.source.nodes
    ]


def find_users(request: Request) -> list[Used]:
    """Ask all nodes at once who uses them, in the order of the list."""
    answered = try_all(request)
    known = {node.name: Used(node, error=error) for node, error in answered.lost}
    for node, answer in zip(answered.reached, look(answered.reached, "gpus", "load"), strict=True):
        cpus = node.probed.facts.cpus
        if isinstance(answer, Checkup):
            ahead = clock.ahead(node.probed.facts.clock_offset, 0.0)
            known[node.node.name] = Used(node.node, cpus, clock.of_checkup(answer, ahead))
        else:
            known[node.node.name] = Used(node.node, cpus, error=answer)
    return [known[node.name] for node in answered.source.nodes]


def look(nodes: Sequence[Reached], *parts: str) -> list[Checkup | OrchestratorError]:
    """Have the nodes look closer at themselves."""
    questions = [Examine(workdir="/", parts=parts)] * len(nodes)
    answers = fleet.ask(nodes, questions, GPU_SECONDS)
    return [a.checkup if isinstance(a, CheckedUp) else a for a in answers]
