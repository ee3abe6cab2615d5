"""A diagnosis on the screen: one table, then each problem once with what mends it; or as JSON."""

from __future__ import annotations

from typing import Any

from orchestrator.head.doctor.examination import CHECKS, Diagnosis
from orchestrator.head.doctor.findings import BAD, UNKNOWN, WARN, Finding

WORDS = {"": "ok", WARN: "warn", BAD: "BAD", UNKNOWN: "?", "-": "-"}
COLOURS = {"": "32", WARN: "33", BAD: "1;31", UNKNOWN: "36", "-": "2"}
LEVELS = (BAD, WARN, UNKNOWN)


def to_text(found: Diagnosis, *, colour: bool, hints: bool = True) -> str:
    parts = [table(found, colour), problems(found.findings, colour, hints), summary(found)]
    return "\n\n".join(part for part in parts if part)


def columns(found: Diagnosis) -> list[str]:
    """Without what nobody was asked about."""
    return [name for name in CHECKS if any(found.level(n, name) != "-" for n in found.case.nodes)]


def table(found: Diagnosis, colour: bool) -> str:
    checks = columns(found)
    first = max(len(node.name) for node in found.case.nodes)
    lines = [" ".join([" " * first, *(f"{name:<{width(name)}}" for name in checks)]).rstrip()]
    for node in found.case.nodes:
        cells = [paint(found.level(node, name), width(name), colour) for name in checks]
        lines.append(" ".join([f"{node.name:<{first}}", *cells]).rstrip())
    return "\n".join(lines)


def width(check: str) -> int:
    return max(4, len(check))


def paint(level: str, size: int, colour: bool) -> str:
    word = f"{WORDS[level]:<{size}}"
    return f"\x1b[{COLOURS[level]}m{word}\x1b[0m" if colour else word


def problems(findings: tuple[Finding, ...], colour: bool, hints: bool) -> str:
    lines = []
    for level in LEVELS:
        for finding in findings:
            if finding.level == level:
                mark = paint(level, 4, colour)
                lines.append(f"{mark} {finding.check}: {finding.what}")
                if finding.fix and hints:
                    lines.append(f"       -> {finding.fix}")
    return "\n".join(lines)


def summary(found: Diagnosis) -> str:
    count = {level: sum(f.level == level for f in found.findings) for level in LEVELS}
    what = [f"{count[level]} {WORDS[level]}" for level in LEVELS if count[level]]
    nodes = len(found.case.nodes)
    kind = "all checks" if found.case.full else "quick checks"
    return (
        f"{nodes} node{'s' * (nodes != 1)}, {kind}, {found.seconds:.1f} s: "
        f"{', '.join(what) or 'all is well'}"
    )


def to_json(found: Diagnosis) -> dict[str, Any]:
    checks = columns(found)
    return {
        "ok": not found.bad,
        "full": found.case.full,
        "seconds": round(found.seconds, 3),
        "nodes": [
            {
                "name": node.name,
                "hostname": node.facts.hostname if node.facts else None,
                "checks": {name: found.level(node, name) or "ok" for name in checks},
            }
            for node in found.case.nodes
        ],
        "findings": [
            {
                "check": one.check,
                "level": one.level,
                "nodes": list(one.nodes),
                "what": one.what,
                "fix": one.fix,
            }
            for one in found.findings
        ],
    }
