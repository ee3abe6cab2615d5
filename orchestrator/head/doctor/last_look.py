"""Keeps what the doctor found last on each machine, for whoever looks at the machines later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from orchestrator.head.doctor.findings import Finding
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.message import Moment
from orchestrator.records import machines
from orchestrator.records.machines import machine_of

FILE = "doctor.json"
MOST_MACHINES, MOST_FINDINGS, LONGEST = 2000, 20, 300  # of a machine; characters of a text


@dataclass(frozen=True)
class LastLook:
    """When the doctor saw a machine last, and what was wrong with it."""

    time: Moment
    findings: list[Finding] = field(default_factory=list)


Looks = dict[str, LastLook]  # by machine


def read() -> Looks:
    return machines.read(FILE, Looks)


def note(nodes: Sequence[Node], findings: Sequence[Finding]) -> None:
    """Remember a look at these nodes; UsageError: it cannot be."""
    now = time.time()
    with machines.changing(FILE, Looks) as known:
        for node in nodes:
            own = [
                replace(each, nodes=(), what=each.what[:LONGEST], fix=each.fix[:LONGEST])
                for each in findings
                if node.name in each.nodes
            ]
            known[machine_of(node)] = LastLook(now, own[:MOST_FINDINGS])
        for machine in sorted(known, key=lambda name: -known[name].time)[MOST_MACHINES:]:
            del known[machine]
