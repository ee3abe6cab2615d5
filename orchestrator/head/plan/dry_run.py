"""A plan as text or JSON: what every node would run, ready to be pasted into a shell there."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import shlex

from orchestrator.head.plan.model import NodePlan, Plan
from orchestrator.head.plan.plan import script_path


def shell_lines(plan: Plan, node: NodePlan) -> list[str]:
    """Write the lines that run a node's part when they are pasted into a shell there."""
    lines = [f"cd {shlex.quote(node.workdir)}"]
    lines += [f"unset {name}" for name in node.unset]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in node.env.items()]
    kind = node.target.kind
    if kind == "engine" or (plan.start == "fork" and kind != "module"):
        # --run-path leaves out what `python script.py` does: the script's directory comes first.
        script = script_path(node.target, node.workdir, node.library)
        first = node.library if kind == "engine" else posixpath.dirname(script)
        lines.append(f'export PYTHONPATH={shlex.quote(first)}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    for name, text in node.files:
        lines.append(f"cat > {shlex.quote(name)} <<'END'\n{text}END")
    lines.append(" ".join(map(shlex.quote, node.paste)))
    return lines


def to_text(plan: Plan) -> str:
    blocks = []
    for node in plan.nodes:
        ranks = f"rank {node.first_rank}"
        if node.nproc > 1:
            ranks = f"ranks {node.first_rank}-{node.last_rank}"
        head = f"# node {node.index}: {node.node.name} ({ranks}: {node.nproc_why})"
        blocks.append("\n".join([head, *shell_lines(plan, node)]))
    heading = [f"# {len(plan.nodes)} nodes, {plan.world_size} ranks, {plan.start} start"]
    heading[0] += f", master {plan.master_address}:{plan.master_port}"
    heading += [f"# note: {note}" for note in plan.notes]
    heading += [f"# spare: {name}" for name in plan.spares]
    return "\n".join(heading) + "\n\n" + "\n\n".join(blocks) + "\n"


def to_json(plan: Plan) -> str:
    data = dataclasses.asdict(plan)
    for entry, node in zip(data["nodes"], plan.nodes, strict=True):
        entry["env"] = node.env
        entry["command"] = list(node.paste)
        entry["shell"] = "\n".join(shell_lines(plan, node))
        entry["ranks"] = list(range(node.first_rank, node.first_rank + node.nproc))
        del entry["paste"]
    return json.dumps(data, indent=1)
