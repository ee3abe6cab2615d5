"""A plan as text or JSON: what every node would run, ready to be pasted into a shell there."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import shlex

from orchestrator.common.text import plural
from orchestrator.head.plan import redact
from orchestrator.head.plan.model import NodePlan, Plan
from orchestrator.head.plan.plan import script_path


def shell_lines(plan: Plan, node: NodePlan) -> list[str]:
    """Write the lines that run a node's part when they are pasted into a shell there.

    The variables are those of torchrun alone: the shell stays as it is.
    """
    around = [
        *([f"inside: {node.node.wrap}"] if node.node.wrap else []),
        *([f"with this active: {node.node.activate}"] if node.node.activate else []),
    ]
    lines = [*map(comment, around), f"cd {quoted(node.workdir)}"]
    for name, text in node.files:
        lines.append(f"cat > {quoted(name)} <<'END'\n{text}END")
    env = dict(node.env)
    python_path = ""
    kind = node.target.kind
    if kind == "engine" or (plan.start == "fork" and kind != "module"):
        # --run-path leaves out what `python script.py` does: the script's directory comes first.
        script = script_path(node.target, node.workdir, node.library)
        first = node.library if kind == "engine" else posixpath.dirname(script)
        theirs = env.pop("PYTHONPATH", "")
        rest = quoted(f":{theirs}") if theirs else '"${PYTHONPATH:+:$PYTHONPATH}"'
        python_path = f"PYTHONPATH={quoted(first)}{rest}"
    words = ["env", *(f"-u {quoted(name)}" for name in node.unset)]
    words += [f"{quoted(name)}={quoted(value)}" for name, value in env.items()]
    words += [python_path] if python_path else []
    words.append(" ".join(map(quoted, node.paste)))
    return [*lines, " \\\n  ".join(words)]


def quoted(word: str) -> str:
    """Quote a word for a shell, zsh included: there, =eth0 is the path of a program eth0."""
    safe = shlex.quote(word)
    return f"'{word}'" if safe == word and word.startswith("=") else safe


def to_text(plan: Plan) -> str:
    plan = redact.shown(plan)
    blocks = []
    for node in plan.nodes:
        ranks = f"rank {node.first_rank}"
        if node.nproc > 1:
            ranks = f"ranks {node.first_rank}-{node.last_rank}"
        head = comment(f"node {node.index}: {node.node.name} ({ranks}: {node.nproc_why})")
        blocks.append("\n".join([head, *shell_lines(plan, node)]))
    ranks = f"{plural(len(plan.nodes), 'node')}, {plural(plan.world_size, 'rank')}"
    heading = [
        comment(f"{ranks}, {plan.start} start, master {plan.master_address}:{plan.master_port}"),
        *(comment(f"note: {note}") for note in plan.notes),
        *(comment(f"spare: {name}") for name in plan.spares),
    ]
    return "\n".join(heading) + "\n\n" + "\n\n".join(blocks) + "\n"


def comment(text: str) -> str:
    """Write a comment of one line: what a node says in it must not become a command."""
    return " ".join(["#", *text.split()])


def to_json(plan: Plan) -> str:
    plan = redact.shown(plan)
    data = dataclasses.asdict(plan)
    for entry, node in zip(data["nodes"], plan.nodes, strict=True):
        entry["env"] = node.env
        entry["command"] = list(node.paste)
        entry["shell"] = "\n".join(shell_lines(plan, node))
        entry["ranks"] = list(range(node.first_rank, node.first_rank + node.nproc))
        del entry["paste"]
    return json.dumps(data, indent=1)
