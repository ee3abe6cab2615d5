"""`orchestrator plan --explain`: every setting of every node: its value, its source and why.

Nodes with the same value share a line, so 64 nodes take no more lines than two.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.common.text import plural, table
from orchestrator.head.plan.model import NodePlan, Plan
from orchestrator.head.plan.redact import shown, value_of

IDENTITY = "identifies the node"  # settings that differ by design
WIDEST = 32  # a longer value is not cut, and shifts only its own line
TRANSPORTS = {
    "infiniband": "NCCL uses InfiniBand",
    "roce": "NCCL uses RoCE",
    "ethernet": "NCCL uses TCP",
    "yours": "NCCL uses what you chose",
    "none": "one node: NCCL needs no network",
}


def to_text(plan: Plan) -> str:
    plan = shown(plan)
    rows = setting_rows(plan.nodes)
    lines = [
        f"{plural(len(plan.nodes), 'node')}, {plan.world_size} ranks, {plan.start} start, "
        f"master {plan.master_address}:{plan.master_port}; {TRANSPORTS[plan.transport]}",
        "",
        *table([("NODE", "NAME", "ADDRESS", "RANKS"), *map(node_row, plan.nodes)], widest=WIDEST),
        "",
        *table([("SETTING", "NODES", "VALUE", "SOURCE", "WHY"), *rows], widest=WIDEST),
    ]
    remarks = [f"note: {note}" for note in plan.notes] + [f"hint: {hint}" for hint in plan.hints]
    return "\n".join([*lines, *([""] if remarks else []), *remarks]) + "\n"


def node_row(node: NodePlan) -> tuple[str, ...]:
    last = f"-{node.last_rank}" if node.nproc > 1 else ""
    return (
        str(node.index),
        node.node.name,
        node.address,
        f"{node.first_rank}{last} ({node.nproc_why})",
    )


def setting_rows(nodes: Sequence[NodePlan]) -> list[tuple[str, ...]]:
    """Return (setting, nodes, value, source, why), the settings in order of appearance."""
    groups: dict[str, dict[tuple[str, str, str], list[int]]] = {}
    for node in nodes:
        for name in dict.fromkeys(setting.name for setting in node.settings):
            row = decided(node, name)
            if row is not None:
                groups.setdefault(name, {}).setdefault(row, []).append(node.index)
    rows: list[tuple[str, ...]] = []
    for name, decisions in groups.items():
        for i, ((value, source, why), indexes) in enumerate(decisions.items()):
            rows.append(("" if i else name, ranges(indexes), value, source, why))
    return rows


def decided(node: NodePlan, name: str) -> tuple[str, str, str] | None:
    """Return (value, source, why) of the winning value; why names what it overrides."""
    *others, last = [setting for setting in node.settings if setting.name == name]
    if last.why == IDENTITY:
        return None
    why = last.why
    lost = [setting for setting in others if setting.value != last.value]
    if lost:
        why += f"; not {value_of(lost[-1])} ({'yours, ' if lost[-1].yours else ''}{lost[-1].why})"
    return value_of(last), "yours" if last.yours else "computed", why


def ranges(numbers: Sequence[int]) -> str:
    """Write numbers as ranges: 0-3,5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
