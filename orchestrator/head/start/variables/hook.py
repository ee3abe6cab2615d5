"""Run the user's hook on every node: a shell file whose exports reach the ranks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.common import hiding
from orchestrator.common.errors import CheckFailed, NodeError, UsageError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.plan.model import EnvSetting, NodePlan, Plan
from orchestrator.protocol.requests.start import Hook, Hooked

HOOK_TIMEOUT_SECONDS = 70.0


def read(path: str | None) -> str:
    """Read the hook; one that has only comments is empty, and needs no shell on every node."""
    if path is None:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"the hook {path} cannot be read: {error.strerror}") from error
    lines = (line.strip() for line in text.splitlines())
    return text if any(line and not line.startswith("#") for line in lines) else ""


def variables(text: str) -> frozenset[str]:
    """List the variables that a hook names before it is run; it may set them on some nodes."""
    return frozenset(re.findall(r"\bNCCL_[A-Z_]+", text))


def digest(text: str) -> str:
    """Return what tells one hook from another; nothing where there is none."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest() if text else ""


def run(
    plan: Plan, reached: Sequence[Reached], text: str, path: str | None, secrets: Sequence[str]
) -> Plan:
    """Run the hook on every node of the plan; what it exports wins over what was computed."""
    hooks = [Hook(text=text, env=node.env, workdir=node.workdir) for node in plan.nodes]
    try:
        answers = fleet.ask_all(reached, hooks, HOOK_TIMEOUT_SECONDS, f" ({path} failed)")
    except NodeError as error:
        what = hiding.hide(error.what, secrets)
        raise CheckFailed(f"{what}\nnothing was started") from error
    return replace(plan, nodes=tuple(map(changed, plan.nodes, answers)))


def changed(node: NodePlan, answer: Hooked) -> NodePlan:
    """Change a node's environment as its hook did, but for its identity and what was typed."""
    fixed = {s.name for s in node.settings if s.why.startswith(("identifies the node", "--"))}
    new = [
        EnvSetting(name, value, "the hook", yours=True)
        for name, value in answer.env.items()
        if name not in fixed
    ]
    kept = [s for s in node.settings if s.name not in answer.unset or s.name in fixed]
    unset = tuple(name for name in answer.unset if name not in fixed)
    return replace(node, settings=(*kept, *new), unset=unset)
