"""Examine every node, alone and with the others, before anything is started.

The quick checks of a launch read the facts that it has anyhow. The full ones ask all nodes at once
for a closer look (torch imported, tools run), and let every node call every other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from orchestrator.common.errors import CheckFailed, OrchestratorError
from orchestrator.common.text import plural
from orchestrator.head.doctor import check_machine, check_network, check_software
from orchestrator.head.doctor.findings import (
    BAD,
    UNKNOWN,
    WARN,
    Case,
    Check,
    Examined,
    Finding,
    Needs,
    folded,
)
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan import addresses as node_addresses
from orchestrator.head.plan.model import NodeAddress
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import PLAIN, Cell, Terminal
from orchestrator.protocol.facts import Checkup, Disk
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.machine import (
    CheckedUp,
    Dial,
    Dialed,
    Examine,
    Listen,
    Listening,
)
from orchestrator.protocol.requests.request import Request

LOOK_SECONDS = 90.0  # longer than the longest limit of a part, which is that of importing torch
LISTEN_SECONDS = 10.0
DIAL_SECONDS = 3.0
CHECKS: dict[str, Check] = {
    "reach": check_software.reach,
    "cordon": check_software.cordon,
    "python": check_software.python,
    "torch": check_software.torch,
    "nccl": check_software.nccl,
    "driver": check_software.driver,
    "config": check_software.config,
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
NOBODY: Mapping[str, str] = {}
FULL_ONLY = ("busy", "code", "links")
OF_OTHERS = ("ours", "names")  # nothing that a launch need repeat each time

Call = tuple[str, str, int]  # from, to, port
A = TypeVar("A", bound=Message)


class Ask(Protocol):
    """Ask each node its own request, all at once."""

    def __call__(
        self, requests: Sequence[Request[A]], timeout: float
    ) -> list[A | OrchestratorError]: ...


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the facts that they were drawn from."""

    case: Case
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def bad(self) -> bool:
        return any(finding.level == BAD for finding in self.findings)

    def level(self, node: Examined, check: str) -> str:
        """Return the worst level of a node's findings in a check: "" if none, "-" if unchecked."""
        levels = {f.level for f in self.findings if f.check == check and node.name in f.nodes}
        for level in (BAD, WARN, UNKNOWN):
            if level in levels:
                return level
        blind = node.facts is None and check != "reach"
        return "-" if blind or (check in FULL_ONLY and not self.case.full) else ""


def diagnose(
    nodes: Sequence[ProbedNode],
    lost: Sequence[Examined],
    needs: Needs,
    ask: Ask | None = None,
    cordoned: Mapping[str, str] = NOBODY,
    head: Disk | None = None,
) -> Diagnosis:
    """Judge the nodes by their facts, and with `ask` by a closer look; `lost` were not reached."""
    began = time.monotonic()
    addresses, error = find_addresses(nodes)
    checkups = check_in_depth(nodes, needs.script, ask) if ask else [None] * len(nodes)
    silent, failed = dial(nodes, addresses, ask) if ask and addresses else ({}, {})
    seen = [
        examined(node, checkup, failed.get(node.name, ""))
        for node, checkup in zip(nodes, checkups, strict=True)
    ]
    case = Case(
        nodes=tuple(replace(node, cordoned=cordoned.get(node.name, "")) for node in (*seen, *lost)),
        full=ask is not None,
        needs=needs,
        addresses=addresses,
        network_error=error,
        head=head,
        silent=silent,
    )
    return judge(case, began)


def judge(case: Case, began: float) -> Diagnosis:
    """Run every check on what is known of the nodes."""
    findings = [finding for check in CHECKS.values() for finding in check(case)]
    return Diagnosis(case, tuple(folded(findings)), time.monotonic() - began)


def find_addresses(
    nodes: Sequence[ProbedNode],
) -> tuple[dict[str, NodeAddress], tuple[str, str] | None]:
    """Find every node's address in the job's network, or the error and its fix."""
    try:
        addresses = node_addresses.find(nodes) if nodes else []
    except CheckFailed as error:
        return {}, (error.what, error.fix)
    return {node.name: address for node, address in zip(nodes, addresses, strict=True)}, None


def examined(
    node: ProbedNode, checkup: Checkup | OrchestratorError | None, error: str = ""
) -> Examined:
    """Put together what is known of a node that was reached."""
    return Examined(
        name=node.name,
        facts=node.facts,
        reached=node.reached,
        error=checkup.what if isinstance(checkup, OrchestratorError) else error,
        checkup=checkup if isinstance(checkup, Checkup) else None,
        slots=node.node.slots,
        placed=node.node.workdir is not None,
    )


