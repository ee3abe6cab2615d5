"""What `orchestrator prune` says: the table before, the words after, and both as JSON."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator import text
from orchestrator.head.prune.scan import Found, Plan
from orchestrator.head.screen import output
from orchestrator.records.checkpoint_store import shown


def print_out(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # a reader that left does not stop the removal
        output.tell(text)


def experiments(count: int) -> str:
    return f"{count} experiment{'' if count == 1 else 's'}"


def tell(options: Mapping[str, Any], text: str) -> None:
    if not options["as_json"]:
        print_out(text)


def show(plan: Plan, *, verbose: bool) -> None:
    """What would go, and what stays though its time has come."""
    if plan.going:
        table(plan, plan.going)
    for name in plan.hidden:
        left = text.size(plan.measured[name].size)
        print_out(f"{shown(name)}: left by a prune that was interrupted, {left}")
    for one in plan.going:
        if plan.measured[one.name].obstacle:
            print_out(f"cannot be removed: {shown(one.name)}: {plan.measured[one.name].obstacle}")
    for one, why in plan.decided:
        if one.record is not None and why is not None and (verbose or why == one.busy):
            print_out(f"kept: {shown(one.name)}: {why}")
    foreign(plan, verbose=verbose)
    for node, why in plan.unreached.items():
        print_out(f"not reached: {shown(node)}: {why}")
    if not plan.going and not plan.hidden:
        count = sum(1 for one, _ in plan.decided if one.record is not None)
        print_out(f"nothing to remove: {experiments(count)} in {shown(plan.directory)}")
    else:
        size = sum(found.size for found in plan.measured.values())
        print_out(f"{experiments(len(plan.going))}, {text.size(size)}")


def foreign(plan: Plan, *, verbose: bool) -> None:
    for one, why in plan.decided if verbose else ():
        if one.record is None:
            print_out(f"not ours: {shown(one.name)}: {why}")


def table(plan: Plan, rows: Sequence[Found]) -> None:
    width = max([10, *(len(shown(one.name)) for one in rows)])
    line = f"{{:{width}}}  {{:8}}  {{:16}}  {{:>8}}  {{}}"
    print_out(line.format("experiment", "state", "when", "size", "").rstrip())
    for one in rows:
        assert one.record is not None
        size = text.size(plan.measured[one.name].size)
        pin = "pinned" if one.pinned else ""
        row = (shown(one.name), shown(one.record.state), clock(one)[:16], size, pin)
        print_out(line.format(*row).rstrip())


def clock(one: Found) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.when))


def conclude(options: Mapping[str, Any], plan: Plan) -> None:
    """What came of it."""
    for name, why in plan.spared.items():
        tell(options, f"kept: {shown(name)}: {why}")
    for name, why in plan.failed.items():
        tell(options, f"NOT REMOVED: {shown(name)}: {why}")
    gone = [one for one in plan.going if one.name in plan.removed]
    words = f"removed {experiments(len(gone))}, {text.size(plan.freed)} freed"
    if plan.on_nodes:
        words += f" here and {text.size(plan.freed_on_nodes)} on their nodes"
    elif gone:
        words += "; what they left on their nodes stays there (--on-nodes removes that too)"
    tell(options, words)


def told_json(options: Mapping[str, Any], plan: Plan) -> None:
    if not options["as_json"]:
        return
    ours = [(one, why) for one, why in plan.decided if one.record is not None]
    told = {
        "directory": str(plan.directory),
        "dry_run": options["dry_run"],
        "experiments": [about(plan, one, why) for one, why in ours],
        "left_over": [
            {"name": name, "size": plan.measured[name].size, **became(plan, name)}
            for name in plan.hidden
        ],
        "not_ours": [
            {"name": one.name, "reason": why} for one, why in plan.decided if one.record is None
        ],
        "nodes_not_cleaned": plan.unreached,
        "freed": plan.freed,
        "freed_on_nodes": plan.freed_on_nodes,
    }
    print_out(json.dumps(told, indent=1))


def about(plan: Plan, one: Found, why: str | None) -> dict[str, Any]:
    assert one.record is not None
    measured = plan.measured.get(one.name)
    return {
        "name": one.name,
        "state": one.record.state,
        "when": clock(one),
        "size": measured.size if measured else None,
        "pinned": one.pinned,
        **(became(plan, one.name) if why is None else {"action": "kept", "reason": why}),
    }


def became(plan: Plan, name: str) -> dict[str, Any]:
    if name in plan.removed:
        return {"action": "removed", "reason": None}
    if name in plan.spared:
        return {"action": "kept", "reason": plan.spared[name]}
    obstacle = plan.failed.get(name) or plan.measured[name].obstacle
    return {"action": "failed" if obstacle else "would be removed", "reason": obstacle or None}
