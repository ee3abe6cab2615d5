"""Reach all nodes at once, and describe what machine each of them is."""

from __future__ import annotations

from orchestrator.head.connect import fleet
from orchestrator.head.inventory import machine
from orchestrator.head.inventory.machine import Machine
from orchestrator.head.launch.nodes import try_all
from orchestrator.head.launch.request import Request
from orchestrator.protocol.messages import CheckedUp, Examine
from orchestrator.records import cordons
from orchestrator.records.machine_name import machine_of

GPU_SECONDS = 40.0  # without persistence mode the driver is loaded for every query


def find_machines(request: Request) -> list[Machine]:
    """Reach all nodes at once and describe each, in the order of the list."""
    answered = try_all(request)
    with_gpus = [node for node in answered.reached if node.probed.facts.gpus]
    question = Examine(workdir="/", parts=("gpus",))
    answers = fleet.ask(with_gpus, [question] * len(with_gpus), GPU_SECONDS)
    checkups = {
        node.node.name: answer.checkup
        for node, answer in zip(with_gpus, answers, strict=True)
        if isinstance(answer, CheckedUp)
    }
    known = {
        node.node.name: machine.machine(node.probed, checkups.get(node.node.name))
        for node in answered.reached
    }
    known.update({node.name: machine.lost(node, error) for node, error in answered.lost})
    cordoned = cordons.read()
    return [
        known[node.name].replace(cordoned=cordoned[machine_of(node)].words)
        if machine_of(node) in cordoned
        else known[node.name]
        for node in answered.source.nodes
    ]
