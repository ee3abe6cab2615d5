"""Examines every node, alone and with the others, before anything is started.

The quick checks of a launch use the facts of its probe. The full checks send all nodes a request
(they import torch and run tools), and have every node connect to every other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.common.errors import CheckFailed, OrchestratorError
from orchestrator.common.text import plural
from orchestrator.head.doctor import check_machine, check_network
from orchestrator.head.doctor.findings import (
    BAD,
    UNKNOWN,
    WARN,
    Case,
    Examined,
    Finding,
    Needs,
    fold_findings,
)
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan import addresses as node_addresses
from orchestrator.head.plan.model import NodeAddress
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import PLAIN, Cell, Terminal
from orchestrator.protocol.facts import Checkup, Disk
from orchestrator.protocol.requests.machine import (
    Dial,
    Dialed,
    Examine,
    Listen,
    Listening,
)
from orchestrator.protocol.timing import DIAL_SECONDS, EXAMINE_ANSWER_SECONDS, QUICK_ANSWER_SECONDS

CHECKS: dict[str, Callable[[Case], Iterator[Finding]]] = {
    "reach": check_machine.check_reach,
    "python": check_machine.check_python,
    "torch": check_machine.check_torch,
    "nccl": check_machine.check_nccl,
    "driver": check_machine.check_driver,
    "gpus": check_machine.check_gpus,
    "busy": check_machine.check_busy,
    "ours": check_machine.check_ours,
    "code": check_machine.check_code,
    "workdir": check_machine.check_workdir,
    "disk": check_machine.check_disk,
    "shm": check_machine.check_shm,
    "limits": check_machine.check_limits,
    "clock": check_machine.check_clock,
    "net": check_network.check_net,
    "mtu": check_network.check_mtu,
    "links": check_network.check_links,
    "port": check_network.check_port,
    "names": check_network.check_names,
}
FULL_ONLY = ("busy", "code", "links")
# Checks that a launch does not repeat each time.
OF_OTHERS = ("ours", "names")

# (from, to, port)
Call = tuple[str, str, int]
# Sends each node its own request, all at once, and returns answers and errors.
Ask = Callable[[Sequence[Any], float], list[Any]]


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the facts that they are based on."""

    case: Case
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def bad(self) -> bool:
        return any(finding.level == BAD for finding in self.findings)


def diagnose_nodes(
    nodes: Sequence[ProbedNode],
    lost: Sequence[Examined],
    needs: Needs,
    ask: Ask | None = None,
    head: Disk | None = None,
) -> Diagnosis:
    """Return the findings on the nodes; with `ask` the full checks run, which send requests.

    `lost` are the nodes that could not be reached.
    """
    began = time.monotonic()
    addresses, error = find_addresses(nodes)
    answers: Sequence[Checkup | OrchestratorError | None] = [None] * len(nodes)
    silent: dict[Call, str] = {}
    failed: dict[str, str] = {}
    if ask:
        looks = [Examine(workdir=n.facts.workdir, script=needs.script) for n in nodes]
        answers = ask(looks, EXAMINE_ANSWER_SECONDS)
        silent, failed = dial_nodes(nodes, addresses, ask) if addresses else ({}, {})
    seen = [
        examined_node(node, answer, failed.get(node.name, ""))
        for node, answer in zip(nodes, answers, strict=True)
    ]
    case = Case(
        nodes=(*seen, *lost),
        full=ask is not None,
        needs=needs,
        addresses=addresses,
        network_error=error,
        head=head,
        silent=silent,
    )
    return judge_case(case, began)


def judge_case(case: Case, began: float) -> Diagnosis:
    """Run every check on the case and return the findings."""
    findings = [one for name, check in CHECKS.items() for one in fold_findings(name, check(case))]
    return Diagnosis(case, tuple(findings), time.monotonic() - began)


def find_addresses(
    nodes: Sequence[ProbedNode],
) -> tuple[dict[str, NodeAddress], tuple[str, str] | None]:
    """Return every node's address in the job's network, or no address and (what, fix)."""
    try:
        addresses = node_addresses.find_addresses(nodes) if nodes else []
    except CheckFailed as error:
        return {}, (error.what, error.fix)
    return {node.name: address for node, address in zip(nodes, addresses, strict=True)}, None


def examined_node(
    node: ProbedNode, answer: Checkup | OrchestratorError | None, error: str = ""
) -> Examined:
    """Return the Examined of a node that was reached."""
    return Examined(
        name=node.name,
        facts=node.facts,
        reached=node.reached,
        error=answer.what if isinstance(answer, OrchestratorError) else error,
        checkup=answer if isinstance(answer, Checkup) else None,
        slots=node.node.slots,
        placed=node.node.workdir is not None,
    )


