"""Says what a look at the machines at night found: what is bad, and what has changed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.head.doctor.examination import WORDS, Diagnosis
from orchestrator.head.doctor.findings import BAD, Finding
from orchestrator.head.doctor.last_look import Looks
from orchestrator.head.nodes.node_list import Node
from orchestrator.records.cordons import Cordons
from orchestrator.records.machines import machine_of

OF_MACHINES = ("gpus", "disk", "shm", "limits")  # what a machine lacks by itself
FLEETING = ("busy", "ours", "cordon")  # jobs come and go; a cordon is said when it is made
REASON = "doctor: "  # begins that of a cordon which ends by itself


@dataclass(frozen=True)
class Night:
    """Tells what is to be said, and which nodes are to be cordoned, or used again."""

    findings: Sequence[Finding]  # bad ones, and new ones
    gone: Sequence[str]  # what was wrong at the look before
    sick: Mapping[str, str]  # node -> why it is cordoned
    well: Sequence[str]  # nodes that the doctor had cordoned


def night_of(
    diagnosis: Diagnosis, nodes: Sequence[Node], before: Looks, cordoned: Cordons
) -> Night:
    machines = {node.name: machine_of(node) for node in nodes}
    seen = [node.name for node in diagnosis.case.nodes if node.facts is not None]
    lasting = [one for one in diagnosis.findings if one.check not in FLEETING]
    now = {(name, one.check, one.level) for one in lasting for name in one.nodes}
    last = {
        (name, one.check, one.level)
        for name, machine in machines.items()
        for one in (before[machine].findings if machine in before else ())
        if one.check not in FLEETING
    }
    bad = {
        name: f"{one.check}: {one.what}"
        for one in reversed(lasting)
        if one.level == BAD and one.check in OF_MACHINES
        for name in one.nodes
    }
    ours = [one.machine for one in cordoned.values() if one.reason.startswith(REASON)]
    return Night(
        findings=[
            one
            for one in lasting
            if one.level == BAD
            or any((name, one.check, one.level) not in last for name in one.nodes)
        ],
        gone=[
            f"{name}: {check} is {WORDS[level]} no more"
            for name, check, level in sorted(last - now)
            if name in seen
        ],
        sick={name: why for name, why in bad.items() if machines[name] not in cordoned},
        well=[name for name in seen if machines[name] in ours and name not in bad],
    )
