"""Format a plan as text or JSON: each node's command lines, ready to paste into a shell there.

The plan is one from which redact.redact_plan() has taken the secrets.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence
from typing import Any

from orchestrator.common.hosts import number_ranges
from orchestrator.common.text import align_columns, plural
from orchestrator.head.plan.model import NodePlan, Plan
from orchestrator.head.plan.plan import script_path
from orchestrator.head.plan.redact import value_of
from orchestrator.protocol.message import encode_value


def shell_lines(plan: Plan, node: NodePlan) -> list[str]:
    """Return the lines that run a node's part when they are pasted into a shell there.

    The variables are set only for torchrun, so the shell's environment does not change.
    """
    around = [
        *([f"inside: {node.node.wrap}"] if node.node.wrap else []),
        *([f"with this active: {node.node.activate}"] if node.node.activate else []),
    ]
    lines = [*map(shell_comment, around), f"cd {quote_word(node.workdir)}"]
    for name, text in node.files:
        lines.append(f"cat > {quote_word(name)} <<'END'\n{text}END")
    env = dict(node.env)
    python_path = ""
    kind = node.target.kind
    if kind == "engine" or (plan.start == "fork" and kind != "module"):
        # Unlike `python script.py`, --run-path does not put the script's directory first in
        # sys.path.
        script = script_path(node.target, node.workdir, node.library)
        first = node.library if kind == "engine" else posixpath.dirname(script)
        theirs = env.pop("PYTHONPATH", "")
        rest = quote_word(f":{theirs}") if theirs else '"${PYTHONPATH:+:$PYTHONPATH}"'
        python_path = f"PYTHONPATH={quote_word(first)}{rest}"
    words = ["env", *(f"-u {quote_word(name)}" for name in node.unset)]
    words += [f"{quote_word(name)}={quote_word(value)}" for name, value in env.items()]
    words += [python_path, " ".join(map(quote_word, node.paste))]
    return [*lines, " \\\n  ".join(filter(None, words))]


def quote_word(word: str) -> str:
    """Return a word quoted for a shell; zsh would replace =eth0 by the path of a program eth0."""
    safe = shlex.quote(word)
    return f"'{word}'" if safe == word and word.startswith("=") else safe


def plan_to_text(plan: Plan) -> str:
    blocks = []
    for node in plan.nodes:
        several = f"ranks {node.first_rank}-{node.last_rank}"
        ranks = several if node.nproc > 1 else f"rank {node.first_rank}"
        head = shell_comment(f"node {node.index}: {node.node.name} ({ranks}: {node.nproc_why})")
        blocks.append("\n".join([head, *shell_lines(plan, node)]))
    ranks = f"{plural(len(plan.nodes), 'node')}, {plural(plan.world_size, 'rank')}"
    heading = [
        shell_comment(f"{ranks}, {plan.start} start, master {plan.master}"),
        *(shell_comment(f"note: {note}") for note in plan.notes),
        *(shell_comment(f"spare: {name}") for name in plan.spares),
    ]
    return "\n".join(heading) + "\n\n" + "\n\n".join(blocks) + "\n"


def shell_comment(text: str) -> str:
    """Return a one-line shell comment: a node's text in it must not become a command."""
    return " ".join(["#", *text.split()])


def plan_to_json(plan: Plan) -> dict[str, Any]:
    data: dict[str, Any] = encode_value(plan)
    for entry, node in zip(data["nodes"], plan.nodes, strict=True):
        entry["env"] = node.env
        entry["command"] = list(node.paste)
        entry["shell"] = "\n".join(shell_lines(plan, node))
        entry["ranks"] = list(range(node.first_rank, node.first_rank + node.nproc))
        del entry["paste"]
    return data


# -- explain ------------------------------------------------------------------------------------
# `orchestrator plan --explain` shows the value, source and reason of every node's settings.

# The reason of settings that differ between nodes by design.
IDENTITY = "identifies the node"
# A longer value is not cut; it only shifts the rest of its line.
WIDEST = 32
NODE_COLUMNS = ("NODE", "NAME", "ADDRESS", "RANKS", "REACHED BY")
TRANSPORTS = {
    "infiniband": "NCCL uses InfiniBand",
    "roce": "NCCL uses RoCE",
    "ethernet": "NCCL uses TCP",
    "yours": "NCCL uses what you chose",
    "none": "one node: NCCL needs no network",
}


def explain_plan(plan: Plan) -> str:
    rows = setting_rows(plan.nodes)
    lines = [
        f"{plural(len(plan.nodes), 'node')}, {plan.world_size} ranks, {plan.start} start, "
        f"master {plan.master}; {TRANSPORTS[plan.transport]}",
        "",
        *align_columns([NODE_COLUMNS, *map(node_row, plan.nodes)], widest=WIDEST),
        "",
        *align_columns([("SETTING", "NODES", "VALUE", "SOURCE", "WHY"), *rows], widest=WIDEST),
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
        node.way,
    )


def setting_rows(nodes: Sequence[NodePlan]) -> list[tuple[str, ...]]:
    """Return rows (setting, nodes, value, source, why) in the order of the settings."""
    groups: dict[str, dict[tuple[str, str, str], list[int]]] = {}
    for node in nodes:
        for name in dict.fromkeys(setting.name for setting in node.settings):
            row = decided_value(node, name)
            if row is not None:
                groups.setdefault(name, {}).setdefault(row, []).append(node.index)
    rows: list[tuple[str, ...]] = []
    for name, decisions in groups.items():
        for i, ((value, source, reason), indexes) in enumerate(decisions.items()):
            rows.append(("" if i else name, number_ranges(indexes), value, source, reason))
    return rows


def decided_value(node: NodePlan, name: str) -> tuple[str, str, str] | None:
    """Return (value, source, why) of the winning value; `why` names the value it overrides."""
    *others, last = [setting for setting in node.settings if setting.name == name]
    if last.why == IDENTITY:
        return None
    reason = last.why
    lost = [setting for setting in others if setting.value != last.value]
    if lost:
        reason += (
            f"; not {value_of(lost[-1])} ({'yours, ' if lost[-1].yours else ''}{lost[-1].why})"
        )
    return value_of(last), "yours" if last.yours else "computed", reason