def dial_nodes(
    nodes: Sequence[ProbedNode], addresses: Mapping[str, NodeAddress], ask: Ask
) -> tuple[dict[Call, str], dict[str, str]]:
    """Connect every node to every other in the job's network.

    Return the reasons of failed calls, and the reasons of nodes that were lost in that time.
    """
    secret = {node.name: secrets.token_hex(8) for node in nodes}
    ports = [(nodes[0].facts.port or 0, 0), *[(0,)] * (len(nodes) - 1)]
    pairs = zip(nodes, ports, strict=True)
    listening = ask(
        [Listen(ports=own, word=secret[n.name]) for n, own in pairs], QUICK_ANSWER_SECONDS
    )
    targets = [
        (node.name, port)
        for node, answer in zip(nodes, listening, strict=True)
        if isinstance(answer, Listening)
        for port in answer.ports
        if port
    ]
    calls = [[(n.name, name, port) for name, port in targets if name != n.name] for n in nodes]
    places = [
        tuple((addresses[name].address, port, secret[name]) for _, name, port in of_node)
        for of_node in calls
    ]
    dials = [Dial(places=of_node, seconds=DIAL_SECONDS) for of_node in places]
    dialed = ask(dials, DIAL_SECONDS * (2 + len(targets) / 32) + 10)
    silent: dict[Call, str] = {}
    failed: dict[str, str] = {}
    for node, of_node, listened, answer in zip(nodes, calls, listening, dialed, strict=True):
        if isinstance(answer, Dialed):
            pairs_of_node = zip(of_node, answer.answers, strict=False)
            silent |= {call: reason for call, reason in pairs_of_node if reason}
        if isinstance(listened, OrchestratorError):
            failed[node.name] = f"it was lost while it was called: {listened.what}"
        elif isinstance(answer, OrchestratorError):
            failed[node.name] = f"it was lost while it called the others: {answer.what}"
    return silent, failed


# -- the report ------------------------------------------------------------------------------------

# The worst level comes first.
WORDS = {BAD: "BAD", WARN: "warn", UNKNOWN: "?"}
STYLES = {WARN: styles.WARNING, BAD: styles.FAILED, UNKNOWN: styles.UNKNOWN}


def diagnosis_to_text(
    diagnosis: Diagnosis, terminal: Terminal = PLAIN, *, hints: bool = True
) -> str:
    """Return the findings as text, the worst first, and a line that counts them."""
    rows: list[list[Cell]] = []
    for finding in sorted(diagnosis.findings, key=lambda one: list(WORDS).index(one.level)):
        mark = (f"{WORDS[finding.level]:<4}", STYLES[finding.level])
        rows.append([mark, f"{finding.check}: {finding.what}"])
        if finding.fix and hints:
            fix = "\n    ".join(line.strip() for line in finding.fix.splitlines())
            rows += [["", line] for line in f" -> {fix}".splitlines()]
    # Unwrapped: fixes are to be copied.
    problems = output.format_table(rows, Terminal(color=terminal.color))
    count = {level: sum(f.level == level for f in diagnosis.findings) for level in WORDS}
    what = ", ".join(f"{count[level]} {word}" for level, word in WORDS.items() if count[level])
    kind = "all checks" if diagnosis.case.full else "quick checks"
    done = [name for name in CHECKS if diagnosis.case.full or name not in FULL_ONLY]
    summary = (
        f"{plural(len(diagnosis.case.nodes), 'node')}, {kind}, {diagnosis.seconds:.1f} s:"
        f" {what or 'all is well'}"
    )
    return f"{problems}\n\n{summary}" if rows else f"{summary}\n  checked: {', '.join(done)}"


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    levels = [checks_of(diagnosis, node) for node in diagnosis.case.nodes]
    # The checks that at least one node went through.
    checks = [name for name in CHECKS if any(of_node[name] != "-" for of_node in levels)]
    return {
        "ok": not diagnosis.bad,
        "full": diagnosis.case.full,
        "seconds": round(diagnosis.seconds, 3),
        "nodes": [
            {
                "name": node.name,
                "hostname": node.facts.hostname if node.facts else None,
                "checks": {name: of_node[name] for name in checks},
            }
            for node, of_node in zip(diagnosis.case.nodes, levels, strict=True)
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


def checks_of(diagnosis: Diagnosis, node: Examined) -> dict[str, str]:
    """Return the worst level of a node's findings by check: "ok" if none, "-" if unchecked."""
    found = dict.fromkeys(CHECKS, "ok")
    if node.facts is None:
        found = {**dict.fromkeys(CHECKS, "-"), "reach": "ok"}
    elif not diagnosis.case.full:
        found |= dict.fromkeys(FULL_ONLY, "-")
    mine = [finding for finding in diagnosis.findings if node.name in finding.nodes]
    for level in reversed(WORDS):
        found |= {finding.check: level for finding in mine if finding.level == level}
    return found
