"""What `orchestrator verify` says when it is done: tables of what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.head.verify.chart import duration
from orchestrator.head.verify.diagnosis import Finding, operations, size
from orchestrator.head.verify.prediction import Prediction

WIDEST = 12  # nodes whose pairs are shown as a matrix
SCOPES = {"all": "among all {} ranks", "node": "within each node", "across": "across nodes"}
ENDED = {  # why sizes are missing
    "time": "larger sizes are left out where their time was up; more with --seconds",
    "memory": "larger sizes are left out: the ranks have not the memory for them",
}
RED, YELLOW, GREEN = "31", "33", "32"


def tell(
    told: Mapping[str, Any],
    findings: Sequence[Finding],
    predictions: Sequence[Prediction],
    *,
    color: bool,
) -> str:
    blocks = [collectives(told), pairs(told), devices(told), predicted(told, predictions)]
    blocks.append(conclusion(told, findings, color=color))
    return "\n\n".join(block for block in blocks if block) + "\n"


def collectives(told: Mapping[str, Any]) -> str:
    """A table for each scope: sizes down, collectives across, time and bus bandwidth each."""
    rows = told.get("collectives", [])
    blocks = []
    for scope, title in SCOPES.items():
        own = [row for row in rows if row["scope"] == scope and row["bytes"]]
        if not own:
            continue
        names = list(dict.fromkeys(row["collective"] for row in own))
        cells = {(row["collective"], size(row["bytes"])): row for row in own}
        sizes = list(dict.fromkeys(size(row["bytes"]) for row in sorted(own, key=by_size)))
        lines = [f"{title.format(own[0]['ranks'])}: time of one call, bus bandwidth in Gb/s"]
        lines.append(" " * 8 + "".join(f"{name:>18}" for name in names))
        for count in sizes:
            shown = [cell(cells.get((name, count))) for name in names]
            lines.append(f"{count:>8}" + "".join(f"{one:>18}" for one in shown))
        blocks.append("\n".join(lines))
    barriers = [row for row in rows if row["collective"] == "barrier"]
    if barriers:
        blocks.append(f"barrier: {duration(barriers[0]['seconds'])}")
    return "\n\n".join([*blocks, *(ENDED[why] for why in told.get("notes", []))])


def by_size(row: Mapping[str, Any]) -> int:
    return int(row["bytes"])


def cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{duration(row['seconds'])} {8e-9 * row['busbw']:8.3f}"


def pairs(told: Mapping[str, Any]) -> str:
    rows = told.get("pairs", [])
    if not rows:
        return ""
    rates = {(row["from"], row["to"]): 8e-9 * row["rate"] for row in rows}
    nodes = sorted({node for pair in rates for node in pair})
    delays = sorted(row["latency"] for row in rows)
    spread = f"one way {duration(delays[0])} to {duration(delays[-1])}"
    if len(nodes) > WIDEST:
        lines = [f"each node with all others, Gb/s, slowest and fastest ({spread})"]
        for node in nodes:
            out = [rate for (a, _), rate in rates.items() if a == node]
            into = [rate for (_, b), rate in rates.items() if b == node]
            lines.append(
                f"  node {node:<3} sends {min(out):7.3g} to {max(out):7.3g}"
                f"   receives {min(into):7.3g} to {max(into):7.3g}"
            )
        return "\n".join(lines)
    lines = [f"from a node to a node, Gb/s ({spread})"]
    lines.append(" " * 10 + "".join(f"{f'node {node}':>9}" for node in nodes))
    for a in nodes:
        shown = [f"{rates[a, b]:.3g}" if (a, b) in rates else "-" for b in nodes]
        lines.append(f"  {f'node {a}':8}" + "".join(f"{one:>9}" for one in shown))
    return "\n".join(lines)


def devices(told: Mapping[str, Any]) -> str:
    flops = told["flops"]
    lines = []
    for kind in sorted(set(told["devices"])):
        own = [flops[rank] for rank, its in enumerate(told["devices"]) if its == kind]
        between = f"{operations(min(own))} to {operations(max(own))}"
        lines.append(f"multiplying matrices, {len(own)} x {kind}: {between}")
    return "\n".join(lines)


def predicted(told: Mapping[str, Any], predictions: Sequence[Prediction]) -> str:
    model = told.get("model") or {}
    if "why" in model:
        return f"no prediction of step times: {model['why']}"
    if not predictions:
        return ""
    lines = [f"a step of the configured model ({model['parameters']:,} parameters), best first"]
    head = ("", "step", "computing", "communicating", "memory per rank")
    lines.append(f"  {head[0]:14}{head[1]:>10}{head[2]:>12}{head[3]:>16}{head[4]:>18}")
    for one in predictions:
        notes = ["configured"] if one.configured else []
        notes += [] if one.fits else ["does not fit"]
        notes += ["messages larger than measured"] if one.beyond else []
        lines.append(
            f"  {one.strategy:14}{duration(one.step):>10}{duration(one.compute):>12}"
            f"{duration(one.communication):>16}{size(int(one.memory)):>18}"
            + (f"  ({', '.join(notes)})" if notes else "")
        )
    if model["micro_batch"] is None:
        lines.append("  the model does not say its FLOPs, so its computing is left out")
    return "\n".join(lines)


def conclusion(told: Mapping[str, Any], findings: Sequence[Finding], *, color: bool) -> str:
    def tint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if color else text

    lines = []
    for one in findings:
        wrong = one.kind == "wrong"
        word = "WRONG" if wrong else "SLOW"
        lines.append(tint(f"{word}: {one.text}", RED if wrong else YELLOW))
    if not told["complete"]:
        lines.append(tint("the run ended before everything was measured", YELLOW))
    elif not findings:
        several = len(told["devices"]) > 1
        words = "every result is right, no node, link or device is slower than the others"
        lines.append(
            tint(words if several else "one rank alone: there is no link to verify", GREEN)
        )
    return "\n".join(lines)
