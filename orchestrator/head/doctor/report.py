"""Write a diagnosis as text (one table, then each problem once with its fix) or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.common.text import plural
from orchestrator.head.doctor.examination import CHECKS, Diagnosis
from orchestrator.head.doctor.findings import BAD, UNKNOWN, WARN, Finding
from orchestrator.head.screen import output
from orchestrator.head.screen.output import PLAIN, Cell, Terminal

WORDS = {"": "ok", WARN: "warn", BAD: "BAD", UNKNOWN: "?", "-": "-"}
STYLES = {"": "green", WARN: "yellow", BAD: "bold red", UNKNOWN: "cyan", "-": "dim"}
LEVELS = (BAD, WARN, UNKNOWN)


def to_text(diagnosis: Diagnosis, terminal: Terminal = PLAIN, *, hints: bool = True) -> str:
    parts = [
        table(diagnosis, terminal),
        problems(diagnosis.findings, terminal, hints=hints),
        summary(diagnosis),
    ]
    return "\n\n".join(part for part in parts if part)


def columns(diagnosis: Diagnosis) -> list[str]:
    """List the checks that at least one node went through."""
    return [
        name
        for name in CHECKS
        if any(diagnosis.level(n, name) != "-" for n in diagnosis.case.nodes)
    ]


def table(diagnosis: Diagnosis, terminal: Terminal) -> str:
    """Draw a row for each node; several tables, one below the other, on a narrow screen."""
    nodes = diagnosis.case.nodes
    blocks = []
    widest = max(len(node.name) for node in nodes)
    for checks in groups(columns(diagnosis), (terminal.width or output.UNLIMITED) - widest):
        rows: list[list[Cell]] = [["", *checks]]
        for node in nodes:
            levels = [diagnosis.level(node, name) for name in checks]
            rows.append([node.name, *((WORDS[level], STYLES[level]) for level in levels)])
        blocks.append(output.table(rows, terminal, headed=True))
    return "\n\n".join(blocks)


def groups(checks: Sequence[str], width: int) -> Iterator[list[str]]:
    """Split the checks into rows of headings that are no wider than this."""
    group: list[str] = []
    used = 0
    for name in checks:
        size = max(len(name), 4) + 2
        if group and used + size > width:
            yield group
            group, used = [], 0
        group.append(name)
        used += size
    yield group


def problems(findings: Sequence[Finding], terminal: Terminal, *, hints: bool) -> str:
    rows: list[list[Cell]] = []
    for level in LEVELS:
        for finding in findings:
            if finding.level == level:
                mark = (f"{WORDS[level]:<4}", STYLES[level])
                rows.append([mark, f"{finding.check}: {finding.what}"])
                if finding.fix and hints:
                    rows.append(["", f" -> {finding.fix}"])
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
