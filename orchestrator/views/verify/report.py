"""The tables that `orchestrator verify` prints when it is done. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.common.text import duration
from orchestrator.head.screen import styles
from orchestrator.head.screen.output import PLAIN, Cell, Terminal, paint, table
from orchestrator.views.verify.diagnosis import Bottleneck, operations, places, size

WIDEST = 12  # nodes whose pairs are shown as a matrix
ENDED = {  # why sizes are missing
    "time": "larger sizes are left out where their time was up; more with --seconds",
    "memory": "larger sizes are left out: the ranks do not have the memory for them",
}


def to_text(
    results: Mapping[str, Any],
    findings: Sequence[Bottleneck],
    terminal: Terminal = PLAIN,
) -> str:
    blocks = [*collectives(results, terminal), pairs(results, terminal), devices(results)]
    blocks.append(conclusion(results, findings, terminal))
    return "\n\n".join(block for block in blocks if block) + "\n"


def collectives(results: Mapping[str, Any], terminal: Terminal) -> list[str]:
    """Return a table with sizes down, collectives across: their time and bandwidth."""
    rows = results.get("collectives", [])
    blocks = []
    if timed := [row for row in rows if row["bytes"]]:
        names = list(dict.fromkeys(row["collective"] for row in timed))
        by_cell = {(row["collective"], row["bytes"]): row for row in timed}
        lines: list[list[Cell]] = [["", *names]]
        for count in sorted({int(row["bytes"]) for row in timed}):
            lines.append([size(count), *(cell(by_cell.get((name, count))) for name in names)])
        heading = f"among all {timed[0]['ranks']} ranks: time of one call, bus bandwidth in Gb/s"
        blocks.append(f"{heading}\n{figures(lines, terminal)}")
    barriers = [row for row in rows if row["collective"] == "barrier"]
    if barriers:
        blocks.append(f"barrier: {duration(barriers[0]['seconds'])}")
    return [*blocks, *(ENDED[reason] for reason in results.get("notes", []))]


def figures(rows: Sequence[Sequence[Cell]], terminal: Terminal) -> str:
    """Return a table of numbers, with headings above and at the left."""
    return table(rows, terminal, right=range(1, len(rows[0])), headed=True, indent=2)


def cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{duration(row['seconds'])} {8e-9 * row['busbw']:8.3f}"


def pairs(results: Mapping[str, Any], terminal: Terminal) -> str:
    rows = results.get("pairs", [])
    if not rows:
        return ""
    rates = {(row["from"], row["to"]): 8e-9 * row["rate"] for row in rows}
    nodes = sorted({node for pair in rates for node in pair})
    delays = sorted(row["latency"] for row in rows)
    spread = f"one way {duration(delays[0])} to {duration(delays[-1])}"
    if len(nodes) > WIDEST:
        lines: list[list[Cell]] = [
            ["", "sends, slowest", "fastest", "receives, slowest", "fastest"]
        ]
        for node in nodes:
            out = [rate for (a, _), rate in rates.items() if a == node]
            into = [rate for (_, b), rate in rates.items() if b == node]
            ends = (min(out), max(out), min(into), max(into))
            lines.append([f"node {node}", *(f"{rate:.3g}" for rate in ends)])
        return f"each node with all others, Gb/s ({spread})\n{figures(lines, terminal)}"
    lines = [["", *(f"node {node}" for node in nodes)]]
    for a in nodes:
        shown = [f"{rates[a, b]:.3g}" if (a, b) in rates else "-" for b in nodes]
        lines.append([f"node {a}", *shown])
    return f"from a node to a node, Gb/s ({spread})\n{figures(lines, terminal)}"


def devices(results: Mapping[str, Any]) -> str:
    flops = results["flops"]
    lines = []
    for kind in sorted(set(results["devices"])):
        rates_of_kind = [flops[rank] for rank, its in enumerate(results["devices"]) if its == kind]
        between = f"{operations(min(rates_of_kind))} to {operations(max(rates_of_kind))}"
        lines.append(f"multiplying matrices, {len(rates_of_kind)} x {kind}: {between}")
    return "\n".join(lines)


def conclusion(
    results: Mapping[str, Any], findings: Sequence[Bottleneck], terminal: Terminal
) -> str:
    lines = []
    for finding in findings:
        wrong = finding.kind == "wrong"
        text = f"{'WRONG' if wrong else 'SLOW'}: {finding.text}"
        lines.append(paint(text, styles.FAILED if wrong else styles.WARNING, terminal))
    if not results["complete"]:
        lines.append(
            paint("the run ended before everything was measured", styles.WARNING, terminal)
        )
    elif not findings:
        several = len(results["devices"]) > 1
        text = "every result is right, no node, link or device is slower than the others"
        text = text if several else "one rank alone: there is no link to verify"
        lines.append(paint(text, styles.DONE, terminal))
    return "\n".join(lines)


# -- bits ---------------------------------------------------------------------------------------
# Find the device whose results have other bits than those of its kind, or than its own. Pure.

Hashes = Mapping[str, Sequence[int]]  # of one rank: case -> the hashes that were seen


def findings(results: Mapping[str, Any]) -> list[Bottleneck]:
    """Return a finding per device: what does not repeat itself first, then who is odd."""
    node_of, names = places(results)
    hashes: Sequence[Hashes] = results["bits"]["hashes"]
    found = []
    unsteady = set()
    for rank, of_rank in enumerate(hashes):
        cases = [case for case, values in of_rank.items() if len(values) > 1]
        if cases:
            unsteady.add(rank)
            text = f"{who(rank, node_of, names)} does not get the same bits twice: {listed(cases)}"
            found.append(Bottleneck("wrong", text, (node_of[rank],)))
    for kind, ranks in by_kind(results).items():
        steady = [rank for rank in ranks if rank not in unsteady]
        found += odd_ones(kind, steady, hashes, node_of, names)
    return found


def odd_ones(
    kind: str,
    ranks: Sequence[int],
    hashes: Sequence[Hashes],
    node_of: Sequence[int],
    names: Sequence[str],
) -> list[Bottleneck]:
    """Name those outside the majority of a kind; without a majority, all of them together."""
    odd: dict[int, list[str]] = {}
    open_cases = []
    for case in hashes[ranks[0]] if ranks else ():
        values = {rank: hashes[rank][case][0] for rank in ranks}
        ((common, count),) = Counter(values.values()).most_common(1)
        if count == len(ranks):
            continue
        if count * 2 <= len(ranks):
            open_cases.append(case)
            continue
        for rank, value in values.items():
            if value != common:
                odd.setdefault(rank, []).append(case)
    found = [
        Bottleneck(
            "wrong",
            f"{who(rank, node_of, names)} gets other bits than the {len(ranks) - len(odd)} others"
            f" of its kind: {listed(cases)} ({kind})",
            (node_of[rank],),
        )
        for rank, cases in odd.items()
    ]
    if open_cases:
        everyone = ", ".join(who(rank, node_of, names) for rank in ranks[:8])
        text = (
            f"{everyone} get different bits, and no majority says which one is right:"
            f" {listed(open_cases)} ({kind})"
        )
        found.append(Bottleneck("wrong", text, tuple(sorted({node_of[r] for r in ranks}))))
    return found


def bits_text(
    results: Mapping[str, Any], found: Sequence[Bottleneck], terminal: Terminal = PLAIN
) -> str:
    bits = results["bits"]
    lines = []
    for kind, ranks in by_kind(results).items():
        rounds = [bits["rounds"][rank] for rank in ranks]
        alone = "" if len(ranks) > 1 else "; alone of its kind, it is compared with itself only"
        lines.append(f"{len(ranks)} x {kind}: {min(rounds):,} rounds each at least{alone}")
    lines.append("")
    lines += [paint(f"WRONG: {item.text}", styles.FAILED, terminal) for item in found]
    if not found:
        cases = len(bits["hashes"][0])
        lines.append(
            paint(f"all {cases} computations gave the same bits, every time, on every device of a"
                  " kind", styles.DONE, terminal)
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def by_kind(results: Mapping[str, Any]) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {}
    for rank, kind in enumerate(results["bits"]["kinds"]):
        kinds.setdefault(kind, []).append(rank)
    return kinds


def who(rank: int, node_of: Sequence[int], names: Sequence[str]) -> str:
    return f"the device of rank {rank} on {names[node_of[rank]]}"


def listed(cases: Sequence[str]) -> str:
    more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
    return ", ".join(cases[:3]) + more
