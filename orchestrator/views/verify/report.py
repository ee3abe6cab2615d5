"""The tables that `orchestrator verify` prints when it is done. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.common.text import duration
from orchestrator.head.screen.output import PLAIN, Cell, Look, paint, table
from orchestrator.views.verify.diagnosis import Bottleneck, operations, size
from orchestrator.views.verify.prediction import Prediction

WIDEST = 12  # nodes whose pairs are shown as a matrix
SCOPES = {"all": "among all {} ranks", "node": "within each node", "across": "across nodes"}
ENDED = {  # why sizes are missing
    "time": "larger sizes are left out where their time was up; more with --seconds",
    "memory": "larger sizes are left out: the ranks do not have the memory for them",
}


def to_text(
    results: Mapping[str, Any],
    findings: Sequence[Bottleneck],
    predictions: Sequence[Prediction],
    look: Look = PLAIN,
) -> str:
    blocks = [*collectives(results, look), pairs(results, look), devices(results)]
    blocks += [predicted(results, predictions, look), conclusion(results, findings, look)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def collectives(results: Mapping[str, Any], look: Look) -> list[str]:
    """Return a table for each scope: sizes down, collectives across, their time and bandwidth."""
    rows = results.get("collectives", [])
    blocks = []
    for scope, title in SCOPES.items():
        own = [row for row in rows if row["scope"] == scope and row["bytes"]]
        if not own:
            continue
        names = list(dict.fromkeys(row["collective"] for row in own))
        by_cell = {(row["collective"], row["bytes"]): row for row in own}
        lines: list[list[Cell]] = [["", *names]]
        for count in sorted({int(row["bytes"]) for row in own}):
            lines.append([size(count), *(cell(by_cell.get((name, count))) for name in names)])
        heading = f"{title.format(own[0]['ranks'])}: time of one call, bus bandwidth in Gb/s"
        blocks.append(f"{heading}\n{figures(lines, look)}")
    barriers = [row for row in rows if row["collective"] == "barrier"]
    if barriers:
        blocks.append(f"barrier: {duration(barriers[0]['seconds'])}")
    return [*blocks, *(ENDED[why] for why in results.get("notes", []))]


def figures(rows: Sequence[Sequence[Cell]], look: Look) -> str:
    """Return a table of numbers, with headings above and at the left."""
    return table(rows, look, right=range(1, len(rows[0])), headed=True, indent=2)


def cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{duration(row['seconds'])} {8e-9 * row['busbw']:8.3f}"


def pairs(results: Mapping[str, Any], look: Look) -> str:
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
        return f"each node with all others, Gb/s ({spread})\n{figures(lines, look)}"
    lines = [["", *(f"node {node}" for node in nodes)]]
    for a in nodes:
        shown = [f"{rates[a, b]:.3g}" if (a, b) in rates else "-" for b in nodes]
        lines.append([f"node {a}", *shown])
    return f"from a node to a node, Gb/s ({spread})\n{figures(lines, look)}"


def devices(results: Mapping[str, Any]) -> str:
    flops = results["flops"]
    lines = []
    for kind in sorted(set(results["devices"])):
        own = [flops[rank] for rank, its in enumerate(results["devices"]) if its == kind]
        between = f"{operations(min(own))} to {operations(max(own))}"
        lines.append(f"multiplying matrices, {len(own)} x {kind}: {between}")
    return "\n".join(lines)


def predicted(results: Mapping[str, Any], predictions: Sequence[Prediction], look: Look) -> str:
    model = results.get("model") or {}
    if "why" in model:
        return f"no prediction of step times: {model['why']}"
    if not predictions:
        return ""
    heading = f"a step of the configured model ({model['parameters']:,} parameters), best first"
    rows: list[list[Cell]] = [
        ["", "step", "computing", "communicating", "memory per rank", ""],
    ]
    for prediction in predictions:
        notes = ["configured"] if prediction.configured else []
        notes += [] if prediction.fits else ["does not fit"]
        notes += ["messages larger than measured"] if prediction.beyond else []
        times = (prediction.step, prediction.compute, prediction.communication)
        note = f"({', '.join(notes)})" if notes else ""
        memory = size(prediction.memory)
        rows.append([prediction.strategy, *map(duration, times), memory, note])
    lines = [heading, table(rows, look, right=range(1, 5), headed=True, indent=2)]
    if model["micro_batch"] is None:
        lines.append("  the model does not say its FLOPs, so its computing is left out")
    return "\n".join(lines)


def conclusion(results: Mapping[str, Any], findings: Sequence[Bottleneck], look: Look) -> str:
    lines = []
    for finding in findings:
        wrong = finding.kind == "wrong"
        text = f"{'WRONG' if wrong else 'SLOW'}: {finding.text}"
        lines.append(paint(text, "red" if wrong else "yellow", look))
    if not results["complete"]:
        lines.append(paint("the run ended before everything was measured", "yellow", look))
    elif not findings:
        several = len(results["devices"]) > 1
        text = "every result is right, no node, link or device is slower than the others"
        text = text if several else "one rank alone: there is no link to verify"
        lines.append(paint(text, "green", look))
    return "\n".join(lines)