def check_in_depth(
    nodes: Sequence[ProbedNode], script: str, ask: Ask
) -> list[Checkup | OrchestratorError]:
    """Run the deep probe on all nodes at once: as slow as the slowest import of torch."""
    answers = ask([Examine(workdir=n.facts.workdir, script=script) for n in nodes], LOOK_SECONDS)
    return [answer.checkup if isinstance(answer, CheckedUp) else answer for answer in answers]


def dial(
    nodes: Sequence[ProbedNode], addresses: Mapping[str, NodeAddress], ask: Ask
) -> tuple[dict[Call, str], dict[str, str]]:
    """Let every node call every other in the job's network.

    Return why calls failed, and which nodes were lost meanwhile, and why.
    """
    secret = {node.name: secrets.token_hex(8) for node in nodes}
    ports = [(nodes[0].facts.port or 0, 0), *[(0,)] * (len(nodes) - 1)]
    listeners = [
        Listen(ports=numbers, word=secret[node.name])
        for node, numbers in zip(nodes, ports, strict=True)
    ]
    listening = ask(listeners, LISTEN_SECONDS)
    targets = [
        (node.name, port)
        for node, answer in zip(nodes, listening, strict=True)
        if isinstance(answer, Listening)
        for port in answer.ports
        if port
    ]
    calls = [[(n.name, name, port) for name, port in targets if name != n.name] for n in nodes]
    dials = [
        Dial(
            places=tuple(
                (addresses[name].address, port, secret[name]) for _, name, port in calls_of_node
            ),
            seconds=DIAL_SECONDS,
        )
        for calls_of_node in calls
    ]
    limit = DIAL_SECONDS * (2 + len(targets) / 32) + 10
    dialed = ask(dials, limit)
    silent = {
        call: reason
        for calls_of_node, answer in zip(calls, dialed, strict=True)
        if isinstance(answer, Dialed)
        for call, reason in zip(calls_of_node, answer.answers, strict=False)
        if reason
    }
    failed = {
        node.name: f"it was lost while {when}: {answer.what}"
        for when, answers in (("it was called", listening), ("it called the others", dialed))
        for node, answer in zip(nodes, answers, strict=True)
        if isinstance(answer, OrchestratorError)
    }
    return silent, failed


# -- the report ------------------------------------------------------------------------------------

WORDS = {WARN: "warn", BAD: "BAD", UNKNOWN: "?"}
STYLES = {WARN: styles.WARNING, BAD: styles.FAILED, UNKNOWN: styles.UNKNOWN}
LEVELS = (BAD, WARN, UNKNOWN)


def to_text(diagnosis: Diagnosis, terminal: Terminal = PLAIN, *, hints: bool = True) -> str:
    parts = [problems(diagnosis.findings, terminal, hints=hints), summary(diagnosis)]
    return "\n\n".join(part for part in parts if part)


def columns(diagnosis: Diagnosis) -> list[str]:
    """List the checks that at least one node went through."""
    return [
        name
        for name in CHECKS
        if any(diagnosis.level(n, name) != "-" for n in diagnosis.case.nodes)
    ]


def problems(findings: Sequence[Finding], terminal: Terminal, *, hints: bool) -> str:
    rows: list[list[Cell]] = []
    for level in LEVELS:
        for finding in findings:
            if finding.level == level:
                mark = (f"{WORDS[level]:<4}", STYLES[level])
                rows.append([mark, f"{finding.check}: {finding.what}"])
                if finding.fix and hints:
                    fix = "\n    ".join(line.strip() for line in finding.fix.splitlines())
                    rows += [["", line] for line in f" -> {fix}".splitlines()]
    return output.table(rows, Terminal(color=terminal.color))  # unwrapped: fixes are to be copied


def summary(diagnosis: Diagnosis) -> str:
    count = {level: sum(f.level == level for f in diagnosis.findings) for level in LEVELS}
    what = [f"{count[level]} {WORDS[level]}" for level in LEVELS if count[level]]
    kind = "all checks" if diagnosis.case.full else "quick checks"
    nodes = plural(len(diagnosis.case.nodes), "node")
    return f"{nodes}, {kind}, {diagnosis.seconds:.1f} s: {', '.join(what) or 'all is well'}"


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    checks = columns(diagnosis)
    return {
        "ok": not diagnosis.bad,
        "full": diagnosis.case.full,
        "seconds": round(diagnosis.seconds, 3),
        "nodes": [
            {
                "name": node.name,
                "hostname": node.facts.hostname if node.facts else None,
                "checks": {name: diagnosis.level(node, name) or "ok" for name in checks},
            }
            for node in diagnosis.case.nodes
        ],
        "findings": [
            {
                "check": finding.check,
                "level": finding.level,
                "nodes": list(finding.nodes),
                "what": finding.what,
                "fix": finding.fix,
            }
            for finding in diagnosis.findings
        ],
    }
