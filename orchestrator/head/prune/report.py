"""The output of `orchestrator prune`: the table before, the outcome after, and both as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from orchestrator.common.text import plural, size
from orchestrator.head.prune.scan import PrunePlan, ScannedExperiment
from orchestrator.head.screen import output
from orchestrator.records.checkpoint_store import shown

STATES = {"done": "green", "failed": "red", "lost": "red"}


def show(plan: PrunePlan, *, verbose: bool) -> None:
    """Print what would be removed, and what stays although the rules select it."""
    if plan.going:
        table(plan, plan.going)
    for name in plan.hidden:
        left = size(plan.measured[name].size)
        output.tell(f"{shown(name)}: left by a prune that was interrupted, {left}")
    for entry in plan.going:
        obstacle = plan.measured[entry.name].obstacle
        if obstacle:
            output.tell(f"cannot be removed: {shown(entry.name)}: {obstacle}")
    for entry, why in plan.ours:
        if why is not None and (verbose or why == entry.busy):
            output.tell(f"kept: {shown(entry.name)}: {why}")
    foreign(plan, verbose=verbose)
    for node, why in plan.unreached.items():
        output.tell(f"not reached: {shown(node)}: {why}")
    if plan.going or plan.hidden:
        total = sum(measured.size for measured in plan.measured.values())
        output.tell(f"{plural(len(plan.going), 'experiment')}, {size(total)}")
    else:
        count = plural(len(plan.ours), "experiment")
        output.tell(f"nothing to remove: {count} in {shown(plan.directory)}")


def foreign(plan: PrunePlan, *, verbose: bool) -> None:
    for entry, why in plan.decided if verbose else ():
        if entry.record is None:
            output.tell(f"not ours: {shown(entry.name)}: {why}")


def table(plan: PrunePlan, entries: Sequence[ScannedExperiment]) -> None:
    rows: list[list[output.Cell]] = [["experiment", "state", "when", "size", ""]]
    for entry in entries:
        assert entry.record is not None
        state = shown(entry.record.state)
        bytes_, pin = size(plan.measured[entry.name].size), "pinned" if entry.pinned else ""
        style = STATES.get(state, "")
        rows.append([shown(entry.name), (state, style), clock(entry)[:16], bytes_, pin])
    output.tell(output.table(rows, output.terminal(), right={3}, headed=True))


def clock(entry: ScannedExperiment) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.when))


def conclusion(plan: PrunePlan) -> str:
    """Return the outcome."""
    lines = [f"kept: {shown(name)}: {why}" for name, why in plan.spared.items()]
    lines += [f"NOT REMOVED: {shown(name)}: {why}" for name, why in plan.failed.items()]
    gone = [entry for entry in plan.going if entry.name in plan.removed]
    summary = f"removed {plural(len(gone), 'experiment')}, {size(plan.freed)} freed"
    if plan.on_nodes:
        summary += f" here and {size(plan.freed_on_nodes)} on their nodes"
    elif gone:
        summary += "; what they left on their nodes stays there (--on-nodes removes that too)"
    return "\n".join([*lines, summary])


def to_json(plan: PrunePlan, *, dry_run: bool) -> str:
    """Return all that is known of the experiments, and what became of each."""
    whole = {
        "directory": str(plan.directory),
        "dry_run": dry_run,
        "experiments": [about(plan, entry, why) for entry, why in plan.ours],
        "left_over": [
            {"name": name, "size": plan.measured[name].size, **outcome(plan, name)}
            for name in plan.hidden
        ],
        "not_ours": [
            {"name": entry.name, "reason": why}
            for entry, why in plan.decided
            if entry.record is None
        ],
        "nodes_not_cleaned": plan.unreached,
        "freed": plan.freed,
        "freed_on_nodes": plan.freed_on_nodes,
    }
    return json.dumps(whole, indent=1)


def about(plan: PrunePlan, entry: ScannedExperiment, why: str | None) -> dict[str, Any]:
    assert entry.record is not None
    measured = plan.measured.get(entry.name)
    return {
        "name": entry.name,
        "state": entry.record.state,
        "when": clock(entry),
        "size": measured.size if measured else None,
        "pinned": entry.pinned,
        **(outcome(plan, entry.name) if why is None else {"action": "kept", "reason": why}),
    }


def outcome(plan: PrunePlan, name: str) -> dict[str, Any]:
    if name in plan.removed:
        return {"action": "removed", "reason": None}
    if name in plan.spared:
        return {"action": "kept", "reason": plan.spared[name]}
    obstacle = plan.failed.get(name) or plan.measured[name].obstacle
    return {"action": "failed" if obstacle else "would be removed", "reason": obstacle or None}
