"""The tables that `orchestrator verify` prints when it is done. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.common.text import duration
from orchestrator.head.screen import styles
from orchestrator.head.screen.output import PLAIN, Cell, Terminal, paint, table
from orchestrator.views.verify.diagnosis import Bottleneck, operations, size

WIDEST = 12  # nodes whose pairs are shown as a matrix
ENDED = {  # why sizes are missing
    "time": "larger sizes are left out where their time was up; more with --seconds",
    "memory": "larger sizes are left out: the ranks do not have the memory for them",
}


def to_text(
    results: Mapping[str, Any], findings: Sequence[Bottleneck], terminal: Terminal = PLAIN
) -> str:
    blocks = measured(results, terminal)
    for finding in findings:
        wrong = finding.kind == "wrong"
        words = f"{'WRONG' if wrong else 'SLOW'}: {finding.text}"
        blocks.append(paint(words, styles.FAILED if wrong else styles.WARNING, terminal))
    if not results.get("complete", True):
        words = "the run ended before everything was measured"
        blocks.append(paint(words, styles.WARNING, terminal))
    elif not findings:
        blocks.append(paint(all_well(results), styles.DONE, terminal))
    return "\n\n".join(blocks) + "\n"


def all_well(results: Mapping[str, Any]) -> str:
    if len(results["devices"]) == 1:
        return "one rank alone: there is no link to verify"
    return "every result is right, no node, link or device is slower than the others"


def measured(results: Mapping[str, Any], terminal: Terminal) -> list[str]:
    """Return a table of collectives by size, one of pairs of nodes, and a line for each device."""
    blocks = []
    rows = results.get("collectives", [])
    if timed := {(row["collective"], row["bytes"]): row for row in rows}:
        names = list(dict.fromkeys(name for name, _ in timed))
        lines: list[list[Cell]] = [["", *names]]
        for count in sorted({count for _, count in timed}):
            lines.append([size(count), *(cell(timed.get((name, count))) for name in names)])
        heading = f"among all {rows[0]['ranks']} ranks: time of one call, bus bandwidth in Gb/s"
        blocks.append(f"{heading}\n{figures(lines, terminal)}")
    blocks += [ENDED[reason] for reason in results.get("notes", [])]
    rates = {(r["from"], r["to"]): f"{8e-9 * r['rate']:.3g}" for r in results.get("pairs", [])}
    nodes = sorted({node for pair in rates for node in pair})
    if 0 < len(nodes) <= WIDEST:
        lines = [["", *(f"node {node}" for node in nodes)]]
        lines += [[f"node {a}", *(rates.get((a, b), "-") for b in nodes)] for a in nodes]
        delays = sorted(row["latency"] for row in results["pairs"])
        spread = f"one way {duration(delays[0])} to {duration(delays[-1])}"
        blocks.append(f"from a node to a node, Gb/s ({spread})\n{figures(lines, terminal)}")
    for kind in sorted(set(results["devices"])):
        pairs = zip(results["flops"], results["devices"], strict=True)
        flops = [rate for rate, its in pairs if its == kind]
        between = f"{operations(min(flops))} to {operations(max(flops))}"
        blocks.append(f"multiplying matrices, {len(flops)} x {kind}: {between}")
    return blocks


def figures(rows: Sequence[Sequence[Cell]], terminal: Terminal) -> str:
    """Return a table of numbers, with headings above and at the left."""
    return table(rows, terminal, right=range(1, len(rows[0])), headed=True, indent=2)


def cell(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else f"{duration(row['seconds'])} {8e-9 * row['busbw']:8.3f}"
