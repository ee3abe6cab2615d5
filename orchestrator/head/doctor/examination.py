"""Examine every node, alone and with the others, before anything is started.

The quick checks of a launch read the facts that it has anyhow. The full ones take a closer look on
all nodes at once (torch imported, tools asked), and let every node call every other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.doctor import check_machine, check_network, check_software, deep_probe
from orchestrator.head.doctor.findings import BAD, UNKNOWN, WARN, Case, Check, Examined, Finding
from orchestrator.head.plan import addresses
from orchestrator.head.plan.model import NodeAddress
from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.messages import Dial, Listen

DIAL_SECONDS = 3.0
CHECKS: dict[str, Check] = {
    "reach": check_software.reach,
    "python": check_software.python,
    "torch": check_software.torch,
    "nccl": check_software.nccl,
    "driver": check_software.driver,
    "gpus": check_machine.gpus,
    "busy": check_machine.busy,
    "ours": check_machine.ours,
    "code": check_software.code,
    "workdir": check_machine.workdir,
    "disk": check_machine.disk,
    "shm": check_machine.shm,
    "limits": check_machine.limits,
    "clock": check_machine.clock,
    "net": check_network.net,
    "mtu": check_network.mtu,
    "links": check_network.links,
    "port": check_network.port,
    "names": check_network.names,
}
FULL_ONLY = ("busy", "code", "links")
OF_OTHERS = ("ours", "names")  # nothing that a launch need repeat each time


@dataclass(frozen=True)
class Diagnosis:
    case: Case
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def bad(self) -> bool:
        return any(finding.level == BAD for finding in self.findings)

    def level(self, node: Examined, check: str) -> str:
        """The worst level of a node's findings in a check: "" if none, "-" if unchecked."""
        levels = {f.level for f in self.findings if f.check == check and node.name in f.nodes}
        for level in (BAD, WARN, UNKNOWN):
            if level in levels:
                return level
        blind = node.facts is None and check != "reach"
        return "-" if blind or (check in FULL_ONLY and not self.case.full) else ""


def judge(case: Case, began: float) -> Diagnosis:
    findings = [finding for check in CHECKS.values() for finding in check(case)]
    return Diagnosis(case, tuple(findings), time.monotonic() - began)


def examine(
    nodes: Sequence[Examined],
    reached: Sequence[Reached],
    *,
    full: bool,
    port: tuple[int, bool],
    script: str,
    torch_needed: bool,
) -> Case:
    """`nodes` in the order of the list; those that were reached get their facts and checkups."""
    probed = [one.probed for one in reached]
    found: dict[str, NodeAddress] = {}
    error = None
    if probed:
        try:
            found = {
                node.name: address
                for node, address in zip(probed, addresses.find(probed), strict=True)
            }
        except CheckFailed as failed:
            error = (failed.what, failed.fix)
    looked = look_closer(reached, script) if full else {}
    silent = dial(reached, found) if full and found else {}
    known = {one.node.name: one for one in reached}
    return Case(
        nodes=tuple(seen(one, known.get(one.name), looked) for one in nodes),
        full=full,
        torch_needed=torch_needed,
        places=found,
        network_error=error,
        port=port,
        silent=silent,
    )


def seen(
    one: Examined, reached: Reached | None, looked: dict[str, Checkup | OrchestratorError]
) -> Examined:
    if reached is None:
        return one
    closer = looked.get(one.name)
    return Examined(
        name=one.name,
        facts=reached.facts,
        reached=reached.connection.address,
        error=closer.what if isinstance(closer, OrchestratorError) else "",
        checkup=closer if isinstance(closer, Checkup) else None,
        slots=reached.node.slots,
    )


def look_closer(reached: Sequence[Reached], script: str) -> dict[str, Checkup | OrchestratorError]:
    """Run the deep probe on all nodes at once: as slow as the slowest import of torch."""

    def look(one: Reached) -> Checkup:
        return deep_probe.ask(one.channel, one.facts.workdir, script)

    names = [one.node.name for one in reached]
    return dict(zip(names, fleet.everywhere(reached, look), strict=True))


def dial(
    reached: Sequence[Reached], found: dict[str, NodeAddress]
) -> dict[tuple[str, str, int], str]:
    """Let every node call every other at its address in the job's network; who stays silent."""
    words = {one.node.name: secrets.token_hex(8) for one in reached}

    def listen(one: Reached) -> list[int]:
        ports = (one.facts.port or 0, 0) if one is reached[0] else (0,)
        answer = one.channel.ask(Listen(ports=ports, word=words[one.node.name]), 10)
        return [port for port in answer.ports if port]

    open_ports = fleet.everywhere(reached, listen)
    targets = [
        (one.node.name, port)
        for one, ports in zip(reached, open_ports, strict=True)
        if not isinstance(ports, OrchestratorError)
        for port in ports
    ]

    def call(one: Reached) -> dict[tuple[str, str, int], str]:
        others = [(name, port) for name, port in targets if name != one.node.name]
        calls = [(found[name].address, port, words[name]) for name, port in others]
        limit = DIAL_SECONDS * (2 + len(calls) / 32)
        answer = one.channel.ask(Dial(places=tuple(calls), seconds=DIAL_SECONDS), limit + 10)
        results = zip(others, answer.answers, strict=False)
        return {(one.node.name, name, port): why for (name, port), why in results if why}

    silent: dict[tuple[str, str, int], str] = {}
    for result in fleet.everywhere(reached, call):
        if isinstance(result, OrchestratorError):
            raise NodeError(f"a node was lost while it called the others: {result.what}")
        silent.update(result)
    return silent
